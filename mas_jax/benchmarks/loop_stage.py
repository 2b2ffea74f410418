"""Stage II of the toy's config as the loop benchmark plays it: its first step's questions, again
and again, by the hierarchy with its training budgets and draws. Must not know: who generates.
"""

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mas_jax.agents import rollout
from mas_jax.agents.setting import Run, Team, World
from mas_jax.benchmarks.loop_workload import Recorder, Script, Waves
from mas_jax.config import default_config
from mas_jax.data.questions import of_step
from mas_jax.learning import experience, policy_files, samplers, scenes, teams
from mas_jax.records import Episode, Question
from mas_jax.retrieval.hashed_ngrams import HashedNgrams
from mas_jax.retrieval.index import IndexConfig, Retriever, contents
from mas_jax.rewards.exact_match import exact_match_reward


@dataclass(frozen=True)
class Stage:
    """Questions with `group` episodes each, the team, and what searches the toy world."""

    questions: tuple[Question, ...]
    group: int
    team: Team
    retriever: Retriever
    vectors_NE: np.ndarray

    def fresh(self) -> "Stage":
        """The same with an index that has not been asked anything."""
        made = Retriever.build(
            self.retriever.passages, HashedNgrams(), IndexConfig(), self.vectors_NE
        )
        return dataclasses.replace(self, retriever=made)

    def play(
        self, sample: Callable[..., Awaitable], waves: Waves | None = None
    ) -> Sequence[Episode]:
        """The episodes, in order of question and rollout; waves: which also watch the searches."""
        search = self.retriever.search if waves is None else waves.watched(self.retriever.search)
        return experience.collect(
            self.questions, self.group, self.team,
            world=World(sample, search, exact_match_reward), run=Run(0, "train", 0),
            limits=rollout.Limits(**default_config().rollout),
        )  # fmt: skip


def make(num_questions: int, group: int) -> Stage:
    """Stage II's first step with so many questions."""
    config = default_config()
    tokenizer = policy_files.load_tokenizer(policy_files.checkpoint_directory(config))
    scene = scenes.make_scene(config, tokenizer)
    passages = scene.retriever.passages
    return Stage(
        tuple(of_step(scene.training, seed=0, step=0, count=num_questions, host=0, num_hosts=1)),
        group,
        teams.make_team(config, "hierarchy", scene, training=True),
        scene.retriever,
        HashedNgrams().encode_passages([contents(passage) for passage in passages]),
    )


def record(stage: Stage) -> Script:
    """What the starting policy says when it plays the stage."""
    config = default_config()
    directory = policy_files.checkpoint_directory(config)
    engines = samplers.make_engines(config, directory, stage.team.chat.tokenizer)
    recorder = Recorder(engines.sample)
    stage.play(recorder.sample)
    return recorder.script
