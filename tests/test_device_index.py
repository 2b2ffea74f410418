"""Exact search on devices against the exact index on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mas_jax.model import sharding
from mas_jax.retrieval import device_index, exact_index
from mas_jax.retrieval.device_index import DeviceShard


def unit(shape, seed):
    x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def shard(vectors, *, mesh=None, dtype=jnp.float32, spare=8, exact=True):
    mesh = mesh or sharding.make_mesh(data=8)
    return DeviceShard(vectors, mesh=mesh, dtype=dtype, spare=spare, exact=exact)


def same(found, expected):
    for (scores, rows), (wanted_scores, wanted_rows) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(rows, wanted_rows)
        np.testing.assert_allclose(scores, wanted_scores, atol=1e-6)


@pytest.mark.parametrize("count", [1, 5, 8, 100, 1003])
@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_it_finds_what_the_exact_index_finds(count, sizes):
    vectors, queries = unit((count, 32), 0), unit((11, 32), 1)
    expected = exact_index.ExactShard(vectors).search(queries, 4)
    for exact in (True, False):
        found = shard(vectors, mesh=sharding.make_mesh(**sizes), exact=exact).search(queries, 4)
        same(found, expected)


def test_blocks_and_one_device_change_nothing(monkeypatch):
    vectors, queries = unit((997, 16), 2), unit((600, 16), 3)  # more queries than one call takes
    expected = exact_index.ExactShard(vectors).search(queries, 7)
    for block in (10, 64, 1000):
        monkeypatch.setattr(device_index, "BLOCK", block)
        one = sharding.make_mesh(devices=jax.devices()[:1])
        same(shard(vectors, mesh=one).search(queries, 7), expected)
        same(shard(vectors).search(queries, 7), expected)


def test_ties_go_to_the_earlier_row_and_negative_scores_are_found():
    vectors = np.tile(-unit((1, 16), 4), (50, 1))
    [(scores, rows)] = shard(vectors, spare=40).search(-vectors[:1], 5)
    np.testing.assert_array_equal(rows, np.arange(5))
    np.testing.assert_allclose(scores, -1, atol=1e-6)


def test_bfloat16_with_spare_candidates_ranks_as_float32_does():
    vectors, queries = unit((2000, 64), 5), unit((40, 64), 6)
    expected = exact_index.ExactShard(vectors).search(queries, 3)
    same(shard(vectors, dtype=jnp.bfloat16, spare=30).search(queries, 3), expected)


def test_shards_of_one_size_share_their_programs():
    vectors, queries = unit((203, 16), 8), unit((2, 16), 9)
    shard(vectors[:101]).search(queries, 3)
    compiled = device_index._best._cache_size()
    same(
        shard(vectors[101:]).search(queries, 3),  # 102: both fill 13 rows a device
        exact_index.ExactShard(vectors[101:]).search(queries, 3),
    )
    assert device_index._best._cache_size() == compiled


def test_more_results_than_vectors_gives_all():
    vectors = unit((3, 16), 7)
    [(_, rows)] = shard(vectors).search(vectors[:1], 10)
    assert sorted(rows.tolist()) == [0, 1, 2] and rows[0] == 0
