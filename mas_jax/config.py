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


def role(**changes) -> ConfigDict:
    """A row of the role programme (learning/programme.py Row): outcome GRPO but for the changes.

    Raises: KeyError for an unknown key, through the lock of the section.
    """
    row = ConfigDict(
        dict(
            trained=True, advantages=("group",), correct="mean", behaviour="none",
            behaviour_weight=0.1, behaviour_cap=6, invalid="term", group_by="question",
            scale="std", scale_eps=1e-6, drop_zero_variance=False, teacher="teacher", beta=0.01,
            log_ratio_clip=0.0, future_discount=0.0, gae_discount=1.0, gae_decay=1.0,
            policy_loss="ppo", clip_low=0.2, clip_high=0.2, dual_clip=0.0, divergence="none",
            divergence_coef=1.0, jsd_beta=0.5, kl_coef=0.0, kl_reference="teacher",
            kl_estimator="k3", entropy_coef=1e-3, value_coef=0.5, value_clip=0.0,
            correction="none", correction_cap=2.0, aggregation="token", weight=1.0,
        )
    ).lock()  # fmt: skip
    row.update(changes)
    return row


def cascade_programme() -> ConfigDict:
    """Stage I, METHODS 1.1: every role on the outcome, the Searcher also on its searching."""
    return ConfigDict(dict(searcher=role(behaviour="search_activity"), answerer=role()))


def hierarchy_programme() -> ConfigDict:
    """Stage II, METHODS 1.1: the Searcher distilled token by token, the others on the outcome and
    held near the teacher."""
    return ConfigDict(
        dict(
            leader=role(behaviour="assignment", kl_coef=1e-3),
            searcher=role(advantages=("distillation",), entropy_coef=0.0),
            answerer=role(kl_coef=1e-3),
        )
    )


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
    # learning/pipeline.py: stages in the order of train.stages; a stage named "teacher" makes the
    # teacher of those after it, unless teacher.checkpoint names one
    config.stages = ConfigDict(
        dict(
            teacher=dict(team="cascade", sampler="policy", steps=40,
                         programme=cascade_programme()),
            student=dict(team="hierarchy", sampler="policy", steps=40,
                         programme=hierarchy_programme()),
        )
    )  # fmt: skip
    # checkpoint: a directory in the Hugging Face layout; ema_decay: of the teacher named "ema"
    config.teacher = ConfigDict(dict(checkpoint="", ema_decay=0.99))
    config.certify = ConfigDict(  # is the teacher better than the untrained cascade?
        dict(num_questions=140, num_runs=4, ignore=False)
    )
    config.train = ConfigDict(
        dict(
            stages=("teacher", "student"), questions=16, group_size=8, candidates=5,
            updates_per_batch=1, temperature=1.0,
            micro_rows=8, row_length=384, chunk=1024, mesh=dict(data=1, fsdp=1, tensor=1),
            dtype="float32", remat="none", backend="auto",
            value_head=False, whiten=True,
            checkpoint_interval=10, keep_checkpoints=2,
            validation_interval=0, validation_questions=140, validation_runs=1,
            role_gradient_interval=20, drift_frac=0.1, log_interval_s=10.0,
            optimizer=dict(  # learning/update.py OptimizerSettings
                learning_rate=2e-4, warmup_steps=5, schedule="constant", b1=0.9, b2=0.95, eps=1e-8,
                weight_decay=0.0, max_grad_norm=1.0, moment_dtype="float32",
            ),
            alarms=dict(  # learning/alarms.py AlarmSettings
                window=10, searches=0.5, valid_actions=0.8, entropy=0.2, failure_frac=0.05,
            ),
        )
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
