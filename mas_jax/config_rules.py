"""The rules between settings: what a config must satisfy before anything is built from it.

Must not know: defaults, what is built.
"""

from pathlib import Path

from ml_collections import ConfigDict

from mas_jax.choices import (
    BACKENDS,
    DIALECTS,
    REMATS,
    SCHEDULES,
    SPLITS,
    TEAMS,
    TEMPLATES,
    WEIGHTS,
    check_choice,
    check_no_secret,
)
from mas_jax.collaboration_rules import ACTORS, SUBJECTS, TOPOLOGIES, check_evaluated
from mas_jax.stage_rules import check_budgets, check_stage, check_stepwise

_COUNTS = {
    "evaluation": ("num_questions", "num_runs"),
    "certify": ("num_questions", "num_runs"),
    "train": (
        "questions", "group_size", "candidates", "updates_per_batch", "micro_rows", "row_length",
        "chunk", "keep_checkpoints", "validation_questions", "validation_runs",
    ),
}  # fmt: skip


def validate(config: ConfigDict, *, has_weights: bool = True) -> None:
    """Raises: ValueError with both values and what to change, for settings that contradict.

    has_weights: whether checkpoints and protocols must be there; a plan needs none.
    """
    t, e = config.train, config.evaluation
    check_choice("evaluation.split", e.split, SPLITS)
    check_choice("model.template", config.model.template, TEMPLATES)
    check_choice("train.optimizer.schedule", t.optimizer.schedule, SCHEDULES)
    check_choice("train.remat", t.remat, REMATS)
    check_choice("retriever.backend", config.retriever.backend, BACKENDS)
    check_choice("engine.weights", config.engine.weights, WEIGHTS)
    for section, names in _COUNTS.items():
        for name in names:
            if config[section][name] < 1:
                raise ValueError(f"{section}.{name}={config[section][name]} must be at least 1")
    if t.patience < 0 or (t.patience and not t.validation_interval):
        raise ValueError(
            f"train.patience={t.patience} counts validations, and train.validation_interval="
            f"{t.validation_interval}; set both above 0, or patience=0"
        )
    if config.data.first < 0:
        raise ValueError(f"data.first={config.data.first} must be at least 1, or 0 for all")
    _check_warmups(config)
    if t.temperature <= 0:
        raise ValueError(
            f"train.temperature={t.temperature} must be above 0; a greedy policy has no log-probs "
            "to learn from"
        )
    parts = t.mesh.data * t.mesh.fsdp
    if t.micro_rows % parts:
        raise ValueError(
            f"train.micro_rows={t.micro_rows} is not divisible by {parts}, which is "
            f"train.mesh.data={t.mesh.data} x fsdp={t.mesh.fsdp}; set a multiple"
        )
    if has_weights:
        _check_directories(config)
    _check_data(config)
    for kind in ("searches", "tokens"):
        if min(e.caps[kind], default=1) < 1:
            raise ValueError(f"evaluation.caps.{kind}={e.caps[kind]} must each be at least 1")
    check_choice("data.subject", config.data.subject, SUBJECTS)
    check_choice("actor.kind", config.actor.kind, ACTORS)
    check_choice("actor.template", config.actor.template, TEMPLATES)
    check_no_secret("actor.base_url", config.actor.base_url)
    _check_teams(config)
    check_evaluated(config)
    _check_stages(config)
    if has_weights:
        _check_protocols(config)


def _check_warmups(config: ConfigDict) -> None:
    """Raises: ValueError if a starting policy's learning rate would never fall."""
    p, m = config.pretrain.settings, config.math_pretrain
    for where, steps, warmup in (
        ("pretrain.settings", p.steps, p.warmup_steps),
        *((f"math_pretrain.steps.{who}", m.steps[who], m.settings.warmup_steps) for who in m.steps),
    ):
        if warmup >= steps:
            raise ValueError(
                f"{where} has {steps} steps and warmup_steps={warmup}, so the learning rate never "
                "falls; set fewer warmup_steps, or more steps"
            )


def _check_teams(config: ConfigDict) -> None:
    """Raises: ValueError for a team that cannot be evaluated as the config says."""
    e = config.evaluation
    for team in e.teams:
        check_choice("evaluation.teams", team, (*TEAMS, *TOPOLOGIES))
        if e.privileged and team != "single":
            raise ValueError(
                f"evaluation.privileged=True, and evaluation.teams has the {team}, none of whose "
                "roles reads the question alone; set evaluation.teams=('single',)"
            )
        if config.model.stepwise:
            check_stepwise("evaluation.teams", team)
        check_budgets(config, team, where="evaluation.teams")
        if team in TOPOLOGIES and (*e.caps.searches, *e.caps.tokens):
            raise ValueError(
                f"evaluation.caps={dict(e.caps)} are of teams that search, and {team!r} is in "
                "evaluation.teams; clear the caps"
            )


