"""Several engines behind one `sample`: who gets what, and that it changes no token."""

import time

import jax
import pytest
from engines import make_engine, make_params, make_prompts, run, sample

from mas_jax.model import sharding
from mas_jax.sampling.replicas import Replicas

PROMPTS = make_prompts((3, 9, 17, 30, 5, 12))


def make_replicas(count: int) -> Replicas:
    meshes = [sharding.make_mesh(devices=[device]) for device in jax.devices()[:count]]
    return Replicas([make_engine(mesh=mesh) for mesh in meshes])


def test_replicas_draw_what_one_engine_draws_and_share_the_questions():
    want = run(*(sample(make_engine(), p, str(i)) for i, p in enumerate(PROMPTS)))
    replicas = make_replicas(2)
    got = run(*(sample(replicas, p, str(i)) for i, p in enumerate(PROMPTS)))
    assert [[s.tokens for s in r] for r in got] == [[s.tokens for s in r] for r in want]
    parts = [engine.metrics.sequences for engine in replicas.engines]
    assert sum(parts) == replicas.metrics["sequences"] == len(PROMPTS)
    busy = [e.metrics.prefill_s + e.metrics.decode_s for e in replicas.engines]
    assert replicas.metrics["device_s"] == pytest.approx(sum(busy) / len(busy))
    assert all(parts)
    again = run(*(sample(replicas, PROMPTS[3], "3", max_tokens=2) for _ in range(5)))
    assert len({tuple(r) for r in again}) == 1
    assert replicas.metrics["shared_tokens"] == 5 * 28  # one question, one engine, one prefix


def test_a_call_under_way_counts_as_it_goes():
    engine = make_replicas(1).engines[0]
    seen = []

    def _slow(program):
        def _run(*args):
            seen.append(engine.device.busy_s)
            time.sleep(0.02)
            seen.append(engine.device.busy_s)
            return program(*args)

        return _run

    run(sample(engine, PROMPTS[0]))
    before = engine.device.busy_s
    programs = engine.device._programs.items()
    engine.device._programs = {name: _slow(one) for name, one in programs}
    run(sample(engine, PROMPTS[0], "1", max_tokens=1))
    assert 0 < before <= seen[0] and seen[1] - seen[0] >= 0.02
    still = engine.device.busy_s
    assert seen[-1] <= still == engine.device.busy_s  # nothing is under way


def test_new_weights_reach_every_replica():
    replicas = make_replicas(2)
    replicas.set_params(make_params(1))
    want = run(*(sample(make_engine(seed=1), p, str(i)) for i, p in enumerate(PROMPTS)))
    got = run(*(sample(replicas, p, str(i)) for i, p in enumerate(PROMPTS)))
    assert [[s.tokens for s in r] for r in got] == [[s.tokens for s in r] for r in want]


def test_unequal_engines_are_refused():
    with pytest.raises(ValueError, match="one policy with equal settings"):
        Replicas([])
