"""What a program costs, counted by hand on small texts; TPU v5p: 459 TFLOP/s, 2,765 GB/s of HBM,
90 GB/s a link one way."""

import pytest

from mas_jax.planning import chips, hlo
from mas_jax.planning.cost import Cost, Kernel, Reader, extrapolated

CHIP, SHAPE = chips.parse_topology("v5p:2x2x2")
PLACE = chips.Slice("v5p:2x2x2", CHIP, SHAPE, ())
RING = [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0), (0, 1, 1), (1, 1, 1), (1, 0, 1), (0, 0, 1)]


def cost_of(body: str, *, others: str = "", turns=None, kernel=None) -> Cost:
    """Of a program whose entry has these lines, after others; two inputs of bf16 [1024, 1024]."""
    text = (
        f"HloModule f\n\n{others}\nENTRY %main (a: bf16[1024,1024]) -> bf16[1024,1024] {{\n"
        "  %a = bf16[1024,1024] parameter(0)\n  %b = bf16[1024,1024] parameter(1)\n"
        "  %n = s32[] parameter(2)\n" + body + "\n}\n"
    )
    kernels = kernel or (lambda one: None)
    return Reader(hlo.parse(text), PLACE, RING, turns or {}, kernels).cost()


MATMUL = "%c = bf16[1024,1024] convolution(%a, %b), dim_labels=bf_io->bf"
MB = 2 * 1024**2


def test_a_matmul_is_two_flops_a_product_and_moves_its_three_arrays():
    cost = cost_of(f"  ROOT {MATMUL}")
    assert cost.flops == pytest.approx(2 * 1024**3)
    assert cost.num_bytes == 3 * MB
    # 4.7 us of compute, 2.3 us of memory
    assert cost.seconds == pytest.approx(2 * 1024**3 / 459e12)


def test_batched_products_are_counted_once_each():
    line = (
        "  ROOT %c = f32[8,64,32] dot(%x, %y), lhs_batch_dims={0}, rhs_batch_dims={0}, "
        "lhs_contracting_dims={2}, rhs_contracting_dims={1}"
    )
    made = "  %x = f32[8,64,16] copy(%a)\n  %y = f32[8,16,32] copy(%b)\n"
    assert cost_of(made + line).flops == pytest.approx(2 * 8 * 64 * 16 * 32)


def test_what_lies_in_vmem_moves_no_hbm_bytes():
    line = "  ROOT %c = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} add(%a, %b)"
    assert cost_of(line).num_bytes == 2 * MB


SLICING = """
%fused (p0: bf16[1024,1024], p1: s32[]) -> bf16[8,1024] {
  %p0 = bf16[1024,1024] parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %s = bf16[8,1024] dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={8,1024}
}

%update (q0: bf16[1024,1024], q1: bf16[8,1024], q2: s32[]) -> bf16[1024,1024] {
  %q0 = bf16[1024,1024] parameter(0)
  %q1 = bf16[8,1024] parameter(1)
  %q2 = s32[] parameter(2)
  ROOT %u = bf16[1024,1024] dynamic-update-slice(%q0, %q1, %q2, %q2)
}
"""


def test_a_fusion_reads_the_slice_that_it_takes_and_writes_the_slice_that_it_updates():
    part = 8 * 1024 * 2
    read = "  ROOT %s = bf16[8,1024] fusion(%a, %n), kind=kLoop, calls=%fused"
    assert cost_of(read, others=SLICING).num_bytes == 2 * part + 4
    both = (
        "  %s = bf16[8,1024] fusion(%a, %n), kind=kLoop, calls=%fused\n"
        "  ROOT %u = bf16[1024,1024] fusion(%b, %s, %n), kind=kLoop, calls=%update"
    )
    assert cost_of(both, others=SLICING).num_bytes == 4 * part + 8


TWO_RESULTS = """
%two (p0: bf16[1024,1024], p1: bf16[8,1024], p2: s32[]) -> (bf16[8,1024], bf16[1024,1024]) {
  %p0 = bf16[1024,1024] parameter(0)
  %p1 = bf16[8,1024] parameter(1)
  %p2 = s32[] parameter(2)
  %v = bf16[1024,1024] bitcast(%p0)
  %u = bf16[1024,1024] dynamic-update-slice(%v, %p1, %p2, %p2)
  ROOT %t = (bf16[8,1024], bf16[1024,1024]) tuple(%p1, %u)
}
"""


def test_of_two_results_the_one_that_is_updated_in_place_costs_its_update():
    part = 8 * 1024 * 2
    body = (
        "  %s = bf16[8,1024]{1,0:S(1)} copy(%n)\n  %z = s32[]{:S(2)} constant(0)\n"
        "  ROOT %t = (bf16[8,1024], bf16[1024,1024]) fusion(%b, %s, %z), kind=kLoop, calls=%two"
    )
    cost = cost_of(body, others=TWO_RESULTS)
    assert cost.num_bytes == 2 * part + 4  # and the copy reads a number


