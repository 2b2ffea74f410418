"""Causal attention inside segments, behind one function with explicit backends.

`reference` is the specification; the others compute the same numbers with one platform's kernel.
A kernel works on one device, so under a mesh each device runs it on its own rows and heads.

Dimensions: B rows, T query positions, S key positions (here as many as T), N query heads,
K key/value heads, J query heads per key/value head (N = K J), H head dim. Must not know: models,
parameters, the paged cache (`paged_attention.py`).
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention

from mas_jax.model import sharding
from mas_jax.model.blocked_attention import blocked_rows

Q_AXES = ("batch", "length", "heads", "head_dim")
KV_AXES = ("batch", "length", "kv_heads", "head_dim")
ROW_AXES = ("batch", "length")

SPLASH_LANES = 128  # the kernel's tiles are multiples of this many positions
SPLASH_BLOCK = 512  # positions a grid step: a tile of float32 scores is 1 MiB of VMEM
CUDNN_LENGTH_MULTIPLE = 2  # jax refuses the gradient for an odd number of positions
CUDNN_DTYPES = (jnp.bfloat16, jnp.float16)
CUDNN_MAX_HEAD_DIM = 256  # from Hopper on; jax itself refuses more than 128 on older GPUs


def reference(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segment_ids_BT: jax.Array
) -> jax.Array:
    """Softmax attention in plain jnp, float32 softmax: the specification of every other backend.

    Token t sees token s of its row if s <= t and both carry the same segment id. Returns [B,T,N,H].
    """
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q_BTKJH = q_BTNH.reshape(B, T, K, N // K, H)
    scores_BKJTS = jnp.einsum(
        "BTKJH,BSKH->BKJTS", q_BTKJH, k_BSKH, preferred_element_type=jnp.float32
    )
    same_BTS = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    visible_BTS = same_BTS & jnp.tril(jnp.ones((T, T), bool))
    scores_BKJTS = jnp.where(visible_BTS[:, None, None], scores_BKJTS * H**-0.5, -jnp.inf)
    weights_BKJTS = jax.nn.softmax(scores_BKJTS, axis=-1).astype(v_BSKH.dtype)
    return jnp.einsum("BKJTS,BSKH->BTKJH", weights_BKJTS, v_BSKH).reshape(B, T, N, H)


def on_mesh(
    kernel: Callable[..., jax.Array],
    args: Sequence[jax.Array],
    *,
    in_axes: Sequence[Sequence[str]],
    out_axes: Sequence[str],
) -> jax.Array:
    """`kernel(*args)`, on each device's own part of every argument where `jax.set_mesh` is active.

    XLA cannot split a kernel by itself. in_axes, out_axes: logical axis names, one a dimension of
    each array's shape.
    Raises: ValueError if a dimension of an argument is not divisible by its mesh axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return kernel(*args)
    for x, axes in zip(args, in_axes, strict=True):
        for size, axis in zip(x.shape, axes, strict=True):
            parts = math.prod(mesh.shape[name] for name in sharding.mesh_axes(axis))
            if size % parts:
                raise ValueError(
                    f"attention: {axis}={size} of an input {x.shape} is not divisible by {parts}, "
                    f"the size of mesh axes {sharding.mesh_axes(axis)}; change the mesh"
                )
    # kernels do not say over which mesh axes their outputs vary, so that check has to be off
    split = jax.shard_map(
        kernel,
        in_specs=tuple(sharding.spec(axes) for axes in in_axes),
        out_specs=sharding.spec(out_axes),
        check_vma=False,
    )
    return split(*args)


def _pad_length(x: jax.Array, multiple: int) -> jax.Array:
    """`x` [B, T, ...] with zeros after the last position, up to a multiple of `multiple`."""
    missing = -x.shape[1] % multiple
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))


def _splash_rows(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    interpret: bool,
) -> jax.Array:
    """Splash attention on one device; positions are padded at the end, where no token sees them."""
    T, N, H = q_BTNH.shape[1:]
    block = min(SPLASH_BLOCK, T + -T % SPLASH_LANES)
    sizes = splash_attention.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block,
        block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=block,
        block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip
    q_BTNH = (q_BTNH.astype(jnp.float32) * H**-0.5).astype(q_BTNH.dtype)
    q_BNTH, k_BKSH, v_BKSH = (
        _pad_length(x, block).swapaxes(1, 2) for x in (q_BTNH, k_BSKH, v_BSKH)
    )
    ids_BT = _pad_length(segment_ids_BT.astype(jnp.int32), block)
    causal = splash_attention.CausalMask((ids_BT.shape[1], ids_BT.shape[1]))
    # the block schedule takes numpy seconds on long rows; jax caches it by the value of the mask
    kernel = splash_attention.make_splash_mha(
        mask=splash_attention.MultiHeadMask([causal] * N),
        head_shards=1, q_seq_shards=1, block_sizes=sizes, interpret=interpret,
    )  # fmt: skip
    ids = splash_attention.SegmentIds(q=ids_BT, kv=ids_BT)
    out_BNTH = jax.vmap(kernel)(q_BNTH, k_BKSH, v_BKSH, ids)
    return out_BNTH.swapaxes(1, 2)[:, :T]


