"""The systems of METHODS as changes to a config: what each config file, and the study, is made of.

Each takes a config, changes it and returns it. Must not know: sizes of machines, data.
"""

from ml_collections import ConfigDict

from mas_jax.collaboration_rules import TOPOLOGIES
from mas_jax.config import cascade_programme, role


def only_stage(
    config: ConfigDict, name: str, *, team: str, sampler: str, programme: ConfigDict
) -> None:
    """Makes this the only stage, as long as the one that it replaces."""
    steps = config.stages[config.train.stages[-1]].steps
    stage = dict(team=team, sampler=sampler, steps=steps, programme=programme)
    config.stages = ConfigDict({name: stage}).lock()
    config.train.stages = (name,)


def grpo_cascade(config: ConfigDict) -> ConfigDict:
    """Stage I alone: the cascade on the outcome, advantages relative to the group."""
    only_stage(config, "grpo", team="cascade", sampler="policy", programme=cascade_programme())
    return config


def ppo_cascade(config: ConfigDict) -> ConfigDict:
    """The cascade on the outcome with a critic: a value head on the same backbone, GAE."""
    programme = cascade_programme(advantages=("gae",))
    only_stage(config, "ppo", team="cascade", sampler="policy", programme=programme)
    config.train.value_head = True
    config.train.updates_per_batch = 4  # with one, the clip would have nothing to do
    return config


def single_agent(config: ConfigDict, *, turns: int = 5, **changes) -> ConfigDict:
    """One agent that searches and answers, on its own outcome, held near the start: METHODS 4.

    turns: the last is the answer. changes: to its row; with the advantage "gae" it has a critic.
    """
    # Search-R1's, which the others keep: KL loss 0.001, low_var_kl (k3), to the start; an entropy
    # bonus of 0.001, ppo_trainer.yaml's, which its scripts leave; discount and decay of a critic 1
    shared = dict(kl_coef=1e-3, kl_reference="initial", kl_estimator="k3", entropy_coef=1e-3)
    programme = ConfigDict(dict(searcher=role(**shared | changes)))
    only_stage(config, "agent", team="single", sampler="policy", programme=programme)
    config.budgets.single.update(dict(turns=turns, searcher_turns=turns, searches=turns - 1))
    config.evaluation.teams = ("single",)
    if not config.model.checkpoint:  # the shipped toy policy never played alone
        config.model.checkpoint = "asset:study_policy"
    if "gae" in programme.searcher.advantages:
        config.train.value_head = True
        config.train.updates_per_batch = 4  # with one, the clip would have nothing to do
    return config


# --- the single-agent baselines, METHODS 4; each config says how it differs from what was published


def prompted_critic(config: ConfigDict) -> ConfigDict:
    """Stage II whose Searcher learns from a judge, as M-GRPO's sub-agents do: METHODS 1.5."""
    config.stages.student.programme.searcher = role(
        behaviour="judge", scale="population_std", alignment="weights"
    )
    return config


def search_r1_grpo(config: ConfigDict) -> ConfigDict:
    """4 searches, then the answer (max_turns 4 in every public script); exact match of the last
    answer; groups of 5, n of the v0.2 script."""
    config = single_agent(config, turns=5)
    config.train.group_size = 5
    return config


def search_r1_ppo(config: ConfigDict) -> ConfigDict:
    """The same with a critic, which needs no group: one rollout of each question, and as many
    rollouts a step as the others."""
    config = single_agent(config, turns=5, advantages=("gae",))
    config.train.update(dict(questions=8 * config.train.questions, group_size=1))
    return config


def research(config: ConfigDict) -> ConfigDict:
    """ReSearch: F1 if above 0, else 0.1 if the format is valid, else 0."""
    return single_agent(config, turns=5, outcome="f1_or_format")


def stepsearch(config: ConfigDict) -> ConfigDict:
    """PPO in which a search earns its information gain less its redundancy, and the end F1 + 0.618
    F1 of the search keys; max_turns 5, then the answer."""
    config = single_agent(
        config, turns=6, advantages=("gae",), outcome="f1_and_keys", key_weight=0.618,
        turn_reward="search_progress",
    )  # fmt: skip
    config.train.update(dict(questions=8 * config.train.questions, group_size=1))
    return config


def gigpo(config: ConfigDict) -> ConfigDict:
    """A = A_episode + w A_step, w 1, discount 0.95; anchor groups are observations of similarity
    0.9 or more; group 5, max_steps 4."""
    config = single_agent(
        config, turns=4, advantages=("group", "step"), step_weight=1.0, step_discount=0.95,
        step_similarity=0.9,
    )  # fmt: skip
    config.train.group_size = 5
    return config


