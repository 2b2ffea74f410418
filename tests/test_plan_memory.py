"""Bytes alive at once, counted by hand on small texts; an array of bf16 [1024, 1024] has 2 MiB."""

import pytest

from mas_jax.planning import hlo
from mas_jax.planning.memory import peak_bytes

MB = 2 * 1024**2
OF = "bf16[1024,1024]"


def peak_of(body: str, *, others: str = "", head: str = "") -> float:
    """In units of 2 MiB, of a program of one input %a."""
    text = f"HloModule f{head}\n\n{others}\nENTRY %m (a: {OF}) -> {OF} {{\n"
    text += f"  %a = {OF} parameter(0)\n" + body + "\n}\n"
    return peak_bytes(hlo.parse(text)) / MB


def test_an_array_lives_until_it_is_read_last():
    chain = f"  %b = {OF} negate(%a)\n  %c = {OF} negate(%b)\n  ROOT %d = {OF} negate(%c)"
    assert peak_of(chain) == 2
    kept = f"  %b = {OF} negate(%a)\n  %c = {OF} negate(%b)\n  ROOT %d = {OF} add(%c, %b)"
    assert peak_of(kept) == 3


def test_other_names_take_no_room():
    body = (
        f"  %b = {OF} negate(%a)\n  %t = ({OF}, {OF}) tuple(%b, %a)\n"
        f"  %g = {OF} get-tuple-element(%t), index=0\n  ROOT %h = {OF} bitcast(%g)"
    )
    assert peak_of(body) == 1


def test_what_lies_in_vmem_is_not_counted():
    assert peak_of(f"  ROOT %b = {OF}{{1,0:T(8,128)(2,1)S(1)}} negate(%a)") == 0


def test_elements_of_a_tuple_live_each_their_own_time():
    body = (
        f"  %b = {OF} negate(%a)\n  %c = {OF} negate(%a)\n  %t = ({OF}, {OF}) tuple(%b, %c)\n"
        f"  %g = {OF} get-tuple-element(%t), index=0\n  %d = {OF} negate(%g)\n"
        f"  %e = {OF} negate(%d)\n  ROOT %f = {OF} negate(%e)"
    )
    assert peak_of(body) == 2  # c ends with the tuple, so d is beside b alone


UPDATE = f"""
%fused (p0: {OF}, p1: s32[]) -> {OF} {{
  %p0 = {OF} parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %u = {OF} dynamic-update-slice(%p0, %p1, %p1, %p1)
}}
"""


def test_an_update_in_place_makes_no_array():
    body = (
        f"  %b = {OF} negate(%a)\n  %i = s32[]{{:S(2)}} constant(0)\n"
        f"  ROOT %c = {OF} fusion(%b, %i), kind=kLoop, calls=%fused"
    )
    assert peak_of(body, others=UPDATE) == 1


LOOP = f"""
%cond (p: (s32[], {OF})) -> pred[] {{
  %p = (s32[], {OF}) parameter(0)
  ROOT %yes = pred[]{{:S(2)}} constant(true)
}}

%body (q: (s32[], {OF})) -> (s32[], {OF}) {{
  %q = (s32[], {OF}) parameter(0)
  %i = s32[] get-tuple-element(%q), index=0
  %x = {OF} get-tuple-element(%q), index=1
  %y = {OF} negate(%x)
  %z = {OF} negate(%y)
  %k = {OF} copy(%z)
  ROOT %t = (s32[], {OF}) tuple(%i, %k)
}}
"""


def test_a_loop_carries_its_arrays_in_place_and_adds_what_its_body_needs():
    body = (
        f"  %b = {OF} negate(%a)\n  %n = s32[]{{:S(2)}} constant(0)\n"
        f"  %s = (s32[], {OF}) tuple(%n, %b)\n"
        f"  %w = (s32[], {OF}) while(%s), condition=%cond, body=%body\n"
        f"  ROOT %r = {OF} get-tuple-element(%w), index=1"
    )
    assert peak_of(body, others=LOOP) == pytest.approx(1 + 2)  # what it carries, y and z


def test_a_result_in_an_arguments_place_is_no_array_more():
    body = f"  %b = {OF} negate(%a)\n  ROOT %t = ({OF}) tuple(%b)"
    assert peak_of(body) == 1
    donated = ", input_output_alias={ {0}: (0, {}, may-alias) }"
    assert peak_of(body, head=donated) == 0
