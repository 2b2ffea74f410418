"""TPU chips by their public figures, and the slices that are made of them.

One convention for the interconnect: bytes a second that one link carries one way, and the number of
torus axes, each with a link to either side. Must not know: models, programs, configs.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import jax

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One chip: peak bf16 FLOP/s, HBM bytes and bytes/s, one-way bytes/s a link, torus axes, from
    what size on an axis closes to a ring, and the devices that jax shows for it, which share all of
    these."""

    peak_flops: float
    hbm_bytes: float
    hbm_bandwidth: float
    link_bandwidth: float
    axes: int
    wraps_from: int
    devices: int = 1


# METHODS 8.1, whose figures "both ways a chip" are halved and shared among 2 links an axis; v4's
# links: the TPU v4 paper (arXiv 2304.01433), 50 GB/s; tpu7x: Google Cloud's page on the chip,
# 1,200 GB/s both ways over 3 axes
CHIPS = {
    "v4": Chip(275e12, 32 * GIB, 1200e9, 50e9, axes=3, wraps_from=4, devices=2),
    "v5e": Chip(197e12, 16 * GIB, 819e9, 50e9, axes=2, wraps_from=16),
    "v5p": Chip(459e12, 95 * GIB, 2765e9, 90e9, axes=3, wraps_from=4),
    "v6e": Chip(918e12, 32 * GIB, 1638e9, 100e9, axes=2, wraps_from=16),
    "tpu7x": Chip(2307e12, 192 * GIB, 7380e9, 100e9, axes=3, wraps_from=4, devices=2),
}


@dataclass(frozen=True)
class Slice:
    """A slice of a kind of chips: its name ("v5p:2x2x2"), the sizes of its axes, its devices."""

    name: str
    chip: Chip
    shape: tuple[int, ...]
    devices: tuple[jax.Device, ...]

    @property
    def num_chips(self) -> int:
        """Chips of the slice; devices may be twice as many."""
        return math.prod(self.shape)

    @property
    def peak_flops(self) -> float:
        """Of one device, bf16 FLOP/s."""
        return self.chip.peak_flops / self.chip.devices

    @property
    def hbm_bytes(self) -> float:
        """Of one device."""
        return self.chip.hbm_bytes / self.chip.devices

    @property
    def hbm_bandwidth(self) -> float:
        """Of one device, bytes/s."""
        return self.chip.hbm_bandwidth / self.chip.devices

    def hops(self, one: Sequence[int], other: Sequence[int]) -> int:
        """Links between two chips by the shortest way."""
        total = 0
        for a, b, size in zip(one, other, self.shape, strict=False):
            straight = abs(a - b)
            wraps = size >= self.chip.wraps_from
            total += min(straight, size - straight) if wraps else straight
        return total

    def links(self, axis: int) -> int:
        """Links of a chip along an axis that a ring of collectives can use: both ways around where
        the axis closes, else one, since the last chip of a line has no other."""
        return 2 if self.shape[axis] >= self.chip.wraps_from else 1


def parse_topology(name: str) -> tuple[Chip, tuple[int, ...]]:
    """The chip and the axes' sizes that "v5p:2x2x2" names.

    Raises: ValueError for an unknown chip, a name of another form, or a wrong number of axes.
    """
    found = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)", name)
    if not found or found[1] not in CHIPS:
        raise ValueError(
            f"topology {name!r}: wanted CHIP:AxB or CHIP:AxBxC with one of {sorted(CHIPS)}, such "
            "as v5p:2x2x2 or v6e:4x4"
        )
    chip, shape = CHIPS[found[1]], tuple(int(size) for size in found[2].split("x"))
    if len(shape) != chip.axes or min(shape) < 1:
        raise ValueError(
            f"topology {name!r}: {found[1]} is a torus of {chip.axes} axes, got {len(shape)} sizes "
            f"{shape}"
        )
    return chip, shape


def make_slice(name: str) -> Slice:
    """The slice that a topology names, with devices that programs can be compiled for.

    Needs the package libtpu, no TPU.
    Raises: ValueError for a bad name; ModuleNotFoundError without libtpu.
    """
    chip, shape = parse_topology(name)
    try:
        import libtpu  # noqa: F401  whether it is there
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a compile plan needs the TPU compiler; install it with `pip install 'mas_jax[plan]'`, "
            "best into an environment of its own, since it slows the start of every other command"
        ) from error
    from jax.experimental import topologies

    try:
        found = topologies.get_topology_desc(name, platform="tpu").devices
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"topology {name!r}: libtpu makes no such slice: {error}") from error
    wanted = math.prod(shape) * chip.devices
    if len(found) != wanted:
        raise ValueError(f"topology {name!r} has {len(found)} devices, expected {wanted}")
    return Slice(name, chip, shape, tuple(found))
