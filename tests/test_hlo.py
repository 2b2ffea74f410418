"""Reading a compiled program's text, on texts written by hand."""

import pytest

from mas_jax.planning import hlo

LOOP = """HloModule jit_f, is_scheduled=true

%cond (p.1: (s32[], f32[8,4], s32[])) -> pred[] {
  %p.1 = (s32[]{:T(128)}, f32[8,4]{1,0:T(8,128)}, s32[]{:T(128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  LIMIT
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}

%body (p.2: (s32[], f32[8,4], s32[])) -> (s32[], f32[8,4], s32[]) {
  %p.2 = (s32[], f32[8,4], s32[]) parameter(0)
  %i.2 = s32[] get-tuple-element(%p.2), index=0
  %x.2 = f32[8,4]{1,0:T(8,128)S(1)} get-tuple-element(%p.2), index=1
  %n.2 = s32[] get-tuple-element(%p.2), index=2
  %one = s32[] constant(STEP)
  %next = s32[] add(%i.2, %one)
  %x.3 = f32[8,4] negate(%x.2)
  ROOT %out = (s32[], f32[8,4], /*index=2*/s32[]) tuple(%next, %x.3, %n.2)
}

ENTRY %main (a: f32[8,4], n: s32[]) -> f32[8,4] {
  %a = f32[8,4]{1,0:T(8,128)} parameter(0)
  %n = s32[] parameter(1)
  %zero = s32[] constant(0)
  %seven = s32[] constant(7)
  %start = (s32[], f32[8,4], s32[]) tuple(%zero, %a, BOUND)
  %loop = (s32[], f32[8,4], s32[]) while(%start), condition=%cond, body=%body, \
metadata={op_name="jit(f)/while" stack_frame_id=3}
  ROOT %y = f32[8,4] get-tuple-element(%loop), index=1
}
"""
CARRIED = "%limit = s32[] get-tuple-element(%p.1), index=2"


def loop_of(
    limit: str = "%limit = s32[] constant(6)", step: int = 1, bound: str = "%n",
    first: str = "constant(0)",
):  # fmt: skip
    text = LOOP.replace("LIMIT", limit).replace("STEP", str(step)).replace("BOUND", bound)
    text = text.replace("constant(0)", first)
    program = hlo.parse(text)
    return program, program.entry.instructions["loop"]


def test_instructions_have_their_arrays_operands_and_sources():
    program, loop = loop_of()
    assert set(program.computations) == {"cond", "body", "main"}
    assert (loop.op, loop.operands, loop.source) == ("while", ("start",), "jit(f)/while")
    assert [array.shape for array in loop.arrays] == [(), (8, 4), ()]
    held = program.computations["body"].instructions["x.2"].arrays[0]
    assert (held.dtype, held.num_bytes, held.space) == ("f32", 128, 1)
    assert program.entry.instructions["a"].arrays[0].space == hlo.HBM
    assert program.entry.root.name == "y"
    assert program.entry.parameter(1).name == "n"
    assert program.entry.parameter(2) is None


@pytest.mark.parametrize(
    ("changes", "turns"),
    [
        ({}, 6),
        ({"step": 2}, 3),
        ({"step": 4}, 2),  # the last turn is not a whole one
        ({"limit": CARRIED, "bound": "%seven"}, 7),
        ({"limit": CARRIED, "bound": "%n"}, None),  # data
        ({"first": "constant(4)"}, 2),
        ({"first": "constant(9)"}, 0),
        ({"first": "negate(%n)"}, None),
    ],
)
def test_a_loop_turns_as_often_as_its_counter_needs(changes, turns):
    program, loop = loop_of(**changes)
    assert hlo.trip_count(program, program.entry, loop) == turns


def test_an_annotation_comes_first():
    text = LOOP.replace("LIMIT", CARRIED).replace("STEP", "1").replace("BOUND", "%n")
    note = 'body=%body, backend_config={"known_trip_count":{"n":"12"}}'
    program = hlo.parse(text.replace("body=%body", note))
    assert hlo.trip_count(program, program.entry, program.entry.instructions["loop"]) == 12


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("f32[3,100]{1,0:T(8,128)}", 8 * 128 * 4),
        ("f32[100,3]{0,1:T(8,128)}", 8 * 128 * 4),  # the first dimension is the fast one
        ("bf16[2,16,128]{2,1,0:T(8,128)(2,1)}", 2 * 16 * 128 * 2),
        ("f32[5]{0:T(512)}", 512 * 4),
        ("f32[5,7]{1,0}", 5 * 7 * 4),
    ],
)
def test_a_tile_is_filled_up(text, stored):
    program = hlo.parse(f"HloModule f\n\nENTRY %m () -> f32[] {{\n  ROOT %x = {text} copy(%y)\n}}")
    assert program.entry.root.arrays[0].stored_bytes == stored


def test_results_in_an_arguments_place_are_known():
    head = "HloModule f, input_output_alias={ {0}: (0, {}, may-alias), {2}: (3, {}, may-alias) }, x"
    body = "\n\nENTRY %m () -> f32[] {\n  ROOT %x = f32[] copy(%y)\n}"
    assert hlo.parse(head + body).donated == {0, 2}
    assert hlo.parse("HloModule f" + body).donated == frozenset()


def test_what_is_no_program_is_an_error():
    with pytest.raises(ValueError, match="no entry computation"):
        hlo.parse("nothing")
