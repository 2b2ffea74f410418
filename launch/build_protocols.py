"""Builds MAPD's protocols of a config's questions, one JSON record a line:
`python launch/build_protocols.py --config=configs/mapd.py --base_url=URL --models=a,b --out=FILE`.

The key comes from the environment variable named by --key_variable. Several models share the
questions in turn. Without an endpoint `--policy=DIR` lets a local policy play, in the config's
engine and chat template, and `--oracle=plain` a script: the toy world's, or one that follows real
questions' gold decompositions (MuSiQue, 2WikiMultihopQA). Budgets of a question are
`--config.offline.repairs=1` and the like. `--alone`: one model writes the protocol
without the team. The records hold raw trajectories too, for configs that imitate.
Interrupted, the same command goes on where it stopped.
"""

import asyncio
from pathlib import Path

from absl import app, flags
from ml_collections import ConfigDict, config_flags
from rich.console import Console

from mas_jax.agents import protocol_files, protocol_oracle
from mas_jax.agents.policy_endpoint import policy_complete
from mas_jax.agents.protocol_gold import GoldScript
from mas_jax.agents.protocol_roles import Limits
from mas_jax.agents.protocol_team import Desk
from mas_jax.agents.rollout import TooManyFailures
from mas_jax.data.decomposition import read_steps
from mas_jax.data.questions import jsonl
from mas_jax.learning import policy_files, process, samplers, scenes
from mas_jax.sampling.api import Client, Endpoint
from mas_jax.sampling.api_budget import BudgetExceeded, prices_of

CONFIG = config_flags.DEFINE_config_file("config", None, "config file, such as configs/mapd.py")
OUT = flags.DEFINE_string("out", "runs/protocols.jsonl", "JSONL file, added to")
SPLIT = flags.DEFINE_enum("split", "train", ["train", "validation", "test"], "whose questions")
NUM = flags.DEFINE_integer("num_questions", 0, "the first so many; 0 for all", lower_bound=0)
MODELS = flags.DEFINE_list("models", [], "models of the endpoint, which take turns")
BASE_URL = flags.DEFINE_string("base_url", "", 'endpoint, without "/chat/completions"')
KEY = flags.DEFINE_string("key_variable", "", "environment variable that holds the endpoint's key")
PRICE = flags.DEFINE_list(
    "price", [], "money per million tokens in and out, such as 2,12; of each model: 2,12,0.5,1"
)
MAX_COST = flags.DEFINE_float("max_cost", None, "money that this run may spend; needs --price")
CACHE = flags.DEFINE_string("cache", "", "directory for the endpoint's answers")
POLICY = flags.DEFINE_string("policy", "", "directory of a policy in the Hugging Face layout")
ORACLE = flags.DEFINE_list("oracle", [], f"styles of the script: {sorted(protocol_oracle.STYLES)}")
SKILL = flags.DEFINE_float("skill", 1.0, "of the script", lower_bound=0.0, upper_bound=1.0)
ALONE = flags.DEFINE_bool("alone", False, "one model without the team, for comparison")
CONCURRENCY = flags.DEFINE_integer("concurrency", 8, "questions at once", lower_bound=1)
FAILURES = flags.DEFINE_float("failure_frac", 0.1, "share of failed questions that ends the run")
STYLE = flags.DEFINE_bool("normalise_style", True, "take self-talk and repetitions away")
flags.mark_flag_as_required("config")


def scripts(scene: scenes.Scene) -> list[protocol_oracle.Player]:
    """A script for each style. Raises: ValueError for files without decompositions."""
    if scene.world is not None:
        return [protocol_oracle.Oracle(scene.world, SKILL.value, s) for s in ORACLE.value]
    if ALONE.value:
        raise ValueError("--alone with --oracle plays the toy world; the config has real questions")
    steps = {}
    for path in map(Path, CONFIG.value.data[SPLIT.value]):
        steps |= read_steps(jsonl(path, dataset=path.stem, split=SPLIT.value))
    questions = {question.uid: question for question in scene.questions[SPLIT.value]}
    return [GoldScript(questions, steps, SKILL.value, s) for s in ORACLE.value]


def desks(config: ConfigDict, scene: scenes.Scene, directory: Path) -> list[Desk]:
    """A desk for each model of an endpoint, each style of the script, or the policy of a directory.
    Raises: ValueError unless exactly one of the three is named."""
    if sum(map(bool, (BASE_URL.value, ORACLE.value, POLICY.value))) != 1:
        raise ValueError("give --base_url and --models of an endpoint, or --policy, or --oracle")
    limits = Limits(**config.offline)
    shared = dict(
        search=scene.retriever.search, limits=limits, normalise_style=STYLE.value,
        is_alone=ALONE.value,
    )  # fmt: skip
    if POLICY.value:
        policy_files.check_chat(scene.chat, directory)
        sample = samplers.make_engines(config, directory, scene.tokenizer).sample
        complete = policy_complete(
            sample, chat=scene.chat, policy=config.model.policy, context=config.engine.context
        )
        return [Desk(complete, model=directory.name, **shared)]
    if ORACLE.value:
        if unknown := sorted(set(ORACLE.value) - protocol_oracle.STYLES.keys()):
            raise ValueError(
                f"--oracle: {unknown[0]!r} is none of {sorted(protocol_oracle.STYLES)}"
            )
        return [
            Desk(protocol_oracle.local(o, limits), model=f"oracle-{o.style}", **shared)
            for o in scripts(scene)
        ]
    if not MODELS.value:
        raise ValueError(f"--base_url={BASE_URL.value} without --models: name one of its models")
    prices = prices_of(MODELS.value, PRICE.value)
    endpoint = Endpoint(BASE_URL.value, KEY.value, prices=prices, max_cost=MAX_COST.value)
    client = Client(endpoint, Path(CACHE.value) if CACHE.value else None)
    return [Desk(client.complete, model=model, **shared) for model in MODELS.value]


def main(argv: list[str]) -> None:
    """Builds what is missing and prints what the file holds."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    config, out, console = CONFIG.value, Path(OUT.value), Console()
    process.start()
    try:
        if POLICY.value:
            config.model.checkpoint = POLICY.value
        directory = policy_files.checkpoint_directory(config)
        scene = scenes.make_scene(config, policy_files.load_tokenizer(directory))
        working = desks(config, scene, directory)
        questions = scene.questions[SPLIT.value]
        questions = questions[: NUM.value] if NUM.value else questions
        protocol_files.check_kind(out, is_alone=ALONE.value, normalise_style=STYLE.value)
    except (ValueError, FileNotFoundError) as error:
        raise app.UsageError(str(error)) from error
    with console.status("protocols") as status:
        try:
            asyncio.run(
                protocol_files.build(
                    questions, working, out, concurrency=CONCURRENCY.value,
                    failure_frac=FAILURES.value,
                    tell=lambda done, of, failed: status.update(
                        f"protocols {done}/{of}, {failed} failed"
                    ),
                )
            )  # fmt: skip
        except (TooManyFailures, BudgetExceeded) as error:
            raise SystemExit(f"stopped: {error}") from error
    records = protocol_files.read(out)
    console.print(protocol_files.summarise(records), soft_wrap=True)
    if missing := len({q.uid for q in questions} - {r["question"] for r in records}):
        raise SystemExit(f"{missing} questions failed and have no record; run the command again")


if __name__ == "__main__":
    app.run(main)
