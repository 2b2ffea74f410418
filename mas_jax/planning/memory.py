"""HBM that a compiled program needs beside its arguments, by the lifetimes of its arrays.

A program's text gives the order in which it runs, so an array lives from its line to the last one
that reads it. What the compiler does beyond that is not in the text: it may put a result where an
operand ends (less), and leaves gaps between buffers (more).
Must not know: chips, costs, what the program computes.
"""

import re

from mas_jax.planning.hlo import HBM, Computation, Instruction, Program

# names of others' arrays, element by element
SAME = frozenset(["while", "opt-barrier", "bitcast", "add-dependency", "copy-done", "async-done"])
UPDATES = frozenset(["dynamic-update-slice", "scatter"])

Owners = list[frozenset[str]]  # for each array of a result, whose place it is or may be


def peak_bytes(program: Program) -> float:
    """Largest number of HBM bytes alive at once that are no arguments, on one device.

    Results count, but for those in the place of an argument.
    """
    entry = program.entry
    results = _owners(program, entry)[entry.root.name]
    in_place = [owners for place, owners in enumerate(results) if place in program.donated]
    return _peak(program, entry, frozenset().union(*in_place), {})


def _peak(
    program: Program, computation: Computation, in_place: frozenset[str], known: dict[str, float]
) -> float:
    """Of one computation, with what runs inside its instructions. in_place: arrays for which there
    is a place already."""
    named, order = _owners(program, computation), list(computation)
    last: dict[str, int] = {}
    for at, one in enumerate(order):
        for name in (one.name, *one.operands):
            if name == one.name or one.op not in ("tuple", "get-tuple-element", "bitcast"):
                last |= dict.fromkeys(frozenset().union(*named.get(name, ())), at)
    last |= dict.fromkeys(frozenset().union(*named[computation.root.name]), len(order))
    ends: dict[int, list[str]] = {}
    for owner, at in last.items():
        ends.setdefault(at, []).append(owner)
    alive, peak, sizes = 0.0, 0.0, {}
    for at, one in enumerate(order):
        for owner, size in _made(one, named[one.name]).items():
            sizes[owner] = 0.0 if owner in in_place else size
            alive += sizes[owner]
        inside = max((_inside(program, name, known) for name in _called(one)), default=0.0)
        peak = max(peak, alive + inside)
        alive -= sum(sizes.get(owner, 0.0) for owner in ends.get(at, ()))
    return peak


def _inside(program: Program, name: str, known: dict[str, float]) -> float:
    """Peak of a computation that another runs; its results lie where the caller keeps them."""
    if name not in known:
        computation = program.computations[name]
        results = _owners(program, computation)[computation.root.name]
        known[name] = _peak(program, computation, frozenset().union(*results), known)
    return known[name]


def _called(one: Instruction) -> list[str]:
    """Computations that an instruction runs in its place."""
    if one.op == "while":
        return [one.called("body")]
    if one.op in ("call", "async-start"):
        return [name for name in (one.called("to_apply"), one.called("calls")) if name][:1]
    if one.op == "conditional":
        found = re.search(r"branch_computations=\{([^}]*)\}", one.attributes)
        names = re.findall(r"%?([\w.\-]+)", found[1]) if found else []
        return names or [one.called("true_computation"), one.called("false_computation")]
    return []


def _owners(program: Program, computation: Computation) -> dict[str, Owners]:
    """Whose place each array of each instruction's result is: its own ("name/element"), or that of
    an operand of which it is another name or which it updates; none for an argument's."""
    named: dict[str, Owners] = {}
    for one in computation:
        given = [named.get(name, []) for name in one.operands]
        if one.op in ("parameter", "constant", "after-all"):
            found = [frozenset()] * len(one.arrays)
        elif one.op == "tuple":
            found = [frozenset().union(*owners) for owners in given]
        elif one.op == "get-tuple-element":
            index = int(re.search(r"index=(\d+)", one.attributes)[1])
            found = [given[0][index]] if index < len(given[0]) else [frozenset().union(*given[0])]
        elif one.op in SAME or one.op.endswith("-done"):
            found = given[0] if one.op in ("while", "opt-barrier") else given[0][:1]
        elif one.op in UPDATES:
            found = given[0][:1]
        else:
            found = [frozenset([f"{one.name}/{i}"]) for i in range(len(one.arrays))]
            for element, operand in _updated(program, one).items():
                if element < len(found) and operand < len(given):
                    found[element] = frozenset().union(*given[operand])
        named[one.name] = found
    return named


def _updated(program: Program, one: Instruction) -> dict[int, int]:
    """Elements of a result that are written over an operand, and which operand that is."""
    found = re.search(r"output_to_operand_aliasing=\{(.*?\}\)?)\}", one.attributes)
    if found:
        pairs = re.findall(r"\{(\d*)\}: \((\d+)", found[1])
        return {int(element or 0): int(operand) for element, operand in pairs}
    if one.op != "fusion":
        return {}
    fused = program.computations[one.called("calls")]
    roots = [fused.root]
    if fused.root.op == "tuple":
        roots = [fused.instructions[name] for name in fused.root.operands]
    places = {element: _source(program, fused, root) for element, root in enumerate(roots)}
    return {element: place for element, place in places.items() if place is not None}


def _source(program: Program, fused: Computation, one: Instruction) -> int | None:
    """Parameter of a fusion that one of its results updates in place, None for no such."""
    is_update = False
    while one.op in UPDATES or one.op in ("bitcast", "copy", "fusion"):
        is_update = is_update or one.op in UPDATES
        operand = 0
        if one.op == "fusion":
            inner = _updated(program, one)
            if 0 not in inner:
                return None
            operand, is_update = inner[0], True
        one = fused.instructions[one.operands[operand]]
    return int(one.literal) if is_update and one.op == "parameter" else None


def _made(one: Instruction, owners: Owners) -> dict[str, float]:
    """HBM bytes of each new array; of a transfer under way the target alone."""
    arrays = list(enumerate(one.arrays))
    if one.op in ("copy-start", "slice-start", "dynamic-slice-start"):
        arrays = arrays[:1]
    elif one.op in ("all-gather-start", "collective-permute-start"):
        arrays = arrays[len(arrays) // 2 :]
    return {
        f"{one.name}/{i}": float(array.stored_bytes)
        for i, array in arrays
        if array.space == HBM and i < len(owners) and f"{one.name}/{i}" in owners[i]
    }
