"""The rules of one stage: its team and sampler, its rows, its trees, its teachers.

`config_rules.py` asks for them. Must not know: defaults, what is built.
"""

from ml_collections import ConfigDict

from mas_jax.choices import (
    CONTROLS,
    FALLBACKS,
    FORMS,
    JUDGES,
    PROTOCOL_FIELDS,
    SAMPLERS,
    TEAMS,
    check_choice,
    check_no_secret,
)
from mas_jax.collaboration_rules import SAMPLED, TOPOLOGIES, VOTING, check_collaboration


def check_stepwise(where: str, team: str, sampler: str = "policy") -> None:
    """What plays where model.stepwise is set. Raises: ValueError."""
    if team != "single" or sampler == "oracle":
        raise ValueError(
            f"model.stepwise=True and {where} is played by the {team} with sampler={sampler!r}: "
            "only a policy that is the team 'single' has a prompt for each turn; set team='single' "
            "and sampler='policy', or model.stepwise=False"
        )


def check_budgets(config: ConfigDict, team: str, *, where: str) -> None:
    """What a team is played with fits its subject, and its conversations the engine."""
    if (config.data.subject == "mathematics") != (team in TOPOLOGIES):
        raise ValueError(
            f"{where}={team!r} and data.subject={config.data.subject!r}: {tuple(TEAMS)} search for "
            f"facts, {tuple(TOPOLOGIES)} solve mathematics; change one of the two"
        )
    if team in TOPOLOGIES:
        check_collaboration(config, team, where=where)
        return
    budgets, longest = config.budgets[team], max(config.sampling.max_tokens.values())
    if budgets.context > config.engine.context:
        raise ValueError(
            f"budgets.{team}.context={budgets.context} exceeds engine.context="
            f"{config.engine.context}; raise the engine's or lower the team's"
        )
    if budgets.observation + longest >= budgets.context:
        raise ValueError(
            f"budgets.{team}.observation={budgets.observation} and the longest "
            f"sampling.max_tokens={longest} leave no room in context={budgets.context}"
        )


def check_stage(config: ConfigDict, name: str) -> None:
    """Team, sampler and length of a stage, and whether its rows fit them."""
    stage, t, where = config.stages[name], config.train, f"stages.{name}"
    check_choice(f"{where}.team", stage.team, (*TEAMS, *TOPOLOGIES))
    check_choice(f"{where}.sampler", stage.sampler, SAMPLERS)
    if config.model.stepwise:
        check_stepwise(where, stage.team, stage.sampler)
    check_budgets(config, stage.team, where=f"{where}.team")
    is_searching = stage.team in TEAMS
    section = f"budgets.{stage.team}" if is_searching else "collaboration"
    context = (config.budgets[stage.team] if is_searching else config.collaboration).context
    if t.row_length < context:
        raise ValueError(
            f"train.row_length={t.row_length} is below {section}.context={context}, so "
            "longer traces would be left out; raise row_length or lower the context"
        )
    _check_solutions(config, stage, where)
    if stage.steps < 1:
        raise ValueError(f"{where}.steps={stage.steps} must be at least 1")
    _check_sampler(config, stage, where)
    wanted, given = set((TEAMS | TOPOLOGIES)[stage.team]), set(stage.programme)
    if wanted != given:
        raise ValueError(
            f"{where}.programme has rows for {sorted(given)} and its team, the {stage.team}, acts "
            f"as {sorted(wanted)}; give exactly these"
        )
    if "actor" in stage.programme and stage.programme.actor.trained:
        raise ValueError(
            f"{where}.programme.actor.trained=True: the Actor is another policy, which no update "
            "reaches; set False, or team='solver' with model.checkpoint the Actor's"
        )
    if "collaborator" in wanted and stage.sampler == "oracle":
        raise ValueError(
            f"{where}.sampler='oracle' searches for facts, and the team {stage.team!r} does not; "
            "set 'policy'"
        )
    if any(row.trained and row.behaviour == "judge" for row in stage.programme.values()):
        _check_judge(config, stage, where=where)
    for acting, row in stage.programme.items():
        _check_row(config, stage, acting, row, where=f"{where}.programme.{acting}")
    _check_tree(config, name)
    _check_teacher(config, name)


