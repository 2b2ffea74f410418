"""What one stage's updates are made with: compiled programs, teachers, and how they are called.

Dimensions: M micro-batches, B rows, T positions. Must not know: episodes, files, other stages.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from mas_jax.learning import teachers, update
from mas_jax.learning.batch import TokenBatch
from mas_jax.learning.objective import Forward, Scores
from mas_jax.learning.programme import Programme
from mas_jax.learning.teachers import Teacher
from mas_jax.learning.update import TrainState
from mas_jax.model import qwen3


class Trainer:
    """Updates of one policy by one programme on one mesh. Raises: ValueError for a teacher that the
    programme reads and `all_teachers` lack, or a critic without a value head."""

    def __init__(  # eight: the parts of an update, none of which follows from another
        self,
        programme: Programme,
        forward: Forward,
        mesh: Mesh,
        optimizer: optax.GradientTransformation,
        all_teachers: Mapping[str, Teacher],
        *,
        updates_per_batch: int,
        whiten: bool,
        ema_decay: float,
        param_dtype: str = "float32",
    ) -> None:
        rows = [row for row in programme.values() if row.learns]
        self.has_critic = any("gae" in row.advantages for row in rows)
        if self.has_critic and not forward.config.value_head:
            raise ValueError(
                "the programme has an advantage 'gae' and the model no value head; set "
                "train.value_head=True"
            )
        scored = frozenset().union(*(row.teachers for row in rows)) if rows else frozenset()
        exact = frozenset(row.teacher for row in rows if row.is_exact)
        own = {"live", "ema"}
        self._scored = teachers.needed(all_teachers, scored - own)
        self._exact = teachers.needed(all_teachers, exact - own)
        self._score_average = "ema" in scored
        self._exact_average = "ema" in exact
        self.programme, self.forward, self.mesh = programme, forward, mesh
        self._optimizer, self._updates_per_batch = optimizer, updates_per_batch
        exact_forwards = {name: self._forward_of(t) for name, t in self._exact.items()}
        exact_forwards |= dict.fromkeys(own & exact, forward)
        self._gradients = update.make_gradients(programme, forward, mesh, exact_forwards)
        self._gae = update.make_gae(programme, mesh, whiten=whiten)
        self._drift = update.make_drift(programme, mesh)
        self.shapes, self.shardings = update.state_shardings(
            optimizer, forward.config, mesh, dtype=param_dtype, with_average=self.has_average
        )
        self._apply = update.make_apply(optimizer, self.shardings, ema_decay=ema_decay)

    @property
    def has_average(self) -> bool:
        """Whether the state keeps an average of the weights."""
        return self._score_average or self._exact_average

    @property
    def abstract_state(self) -> TrainState:
        """Shapes with shardings, to restore into."""
        return jax.tree.map(
            lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
            self.shapes,
            self.shardings,
        )

    def init(self, params: qwen3.Params) -> TrainState:
        """The state before the first update, of a copy of these parameters."""
        make = jax.jit(
            lambda p: update.init_state(p, self._optimizer, with_average=self.has_average),
            out_shardings=self.shardings,
        )
        return make(params)

    @property
    def scored_teachers(self) -> tuple[str, ...]:
        """Teachers whose weights are kept for scores."""
        return tuple(self._scored)

    @property
    def exact_teachers(self) -> tuple[str, ...]:
        """Teachers whose weights are kept for exact divergences."""
        return tuple(self._exact)

    @property
    def program_names(self) -> tuple[str, ...]:
        """Programs of a step that `lower` makes."""
        scores = tuple(f"score of {name}" for name in self._scored)
        own = ("score of the policy",) if self._scores_own else ()
        return (*scores, *own, "gradients", "optimizer")

    @property
    def _scores_own(self) -> bool:
        return self.has_critic or self._updates_per_batch > 1 or self._score_average

    def lower(
        self, name: str, shape: tuple[int, int, int], *, view_length: int = 0
    ) -> jax.stages.Lowered:
        """One of `program_names` for batches of a shape [M, B, T] and rows of views of a length, to
        be compiled where the mesh is; teachers' parameters may be shapes with shardings.
        Raises: ValueError for another name.
        """
        state = self.abstract_state
        batch = update.abstract_batch(self.mesh, shape, view_length=view_length)
        num_micro, floats = jax.ShapeDtypeStruct((), jnp.int32), batch.weights_MBT
        if name == "score of the policy":
            run = update.make_score(self.forward, self.mesh)
            return run.lower(state.params, batch, num_micro)
        if name.startswith("score of "):
            teacher = self._scored[name.removeprefix("score of ")]
            run = update.make_score(self._forward_of(teacher), self.mesh)
            return run.lower(teacher.params, batch, num_micro)
        if name == "optimizer":
            with jax.set_mesh(self.mesh):
                is_last = jax.ShapeDtypeStruct((), jnp.bool_)
                return self._apply.lower(state, state.params, is_last)
        if name != "gradients":
            raise ValueError(f"{name!r} is none of {self.program_names}")
        known = [*self._scored, *(["ema"] if self._score_average else [])]
        old = floats if self.has_critic or self._updates_per_batch > 1 else None
        critic = floats if self.has_critic else None
        scores = Scores(old, dict.fromkeys(known, floats), critic, critic, critic)
        weights = dict.fromkeys(self.programme, jax.ShapeDtypeStruct((), jnp.float32))
        exact = self._exact_params(state)
        return self._gradients.lower(state.params, batch, scores, exact, num_micro, weights)

    def _forward_of(self, teacher: Teacher) -> Forward:
        return self.forward._replace(config=teacher.config)

    def scores(self, state: TrainState, batch: TokenBatch, num_micro: int) -> Scores:
        """What the update reads beside the batch; every forward pass in the same micro-batches."""
        found = {}
        for name, teacher in self._scored.items():
            run = update.make_score(self._forward_of(teacher), self.mesh)
            found[name], _ = run(teacher.params, batch, num_micro)
        if self._score_average:
            run = update.make_score(self.forward, self.mesh)
            found["ema"], _ = run(state.average, batch, num_micro)
        old, values, gae, returns = None, None, None, None
        if self.has_critic or self._updates_per_batch > 1:
            run = update.make_score(self.forward, self.mesh)
            old, values = run(state.params, batch, num_micro)
        if self.has_critic:
            gae, returns = self._gae(batch, values)
        return Scores(old, found, values if self.has_critic else None, gae, returns)

    def _exact_params(self, state: TrainState) -> dict[str, qwen3.Params]:
        params = {name: teacher.params for name, teacher in self._exact.items()}
        return params | ({"ema": state.average} if self._exact_average else {})

    def _gradient(
        self, state: TrainState, batch: TokenBatch, scores: Scores, num_micro: int,
        role_weights: Mapping[str, float],
    ) -> tuple[qwen3.Params, dict]:  # fmt: skip
        weights = {role: jnp.float32(role_weights[role]) for role in self.programme}
        return self._gradients(
            state.params, batch, scores, self._exact_params(state), num_micro, weights
        )

    def update(
        self, state: TrainState, batch: TokenBatch, scores: Scores, num_micro: int
    ) -> tuple[TrainState, dict[str, float]]:
        """The state after the batch's updates, and metrics `update/...`: means over the
        updates, largest values for names in `_max`.

        The given state is used up. An update whose gradient is not finite, or all zero, is skipped
        (`update/skipped`).
        """
        everyone, total = dict.fromkeys(self.programme, 1.0), {}
        for index in range(self._updates_per_batch):
            gradient, found = self._gradient(state, batch, scores, num_micro, everyone)
            is_last = jnp.bool_(index == self._updates_per_batch - 1)
            state, applied = self._apply(state, gradient, is_last)
            values = update.divided(found) | {k: float(v) for k, v in applied.items()}
            for name, value in values.items():
                if name.endswith("_max"):
                    total[name] = max(total.get(name, value), value)
                else:
                    total[name] = total.get(name, 0.0) + value / self._updates_per_batch
        for role, row in self.programme.items():
            if row.distils:
                count = "view_tokens" if row.is_viewed else "tokens"
                total[f"{role}/distillation_tokens"] = total.get(f"{role}/{count}", 0.0)
        return state, {f"update/{name}": value for name, value in total.items()}

    def role_norms(
        self, state: TrainState, batch: TokenBatch, scores: Scores, num_micro: int
    ) -> dict[str, float]:
        """Norm of each role's own gradient, and its share of their sum; a pass for each role."""
        norms = {}
        for role, row in self.programme.items():
            if row.learns:
                only = {other: float(other == role) for other in self.programme}
                gradient, _ = self._gradient(state, batch, scores, num_micro, only)
                norms[role] = float(optax.tree.norm(gradient))
        total = sum(norms.values())
        return {f"update/{role}/gradient_norm": norm for role, norm in norms.items()} | {
            f"update/{role}/gradient_share": norm / total
            for role, norm in norms.items()
            if total > 0
        }

    def drift(
        self, start: qwen3.Params, batch: TokenBatch, num_micro: int, *, frac: float
    ) -> dict[str, float]:
        """KL (k1, nats a token) of the sampling policy to the start, per role, on a share of the
        micro-batches; rows stand in no order, so any share is a fair sample."""
        some = math.ceil(frac * num_micro)
        if not some:
            return {}
        reference_MBT, _ = update.make_score(self.forward, self.mesh)(start, batch, some)
        found = update.divided(self._drift(batch, reference_MBT, np.int32(some)))
        return {f"update/{role}/kl_to_start": value for role, value in found.items()}
