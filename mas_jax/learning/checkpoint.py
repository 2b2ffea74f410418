"""Checkpoints of a run: saved in the background, kept by count and by best, restored only whole.

Orbax writes into a temporary directory and renames it when it is complete, so a save that is
killed leaves the checkpoint before it; older ones go only after the rename. A checkpoint that was
damaged afterwards is noticed (checkpoint_contents.py) and the one before it is used.
Must not know: models, losses, data; the caller's metadata hold the config and the data position.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import orbax.checkpoint as ocp
from etils import epath

from mas_jax.learning import hosts
from mas_jax.learning.checkpoint_contents import (
    DamagedCheckpoint,
    contents,
    read_index,
    read_state,
)

STEP_NAMES = ocp.path.step.standard_name_format()

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """One checkpoint: its optimizer step, its state (jax.Arrays), its metadata as JSON gives it."""

    step: int
    state: Any
    meta: dict[str, Any]


class Checkpointer:
    """The checkpoints of one run in one directory; a context manager that waits when it closes.

    A state is any pytree of jax.Arrays; an `abstract_state` is the same tree of
    `jax.ShapeDtypeStruct` with explicit shardings, on any number of devices. Nothing in the
    directory is created, cleaned or removed before the first `save`: a reader only restores.
    In a run of several processes all of them make the same calls at the same points.
    """

    def __init__(self, directory: Path | str, *, keep: int):
        """Checkpoints in `directory`, of which saving keeps the newest `keep` and the best one."""
        if keep < 1:
            raise ValueError(f"checkpoint keep={keep}: the newest one must stay; set at least 1")
        self._directory = epath.Path(directory).absolute()
        self._keep = keep
        self._manager: ocp.CheckpointManager | None = None
        self._values: dict[int, float] = {}  # of the steps on disk and on their way there
        self._damaged: tuple[int, ...] = ()  # newer than the restored one; the next save drops them
        self._continues = False  # whether the newest step was restored or saved by this object

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of the committed checkpoints, oldest first; whether they are whole is not known."""
        return tuple(sorted(found.step for found in STEP_NAMES.find_all(self._directory)))

    @property
    def best(self) -> int | None:
        """The committed step with the largest value, the newest of equals; None: none measured."""
        return _best_step(self._values_on_disk())

    def save(self, step: int, state: Any, meta: Mapping[str, Any], *, value: float | None) -> None:
        """Start saving; returns once the state is copied, so its buffers may be donated.

        `meta`: a JSON document. `value`: the measure of "best", larger is better, None if this
        step was not measured. Waits for the save before. The step that was saved or restored last
        is left as it is.
        Raises: ValueError for a leaf that is no array, a value that is not finite, or a step that
        is not newer than those on disk; and whatever made the save before fail.
        """
        if value is not None and not math.isfinite(value):
            raise ValueError(f"checkpoint step {step}: value={value} is not finite; pass None")
        manager = self._open()
        manager.wait_until_finished()
        newest = hosts.first(manager.latest_step)
        if step == newest and self._continues:
            return
        if newest is not None and step <= newest:
            raise ValueError(
                f"checkpoint step {step} is not newer than step {newest} in {self._directory}; "
                "restore before saving, or use another directory"
            )
        args = contents(step, state, meta, value=value)
        if value is not None:
            self._values[step] = value
        manager.save(step, force=True, args=args)
        self._continues = True

    def wait(self) -> None:
        """Return when the last save is committed. Raises: whatever made it fail."""
        if self._manager is not None:
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait for the last save and end the threads. Raises: whatever made it fail."""
        if self._manager is not None:
            manager, self._manager = self._manager, None
            manager.close()

    def restore(self, abstract_state: Any) -> Restored | None:
        """The newest whole checkpoint, or None if there is none at all. Outside `jax.set_mesh`.

        Damaged ones are passed over, said in one log line, and removed by the next save.
        Raises: ValueError if all are damaged, with each one's damage, or if a whole one does not
        fit `abstract_state`, naming the leaves.
        """
        self.wait()
        damage: dict[int, DamagedCheckpoint] = {}
        for step in hosts.first(lambda: self.steps[::-1]):
            try:
                restored = self._read(step, abstract_state, complete=True)
            except DamagedCheckpoint as error:
                damage[step] = error
                continue
            if damage:
                logger.warning(
                    "%s: damaged checkpoint of %s; continuing from step %d",
                    *(self._directory, _listed(damage), step),
                )
            self._damaged, self._continues = tuple(damage), True
            return restored
        if not damage:
            return None
        raise ValueError(
            f"{self._directory}: no checkpoint is whole: {_listed(damage)}; recover one of them "
            "or start in another directory"
        ) from damage[max(damage)]

    def restore_step(self, step: int | Literal["best"], abstract_state: Any) -> Restored:
        """The checkpoint of one step, for evaluation and export.

        Leaves that `abstract_state` lacks are not read: a reader of the parameters need not hold
        the optimizer's state.
        Raises: ValueError if it is not there or does not fit; DamagedCheckpoint if it is damaged.
        """
        self.wait()
        steps, found = hosts.first(lambda: [self.steps, self.best if step == "best" else step])
        if found not in steps:
            raise ValueError(
                f"{self._directory}: no checkpoint of step {step!r}; there are {list(steps)}"
            )
        try:
            return self._read(found, abstract_state, complete=False)
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"{self._path(found)} is damaged: {error}") from error

    def index(self, step: int) -> dict[str, Any]:
        """What is known of a committed step without its arrays: `step`, `value`, `meta`, and of
        each of its `leaves` shape and dtype. Raises: DamagedCheckpoint if that is damaged."""
        try:
            return read_index(self._path(step))
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"{self._path(step)} is damaged: {error}") from error

    def _open(self) -> ocp.CheckpointManager:
        """Orbax's manager, made by the first save, without what `restore` found damaged."""
        if self._manager is None:
            self._values = self._values_on_disk()
            options = ocp.CheckpointManagerOptions(
                preservation_policy=_KeepNewestAndBest(self._keep, self._values),
                step_name_format=STEP_NAMES,
                cleanup_tmp_directories=True,
                lightweight_initialize=True,
                save_root_metadata=False,
            )
            self._manager = ocp.CheckpointManager(self._directory, options=options)
        for step in self._damaged:
            self._manager.delete(step)
        self._damaged = ()
        return self._manager

    def _path(self, step: int) -> epath.Path:
        return ocp.path.step.build_step_path(self._directory, STEP_NAMES, step)

    def _values_on_disk(self) -> dict[int, float]:
        """Value of each committed checkpoint that has one and whose index is whole."""
        values = {}
        for step in self.steps:
            try:
                value = read_index(self._path(step))["value"]
            except DamagedCheckpoint:
                continue
            if value is not None:
                values[step] = value
        return values

    def _read(self, step: int, abstract_state: Any, *, complete: bool) -> Restored:
        state, index = read_state(self._path(step), abstract_state, complete=complete)
        if index["step"] != step:
            raise DamagedCheckpoint(f"it is the checkpoint of step {index['step']}")
        return Restored(step, state, index["meta"])


class _KeepNewestAndBest:
    """Orbax's preservation policy: the newest `keep` steps and the best of those there are.

    `values` is the checkpointer's table, which grows with every save.
    """

    def __init__(self, keep: int, values: Mapping[int, float]):
        self._keep, self._values = keep, values

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """For each checkpoint, oldest first, the one being saved included: whether it stays."""
        del context
        steps = [c.step for c in checkpoints]
        best = _best_step({step: self._values[step] for step in steps if step in self._values})
        return [step in steps[-self._keep :] or step == best for step in steps]


def _best_step(values: Mapping[int, float]) -> int | None:
    """The step of the largest value; of equal ones the newest."""
    return max(values, key=lambda step: (values[step], step), default=None)


def _listed(damage: Mapping[int, BaseException]) -> str:
    """`step 40 (why), step 30 (why)`."""
    return ", ".join(f"step {step} ({error})" for step, error in damage.items())
