"""The stages of a config, one after another: each trains from the start, and is exported whole.

Workdir: config.json, revision.json, and a directory for each stage with its metrics, checkpoints
and, once it is done, `policy` in the Hugging Face layout. The stage named "teacher" is certified
on validation questions and then teaches those after it.
Must not know: how a stage trains.
"""

import dataclasses
import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

import jax
from ml_collections import ConfigDict
from rich.console import Console

from mas_jax.agents.judge import Judge
from mas_jax.agents.protocol import MARKERS
from mas_jax.agents.rollout import Limits
from mas_jax.agents.tree import Shape
from mas_jax.config_rules import check_correction, validate
from mas_jax.data.questions import check_disjoint
from mas_jax.evaluation import ledger, report
from mas_jax.evaluation.statistics import accuracy_by_dataset, macro_average
from mas_jax.files import write_json
from mas_jax.learning import (
    certificate,
    cost,
    evaluate,
    hosts,
    judges,
    loop,
    players,
    policy_files,
    privileged,
    revision,
    samplers,
    scenes,
    teams,
    training_mesh,
)
from mas_jax.learning.alarms import AlarmSettings
from mas_jax.learning.continuation import check_unchanged
from mas_jax.learning.export import save_policy
from mas_jax.learning.objective import Forward
from mas_jax.learning.privileged import Privilege
from mas_jax.learning.programme import (
    TEACHER,
    Programme,
    distilled,
    make_programme,
    privileged_roles,
)
from mas_jax.learning.teachers import Teacher, check_voices, voice
from mas_jax.learning.update import OptimizerSettings
from mas_jax.learning.workdir import only_run
from mas_jax.model import qwen3
from mas_jax.model.hf_config import load_config
from mas_jax.sampling.policies import Policies
from mas_jax.sampling.replicas import Replicas

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """What all stages share: the config, what they play in, and where they start.

    reference: the starting policy in the dtype of `train.dtype`, frozen. keep_episodes: as in
    `loop.Stage`.
    """

    config: ConfigDict
    workdir: Path
    start_directory: Path
    scene: scenes.Scene
    engines: Replicas | Policies
    mesh: jax.sharding.Mesh
    model: qwen3.ModelConfig
    reference: qwen3.Params
    keep_episodes: bool = False


def prepare(config: ConfigDict, workdir: Path, *, keep_episodes: bool = False) -> Pipeline:
    """Builds and checks everything that can fail before the first step.

    Raises: ValueError for a bad config, a workdir of another config, or a teacher that speaks
    otherwise than the student; FileNotFoundError for a missing checkpoint.
    """
    validate(config)
    check_correction(config)
    if config.data.test and not (config.data.train and config.data.validation):
        raise ValueError(
            f"data.train={config.data.train} and data.validation={config.data.validation}: "
            "training on real questions needs files of both; test questions are never trained on"
        )
    for name in config.train.stages:
        make_programme(config.stages[name].programme.to_dict())
    _check_workdir(config, workdir)
    directory = policy_files.checkpoint_directory(config)
    tokenizer = policy_files.load_tokenizer(directory)
    scene = scenes.make_scene(config, tokenizer)
    if scene.world is None:
        check_disjoint(scene.questions)
    for name in config.train.stages:  # what its prompts lack is said now
        teams.make_team(config, config.stages[name].team, scene, training=True)
    policy_files.check_chat(scene.chat, directory)
    _check_teacher(config, scene)
    mesh = training_mesh.make(config)
    hosts.introduce(mesh)
    model = dataclasses.replace(load_config(directory), value_head=config.train.value_head)
    return Pipeline(
        config=config,
        workdir=workdir,
        start_directory=directory,
        scene=scene,
        engines=samplers.make_policies(config, directory, tokenizer),
        mesh=mesh,
        model=model,
        reference=training_mesh.load_params(
            directory, mesh, dtype=config.train.dtype, value_head=config.train.value_head
        ),
        keep_episodes=keep_episodes,
    )


def _check_teacher(config: ConfigDict, scene: scenes.Scene) -> None:
    """Raises: ValueError if teacher.checkpoint cannot score what the student says."""
    if not config.teacher.checkpoint:
        return
    directory = Path(config.teacher.checkpoint)
    tokenizer = policy_files.load_tokenizer(directory)
    theirs = policy_files.policy_chat(config, tokenizer)
    policy_files.check_chat(theirs, directory)
    knobs = dict(temperature=config.train.temperature)
    check_voices(
        voice(scene.chat, vocab_size=scene.tokenizer.vocab_size, **knobs),
        voice(theirs, vocab_size=tokenizer.vocab_size, **knobs),
        where=directory,
    )


def as_json(config: ConfigDict) -> dict:
    """The resolved config as the JSON that checkpoints and workdirs hold."""
    return json.loads(config.to_json_best_effort())