def _check_solutions(config: ConfigDict, stage: ConfigDict, where: str) -> None:
    """How many of the Actor's solutions reward a Collaborator, and how much of each."""
    if config.collaboration.reward_window and stage.team in VOTING:
        raise ValueError(
            f"collaboration.reward_window={config.collaboration.reward_window} rewards one "
            f"solution, and {where}.team={stage.team!r} votes on several answers; set 0"
        )
    samples = config.collaboration.actor_samples
    if samples > 1 and stage.team in TOPOLOGIES and stage.team not in SAMPLED:
        raise ValueError(
            f"collaboration.actor_samples={samples} draws the Actor's one solution again, and "
            f"{where}.team={stage.team!r} has no such; set 1, or a team of {SAMPLED}"
        )
    if samples > 1 and config.collaboration.vote_temperature <= 0:
        raise ValueError(
            f"collaboration.actor_samples={samples} at collaboration.vote_temperature="
            f"{config.collaboration.vote_temperature} are {samples} equal solutions; set a "
            "temperature above 0, or 1 sample"
        )


def _check_sampler(config: ConfigDict, stage: ConfigDict, where: str) -> None:
    """What a stage that the policy does not play itself is played with."""
    if stage.sampler == "oracle" and config.data.test:
        raise ValueError(
            f"{where}.sampler='oracle' knows the toy world only, and data.test={config.data.test}; "
            "set sampler='policy'"
        )
    if stage.sampler == "oracle" and config.model.prompts != "toy":
        raise ValueError(
            f"{where}.sampler='oracle' reads the toy prompts only, and model.prompts="
            f"{config.model.prompts!r}; set model.prompts='toy' or sampler='policy'"
        )
    if stage.sampler == "trajectories" and stage.team != "single":
        raise ValueError(
            f"{where}.sampler='trajectories' says what one agent says, and the team is the "
            f"{stage.team}; set team='single'"
        )


def _check_judge(config: ConfigDict, stage: ConfigDict, *, where: str) -> None:
    """What the judge of a stage needs. Raises: ValueError."""
    j = config.judge
    check_choice("judge.kind", j.kind, JUDGES)
    if stage.team == "single":
        raise ValueError(
            f"{where}.team='single' has no subtasks for a judge; set behaviour to another than "
            "'judge', or team='hierarchy'"
        )
    check_no_secret("judge.base_url", j.base_url)
    if j.kind in ("oracle", "length") and config.data.test:
        raise ValueError(
            f"judge.kind={j.kind!r} knows the toy world only, and data.test={config.data.test}; "
            "set 'policy' or 'api'"
        )
    for key in ("accuracy", "length_bias"):
        if not 0.0 <= j[key] <= 1.0:
            raise ValueError(f"judge.{key}={j[key]} is outside [0, 1]")
    if j.length_bias and j.kind != "length":
        raise ValueError(
            f"judge.length_bias={j.length_bias} is of kind 'length', and judge.kind={j.kind!r}; "
            "set judge.kind='length' or length_bias=0.0"
        )
    for key in ("full_words", "max_tokens", "max_chars"):
        if j[key] < 1:
            raise ValueError(f"judge.{key}={j[key]} must be at least 1")
    if j.kind == "policy" and config.model.template == "toy":
        raise ValueError(
            "judge.kind='policy' asks the starting policy in plain words, and model.template='toy' "
            "has none; set judge.kind='oracle', or a real model"
        )
    if j.kind == "policy" and j.max_tokens >= config.engine.context:
        raise ValueError(
            f"judge.max_tokens={j.max_tokens} leaves no room in engine.context="
            f"{config.engine.context}; lower it"
        )
    if j.kind == "api" and not (j.base_url and j.model):
        raise ValueError(
            f"judge.kind='api' with base_url={j.base_url!r} and model={j.model!r}; name both"
        )