SCATTERING = """
%scattered (p0: bf16[1024,1024], p1: s32[8,1], p2: bf16[8,1024]) -> bf16[1024,1024] {
  %p0 = bf16[1024,1024] parameter(0)
  %p1 = s32[8,1] parameter(1)
  %p2 = bf16[8,1024] parameter(2)
  ROOT %s = bf16[1024,1024] scatter(%p0, %p1, %p2), to_apply=%sum
}

%around (q0: bf16[1024,1024], q1: s32[8,1], q2: bf16[8,1024]) -> bf16[1024,1024] {
  %q0 = bf16[1024,1024] parameter(0)
  %q1 = s32[8,1] parameter(1)
  %q2 = bf16[8,1024] parameter(2)
  ROOT %f = bf16[1024,1024] fusion(%q0, %q1, %q2), kind=kCustom, calls=%scattered
}
"""


@pytest.mark.parametrize("calls", ["scattered", "around"])
def test_a_scatter_in_place_reads_and_writes_its_updates_alone(calls):
    made = "  %i = s32[8,1]{1,0:S(1)} copy(%n)\n  %v = bf16[8,1024]{1,0:S(1)} copy(%n)\n"
    line = f"  ROOT %s = bf16[1024,1024] fusion(%a, %i, %v), kind=kCustom, calls=%{calls}"
    assert cost_of(made + line, others=SCATTERING).num_bytes == 8 * 1024 * 2 + 2 * 4


def test_a_kernel_costs_what_it_is_said_to():
    line = '  ROOT %k = bf16[1024,1024] custom-call(%a), custom_call_target="tpu_custom_call"'
    cost = cost_of(line, kernel=lambda one: Kernel(7.0, 5.0) if one.op == "custom-call" else None)
    assert (cost.flops, cost.num_bytes) == (7.0, 5.0)


LOOP = """
%cond (p: (s32[], bf16[1024,1024])) -> pred[] {
  %p = (s32[], bf16[1024,1024]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %limit = s32[] get-tuple-element(%p), index=2
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

%body (q: (s32[], bf16[1024,1024])) -> (s32[], bf16[1024,1024]) {
  %q = (s32[], bf16[1024,1024], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %x = bf16[1024,1024] get-tuple-element(%q), index=1
  %m = s32[] get-tuple-element(%q), index=2
  %y = bf16[1024,1024] convolution(%x, %x), dim_labels=bf_io->bf
  ROOT %t = (s32[], bf16[1024,1024], s32[]) tuple(%j, %y, %m)
}
"""
LOOPING = (
    "  %t = (s32[], bf16[1024,1024], s32[]) tuple(%n, %a, %n)\n"
    "  %w = (s32[], bf16[1024,1024], s32[]) while(%t), condition=%cond, body=%body, "
    'metadata={op_name="jit(f)/while"}\n'
    "  ROOT %r = bf16[1024,1024] get-tuple-element(%w), index=1"
)


def test_a_loop_of_unknown_length_costs_as_often_as_is_said():
    once = cost_of(LOOPING, others=LOOP, turns={"jit(f)/while": 1})
    often = cost_of(LOOPING, others=LOOP, turns={"while": 1, "jit(f)/while": 9})
    assert often.flops == 9 * once.flops == 9 * 2 * 1024**3
    assert often.seconds == pytest.approx(9 * once.seconds)
    assert cost_of(LOOPING, others=LOOP, turns={"jit(f)/while": 0}).seconds == 0.0


def test_a_loop_that_nobody_knows_is_an_error():
    with pytest.raises(ValueError, match=r"loop 'w' of 'jit\(f\)/while' has no constant length"):
        cost_of(LOOPING, others=LOOP, turns={"jit(g)/while": 3})


GATHER = (
    "%g = bf16[8192,1024] all-gather(%a), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}"
)


def test_a_collective_that_nothing_covers_is_waited_for():
    cost = cost_of(f"  ROOT {GATHER}")
    (gather,) = cost.collectives.values()
    assert (gather.kind, gather.group, gather.count) == ("all-gather", 8, 1)
    assert gather.num_bytes == 7 * MB
    # three axes of two chips have a link each
    assert gather.seconds == pytest.approx(7 * MB / (3 * 90e9))
    assert cost.exposed_s == gather.exposed_s == gather.longest_exposed_s == gather.seconds


STARTED = (
    "  %g = (bf16[1024,1024], bf16[8192,1024]) all-gather-start(%a), channel_id=1, "
    "replica_groups=[1,8]<=[8], dimensions={0}\n"
)


def test_work_between_start_and_end_covers_a_collective():
    work = "".join(
        f"  %c{i} = bf16[1024,1024] convolution(%a, %b), dim_labels=bf_io->bf\n" for i in range(4)
    )
    done = "  ROOT %d = bf16[8192,1024] all-gather-done(%g)"
    one = 2 * 1024**3 / 459e12
    wire = 7 * MB / (3 * 90e9)
    assert 4 * one < wire < 16 * one
    assert cost_of(STARTED + work + done).exposed_s == pytest.approx(wire - 4 * one)
    more = "".join(work.replace("%c", f"%{letter}") for letter in "efgh")
    assert cost_of(STARTED + more + done).exposed_s == 0.0


