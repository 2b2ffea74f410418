"""The teams that a config names, and the world that they play in.

Must not know: how scenes and engines are made, how a team plays.
"""

from ml_collections import ConfigDict

from mas_jax.agents.judge import Judge
from mas_jax.agents.prompts import load_stepwise
from mas_jax.agents.setting import Budgets, Sampling, Team, World
from mas_jax.agents.topology import ACTOR, COLLABORATOR, TOPOLOGIES
from mas_jax.learning import collaboration
from mas_jax.learning.scenes import Scene
from mas_jax.sampling.policies import Policies
from mas_jax.sampling.replicas import Replicas


def make_team(config: ConfigDict, name: str, scene: Scene, *, training: bool = False) -> Team:
    """A team with its budgets, all of whose roles are the configured policy.

    training: draws as `config.train` says, from the whole distribution, so that log-probs are those
    of what is trained; what the Collaborator says is under no control.
    """
    sampling = config.sampling.to_dict()
    if training:
        t = config.train
        sampling |= dict(temperature=t.temperature, top_p=1.0, top_k=0, candidates=t.candidates)
    if name in TOPOLOGIES:
        return collaboration.make_team(
            config, name, Sampling(**sampling),
            chats={COLLABORATOR: scene.chat, ACTOR: scene.actor_chat},
            prompts=scene.prompts, grading=scene.grading,
            others={
                uid: text
                for split in scene.questions.values()
                for uid, text in collaboration.next_problems(split).items()
            },
            training=training,
        )  # fmt: skip
    roles = ("leader", "searcher", "answerer")
    return Team(
        name=name,
        chat=scene.chat,
        prompts=scene.prompts,
        budgets=Budgets(**config.budgets[name]),
        sampling=Sampling(**sampling),
        policies=dict.fromkeys(roles, config.model.policy),
        stepwise=load_stepwise(config.model.prompts) if config.model.stepwise else None,
    )


def make_play_world(
    scene: Scene, policies: Replicas | Policies, judge: Judge | None = None
) -> World:
    """What surrounds a team: the policies, what searches, what rewards."""
    return World(
        policies.sample,
        scene.retriever.search,
        scene.reward,
        judge,
        complete=policies.complete if isinstance(policies, Policies) else None,
    )