def tree_grpo(config: ConfigDict) -> ConfigDict:
    """In comments the names of train_multihopqa_tree_search.sh of AMAP-ML/Tree-GRPO."""
    config = single_agent(
        config, turns=4,  # max_turns=3, and then an answer
        advantages=("tree",), tree_form="sum",  # algorithm.adv_estimator=tree
        outcome="format_tiers",  # structure_format_score=0.2, final_format_score=0.1
        kl_coef=1e-3, kl_estimator="k3",  # kl_loss_coef=0.001, kl_loss_type=low_var_kl
    )  # fmt: skip
    config.train.tree.update(dict(trees=2, expansions=2, rounds=1))  # tree_search_m, _n, _l
    config.train.group_size = 6  # tree_search_k=3: all leaves of both trees
    return config


# --- MAPD and what it is compared with, METHODS 2 -------------------------------------------------


def protocol_grpo(config: ConfigDict, **changes) -> ConfigDict:
    """The single agent by outcome GRPO, as all of these have it: 3 searches, then the answer; the
    mean over a sequence, then over sequences; KL 0.001 (k3) to the start. changes: to its row."""
    shared = dict(aggregation="sequence", entropy_coef=0.0)
    if not config.model.checkpoint:  # the toy policy that has seen protocols
        config.model.checkpoint = "asset:protocol_policy"
    config = single_agent(config, turns=4, **shared | changes)
    config.train.view_length = 2 * config.train.row_length
    return config


def mapd(config: ConfigDict, **changes) -> ConfigDict:
    """GRPO and 0.05 times the exact reverse KL to the same weights with the protocol before them,
    a mean over tokens."""
    shared = dict(divergence="reverse_kl", divergence_coef=0.05, teacher="live", view="privileged")
    config = protocol_grpo(config, **shared | changes)
    config.privileged.protocols = "runs/protocols.jsonl"
    return config


def opsd(config: ConfigDict) -> ConfigDict:
    """The privileged branch alone, without a reward."""
    return mapd(config, advantages=(), divergence_coef=1.0)


def ema_branch(config: ConfigDict) -> ConfigDict:
    """As SDPO: the privileged branch is an average of the weights, which follows slowly."""
    return mapd(config, teacher="ema")


def sdar(config: ConfigDict) -> ConfigDict:
    """GRPO and 0.01 times SDAR's gated log-ratio, gate slope 5. WARNING: see
    `losses.gated_log_ratio`; its teacher only weighs the policy's own tokens."""
    return mapd(config, divergence="gated_log_ratio", divergence_coef=0.01, gate_slope=5.0)


def grpo_opsd(config: ConfigDict) -> ConfigDict:
    """SDAR's "GRPO+OPSD": no gate. WARNING: no teacher is in its gradient at all."""
    return mapd(config, divergence="gated_log_ratio", divergence_coef=0.01, gate_slope=0.0)


def protocol_one(config: ConfigDict) -> ConfigDict:
    """MAPD with protocols that one model wrote alone, of a build with --alone."""
    config = mapd(config)
    config.privileged.protocols = "runs/protocols_alone.jsonl"
    return config


def logit_matching(config: ConfigDict) -> ConfigDict:
    """The exact reverse KL to a frozen teacher of the same vocabulary on the student's own
    rollouts, without a reward or anything privileged; a mean over tokens."""
    config = protocol_grpo(
        config, advantages=(), divergence="reverse_kl", divergence_coef=1.0, teacher="teacher",
        aggregation="token", kl_coef=0.0,
    )  # fmt: skip
    config.teacher.checkpoint = "runs/open_teacher"
    return config


_IMITATION = dict(advantages=(), policy_loss="sft", kl_coef=0.0, entropy_coef=0.0)


def raw_trajectory(config: ConfigDict, records: str) -> ConfigDict:
    """The single agent imitates a teacher's whole trajectories: -log p of their tokens.

    records: of the build whose models are the teacher, one alone or the team.
    """
    config = protocol_grpo(config, aggregation="token", **_IMITATION)
    config.stages.agent.sampler = "trajectories"
    config.trajectories = records
    # a trajectory says the same each time: as many episodes a step as the others, of more questions
    config.train.update(dict(questions=8 * config.train.questions, group_size=1))
    # a turn may think: the longest of the toy world's team has 27 tokens
    longest = config.sampling.max_tokens
    longest.searcher = max(32, longest.searcher)
    return config


