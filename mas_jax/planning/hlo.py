"""Reads a compiled program's text: its computations, instructions and loops.

The text is that of XLA after all passes, one line an instruction, in the order in which they run.
Must not know: chips, costs, what the program computes.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

ITEM_BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32,
    "s64": 64, "u64": 64, "f8e4m3fn": 8, "f8e5m2": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64,
    "c64": 64, "token": 0, "opaque": 0,
}  # fmt: skip
HBM = 0  # memory spaces by the layout's S(n): none is HBM, 1 is VMEM

_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")


@dataclass(frozen=True)
class Array:
    """Shape of an array and the memory space that it lies in."""

    dtype: str
    shape: tuple[int, ...]
    space: int
    layout: str = ""

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes without padding."""
        return self.size * ITEM_BITS.get(self.dtype, 32) // 8

    @property
    def stored_bytes(self) -> int:
        """Bytes with the padding of its layout's first tile: {1,0:T(8,128)} fills the last two
        dimensions up to multiples of 8 and 128."""
        order, _, tiling = self.layout.partition(":")
        tile = re.search(r"T\(([\d,]+)\)", tiling)
        if not tile or not self.shape:
            return self.num_bytes
        sizes = [self.shape[int(d)] for d in order.split(",")]  # fastest first
        for place, unit in enumerate(reversed([int(t) for t in tile[1].split(",")])):
            if place < len(sizes):
                sizes[place] = -(-sizes[place] // unit) * unit
        return prod(sizes) * ITEM_BITS.get(self.dtype, 32) // 8


@dataclass(frozen=True)
class Instruction:
    """One line: what it gives (a tuple flattened), its operation, operands by name, and the rest.

    literal: what stands in the brackets, which for a constant is its value.
    """

    name: str
    arrays: tuple[Array, ...]
    op: str
    operands: tuple[str, ...]
    attributes: str
    literal: str
    is_root: bool

    def called(self, attribute: str) -> str:
        """The computation that an attribute ("body", "calls") names, "" without it."""
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else ""

    @property
    def source(self) -> str:
        """The traced operation that it comes from, "" if unsaid."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""


@dataclass
class Computation:
    """Instructions in the order in which they run, by name."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    @property
    def root(self) -> Instruction:
        """What it gives back."""
        return next(i for i in reversed(self.instructions.values()) if i.is_root)

    def parameter(self, number: int) -> Instruction | None:
        """Its parameter of that number."""
        named = (i for i in self if i.op == "parameter" and i.literal == str(number))
        return next(named, None)


@dataclass(frozen=True)
class Program:
    """All computations by name, the one that runs, and which of its results lie in the place of an
    argument that is used up."""

    computations: Mapping[str, Computation]
    entry: Computation
    donated: frozenset[int] = frozenset()


def _matching(text: str, start: int) -> int:
    """Place after the bracket that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place + 1
    raise ValueError(f"no closing bracket in {text[start : start + 80]!r}")


def _arrays(text: str) -> tuple[Array, ...]:
    found = []
    for dtype, sizes, layout in _ARRAY.findall(text):
        space = re.search(r"S\((\d+)\)", layout)
        shape = tuple(int(size) for size in sizes.split(",") if size)
        found.append(Array(dtype, shape, int(space[1]) if space else HBM, layout))
    return tuple(found)


def _instruction(is_root: bool, name: str, text: str) -> Instruction:
    text = re.sub(r"/\*.*?\*/", "", text)
    end = _matching(text, 0) if text.startswith("(") else text.index(" ")
    arrays, rest = _arrays(text[:end]), text[end:].lstrip()
    bracket = rest.index("(")
    close = _matching(rest, bracket)
    inside = rest[bracket + 1 : close - 1]
    return Instruction(
        name=name,
        arrays=arrays,
        op=rest[:bracket],
        operands=tuple(re.findall(r"%([\w.\-]+)", inside)),
        attributes=rest[close:],
        literal=inside.strip(),
        is_root=is_root,
    )


def parse(text: str) -> Program:
    """The program that a text describes. Raises: ValueError if it is none."""
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = Computation(header[2])
            computations[current.name] = current
            entry = current if header[1] else entry
        elif (found := _INSTRUCTION.match(line)) and current is not None:
            one = _instruction(bool(found[1]), found[2], found[3])
            current.instructions[one.name] = one
    if entry is None:
        raise ValueError(f"no entry computation in a text of {len(text)} characters")
    return Program(computations, entry, _donated(text))


def _donated(text: str) -> frozenset[int]:
    """Results in an argument's place: input_output_alias={ {0}: (0, {}, may-alias), ... }."""
    header = text[: text.find("\n")]
    found = re.search(r"input_output_alias=\{(.*?\)) \}", header)
    return frozenset(int(place) for place in re.findall(r"\{(\d+)\}:", found[1] if found else ""))


def trip_count(program: Program, caller: Computation, loop: Instruction) -> int | None:
    """How often a while loop turns; None where that is data.

    Read off the annotation, or off a condition `counter < bound` whose counter starts at a constant
    and grows by one, and whose bound is a constant that may be carried through the loop.
    """
    known = re.search(r'known_trip_count[^}]*?"n":"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    condition = program.computations[loop.called("condition")]
    names, attributes = _compared(program, condition)
    if "direction=LT" not in attributes or len(names) != 2:
        return None
    counter, carried = _carried(condition, names[0]), _carried(condition, names[1])
    limit = _value(condition, names[1])
    start = caller.instructions.get(loop.operands[0])
    if limit is None and carried is not None and start is not None and start.op == "tuple":
        limit = _value(caller, start.operands[carried])
    first = None
    if counter is not None and start is not None and start.op == "tuple":
        first = _value(caller, start.operands[counter])
    if limit is None or counter is None or first is None:
        return None
    body = program.computations[loop.called("body")]
    step = _step(body, body.root.operands[counter], counter)
    return None if not step else max(0, -(-(limit - first) // step))


def _compared(program: Program, condition: Computation) -> tuple[list[str], str]:
    """Names in the condition that its comparison reads, and the comparison's attributes."""
    root = condition.root
    if root.op == "compare":
        return list(root.operands), root.attributes
    if root.op != "fusion":
        return [], ""
    fused = program.computations[root.called("calls")]
    names = []
    for name in fused.root.operands:
        inner = fused.instructions[name]
        names.append(root.operands[int(inner.literal)] if inner.op == "parameter" else name)
    return names, fused.root.attributes if fused.root.op == "compare" else ""


def _value(computation: Computation, name: str) -> int | None:
    """The integer that a name stands for in a computation, through copies."""
    one = computation.instructions.get(name)
    while one is not None and one.op in ("copy", "bitcast", "convert"):
        one = computation.instructions.get(one.operands[0])
    if one is not None and one.op == "constant" and re.fullmatch(r"-?\d+", one.literal):
        return int(one.literal)
    return None


def _carried(computation: Computation, name: str) -> int | None:
    """Which element of a loop's carry a name is."""
    one = computation.instructions.get(name)
    if one is not None and one.op == "get-tuple-element":
        found = re.search(r"index=(\d+)", one.attributes)
        return int(found[1]) if found else None
    return None


def _step(body: Computation, name: str, counter: int) -> int | None:
    """By how much a loop's body moves its counter, through copies and additions of constants; 1
    where a fusion hides it."""
    total = 0
    while (one := body.instructions.get(name)) is not None:
        if one.op == "fusion":
            return total + 1
        if one.op == "copy":
            name = one.operands[0]
        elif one.op == "add":
            constants = [_value(body, operand) for operand in one.operands]
            if constants.count(None) != 1:
                return None
            name = one.operands[constants.index(None)]
            total += sum(value for value in constants if value is not None)
        else:
            return total if _carried(body, name) == counter else None
    return None
