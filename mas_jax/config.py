"""Every default in one place, and the rules between them.

A config file edits `default_config()`; its sections hold the keyword arguments of the dataclass or
function that the section is named for, so a section's meaning stands there. Values here are the
toy world's, which runs on a laptop. Must not know: what is built from them.
"""

from pathlib import Path

from ml_collections import ConfigDict

TEAMS = ("cascade", "hierarchy", "single")
SPLITS = ("train", "validation", "test")
TEMPLATES = ("toy", "qwen-instruct", "qwen3-thinking", "qwen3-not-thinking")


def default_config() -> ConfigDict:
    """A locked ConfigDict: unknown keys and other types are errors that name the key."""
    config = ConfigDict()
    config.seed = 0
    config.model = ConfigDict(
        # a directory in the Hugging Face layout; "" is the shipped toy starting policy
        dict(checkpoint="", dtype="float32", policy="student", template="toy", prompts="toy")
    )
    # of one sampling engine; a host has as many engines as its devices make
    config.mesh = ConfigDict(dict(data=1, fsdp=1, tensor=1))
    config.world = ConfigDict(dict(seed=0, closed_share=0.3))  # data/world.py
    config.retriever = ConfigDict(dict(backend="auto"))  # retrieval/index.py IndexConfig
    config.engine = ConfigDict(  # sampling/device.py EngineSettings
        dict(
            context=384, buckets=(128, 256, 384), num_pages=8192, page_size=8, prefill_blocks=64,
            decode_rows=64, decode_steps=16, max_stop_ids=4, min_active_share=0.6,
            dtype="float32", calls="auto",
        )
    )  # fmt: skip
    shared = dict(waves=3, subtasks=4, passages=3, context=384, observation=256)
    config.budgets = ConfigDict(  # agents/setting.py Budgets, one a team; METHODS §1
        dict(
            cascade=dict(turns=5, searcher_turns=5, searches=4, **shared),
            hierarchy=dict(turns=12, searcher_turns=3, searches=2, **shared),
            single=dict(turns=5, searcher_turns=5, searches=4, **shared),
        )
    )
    config.sampling = ConfigDict(  # agents/setting.py Sampling
        dict(
            temperature=1.0, top_p=1.0, top_k=0, candidates=1,
            max_tokens=dict(leader=48, searcher=24, answerer=16),
        )
    )  # fmt: skip
    config.rollout = ConfigDict(  # agents/rollout.py Limits
        dict(concurrent=384, failure_frac=0.1, min_episodes=50)
    )
    config.evaluation = ConfigDict(
        dict(teams=("cascade", "hierarchy"), split="test", num_questions=560, num_runs=4,
             log_interval_s=10.0)
    )  # fmt: skip
    config.pretrain = ConfigDict(  # learning/toy_policy.py: the starting policy and its traces
        dict(
            # worlds: other seeds than any that is played in, so that facts must be read, not known
            preset="toy-1m", worlds=(101, 102, 103, 104), teams=("cascade", "hierarchy"),
            num_questions=4480, num_episodes=1, num_held_out=70,
            flaws=dict(  # agents/oracle.py Flaws
                stop_early=0.35, drop_word=0.08, whole_question=0.3, misread=0.08,
                skip_search=0.08, from_memory=0.5,
            ),
            settings=dict(  # learning/pretrain.py PretrainSettings
                steps=2000, rows=16, length=256, learning_rate=3e-3, warmup_steps=100,
                weight_decay=0.05, max_grad_norm=1.0, chunk=1024, seed=0,
            ),
        )
    )  # fmt: skip
    return config.lock()


def validate(config: ConfigDict) -> None:
    """Raises: ValueError with both values and what to change, for settings that contradict."""
    budgets, tokens = config.budgets, config.sampling.max_tokens
    for team in config.evaluation.teams:
        if team not in TEAMS:
            raise ValueError(f"evaluation.teams: {team!r} is unknown; choose from {TEAMS}")
        context = budgets[team].context
        if context > config.engine.context:
            raise ValueError(
                f"budgets.{team}.context={context} exceeds engine.context={config.engine.context}; "
                "raise the engine's or lower the team's"
            )
        needed = budgets[team].observation + max(tokens.values())
        if needed >= context:
            raise ValueError(
                f"budgets.{team}.observation={budgets[team].observation} and the longest "
                f"sampling.max_tokens={max(tokens.values())} leave no room in context={context}"
            )
    if config.evaluation.split not in SPLITS:
        raise ValueError(f"evaluation.split={config.evaluation.split!r}; choose from {SPLITS}")
    if config.model.template not in TEMPLATES:
        raise ValueError(f"model.template={config.model.template!r}; choose from {TEMPLATES}")
    if config.evaluation.num_runs < 1 or config.evaluation.num_questions < 1:
        raise ValueError(
            f"evaluation.num_runs={config.evaluation.num_runs} and num_questions="
            f"{config.evaluation.num_questions} must be at least 1"
        )
    checkpoint = config.model.checkpoint
    if checkpoint and not Path(checkpoint).is_dir():
        raise ValueError(
            f"model.checkpoint={checkpoint!r} is not a directory; give one with config.json and "
            "safetensors, or '' for the shipped toy policy"
        )
    if not checkpoint and config.model.template != "toy":
        raise ValueError(
            f"model.template={config.model.template!r} does not fit the shipped toy policy; "
            "set model.checkpoint, or model.template='toy'"
        )
