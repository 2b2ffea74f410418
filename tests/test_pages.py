"""The page pool's books: who holds a page, and which prefix can be found."""

import numpy as np
import pytest

from mas_jax.sampling.pages import TRASH, PagePool, prefix_digests


def test_allocation_sharing_and_eviction_by_hand():
    pool = PagePool(4)  # pages 1, 2, 3
    first, second = pool.allocate(), pool.allocate()
    assert (first, second) == (1, 2)
    pool.publish(first, b"a")
    assert pool.find(b"a") == 1  # two users now
    pool.release([1])
    assert pool.is_used(1)
    pool.release([1, 2])  # 1 stays findable, 2 is free
    assert pool.num_available == 3
    assert [pool.allocate(), pool.allocate()] == [3, 2]  # free pages go before findable ones
    assert pool.find(b"a") == 1
    pool.release([1])
    assert pool.allocate() == 1  # the last one: its prefix is given up
    assert pool.find(b"a") is None
    assert pool.allocate() is None


def test_the_ends_of_prefixes_are_given_up_first():
    pool = PagePool(4)
    pages = [pool.allocate() for _ in range(3)]
    for page, digest in zip(pages, (b"a", b"ab", b"abc"), strict=True):
        pool.publish(page, digest)
    pool.release(pages)
    pool.allocate()
    assert (pool.find(b"a"), pool.find(b"ab"), pool.find(b"abc")) == (1, 2, None)


def test_a_withdrawn_page_cannot_be_found_but_its_users_keep_it():
    pool = PagePool(3)
    used, unused = pool.allocate(), pool.allocate()
    pool.publish(used, b"a")
    pool.publish(unused, b"b")
    pool.release([unused])
    pool.withdraw_all()
    assert pool.find(b"a") is None
    assert pool.find(b"b") is None
    assert pool.is_used(used)
    assert pool.num_available == 1
    pool.release([used])
    assert pool.num_available == 2


def test_only_the_first_page_of_a_prefix_is_findable():
    pool = PagePool(3)
    first, second = pool.allocate(), pool.allocate()
    pool.publish(first, b"a")
    pool.publish(second, b"a")
    assert pool.find(b"a") == first
    with pytest.raises(ValueError, match="page 1 holds a prefix already"):
        pool.publish(first, b"b")
    pool.release([first])
    assert pool.find(b"a") == first


def test_releasing_too_often_is_an_error():
    pool = PagePool(2)
    page = pool.allocate()
    pool.release([page])
    with pytest.raises(ValueError, match=f"page {page} has no user"):
        pool.release([page])


def test_a_pool_needs_a_page_beside_the_trash():
    with pytest.raises(ValueError, match="num_pages=1"):
        PagePool(1)


def test_digests_depend_on_everything_before_and_on_the_version():
    tokens = list(range(12))
    digests = prefix_digests("p@1", tokens, 4)
    assert len(digests) == 3
    assert prefix_digests("p@1", tokens[:11], 4) == digests[:2]  # full pages only
    changed = prefix_digests("p@1", [9, *tokens[1:]], 4)
    assert not set(changed) & set(digests)
    assert not set(prefix_digests("p@2", tokens, 4)) & set(digests)


def test_random_use_never_hands_a_page_out_twice():
    rng = np.random.default_rng(0)
    pool, held = PagePool(12), []
    for step in range(2000):
        if rng.random() < 0.5:
            is_new, digest = rng.random() < 0.6, b"%d" % rng.integers(8)
            page = pool.allocate() if is_new else pool.find(digest)
            if page is not None:
                assert page != TRASH
                assert not (is_new and page in held)
                held.append(page)
                if is_new and rng.random() < 0.5:
                    pool.publish(page, digest)
        elif held:
            pool.release([held.pop(int(rng.integers(len(held))))])
        used = {p for p in range(1, 12) if pool.is_used(p)}
        assert used == set(held), step
        assert pool.num_available == 11 - len(used)
