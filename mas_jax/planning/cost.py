"""What a compiled program costs one device: FLOPs, HBM bytes, collectives, seconds at its peaks.

Every instruction is counted as often as its loops turn. XLA's own account counts a loop's body
once and does not see into a kernel; here the first is read off the program, the second is given as
a `Kernel`. Must not know: models, configs.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mas_jax.planning.chips import Slice
from mas_jax.planning.hlo import HBM, Computation, Instruction, Program, trip_count
from mas_jax.planning.timeline import Timeline

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute",
)  # fmt: skip
# no work of the device: names, views, and the ends of what an earlier line began
FREE = frozenset(
    ["parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call",
     "conditional", "after-all", "partition-id", "replica-id", "iota", "async-update",
     "opt-barrier", "add-dependency", "custom-call-start"]
)  # fmt: skip
# transfers that go on while later lines compute; "call-start" is a gather or scatter by SparseCores
TRANSFERS = frozenset(["copy-start", "slice-start", "dynamic-slice-start", "call-start"])


@dataclass(frozen=True)
class Kernel:
    """Work of a hand-written kernel in one call on one device, which XLA cannot see."""

    flops: float
    num_bytes: float


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind over groups of one size: how many, bytes that a device receives,
    seconds on the links, and those of them in which the device waits."""

    kind: str
    group: int
    count: float = 0.0
    num_bytes: float = 0.0
    seconds: float = 0.0
    exposed_s: float = 0.0
    longest_exposed_s: float = 0.0

    def plus(self, times: float, num_bytes: float, seconds: float, exposed: float) -> "Collective":
        """With one more, `times` times over."""
        return Collective(
            self.kind, self.group, self.count + times, self.num_bytes + times * num_bytes,
            self.seconds + times * seconds, self.exposed_s + times * exposed,
            max(self.longest_exposed_s, times * exposed),
        )  # fmt: skip


@dataclass
class Cost:
    """Of one run of a program on one device.

    busy_s: every instruction at the speed of its compute or its bytes, whichever takes longer;
    with what is waited for collectives that is `seconds`.
    """

    flops: float = 0.0
    num_bytes: float = 0.0
    busy_s: float = 0.0
    collectives: dict[tuple[str, int], Collective] = field(default_factory=dict)

    @property
    def exposed_s(self) -> float:
        """Seconds in which the device waits for collectives."""
        return sum(c.exposed_s for c in self.collectives.values())

    @property
    def seconds(self) -> float:
        """At the chip's peaks."""
        return self.busy_s + self.exposed_s

    def plus(self, other: "Cost", factor: float) -> "Cost":
        """This and `factor` times the other; the longest wait is the longer one's, or what is left
        of all waits where the other is taken away."""
        keys = self.collectives | other.collectives
        both = {}
        for key in keys:
            mine = self.collectives.get(key, Collective(*key))
            its = other.collectives.get(key, Collective(*key))
            both[key] = Collective(
                *key, mine.count + factor * its.count, mine.num_bytes + factor * its.num_bytes,
                mine.seconds + factor * its.seconds, mine.exposed_s + factor * its.exposed_s,
                max(mine.longest_exposed_s, its.longest_exposed_s) if factor > 0
                else mine.exposed_s + factor * its.exposed_s,
            )  # fmt: skip
        return Cost(
            self.flops + factor * other.flops, self.num_bytes + factor * other.num_bytes,
            self.busy_s + factor * other.busy_s, both,
        )  # fmt: skip


def extrapolated(one: Cost, two: Cost, layers: int) -> Cost:
    """Of so many unrolled layers, from programs of one and of two: each more costs the same."""
    return one.plus(two.plus(one, -1.0), layers - 1.0)


Kernels = Callable[[Instruction], Kernel | None]