def _cudnn_lengths_rows(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    implementation: str,
) -> jax.Array:
    """`jax.nn.dot_product_attention` by row lengths, on one device; see `cudnn_lengths`."""
    T = q_BTNH.shape[1]
    q_BTNH, k_BSKH, v_BSKH, ids_BT = (
        _pad_length(x, CUDNN_LENGTH_MULTIPLE) for x in (q_BTNH, k_BSKH, v_BSKH, segment_ids_BT)
    )
    lengths_B = jnp.sum(ids_BT != 0, axis=1, dtype=jnp.int32)
    inside_BT = jnp.arange(ids_BT.shape[1]) < lengths_B[:, None]
    one_sequence_B = jnp.all(ids_BT == jnp.where(inside_BT, ids_BT[:, :1], 0), axis=1)
    inside_BT11 = inside_BT[:, :, None, None]
    # what the kernel leaves at padding is undefined, in the backward pass too: cut off both sides
    q_BTNH, k_BSKH, v_BSKH = (jnp.where(inside_BT11, x, 0) for x in (q_BTNH, k_BSKH, v_BSKH))
    seen_B = jnp.maximum(lengths_B, 1)  # a row of padding alone still needs one key
    out_BTNH = jax.nn.dot_product_attention(
        q_BTNH, k_BSKH, v_BSKH, is_causal=True,
        query_seq_lengths=seen_B, key_value_seq_lengths=seen_B, implementation=implementation,
    )  # fmt: skip
    out_BTNH = jnp.where(inside_BT11, out_BTNH, 0)
    return jnp.where(one_sequence_B[:, None, None, None], out_BTNH, jnp.nan)[:, :T]


def _cudnn_mask_rows(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    implementation: str,
) -> jax.Array:
    """`jax.nn.dot_product_attention` with a dense mask, on one device; see `cudnn_mask`."""
    T = q_BTNH.shape[1]
    q_BTNH, k_BSKH, v_BSKH, ids_BT = (
        _pad_length(x, CUDNN_LENGTH_MULTIPLE) for x in (q_BTNH, k_BSKH, v_BSKH, segment_ids_BT)
    )
    same_B1TS = ids_BT[:, None, :, None] == ids_BT[:, None, None, :]
    out_BTNH = jax.nn.dot_product_attention(
        q_BTNH, k_BSKH, v_BSKH, mask=same_B1TS, is_causal=True, implementation=implementation
    )
    return out_BTNH[:, :T]


SPLASH_ROWS = functools.partial(_splash_rows, interpret=False)
SPLASH_INTERPRET_ROWS = functools.partial(_splash_rows, interpret=True)
CUDNN_LENGTHS_ROWS = functools.partial(_cudnn_lengths_rows, implementation="cudnn")
CUDNN_MASK_ROWS = functools.partial(_cudnn_mask_rows, implementation="cudnn")


def _split_rows(kernel: Callable[..., jax.Array], args: Sequence[jax.Array]) -> jax.Array:
    """`kernel` on each device's rows and heads of q, k, v and segment ids, in `attend`'s shapes."""
    return on_mesh(kernel, args, in_axes=(Q_AXES, KV_AXES, KV_AXES, ROW_AXES), out_axes=Q_AXES)


def splash(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segment_ids_BT: jax.Array
) -> jax.Array:
    """Attention by the block-sparse TPU kernel, [B, T, N, H]; keys are read once per K, not per N.

    Best where T is a multiple of 512: then the kernel works in its widest blocks.
    """
    return _split_rows(SPLASH_ROWS, (q_BTNH, k_BSKH, v_BSKH, segment_ids_BT))


def splash_interpret(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segment_ids_BT: jax.Array
) -> jax.Array:
    """`splash` with its kernel interpreted on any platform, [B, T, N, H]: slow, for tests."""
    return _split_rows(SPLASH_INTERPRET_ROWS, (q_BTNH, k_BSKH, v_BSKH, segment_ids_BT))


