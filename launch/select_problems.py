"""Selects problems that an Actor solves sometimes, from an endpoint or a policy of our own:

python launch/select_problems.py --problems=math_train.jsonl --base_url=URL --model=NAME --out=DIR
python launch/select_problems.py --problems=math_train.jsonl --config=CONFIG --out=DIR

DIR/counts.jsonl says how often the Actor was right on each problem that was looked at,
DIR/math.jsonl holds the selected ones, to train on. Interrupted, the same command goes on.
"""

import asyncio
import dataclasses
import itertools
from pathlib import Path

from absl import app, flags
from ml_collections import config_flags
from rich.console import Console

from mas_jax.agents.rollout import TooManyFailures
from mas_jax.data import problems
from mas_jax.evaluation import problem_selection
from mas_jax.evaluation.problem_selection import Criteria, Records
from mas_jax.learning import actors, process
from mas_jax.rewards.math_sets import solution_reward
from mas_jax.rewards.math_workers import Workers
from mas_jax.sampling.api import Client, Endpoint
from mas_jax.sampling.api_budget import BudgetExceeded, Price

DEFAULTS = Criteria()
PROBLEMS = flags.DEFINE_string("problems", None, "JSONL file, such as math_train.jsonl")
WITHOUT = flags.DEFINE_list("without", [], "files of test problems, which are not selected")
OUT = flags.DEFINE_string("out", "runs/problems", "directory of counts and selection")
CONFIG = config_flags.DEFINE_config_file("config", None, "whose Actor, else model, is asked")
BASE_URL = flags.DEFINE_string("base_url", "", 'endpoint, without "/chat/completions"')
MODEL = flags.DEFINE_string("model", "", "model of the endpoint")
KEY = flags.DEFINE_string("key_variable", "", "environment variable that holds the endpoint's key")
PRICE = flags.DEFINE_list("price", [], "money per million tokens in and out, such as 2,12")
MAX_COST = flags.DEFINE_float("max_cost", None, "money that this run may spend; needs --price")
CACHE = flags.DEFINE_string("cache", "", "directory for the endpoint's answers")
LEVELS = flags.DEFINE_list("levels", list(map(str, DEFAULTS.levels)), "of difficulty")
SAMPLES = flags.DEFINE_integer("samples", DEFAULTS.samples, "of each problem", lower_bound=1)
MOST = flags.DEFINE_float("most", DEFAULTS.most, "largest share of right samples")
COUNT = flags.DEFINE_integer("count", DEFAULTS.count, "problems to select", lower_bound=1)
SEED = flags.DEFINE_integer("seed", DEFAULTS.seed, "of the order and of a local Actor's samples")
TEMPERATURE = flags.DEFINE_float("temperature", 0.7, "of the Actor; 0 makes all samples equal")
MAX_TOKENS = flags.DEFINE_integer("max_tokens", 2048, "of a solution", lower_bound=1)
CONCURRENCY = flags.DEFINE_integer("concurrency", 8, "problems at once", lower_bound=1)
FAILURES = flags.DEFINE_float("failure_frac", 0.1, "share of failed problems that ends the run")
WORKERS = flags.DEFINE_integer("workers", 2, "processes that grade", lower_bound=1)
flags.mark_flag_as_required("problems")


def make_actor() -> actors.Actor:
    """The Actor of the flags. Raises: ValueError unless they name one, and what it raises."""
    drawing = actors.Drawing(TEMPERATURE.value, MAX_TOKENS.value, SEED.value)
    if (CONFIG.value is None) == (not (BASE_URL.value and MODEL.value)):
        raise ValueError("give --base_url and --model of an endpoint, or --config of a policy")
    if CONFIG.value is not None:
        return actors.local(CONFIG.value, drawing)
    prices = {}
    if PRICE.value:
        try:
            prices = {MODEL.value: Price(*map(float, PRICE.value))}
        except (TypeError, ValueError) as error:
            raise ValueError(f"--price={','.join(PRICE.value)}: want two numbers") from error
    endpoint = Endpoint(BASE_URL.value, KEY.value, prices=prices, max_cost=MAX_COST.value)
    client = Client(endpoint, Path(CACHE.value) if CACHE.value else None)
    return actors.remote(client, MODEL.value, drawing)


def main(argv: list[str]) -> None:
    """Selects, writes, and says how many of how many."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    out, console = Path(OUT.value), Console()
    process.start()
    try:
        criteria = Criteria(
            tuple(map(int, LEVELS.value)), SAMPLES.value, MOST.value, COUNT.value, SEED.value
        )
        problem_selection.check(criteria)
        tests = (problems.read_jsonl(Path(path), split="test") for path in WITHOUT.value)
        found = problem_selection.asked_nowhere_else(
            problems.read_jsonl(Path(PROBLEMS.value), split="train"), itertools.chain(*tests)
        )
        problem_selection.in_order(found, criteria)
        actor = make_actor()
        records = Records(out / "counts.jsonl", actor=actor.identity, samples=criteria.samples)
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        raise app.UsageError(str(error)) from error
    with Workers(WORKERS.value) as workers, console.status("selecting") as status:
        try:
            selection = asyncio.run(
                problem_selection.select(
                    found, actor.ask, solution_reward(workers), records, criteria,
                    concurrency=CONCURRENCY.value, failure_frac=FAILURES.value,
                    tell=lambda chosen, looked, failed: status.update(
                        f"{chosen} of {criteria.count} selected, {looked} looked at, "
                        f"{failed} failed; graded: {dict(workers.counts)}"
                    ),
                )
            )  # fmt: skip
        except (TooManyFailures, BudgetExceeded) as error:
            raise SystemExit(f"stopped: {error}") from error
    path = out / f"{found[0].dataset}.jsonl"
    problem_selection.write(selection, path, criteria)
    console.print(
        f"{len(selection.problems)} problems of {selection.looked_at} looked at are in {path}; "
        f"graded: {dict(workers.counts)}",
        soft_wrap=True,
    )
    if selection.failed:
        raise SystemExit(f"{selection.failed} problems failed and were left out; run again to ask")
    if len(selection.problems) < criteria.count:
        raise SystemExit(f"no more than these meet {dataclasses.asdict(criteria)}")


if __name__ == "__main__":
    app.run(main)