@dataclass(frozen=True)
class Reader:
    """How a program is costed.

    turns: of loops whose length is data, by a piece of the traced operation's name; the longest
    piece that fits counts. kernels: the work of custom calls.
    """

    program: Program
    place: Slice
    coords: Sequence[Sequence[int]]
    turns: Mapping[str, float]
    kernels: Kernels

    def cost(self) -> Cost:
        """Of the whole program. Raises: ValueError for a loop of unknown length."""
        cost = Cost()
        self._run(self.program.entry, 1.0, cost)
        return cost

    # one computation after another

    def _run(self, computation: Computation, times: float, cost: Cost) -> None:
        """Adds what a computation costs that runs so many times."""
        time = Timeline()
        for one in computation:
            for inner, often in self._inner(computation, one):
                if not often:
                    continue
                seconds, num_bytes = cost.seconds, cost.num_bytes
                self._run(inner, times * often, cost)
                memory_s = (cost.num_bytes - num_bytes) / self.place.hbm_bandwidth
                time.work((cost.seconds - seconds) / times, memory_s / times)
            if kind := self._collective(one):
                time.send(one.name, _lane(one), kind, *self._wire(kind, one))
                if one.op == kind:  # waited for at once
                    self._wait(time, one.name, times, cost)
            elif one.op in TRANSFERS:
                _, num_bytes = self._work(computation, one)
                cost.num_bytes += times * num_bytes
                time.transfers[one.name] = num_bytes / self.place.hbm_bandwidth
            elif one.op.endswith("-done"):
                self._wait(time, one.operands[0] if one.operands else "", times, cost)
            elif one.op not in FREE:
                flops, num_bytes = self._work(computation, one)
                memory_s = num_bytes / self.place.hbm_bandwidth
                seconds = max(flops / self.place.peak_flops, memory_s)
                cost.flops += times * flops
                cost.num_bytes += times * num_bytes
                cost.busy_s += times * seconds
                time.work(seconds, memory_s)
        for name in (*time.sent, *time.transfers):
            self._wait(time, name, times, cost)

    @staticmethod
    def _wait(time: Timeline, name: str, times: float, cost: Cost) -> None:
        """Waits for a collective or a transfer; nothing else is waited for."""
        if name in time.transfers:
            cost.busy_s += times * time.receive(name)
        elif name in time.sent:
            kind, num_bytes, seconds, group, end = time.sent.pop(name)
            exposed = max(0.0, end - time.clock)
            known = cost.collectives.get((kind, group), Collective(kind, group))
            cost.collectives[kind, group] = known.plus(times, num_bytes, seconds, exposed)
            time.work(exposed, 0.0)

    def _inner(self, computation: Computation, one: Instruction) -> list[tuple[Computation, float]]:
        """Computations that an instruction runs in its place, and how often."""
        named = self.program.computations
        if one.op == "while":
            return [(named[one.called("body")], self._turns(computation, one))]
        if one.op == "call":
            return [(named[one.called("to_apply")], 1.0)]
        if one.op == "conditional":
            return [(named[name], 1.0) for name in _branches(one)[:1]]
        if one.op == "async-start":
            return [(named[one.called("calls")], 1.0)]
        return []

    def _turns(self, computation: Computation, loop: Instruction) -> float:
        known = trip_count(self.program, computation, loop)
        if known is not None:
            return known
        fitting = [piece for piece in self.turns if loop.source.endswith(piece)]
        if not fitting:
            raise ValueError(
                f"the loop {loop.name!r} of {loop.source!r} has no constant length; known are "
                f"those that end with {sorted(self.turns)}"
            )
        return self.turns[max(fitting, key=len)]

    # collectives

    def _collective(self, one: Instruction) -> str:
        """Kind of collective that an instruction begins, "" for none."""
        kind = one.op.removesuffix("-start")
        return kind if kind in COLLECTIVES else ""

    def _wire(self, kind: str, one: Instruction) -> tuple[float, float, int]:
        """Bytes that a device receives, seconds on the links, and devices of a group.

        Rings along every torus axis that a group spans (a permutation: its longest way).
        """
        if kind == "collective-permute":
            pairs = [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", one.attributes)]
            hops = max(
                (self.place.hops(self.coords[a], self.coords[b]) for a, b in pairs), default=1
            )
            num_bytes = float(one.arrays[0].num_bytes)
            # devices of one chip share its memory
            return num_bytes, hops * num_bytes / self.place.chip.link_bandwidth, len(pairs)
        group = _first_group(one.attributes, len(self.coords))
        links = sum(
            self.place.links(axis)
            for axis in range(self.place.chip.axes)
            if len({self.coords[d][axis] for d in group}) > 1
        )
        n, results = len(group), one.arrays
        if one.op == "all-gather-start":
            results = results[len(results) // 2 :]  # after the operands
        size = float(sum(a.num_bytes for a in results))
        if kind == "reduce-scatter":
            size *= n  # its result is one part
        num_bytes = size * (n - 1) / n * (2 if kind == "all-reduce" else 1)
        # each part of an all-to-all passes a quarter of the ring; a gather's passes all of it
        on_links = size * n / 4 if kind == "all-to-all" else num_bytes
        if links == 0:  # within a chip
            return num_bytes, num_bytes / self.place.hbm_bandwidth, n
        return num_bytes, on_links / (links * self.place.chip.link_bandwidth), n

    # work

    def _work(self, computation: Computation, one: Instruction) -> tuple[float, float]:
        """FLOPs of matmuls, and bytes read from and written to HBM."""
        if one.op == "custom-call":
            kernel = self.kernels(one)
            if kernel is not None:
                return kernel.flops, kernel.num_bytes
            if "AllocateBuffer" in one.attributes or "AssumeGather" in one.attributes:
                return 0.0, 0.0
        if one.op in ("copy-start", "slice-start"):
            return 0.0, sum(a.num_bytes for a in one.arrays[:2] if a.space == HBM)
        if one.op in TRANSFERS:  # they read as much as they give, whatever they take it from
            return 0.0, 2.0 * max((a.num_bytes for a in one.arrays[-2:]), default=0)
        operands = [computation.instructions[name] for name in one.operands]
        if one.op == "fusion":
            return self._fusion(one, operands)
        flops = _matmul_flops(computation, one)
        if one.op in ("dynamic-slice", "gather", "slice"):
            operands = operands[1:]
            return flops, 2.0 * _hbm(one) + sum(map(_hbm, operands))
        if one.op in ("dynamic-update-slice", "scatter"):
            return flops, 2.0 * sum(map(_hbm, operands[1:]))
        return flops, _hbm(one) + sum(map(_hbm, operands))

    def _fusion(self, one: Instruction, operands: list[Instruction]) -> tuple[float, float]:
        """A fusion reads of an operand what it takes of it, and writes its result, or the part of
        an operand that it updates in place."""
        fused = self.program.computations[one.called("calls")]
        read = sum(self._read(fused, number, operand) for number, operand in enumerate(operands))
        whole = [float(a.num_bytes if a.space == HBM else 0) for a in one.arrays]
        return self._fused_flops(fused), read + self._written(fused, whole)

    def _written(self, fused: Computation, whole: Sequence[float]) -> float:
        """Bytes that a fusion writes: its results, or the updates of what it changes in place.
        whole: of each result."""
        roots = [fused.root]
        if fused.root.op == "tuple":
            roots = [fused.instructions[name] for name in fused.root.operands]
        return sum(
            self._updates(fused, root, size) for root, size in zip(roots, whole, strict=False)
        )

    def _updates(self, fused: Computation, root: Instruction, whole: float) -> float:
        while root.op in ("bitcast", "copy", "convert", "reshape"):
            root = fused.instructions[root.operands[0]]
        if root.op == "fusion":
            return self._written(self.program.computations[root.called("calls")], [whole])
        place = {"dynamic-update-slice": 1, "scatter": -1}.get(root.op)
        if place is None or not whole:
            return whole
        update = fused.instructions[root.operands[place]]
        return min(whole, float(sum(a.num_bytes for a in update.arrays)))

    def _read(self, fused: Computation, number: int, operand: Instruction) -> float:
        whole = _hbm(operand)
        parameter = fused.parameter(number)
        if not whole or parameter is None:
            return whole
        return self._taken(fused, parameter, whole)

    def _taken(self, fused: Computation, source: Instruction, whole: float) -> float:
        """Bytes that a fusion reads of a parameter, or of another name of it."""
        total = 0.0
        for user in fused:
            if source.name not in user.operands:
                continue
            is_source = user.operands[0] == source.name
            if user.op in ("dynamic-slice", "gather", "slice") and is_source:
                total += user.arrays[0].num_bytes
            elif user.op == "bitcast" and not user.is_root:
                total += self._taken(fused, user, whole)
            elif user.op == "fusion":
                inner = self.program.computations[user.called("calls")]
                parameter = inner.parameter(user.operands.index(source.name))
                total += whole if parameter is None else self._taken(inner, parameter, whole)
            elif user.op not in ("dynamic-update-slice", "scatter") or not is_source:
                return whole  # what is updated in place is not read
        return min(total, whole)

    def _fused_flops(self, fused: Computation) -> float:
        total = 0.0
        for one in fused:
            total += _matmul_flops(fused, one)
            if one.op == "fusion":
                total += self._fused_flops(self.program.computations[one.called("calls")])
        return total


def _lane(one: Instruction) -> str:
    """Permutations of other pairs go other ways around a ring at once; the rest takes all links."""
    found = re.search(r"source_target_pairs=\{(.*?)\}\}", one.attributes)
    return found[1] if found else ""


def _hbm(one: Instruction) -> float:
    """Bytes of an instruction's result that lie in HBM."""
    return float(sum(a.num_bytes for a in one.arrays if a.space == HBM))


def _matmul_flops(computation: Computation, one: Instruction) -> float:
    """Twice the products of a matmul: its arrays of MK, KN and MN elements multiply to (MKN)^2, and
    with B of each to B^3 (MKN)^2, which is B times the square of B MKN. Integers count nothing."""
    if one.op not in ("dot", "convolution") or one.arrays[0].dtype[0] in "us":
        return 0.0
    operands = [computation.instructions[name].arrays[0] for name in one.operands]
    sizes = [float(array.size) for array in (*operands, one.arrays[0])]
    batch = 1
    if found := re.search(r"lhs_batch_dims=\{([\d,]*)\}", one.attributes):
        batch = math.prod(operands[0].shape[int(d)] for d in found[1].split(",") if d)
    return 2.0 * math.sqrt(math.prod(sizes) / batch)


def _branches(one: Instruction) -> list[str]:
    found = re.search(r"branch_computations=\{([^}]*)\}", one.attributes)
    if found:
        return re.findall(r"%?([\w.\-]+)", found[1])
    return [one.called("true_computation")]


def _first_group(attributes: str, num_devices: int) -> list[int]:
    """Devices of a collective's first group: listed, or as iota ([2,4]<=[8], with a transpose)."""
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return [int(d) for d in found[1].split(",")]
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        sizes = [int(s) for s in iota[3].split(",")]
        ids = np.arange(math.prod(sizes)).reshape(sizes)
        if iota[4]:
            ids = ids.transpose([int(s) for s in iota[4].split(",")])
        return ids.reshape(int(iota[1]), int(iota[2]))[0].tolist()
    if found := re.search(r"replica_groups=mesh\['?([^\]]*)\]\s*\{([^}]*)\}", attributes):
        return _mesh_group(found[1], found[2])
    if "replica_groups={}" in attributes or "replica_groups" not in attributes:
        return list(range(num_devices))
    shown = attributes[attributes.index("replica_groups") :][:120]
    raise ValueError(f"unknown form of groups of devices: {shown}")


def _mesh_group(axes: str, over: str) -> list[int]:
    """Devices that differ along some axes of a mesh alone: 0 and 1 for 'a'=4,'b'=2 over 'b'."""
    sizes = {name: int(size) for name, size in re.findall(r"(\w+)'?=(\d+)", axes)}
    names = re.findall(r"(\w+)", over)
    ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    index = tuple(slice(None) if name in names else 0 for name in sizes)
    return ids[index].ravel().tolist()