def sft_then_ppo(config: ConfigDict) -> ConfigDict:
    """Imitation of trajectories, then PPO with a critic that goes on from its policy and is held
    near it."""
    ppo = protocol_grpo(config, advantages=("gae",)).stages.agent
    config = raw_trajectory(config, "runs/protocols_alone.jsonl")
    config.stages = ConfigDict(dict(imitation=config.stages.agent, agent=ppo)).lock()
    config.train.update(dict(stages=("imitation", "agent"), continued=True))
    return config


# --- AgentPO, METHODS 3 --------------------------------------------------------------------------


# topologies with a Collaborator to train, the paper's first
TRAINED_TEAMS = ("hint", *(name for name, roles in TOPOLOGIES.items()
                           if "collaborator" in roles and name != "hint"))  # fmt: skip
AGENTPO_LOSSES = {
    # the authors' script: a mean over tokens, no KL
    "script": dict(aggregation="token", kl_coef=0.0),
    # the paper's formula: a mean over each hint, KL to the start
    "paper": dict(aggregation="sequence", kl_coef=1e-3),
}


def agentpo_variant(text: str, **kinds: tuple[str, ...]) -> dict[str, str]:
    """By kind what an argument such as "critic,paper" names: team, loss, and a config's own kinds,
    whose names are given; the first of a kind where it names none.

    Raises: ValueError for a word of no kind, and for two of one.
    """
    kinds = {"team": TRAINED_TEAMS, "loss": tuple(AGENTPO_LOSSES), **kinds}
    named: dict[str, str] = {}
    for word in filter(None, text.split(",")):
        kind = next((kind for kind, names in kinds.items() if word in names), None)
        if kind is None or kind in named:
            listed = "; ".join(f"{name}: {', '.join(names)}" for name, names in kinds.items())
            raise ValueError(
                f"variant {text!r}: want at most one name of each kind, with commas between them; "
                f"got {word!r}. {listed}"
            )
        named[kind] = word
    return {kind: names[0] for kind, names in kinds.items()} | named


def agentpo(config: ConfigDict, *, team: str = "hint", loss: str = "script") -> ConfigDict:
    """Mathematics by a topology whose Collaborator learns from the team's outcome; the Actor is
    frozen.

    Raises: ValueError for an unknown loss.
    """
    if loss not in AGENTPO_LOSSES:
        raise ValueError(f"loss={loss!r}; choose from {tuple(AGENTPO_LOSSES)}")
    row = role(
        clip_low=0.2, clip_high=0.28, dual_clip=10.0, entropy_coef=0.0, kl_reference="initial",
        kl_estimator="k3", **AGENTPO_LOSSES[loss],
    )  # fmt: skip
    programme = dict(collaborator=row)
    if team != "solver":  # alone, without an Actor
        programme["actor"] = role(trained=False)
    only_stage(config, "agentpo", team=team, sampler="policy", programme=ConfigDict(programme))
    config.data.subject = "mathematics"
    config.evaluation.teams = ("actor", team)
    config.sampling.temperature = 0.0  # evaluated greedily; trained at train.temperature
    config.train.candidates = 1
    return config


def toy_mathematics(config: ConfigDict) -> ConfigDict:
    """AgentPO in toy mathematics between the shipped policies: 16 problems x 8 an update.

    They learned from none of its problems.
    """
    config.model.checkpoint = "asset:math/collaborator_policy"
    config.actor.update(dict(kind="policy", checkpoint="asset:math/actor_policy"))
    config.arithmetic.update(dict(seed=11, train=1000, held_out=600))
    for engine in (config.engine, config.actor.engine):
        engine.update(dict(context=192, buckets=(96, 192), num_pages=4096, prefill_blocks=32))
    config.collaboration.update(dict(context=192, max_tokens=32))
    config.actor.update(dict(context=192, max_tokens=32))
    config.train.update(
        dict(questions=16, group_size=8, row_length=192, micro_rows=8, role_gradient_interval=0)
    )
    config.train.optimizer.learning_rate = 3e-4
    return config


def sft_cascade(config: ConfigDict) -> ConfigDict:
    """The cascade imitates the toy world's script, which knows the toy prompts only."""
    programme = cascade_programme(advantages=(), policy_loss="sft", entropy_coef=0.0)
    only_stage(config, "sft", team="cascade", sampler="oracle", programme=programme)
    config.model.prompts = "toy"
    # the script says the same each time; it has no log-probs to measure a drift with
    config.train.update(dict(questions=128, group_size=1, candidates=1, drift_frac=0.0))
    return config