def _check_stages(config: ConfigDict) -> None:
    """Raises: ValueError for stages that are not one after another, or a bad one of them."""
    t = config.train
    if not t.stages or len(set(t.stages)) < len(t.stages):
        raise ValueError(f"train.stages={t.stages} must name at least one stage, and each once")
    if t.learning_rates and len(t.learning_rates) != len(t.stages):
        raise ValueError(
            f"train.learning_rates={t.learning_rates} must be one for each of train.stages="
            f"{t.stages}; or clear it for train.optimizer.learning_rate in all"
        )
    for name in t.stages:
        check_choice("train.stages", name, config.stages)
        check_stage(config, name)


def check_correction(config: ConfigDict) -> None:
    """Raises: ValueError if a row learns from what an int8 sampler drew as if the policy had."""
    if config.engine.weights == "full":
        return
    for name in config.train.stages:
        for acting, row in config.stages[name].programme.items():
            if row.trained and row.advantages and row.correction == "none":
                where = f"stages.{name}.programme.{acting}.correction"
                raise ValueError(
                    f"engine.weights={config.engine.weights!r} samples from another policy than is "
                    f"trained, and {where}='none'; set 'token' or 'sequence' in every trained row, "
                    "or engine.weights='full'"
                )


def _check_protocols(config: ConfigDict) -> None:
    """Raises: ValueError if a row's teacher or an evaluation reads protocols, or a stage imitates
    trajectories, and there are none."""
    path = config.privileged.protocols
    rows = (row for s in config.train.stages for row in config.stages[s].programme.values())
    is_read = any(row.trained and row.view != "none" for row in rows)
    if (is_read or config.evaluation.privileged) and not Path(path).is_file():
        raise ValueError(
            f"privileged.protocols={path!r} is not a file; make it with launch/build_protocols.py"
        )
    samplers = {config.stages[s].sampler for s in config.train.stages}
    if "trajectories" in samplers and not Path(config.trajectories).is_file():
        raise ValueError(
            f"trajectories={config.trajectories!r} is not a file; make it with "
            "launch/build_protocols.py"
        )


def _check_directories(config: ConfigDict) -> None:
    for name in ("model", "teacher", "actor"):
        path = config[name].checkpoint
        if name != "teacher" and path.startswith(("package:", "asset:")):
            continue  # model/packaged.py, learning/policy_files.py
        if path and not Path(path).is_dir():
            raise ValueError(
                f"{name}.checkpoint={path!r} is not a directory; give one with config.json and "
                "safetensors, or '' for "
                + {"model": "the shipped toy policy", "teacher": "none", "actor": "the model's"}[
                    name
                ]
            )
    if not config.model.checkpoint and config.model.template != "toy":
        raise ValueError(
            f"model.template={config.model.template!r} does not fit the shipped toy policy; "
            "set model.checkpoint, or model.template='toy'"
        )


def _check_data(config: ConfigDict) -> None:
    """Real questions have splits, and exactly one thing that searches their passages."""
    d = config.data
    check_no_secret("data.server", d.server)
    _check_backend(config)
    if not any((*d.train, *d.validation, *d.test, d.corpus, d.index, d.server)):
        return
    if d.subject == "mathematics":
        if d.corpus or d.index or d.server or not d.test:
            raise ValueError(
                f"data.subject='mathematics' with data.test={d.test}, corpus={d.corpus!r}, "
                f"index={d.index!r}, server={d.server!r}: nobody searches; clear the last three, "
                "and name test files or none at all"
            )
    elif not d.test or bool(d.corpus) == bool(d.server):
        raise ValueError(
            f"data.test={d.test}, data.corpus={d.corpus!r} and data.server={d.server!r}: real "
            "questions need test files, and a corpus or a server; clear all for the toy world"
        )
    for path in (path for split in SPLITS for path in d[split]):
        if Path(path).is_dir() and not (Path(path) / "dataset_info.json").is_file():
            raise ValueError(
                f"data: {path!r} is a directory without dataset_info.json; give a JSONL file, or a "
                "directory of ArrayRecord files that launch/prepare_data.py --format=tfds wrote"
            )
    check_choice("data.dialect", d.dialect, DIALECTS)
    if d.weights and len(d.weights) != len(d.train):
        raise ValueError(f"data.weights={d.weights} must be one for each of data.train={d.train}")


def _check_backend(config: ConfigDict) -> None:
    """A server searches as it was started to; BM25 needs a corpus and nothing made from it."""
    d, backend = config.data, config.retriever.backend
    if d.server and backend != "auto":
        raise ValueError(
            f"retriever.backend={backend!r} does not reach data.server={d.server!r}, which "
            "searches as it was started to; leave it 'auto', or set data.corpus in place of it"
        )
    encoder = config.encoder.directory
    if backend == "bm25" and (not d.corpus or d.index or encoder != "hashed"):
        raise ValueError(
            f"retriever.backend='bm25' with data.corpus={d.corpus!r}, data.index={d.index!r} and "
            f"encoder.directory={encoder!r}: it searches the words of a corpus, without vectors; "
            "set data.corpus, data.index='' and encoder.directory='hashed'"
        )
