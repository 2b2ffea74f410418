"""The table logical axis -> mesh axis, and the model on one against eight devices."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mas_jax.model import logprobs, qwen3, scoring, sharding

CONFIG = qwen3.ModelConfig(
    vocab_size=64, num_layers=2, model_dim=32, ffw_dim=48, num_heads=8, num_kv_heads=4,
    head_dim=8, rope_theta=1e4, max_positions=64, qk_norm=True, tied=False, value_head=True,
)  # fmt: skip
MESHES = [
    *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((8, 1, 1), (1, 8, 1))),
    (2, 2, 2),
    (2, 1, 4),
]


def test_an_array_is_split_as_the_table_says():
    assert sharding.spec(("batch", "length", "hidden")) == PartitionSpec(
        ("data", "fsdp"), None, None
    )
    assert sharding.spec(("vocab", "embed")) == PartitionSpec(("tensor",), ("fsdp",))


def test_a_name_without_a_rule_is_an_error_with_the_nearest_one():
    with pytest.raises(
        ValueError, match=r"'vocabulary' has no sharding rule; did you mean 'vocab'"
    ):
        sharding.spec(("vocabulary", "embed"))


def test_two_dimensions_on_one_mesh_axis_are_an_error_with_both_names():
    with pytest.raises(ValueError, match=r"'heads' and 'ffw' of one array .* mesh axis 'tensor'"):
        sharding.spec(("heads", "ffw"))


def test_the_tpu_compiler_is_told_what_is_ours_and_then_what_the_user_says():
    first, second = sharding.TPU_FLAGS
    assert sharding.tpu_flags() == f"{first} {second}"
    own = f"{first.partition('=')[0]}=5"
    assert sharding.tpu_flags(f"--x {own}") == f"--x {own} {second}"


def test_a_mesh_of_the_wrong_size_is_refused():
    with pytest.raises(ValueError, match="needs 6 devices, got 8"):
        sharding.make_mesh(data=3, tensor=2)


def test_a_dimension_that_does_not_divide_is_refused_by_name():
    mesh = sharding.make_mesh(tensor=8)
    with pytest.raises(ValueError, match=r"layers/wk: dimension 'kv_heads' of size 4 .* by 8"):
        qwen3.param_shardings(CONFIG, mesh)


def test_without_a_mesh_constrain_changes_nothing():
    x = jnp.ones((3, 5, 7))
    assert sharding.constrain(x, ("batch", "length", "hidden")) is x


def loss_fn(params, tokens_BT, segment_ids_BT):
    """A loss through every part: policy gradient with entropy, and the value head."""
    hidden_BTD = qwen3.hidden(params, CONFIG, tokens_BT, segment_ids_BT=segment_ids_BT)
    mask_BT = logprobs.predictable(segment_ids_BT)
    head = logprobs.Head(hidden_BTD, qwen3.unembedding(params, CONFIG), CONFIG.vocab_size)
    logprobs_BT, entropy_BT = logprobs.token_logprobs_and_entropy(
        head, tokens_BT, mask_BT, temperature=1.0, chunk=16
    )
    values_BT = qwen3.values(params, hidden_BTD)
    weights_BT = jnp.cos(tokens_BT)  # some per-token advantage
    terms_BT = -logprobs_BT * weights_BT + 0.1 * entropy_BT + 0.1 * jnp.square(values_BT - 1.0)
    return jnp.sum(jnp.where(mask_BT, terms_BT, 0.0)) / jnp.sum(mask_BT), logprobs_BT


def batch() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    tokens_BT = jnp.asarray(rng.integers(0, CONFIG.vocab_size, (8, 24)), jnp.int32)
    lengths = rng.integers(1, 24, (8, 1))
    segment_ids_BT = 1 + (np.arange(24) >= lengths).astype(np.int32)
    segment_ids_BT[:2, -5:] = 0
    return tokens_BT, jnp.asarray(segment_ids_BT)


def random_params() -> qwen3.Params:
    """Every parameter random, so that norms, biases and the value head matter too."""
    params = qwen3.init(CONFIG, jax.random.key(0), dtype=jnp.float32)
    return jax.tree.map(lambda x: x + 0.1 * jnp.sin(jnp.arange(x.size)).reshape(x.shape), params)


@pytest.fixture(scope="module")
def on_one_device():
    params = random_params()
    value_and_grad = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    return params, *value_and_grad(params, *batch())


@pytest.mark.parametrize("shape", MESHES)
def test_eight_devices_give_the_loss_and_gradients_of_one(shape, on_one_device):
    params, (want_loss, want_BT), want_gradient = on_one_device
    mesh = sharding.make_mesh(data=shape[0], fsdp=shape[1], tensor=shape[2])
    param_shardings = qwen3.param_shardings(CONFIG, mesh)
    tokens = NamedSharding(mesh, sharding.spec(("batch", "length")))
    scalar = NamedSharding(mesh, PartitionSpec())
    with jax.set_mesh(mesh):
        step = jax.jit(
            jax.value_and_grad(loss_fn, has_aux=True),
            in_shardings=(param_shardings, tokens, tokens),
            out_shardings=((scalar, tokens), param_shardings),
        )
        (loss, logprobs_BT), gradient = step(
            jax.device_put(params, param_shardings), *jax.device_put(batch(), tokens)
        )
    np.testing.assert_allclose(loss, want_loss, atol=1e-5)
    np.testing.assert_allclose(logprobs_BT, want_BT, atol=1e-5)
    for path, want in jax.tree_util.tree_leaves_with_path(want_gradient):
        got = gradient
        for key in path:
            got = got[key.key]
        np.testing.assert_allclose(got, want, atol=1e-5, err_msg=str(path))


@pytest.mark.parametrize("shape", [(1, 8, 1), (2, 1, 4)])
def test_sharded_init_equals_init_on_one_device(shape):
    mesh = sharding.make_mesh(data=shape[0], fsdp=shape[1], tensor=shape[2])
    shardings = qwen3.param_shardings(CONFIG, mesh)
    init = jax.jit(qwen3.init, static_argnums=0, static_argnames="dtype", out_shardings=shardings)
    got = init(CONFIG, jax.random.key(3), dtype=jnp.float32)
    want = qwen3.init(CONFIG, jax.random.key(3), dtype=jnp.float32)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)
    assert got["layers"]["wq"].sharding.is_equivalent_to(shardings["layers"]["wq"], 4)


def test_the_scoring_entry_point_equals_the_function_on_one_device(on_one_device):
    params, (_, want_BT), _ = on_one_device
    tokens_BT, segment_ids_BT = batch()
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    knobs = dict(temperature=1.0, chunk=16, dtype=jnp.float32, backend="auto")
    score = scoring.make_score(CONFIG, mesh, **knobs)
    assert scoring.make_score(CONFIG, mesh, **knobs) is score
    sharded = jax.device_put(params, qwen3.param_shardings(CONFIG, mesh))
    scores = score(sharded, tokens_BT, segment_ids_BT, jnp.ones(tokens_BT.shape, bool))
    np.testing.assert_allclose(scores.logprobs_BT, want_BT, atol=1e-5)
    rows = NamedSharding(mesh, sharding.spec(("batch", "length")))
    assert scores.entropy_BT.sharding.is_equivalent_to(rows, 2)


def test_weight_decay_reaches_matrices_only():
    params = qwen3.init(CONFIG, jax.random.key(0), dtype=jnp.float32)
    optimizer = optax.adamw(1.0, weight_decay=0.5, mask=qwen3.decay_mask(CONFIG))
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    np.testing.assert_allclose(updates["layers"]["wq"], -0.5 * params["layers"]["wq"], rtol=1e-6)
    assert not np.asarray(updates["layers"]["attn_norm"]).any()
    assert not np.asarray(updates["final_norm"]).any()


@dataclasses.dataclass(frozen=True)
class Chip:
    """A device with a place in a slice."""

    coords: tuple[int, ...]
    process_index: int


def chips_of(shape: tuple[int, ...], host: tuple[int, ...]) -> list[Chip]:
    """In jax's order, the first coordinate fastest; a host holds a block of chips."""
    hosts: dict[tuple[int, ...], int] = {}
    found = []
    for place in np.ndindex(*shape[::-1]):
        block = tuple(at // size for at, size in zip(place[::-1], host, strict=True))
        found.append(Chip(place[::-1], hosts.setdefault(block, len(hosts))))
    return found


@pytest.mark.parametrize(
    ("shape", "host"),
    [((2, 2, 2), (2, 2, 1)), ((4, 4), (2, 2)), ((8, 8), (2, 2)), ((4, 4, 4), (2, 2, 1))],
)
def test_a_ring_goes_from_neighbour_to_neighbour_and_host_to_host(shape, host):
    devices = chips_of(shape, host)
    found = sharding.ring(devices)
    assert sorted(found, key=devices.index) == devices
    for one, other in zip(found, found[1:] + found[:1], strict=True):
        assert sum(abs(a - b) for a, b in zip(one.coords, other.coords, strict=True)) == 1
    hosts = [one.process_index for one in found]
    changes = sum(a != b for a, b in itertools.pairwise(hosts))
    assert changes == len(set(hosts)) - 1  # none is left and entered again


def test_where_there_is_no_ring_there_is_none():
    assert sharding.ring(jax.devices()) is None
    assert sharding.ring(chips_of((3, 3), (3, 3))) is None  # an odd number of squares