def _check_workdir(config: ConfigDict, workdir: Path) -> None:
    """Raises: ValueError that lists the keys in which the workdir's config differs."""
    path = workdir / "config.json"
    saved = hosts.first(lambda: json.loads(path.read_text()) if path.exists() else None)
    if saved is not None:
        check_unchanged(saved, as_json(config))


def _remember(config: ConfigDict, workdir: Path) -> None:
    """Writes the resolved config and what it runs with. Raises: as `_check_workdir`."""
    _check_workdir(config, workdir)
    if jax.process_index() == 0:
        write_json(workdir / "config.json", as_json(config))
        write_json(workdir / "revision.json", revision.describe())


def _teachers(pipeline: Pipeline) -> Mapping[str, Teacher]:
    """The frozen teachers that there are by now: the start, and the trained one if any."""
    found = {"initial": Teacher("initial", pipeline.reference, pipeline.model)}
    given = pipeline.config.teacher.checkpoint
    directory = Path(given) if given else pipeline.workdir / TEACHER / "policy"
    if hosts.first((directory / "config.json").exists):
        dtype = pipeline.config.train.dtype
        params = training_mesh.load_params(directory, pipeline.mesh, dtype=dtype, value_head=False)
        found[TEACHER] = Teacher(TEACHER, params, load_config(directory))
    return found


def _validate(pipeline: Pipeline, name: str, team: str, step: int) -> float:
    """Macro average accuracy on validation questions of what the engines hold."""
    t = pipeline.config.train
    results = evaluate.play_now(
        pipeline.config, pipeline.scene, pipeline.engines, team,
        num_questions=t.validation_questions, num_runs=t.validation_runs, step=step,
    )  # fmt: skip
    plan, scores = results
    return macro_average(accuracy_by_dataset(plan, scores, k=t.validation_runs), "avg")


def _judge(pipeline: Pipeline, programme: Programme) -> Judge | None:
    """The config's judge for a stage whose programme asks for one."""
    if not any(row.trained and row.behaviour == "judge" for row in programme.values()):
        return None
    return judges.make_judge(pipeline.config, pipeline.scene, pipeline.start_directory)


def _privilege(pipeline: Pipeline, programme: Programme) -> Privilege | None:
    """What the privileged branch is shown in a stage whose programme has one."""
    if not privileged_roles(programme):
        return None
    p, scene = pipeline.config.privileged, pipeline.scene
    shown = privileged.read_texts(p, scene.questions["train"], seed=pipeline.config.seed)
    examples = scene.prompts.examples.get("single", ())
    fallback = privileged.fallback_of(p.fallback, control=p.control)
    return Privilege(shown, scene.chat, fallback=fallback, num_examples=len(examples))


def _markers(config: ConfigDict, section: ConfigDict) -> tuple[str, ...] | None:
    """What a stage's policy is watched for: the single agent, with a privileged branch and, as what
    that is compared with, without one. None for others, and for a policy that does not play itself:
    what it imitates says nothing of it."""
    is_watched = section.team == "single" and section.sampler == "policy"
    return MARKERS[config.privileged.form] if is_watched else None


def _stage_config(config: ConfigDict, privilege: Privilege | None, trajectories: str) -> dict:
    """What a checkpoint remembers: the config, and digests of what a privileged branch reads and
    of the trajectories that are imitated."""
    found = as_json(config)
    if privilege is not None:
        found["privileged"]["digest"] = privilege.digest()
    return found | ({"trajectories_digest": trajectories} if trajectories else {})


def _settings(config: ConfigDict, name: str) -> tuple[loop.TrainSettings, OptimizerSettings]:
    """Of a stage of `config.train`."""
    t, is_played = config.train, config.stages[name].sampler == "policy"
    fields = {field.name for field in dataclasses.fields(loop.TrainSettings)}
    own = {key: value for key, value in t.to_dict().items() if key in fields}
    if not is_played:  # without log-probs of what was drawn there is no drift to measure
        own["drift_frac"] = 0.0
    optimizer = t.optimizer.to_dict()
    if t.learning_rates:
        optimizer["learning_rate"] = t.learning_rates[t.stages.index(name)]
    return loop.TrainSettings(**own), OptimizerSettings(**optimizer)