def _check_row(
    config: ConfigDict, stage: ConfigDict, acting: str, row: ConfigDict, *, where: str
) -> None:
    """What the row of the acting role asks of its stage and of the training settings."""
    t = config.train
    if row.behaviour == "assignment" and "leader" not in stage.programme:
        raise ValueError(
            f"{where}.behaviour='assignment' rewards a leader's assignments, and the {stage.team} "
            "has none; set 'search_activity' or 'none'"
        )
    if not row.trained:
        return
    if row.view != "none" and row.divergence_coef:
        _check_view(config, stage, where)
    of_turns = (row.outcome != "correct", row.turn_reward != "none", "step" in row.advantages)
    if any(of_turns) and stage.team != "single":
        raise ValueError(
            f"{where}: outcome={row.outcome!r}, turn_reward={row.turn_reward!r} and advantages="
            f"{row.advantages} credit an agent that searches and answers itself, and the team is "
            f"the {stage.team}; set team='single', or outcome='correct', turn_reward='none' and no "
            "'step'"
        )
    if row.turn_reward != "none" and config.data.server:
        raise ValueError(
            f"{where}.turn_reward={row.turn_reward!r} reads gold passages' texts, which "
            f"data.server={config.data.server!r} does not give; set data.corpus in place of it"
        )
    if "gae" in row.advantages and not t.value_head:
        raise ValueError(
            f"{where}.advantages={row.advantages} need a critic, and train.value_head="
            f"{t.value_head}; set train.value_head=True"
        )
    if row.advantages and stage.sampler != "policy":
        raise ValueError(
            f"{where}.advantages={row.advantages} are of tokens that the policy sampled, and "
            f"the stage's sampler is {stage.sampler!r}; set policy_loss='sft' and advantages=()"
        )
    size = 1 if row.group_by == "context" else t.group_size
    size *= t.candidates if acting == "answerer" else 1
    if {"group", "step"} & set(row.advantages) and size < 2:
        raise ValueError(
            f"{where}.advantages={row.advantages} compare a group, which has one member with "
            f"train.group_size={t.group_size}, candidates={t.candidates} and group_by="
            f"{row.group_by!r}; raise one of the two to 2 or more"
        )


def _check_view(config: ConfigDict, stage: ConfigDict, where: str) -> None:
    """What a row whose teacher reads more than the student asks for."""
    t, p = config.train, config.privileged
    check_choice("privileged.form", p.form, FORMS)
    check_choice("privileged.control", p.control, CONTROLS)
    check_choice("privileged.fallback", p.fallback, FALLBACKS)
    for field in p.fields:
        check_choice("privileged.fields", field, PROTOCOL_FIELDS)
    if stage.team != "single":
        raise ValueError(
            f"{where}.view='privileged' is of an agent that reads the question itself, and the "
            f"team is the {stage.team}; set team='single', or view='none'"
        )
    if not p.protocols:
        raise ValueError(
            f"{where}.view='privileged' and privileged.protocols is empty; set it to a file that "
            "launch/build_protocols.py made, or view='none'"
        )
    if t.view_length < t.row_length:
        raise ValueError(
            f"train.view_length={t.view_length} holds less than train.row_length={t.row_length}, "
            "and a view is longer than its trace; set it to that and room for a protocol"
        )


def _check_tree(config: ConfigDict, name: str) -> None:
    """Only the single agent grows trees, and a question's leaves are its group."""
    t, stage, where = config.train, config.stages[name], f"stages.{name}"
    trees, expansions, rounds = t.tree.trees, t.tree.expansions, t.tree.rounds
    if not trees:
        if any(row.trained and "tree" in row.advantages for row in stage.programme.values()):
            raise ValueError(
                f"{where}.programme: the advantages 'tree' compare leaves, and train.tree.trees=0; "
                "set it to 2, or advantages=('group',)"
            )
        return
    if min(trees, expansions, rounds) < 1:
        raise ValueError(
            f"train.tree={dict(t.tree)}: each must be at least 1; train.tree.trees=0 is without"
        )
    if stage.team != "single":
        raise ValueError(
            f"train.tree.trees={trees} and {where}.team={stage.team!r}: only the team 'single' "
            "grows trees; set train.tree.trees=0"
        )
    leaves = trees * (1 + expansions * rounds)
    if t.group_size != leaves:
        raise ValueError(
            f"train.group_size={t.group_size} is not {leaves}, the leaves of a question with "
            f"train.tree={dict(t.tree)}: trees x (1 + expansions x rounds); set it to {leaves}"
        )


def _check_teacher(config: ConfigDict, name: str) -> None:
    """Raises: ValueError if a row of the stage reads the teacher before there is one."""
    stages, given = config.train.stages, config.teacher.checkpoint
    if given and stages == ("teacher",):
        raise ValueError(
            f"teacher.checkpoint={given!r} takes the place of the stage 'teacher', the only one of "
            f"train.stages={stages}; add a stage, or clear teacher.checkpoint"
        )
    if given or "teacher" in stages[: stages.index(name)]:
        return
    for role_name, row in config.stages[name].programme.items():
        reads = ("distillation" in row.advantages or row.divergence != "none", row.kl_coef != 0)
        if row.trained and (
            (reads[0] and row.teacher == "teacher") or (reads[1] and row.kl_reference == "teacher")
        ):
            raise ValueError(
                f"stages.{name}.programme.{role_name} reads 'teacher', and train.stages={stages} "
                "has no stage 'teacher' before it; add one, or set teacher.checkpoint"
            )
