"""Sparse attention on Hopper: which kernel takes a call, and what none of them takes."""

import jax.numpy as jnp

from pallas_kernels.sparse_attention import few, wide

WIDTHS = (512, 576)
VALUES = 512
HEADS = (8, 128)  # fewest and most


def sparse_attention(
    q, kvs, lists, *, topk_length=None, sink=None, scale, v_width, p_dtype=jnp.bfloat16, lse_prefix=None
):
    """See `pallas_kernels.sparse_attention.sparse_attention`. bf16, values of 512, float32 sums; scale > 0."""
    tokens, heads, width = q.shape
    _require(q, kvs, lists, scale, v_width, p_dtype)
    lengths = (None,) * len(lists) if topk_length is None else topk_length
    lengths = tuple(
        jnp.full(tokens, each.shape[1], jnp.int32) if length is None else length.astype(jnp.int32)
        for each, length in zip(lists, lengths)
    )
    lists = tuple(each.astype(jnp.int32) for each in lists)
    leading, left = [], lse_prefix or 0
    for each, length in zip(lists, lengths):
        leading.append(jnp.clip(length, 0, left))
        left = max(left - each.shape[1], 0)
    full = [i for i, (kv, each) in enumerate(zip(kvs, lists)) if kv.shape[0] and each.shape[1]]
    if 0 in (tokens, len(full)):
        nothing = jnp.full((tokens, heads), -jnp.inf, jnp.float32)
        return (jnp.zeros((tokens, heads, VALUES), q.dtype), nothing) + (lse_prefix is not None) * (nothing,)
    kvs, lists, lengths, leading = (tuple(each[i] for i in full) for each in (kvs, lists, lengths, leading))
    sink = jnp.full(heads, -jnp.inf, jnp.float32) if sink is None else sink.astype(jnp.float32)
    results = _attend(q, kvs, lists, lengths, sink, float(scale))
    if lse_prefix is None:
        return results
    # A pass of its own over the leading entries: only training asks for it.
    return *results, _attend(q, kvs, lists, leading, sink, float(scale))[1]


def _attend(q, kvs, lists, lengths, sink, scale):
    heads = q.shape[1]
    if heads > wide.HEADS and heads % wide.HEADS:
        parts = [slice(0, wide.HEADS), slice(wide.HEADS, heads)]
        results = [_attend(q[:, part], kvs, lists, lengths, sink[part], scale) for part in parts]
        return tuple(jnp.concatenate(each, axis=1) for each in zip(*results))
    attend = few.attend if heads in few.HEADS else wide.attend
    return attend(q, kvs, lists, lengths, sink, scale=scale)


def _require(q, kvs, lists, scale, v_width, p_dtype):
    """Raises NotImplementedError unless the kernels carry the call."""
    tokens, heads, width = q.shape
    for name, array in (("q", q), *((f"kv[{i}]", kv) for i, kv in enumerate(kvs)), ("probabilities", None)):
        dtype = p_dtype if array is None else array.dtype
        if dtype != jnp.bfloat16:
            raise NotImplementedError(f"the sm90 kernel takes bfloat16, and {name} have {jnp.dtype(dtype)}.")
    if width not in WIDTHS or v_width != VALUES:
        raise NotImplementedError(
            f"the sm90 kernel takes keys of 512 or 576 values with {VALUES} of them, not {width} with {v_width}."
        )
    if heads % 8 or not HEADS[0] <= heads <= HEADS[1]:
        raise NotImplementedError(f"the sm90 kernel takes multiples of 8 heads from 8 to 128, not {heads}.")
    if len(lists) > 2:
        raise NotImplementedError(f"the sm90 kernel takes one or two lists, not {len(lists)}.")
    if not scale > 0:
        raise NotImplementedError(f"the sm90 kernel takes a scale above 0, not {scale}.")
    if any(each.size >= 2**31 for each in lists) or tokens * heads >= 2**31:
        raise NotImplementedError("the sm90 kernel counts list entries and query rows of a call in 31 bits.")