def cudnn_lengths(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segment_ids_BT: jax.Array
) -> jax.Array:
    """Attention by cuDNN on rows of one right-padded sequence each, [B, T, N, H], 0 at padding.

    The kernel knows row lengths, no segments. A row that holds anything else (two segments, padding
    before the end) comes back as NaN: ids are traced, so this cannot be an error.
    """
    return _split_rows(CUDNN_LENGTHS_ROWS, (q_BTNH, k_BSKH, v_BSKH, segment_ids_BT))


def cudnn_mask(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segment_ids_BT: jax.Array
) -> jax.Array:
    """Attention by cuDNN on packed rows, [B, T, N, H]; a mask [T, T] and its gradient a row."""
    return _split_rows(CUDNN_MASK_ROWS, (q_BTNH, k_BSKH, v_BSKH, segment_ids_BT))


def blocked(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segment_ids_BT: jax.Array
) -> jax.Array:
    """Attention row by row in blocks that fit a processor's cache, [B, T, N, H]; runs anywhere."""
    return _split_rows(blocked_rows, (q_BTNH, k_BSKH, v_BSKH, segment_ids_BT))


BACKENDS: dict[str, Callable[..., jax.Array]] = {
    "reference": reference,
    "blocked": blocked,
    "splash": splash,
    "splash_interpret": splash_interpret,
    "cudnn_lengths": cudnn_lengths,
    "cudnn_mask": cudnn_mask,
}
PLATFORMS = {"splash": "tpu", "cudnn_lengths": "gpu", "cudnn_mask": "gpu"}  # others run anywhere
AUTO = {"tpu": "splash", "gpu": "cudnn_mask"}  # elsewhere blocked


def platform() -> str:
    """Platform the program is traced for: that of the mesh set by `jax.set_mesh`, else the default.

    The mesh comes first because a program can be compiled for chips that this machine has not got.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.abstract_device is None:
        return jax.default_backend()
    return mesh.abstract_device.platform


def choose(backend: str, q_BTNH: jax.Array) -> str:
    """Name of the backend that runs: `backend` itself, or for "auto" the one of the platform.

    "auto" is splash on TPU, cudnn_mask on GPU and blocked elsewhere, also for float32 on GPU, for
    which cuDNN has no kernel.
    Raises: ValueError if the backend is unknown, is another platform's, or lacks the dtype or head
    dim.
    """
    here, dtype, head_dim = platform(), q_BTNH.dtype, q_BTNH.shape[-1]
    if backend == "auto":
        has_kernel = here in AUTO and not (here == "gpu" and dtype == jnp.float32)
        backend = AUTO[here] if has_kernel else "blocked"
    if backend not in BACKENDS:
        raise ValueError(
            f"attention backend {backend!r} is unknown; choose 'auto' or one of {sorted(BACKENDS)}"
        )
    if backend in PLATFORMS and PLATFORMS[backend] != here:
        raise ValueError(
            f"attention backend {backend!r} runs on {PLATFORMS[backend]}, but this program is for "
            f"{here}; choose 'auto' or 'reference'"
        )
    if backend.startswith("cudnn") and dtype not in CUDNN_DTYPES:
        raise ValueError(
            f"attention backend {backend!r} takes bfloat16 or float16, got q of {dtype}; "
            "compute in bfloat16 or choose 'reference'"
        )
    if backend.startswith("cudnn") and (head_dim % 8 or head_dim > CUDNN_MAX_HEAD_DIM):
        raise ValueError(
            f"attention backend {backend!r} takes a head dim that is a multiple of 8 and at most "
            f"{CUDNN_MAX_HEAD_DIM}, got {head_dim}; choose 'reference'"
        )
    return backend


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    backend: str,
) -> jax.Array:
    """Causal attention that never crosses a segment, [B, T, N, H] in q's dtype.

    Shapes: q [B, T, N, H]; k, v [B, T, K, H]; segment_ids [B, T] int, 0 at padding, where the
    result is finite and otherwise up to the backend. backend: a key of `BACKENDS`, or "auto".
    Raises: ValueError at trace time for shapes that do not fit together, and for the cases of
    `choose` and `on_mesh`.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    if k_BSKH.shape != (B, T, K, H) or v_BSKH.shape != k_BSKH.shape or N % K:
        raise ValueError(
            f"attend: q {q_BTNH.shape}, k {k_BSKH.shape}, v {v_BSKH.shape}; wanted q [B, T, N, H], "
            "k and v [B, T, K, H] with N a multiple of K"
        )
    if segment_ids_BT.shape != (B, T):
        raise ValueError(f"attend: segment_ids {segment_ids_BT.shape}, wanted [B, T] = {(B, T)}")
    return BACKENDS[choose(backend, q_BTNH)](q_BTNH, k_BSKH, v_BSKH, segment_ids_BT)
