"""How far systems have drifted from their start, and what they leak, by the records of evaluations:
`python launch/compare_drift.py --policy=DIR START.jsonl SYSTEM.jsonl ...`.

Records as launch/evaluate.py and launch/study.py write them, of the same questions; the first file
is the untrained policy's. --policy: a directory with the tokenizer of all. The alarms are those
that training gives a stage with a privileged branch (config.train.alarms), the start as norm.
"""

from pathlib import Path

from absl import app, flags
from rich.console import Console

from mas_jax.agents.protocol import MARKERS
from mas_jax.config import default_config
from mas_jax.evaluation import records_file, report
from mas_jax.learning import drift_of_records, policy_files
from mas_jax.learning.alarms import AlarmSettings

POLICY = flags.DEFINE_string("policy", None, "directory with the policies' tokenizer")
FORM = flags.DEFINE_enum("form", "toy", sorted(MARKERS), "privileged.form, which markers are of")
STYLE = flags.DEFINE_float("style", None, "limit of drift, nats; unset: the config's default")
flags.mark_flag_as_required("policy")


def read(paths: list[Path]) -> dict[str, tuple]:
    """Questions and episodes of each file, by name. Raises: ValueError unless all are of the same
    questions and tokenizer."""
    found = {path.stem: (path, *records_file.read_any(path)) for path in paths}
    if len(found) < len(paths):
        raise ValueError(f"two files of one name in {[str(path) for path in paths]}")
    (first, header, *_), *others = found.values()
    for path, other, *_ in others:
        for key in ("questions", "num_runs"):
            if other[key] != header[key]:
                raise ValueError(f"{first} and {path} differ in {key}; compare runs of the same")
        ours, theirs = (h["settings"].get("tokenizer") for h in (header, other))
        if ours != theirs:
            raise ValueError(f"{first} and {path} are of two tokenizers, {ours} and {theirs}")
    return {name: rest for name, (_, _, *rest) in found.items()}


def main(argv: list[str]) -> None:
    """Prints a row a system and its alarms; files that cannot be compared end it with one line."""
    if len(argv) < 3:
        raise app.UsageError(f"a start and at least one system are compared, got {argv[1:]}")
    try:
        found = read([Path(name) for name in argv[1:]])
        tokenizer = policy_files.load_tokenizer(Path(POLICY.value))
    except (ValueError, FileNotFoundError) as error:
        raise app.UsageError(str(error)) from error
    start_name, (_, start) = next(iter(found.items()))
    roles = sorted({trace.role for episode in start for trace in episode.traces})
    limits = default_config().train.alarms.to_dict()
    if STYLE.value is not None:
        limits["style"] = STYLE.value
    settings = AlarmSettings(**limits, distilled=(), privileged=tuple(roles))
    values = {
        name: drift_of_records.measure(
            episodes, start, questions, markers=MARKERS[FORM.value], tokenizer=tokenizer
        )
        for name, (questions, episodes) in found.items()
    }
    console = Console()
    console.print(report.to_rich(drift_of_records.grid(values)))
    for name, own in values.items():
        alarms = drift_of_records.check(own, values[start_name], settings)
        for alarm in alarms:
            console.print(f"{name}: ALARM {alarm.name}: {alarm.message}", soft_wrap=True)
        if not alarms:
            console.print(f"{name}: no alarm")


if __name__ == "__main__":
    app.run(main)