def test_groups_are_listed_or_counted():
    listed = GATHER.replace("[1,8]<=[8]", "{{0,1},{2,3},{4,5},{6,7}}")
    (pair,) = cost_of(f"  ROOT {listed}").collectives.values()
    assert (pair.group, pair.num_bytes) == (2, 4 * MB)
    turned = GATHER.replace("[1,8]<=[8]", "[2,4]<=[4,2]T(1,0)")  # 0 2 4 6 and 1 3 5 7
    (four,) = cost_of(f"  ROOT {turned}").collectives.values()
    assert (four.group, four.num_bytes) == (4, 6 * MB)


def test_groups_of_a_mesh_differ_along_the_named_axes():
    for over, group in (("'a'", 4), ("'b'", 2), ("'a', 'b'", 8)):
        line = GATHER.replace("[1,8]<=[8]", f"mesh['a'=4,'b'=2] {{{over}}}")
        (found,) = cost_of(f"  ROOT {line}").collectives.values()
        assert found.group == group


def test_groups_of_an_unknown_form_are_an_error():
    with pytest.raises(ValueError, match="unknown form of groups of devices"):
        cost_of("  ROOT " + GATHER.replace("[1,8]<=[8]", "everyone"))


def test_several_arrays_in_one_collective_add_up():
    line = (
        "  ROOT %r = (bf16[1024,1024], bf16[1024,1024]) all-reduce(%a, %b), replica_groups={}, "
        "to_apply=%sum"
    )
    (both,) = cost_of(line).collectives.values()
    assert both.num_bytes == pytest.approx(2 * 2 * MB * 7 / 8)  # reduced, then gathered


def test_parts_of_an_all_to_all_pass_a_quarter_of_the_ring():
    line = "  ROOT %t = bf16[1024,1024] all-to-all(%a), replica_groups=[1,8]<=[8]"
    (found,) = cost_of(line).collectives.values()
    assert found.num_bytes == MB * 7 / 8
    assert found.seconds == pytest.approx(MB * 8 / 4 / (3 * 90e9))


def test_a_permutation_takes_its_longest_way():
    line = "  ROOT %p = bf16[1024,1024] collective-permute(%a), source_target_pairs={{0,1},{0,2}}"
    (permutation,) = cost_of(line).collectives.values()
    assert permutation.seconds == pytest.approx(2 * MB / 90e9)  # two links


COPIED = (
    "  %c = (bf16[1024,1024]{1,0:S(1)}, bf16[1024,1024], u32[]) copy-start(%a)\n"
    "BETWEEN"
    "  ROOT %d = bf16[1024,1024]{1,0:S(1)} copy-done(%c)"
)
IN_VMEM = "  %x = bf16[1024,1024]{1,0:S(1)} constant({...})\n"
PRODUCT = (
    "  %p = bf16[1024,1024]{1,0:S(1)} convolution(%x, %x), dim_labels=bf_io->bf\n"  # all in VMEM
)


def test_a_transfer_takes_the_bandwidth_that_computing_leaves():
    copy_s, product_s = MB / 2765e9, 2 * 1024**3 / 459e12
    alone = cost_of(COPIED.replace("BETWEEN", ""))
    assert alone.seconds == pytest.approx(copy_s)
    covered = cost_of(IN_VMEM + COPIED.replace("BETWEEN", PRODUCT))
    assert covered.seconds == pytest.approx(product_s)
    assert covered.num_bytes == MB
    # what reads HBM all the time leaves nothing: sum of both
    reading = "  %r = bf16[1024,1024]{1,0:S(1)} add(%a, %b)\n"
    busy = cost_of(COPIED.replace("BETWEEN", reading))
    assert busy.seconds == pytest.approx(copy_s + 2 * MB / 2765e9)


def test_permutations_go_both_ways_around_a_ring_at_once():
    line = (
        "  %p{n} = (bf16[1024,1024], bf16[1024,1024]) collective-permute-start(%a), "
        "source_target_pairs={pairs}\n"
    )
    ends = "  %e1 = bf16[1024,1024] collective-permute-done(%p1)\n"
    ends += "  ROOT %e2 = bf16[1024,1024] collective-permute-done(%p2)"
    one, other = "{{0,1},{1,2}}", "{{1,0},{2,1}}"
    first = line.replace("{n}", "1").replace("{pairs}", one)
    for pairs, times in ((other, 1), (one, 2)):
        second = line.replace("{n}", "2").replace("{pairs}", pairs)
        assert cost_of(first + second + ends).seconds == pytest.approx(times * MB / 90e9)


def test_layers_more_cost_the_same_each():
    one = cost_of(f"  {MATMUL}\n  ROOT {GATHER}")
    two = cost_of(f"  {MATMUL}\n  {MATMUL.replace('%c', '%d')}\n  ROOT {GATHER}")
    five = extrapolated(one, two, 5)
    assert five.flops == pytest.approx(5 * one.flops)
    assert five.num_bytes == pytest.approx(one.num_bytes + 4 * 3 * MB)
    assert [c.count for c in five.collectives.values()] == [1]
