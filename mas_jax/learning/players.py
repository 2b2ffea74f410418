"""Who plays a stage's episodes: the policy, the toy world's script, or a teacher's trajectories.

The last two are imitated; their tokens were drawn from no policy, so they have no log-probs.
Must not know: how a stage trains.
"""

import dataclasses
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from ml_collections import ConfigDict

from mas_jax.agents.oracle import Flaws
from mas_jax.agents.scripted import ScriptedSampler
from mas_jax.agents.setting import Team
from mas_jax.agents.trajectory import Replay, read_trajectories
from mas_jax.data.questions import Mixture
from mas_jax.learning import scenes, teams
from mas_jax.sampling.replicas import Replicas


@dataclasses.dataclass(frozen=True)
class Players:
    """What plays and what it is asked. digest: of the trajectories, which a run that goes on must
    find again; "" without any."""

    team: Team
    sample: Callable[..., Awaitable]
    questions: Mixture
    digest: str = ""


def make_players(
    config: ConfigDict, section: ConfigDict, scene: scenes.Scene, engines: Replicas
) -> Players:
    """The players of the stage that a section of the config describes.

    Raises: as `read_trajectories`; ValueError if no training question has a trajectory.
    """
    team = teams.make_team(config, section.team, scene, training=True)
    if section.sampler == "policy":
        return Players(team, engines.sample, scene.training)
    if section.sampler == "oracle":
        script = ScriptedSampler(scene.world, scene.chat, scene.prompts, Flaws())
        return Players(team, script.sample, scene.training)
    path = Path(config.trajectories)
    form = "toy" if config.model.prompts == "toy" else "full"
    asked = {question.uid for source in scene.training.sources for question in source}
    found = {u: said for u, said in read_trajectories(path, form).items() if u in asked}
    # a teacher had its own budget, and its trajectories are imitated whole
    most = max(map(len, found.values()), default=1)
    budgets = dataclasses.replace(
        team.budgets, turns=most, searcher_turns=most, searches=most, all_searches=most
    )
    sources = tuple(
        tuple(question for question in source if question.uid in found)
        for source in scene.training.sources
    )
    if not all(sources):
        raise ValueError(
            f"trajectories={str(path)!r} holds none of the questions of a training set, of which "
            f"there are {len(sources)}; build it from this config's training questions"
        )
    digest = hashlib.blake2b(repr(sorted(found.items())).encode(), digest_size=8)
    return Players(
        dataclasses.replace(team, budgets=budgets),
        Replay(found, scene.tokenizer).sample,
        Mixture(sources, scene.training.weights),
        digest.hexdigest(),
    )
