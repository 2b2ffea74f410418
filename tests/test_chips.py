"""Slices by name, and the ways between their chips."""

import pytest

from mas_jax.planning import chips


def test_a_name_says_chip_and_shape():
    chip, shape = chips.parse_topology("v6e:4x8")
    assert (chip, shape) == (chips.CHIPS["v6e"], (4, 8))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v9:2x2", "wanted CHIP:AxB"),
        ("v5p", "wanted CHIP:AxB"),
        ("v5p:4x4", "a torus of 3 axes, got 2"),
        ("v6e:2x2x2", "a torus of 2 axes, got 3"),
        ("v6e:0x2", "torus of 2 axes"),
    ],
)
def test_a_wrong_name_is_one_clear_error(name, said):
    with pytest.raises(ValueError, match=said):
        chips.parse_topology(name)


def test_devices_of_one_chip_share_it():
    chip, shape = chips.parse_topology("tpu7x:2x2x1")
    place = chips.Slice("tpu7x:2x2x1", chip, shape, ())
    assert place.num_chips == 4
    assert 2 * place.peak_flops == chip.peak_flops
    assert 2 * place.hbm_bytes == 192 * 2**30


def test_long_axes_close_to_rings():
    chip, _ = chips.parse_topology("v5p:4x2x2")
    wide = chips.Slice("v5p:4x2x2", chip, (4, 2, 2), ())
    assert wide.hops((0, 0, 0), (3, 0, 0)) == 1  # around
    assert wide.hops((0, 0, 0), (2, 1, 0)) == 3
    assert [wide.links(axis) for axis in range(3)] == [2, 1, 1]
    # v6e closes at its full 16 alone
    flat, _ = chips.parse_topology("v6e:4x16")
    line = chips.Slice("v6e:4x16", flat, (4, 16), ())
    assert (line.hops((0, 0), (3, 0)), line.hops((0, 0), (0, 15))) == (3, 1)
    assert [line.links(axis) for axis in range(2)] == [1, 2]


def test_links_are_counted_one_way():
    # METHODS 8.1: v5e 400 and v6e 800 GB/s both ways a chip, on 4 links
    for name, both_ways in (("v5e", 400e9), ("v6e", 800e9), ("tpu7x", 1200e9)):
        chip = chips.CHIPS[name]
        assert 2 * chip.axes * 2 * chip.link_bandwidth == both_ways
