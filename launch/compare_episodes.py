"""How many tokens two runs drew alike: `python launch/compare_episodes.py RUN/STAGE RUN/STAGE`.

Of the steps that both have kept (`launch/train.py --keep_episodes`), such as runs of one
config on other numbers of hosts: the share of sampled tokens that are equal, each with all that
stands before it.
"""

from pathlib import Path

from absl import app

from mas_jax.learning import kept_episodes


def main(argv: list[str]) -> None:
    """Prints a line a step; two directories that cannot be compared end it with one line."""
    if len(argv) != 3:
        raise app.UsageError(f"two directories of stages are compared, got {argv[1:]}")
    try:
        ours, theirs = (kept_episodes.read(Path(stage)) for stage in argv[1:])
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    for step in sorted(ours.keys() & theirs.keys()):
        equal, count = kept_episodes.equal_tokens(ours[step], theirs[step])
        print(f"step {step}: {equal / max(count, 1):.4f} of {count} sampled tokens are equal")


if __name__ == "__main__":
    app.run(main)