def make_stage(pipeline: Pipeline, name: str) -> loop.Stage:
    """A stage of the config with everything that its steps read."""
    config, scene = pipeline.config, pipeline.scene
    section, t = config.stages[name], config.train
    programme: Programme = make_programme(section.programme.to_dict())
    playing = players.make_players(config, section, scene, pipeline.engines)
    settings, optimizer = _settings(config, name)
    has_turn_rewards = any(row.turn_reward != "none" for row in programme.values())
    alarms = t.alarms.to_dict() | {
        "distilled": distilled(programme), "privileged": privileged_roles(programme)
    }  # fmt: skip
    privilege = _privilege(pipeline, programme)
    return loop.Stage(
        name=name,
        team=playing.team,
        programme=programme,
        steps=section.steps,
        seed=config.seed,
        questions=playing.questions,
        world=dataclasses.replace(
            teams.make_play_world(scene, pipeline.engines, _judge(pipeline, programme)),
            sample=playing.sample,
        ),
        gold=scenes.gold_texts(scene) if has_turn_rewards else {},
        publish=pipeline.engines.set_params,
        sampler_counts=lambda: (
            pipeline.engines.metrics | {f"graded_{kind}": n for kind, n in scene.graded.items()}
        ),
        validate=lambda step: _validate(pipeline, name, section.team, step),
        start=lambda: training_mesh.load_params(
            pipeline.start_directory, pipeline.mesh, dtype=t.param_dtype, value_head=t.value_head
        ),
        reference=pipeline.reference,
        forward=Forward(
            config=pipeline.model, temperature=t.temperature, chunk=t.chunk, dtype=t.dtype,
            remat=t.remat, backend=t.backend,
        ),
        mesh=pipeline.mesh,
        teachers=_teachers(pipeline),
        optimizer=optimizer,
        ema_decay=config.teacher.ema_decay,
        param_dtype=t.param_dtype,
        limits=Limits(**config.rollout),
        shape=Shape(**t.tree) if t.tree.trees else None,
        alarms=AlarmSettings(**alarms),
        settings=settings,
        config=_stage_config(config, privilege, playing.digest),
        privilege=privilege,
        markers=_markers(config, section),
        keep_episodes=pipeline.keep_episodes,
    )  # fmt: skip


def run(pipeline: Pipeline, console: Console) -> dict[str, Path]:
    """Trains every stage that is not done yet; the policy directories by stage name.

    Raises: as `loop.train`; `certificate.NotCertified` for a teacher that is not better than the
    start; `workdir.InUse` if another run is at work there.
    """
    with only_run(pipeline.workdir):
        _remember(pipeline.config, pipeline.workdir)
        return _run_stages(pipeline, console)


def _run_stages(pipeline: Pipeline, console: Console) -> dict[str, Path]:
    config, done = pipeline.config, {}
    for name in config.train.stages:
        if name == TEACHER and config.teacher.checkpoint:
            logger.info("stage teacher: not trained, teacher.checkpoint is given")
            continue
        directory = pipeline.workdir / name / "policy"
        if not hosts.first((directory / "config.json").exists):
            begin = _going_on(pipeline, list(done.values()))
            params = loop.train(make_stage(begin, name), pipeline.workdir / name, console)
            export(pipeline, params, directory)
        done[name] = directory
        if name == TEACHER:
            certify(pipeline, directory, console)
    if jax.process_index() == 0:
        entries = [entry for name in done for entry in cost.of_stage(pipeline.workdir / name)]
        title = "Cost of training, sums, without validation"
        grid = ledger.grid(entries, title=title, num_workflows=1, are_parts=True)
        console.print(report.to_rich(grid))
    return done


def _going_on(pipeline: Pipeline, before: list[Path]) -> Pipeline:
    """The pipeline as its next stage sees it, with train.continued: it starts from the policy that
    the stage before it made. before: directories of the policies so far."""
    t = pipeline.config.train
    if not (t.continued and before):
        return pipeline
    last = before[-1]
    reference = training_mesh.load_params(
        last, pipeline.mesh, dtype=t.dtype, value_head=t.value_head
    )
    return dataclasses.replace(pipeline, start_directory=last, reference=reference)


def export(pipeline: Pipeline, params: qwen3.Params, directory: Path) -> None:
    """Writes a policy in the Hugging Face layout, whole or not at all, without a value head."""
    if jax.process_index() == 0:
        for leftover in directory.parent.glob(f".{directory.name}.partial-*"):  # of a killed save
            shutil.rmtree(leftover)
    save_policy(params, pipeline.start_directory, directory)


def certify(pipeline: Pipeline, directory: Path, console: Console) -> None:
    """Compares the teacher with the start in its own team, once; writes teacher/certificate.json.

    Raises: as `certificate.check`.
    """
    path = pipeline.workdir / TEACHER / "certificate.json"
    found = hosts.first(lambda: json.loads(path.read_text()) if path.exists() else None)
    if found is None:
        places = {"start": pipeline.start_directory, TEACHER: directory}
        found = certificate.measure(pipeline.config, pipeline.scene, pipeline.engines, places)
        if jax.process_index() == 0:
            write_json(path, found)
    certificate.check(found, console, ignore=pipeline.config.certify.ignore)
