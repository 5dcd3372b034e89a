"""The gradient of attention over listed rows: one reverse pass in plain JAX, whatever computed the results.

With s = scale q.k of an entry, L the log of the sum of exp(s), Z that log with the sink's term, and w = exp(s - Z):

    ds = w (dout . v - dout . out) + dlse exp(s - L) + the same of the prefix's lse for its entries
    dq = scale sum ds k      dk += scale ds q      dv += w dout      dsink = -sum exp(sink - Z) (dout . out)

w comes from the lse that the forward pass returned. Probabilities are not rounded: rounding counts as the identity.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import blocks, dispatch, indexing
from pallas_kernels.sparse_attention import dense, online_softmax


class Options(NamedTuple):
    """What is static in a call: `implementation` is a name of `dispatch`, or "dense"."""

    package: str
    implementation: str | None
    scale: float
    v_width: int
    p_dtype: Any
    lse_prefix: int | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(options, q, kvs, lists, lengths, sink):
    """(out, lse) or (out, lse, lse of the prefix) by the implementation that `options` name."""
    arguments = dict(
        topk_length=lengths, sink=sink, scale=options.scale, v_width=options.v_width, p_dtype=options.p_dtype,
        lse_prefix=options.lse_prefix,
    )  # fmt: skip
    if options.implementation == "dense":
        return dense.sparse_attention(q, kvs, lists, **arguments)
    return dispatch.call(options.package, "sparse_attention", options.implementation, q, kvs, lists, **arguments)


def _forward(options, q, kvs, lists, lengths, sink):
    results = attend(options, q, kvs, lists, lengths, sink)
    return results, (q, kvs, lists, lengths, sink, results)


def _backward(options, residuals, cotangents):
    q, kvs, lists, lengths, sink, results = residuals
    dq, dkvs, dsink = gradient(
        q, kvs, lists, lengths, sink, results, cotangents, scale=options.scale, lse_prefix=options.lse_prefix
    )
    return dq, dkvs, (None,) * len(lists), None if lengths is None else (None,) * len(lengths), dsink


attend.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnames=("scale", "lse_prefix"))
def gradient(q, kvs, lists, lengths, sink, results, cotangents, *, scale, lse_prefix):
    """Cotangents of q, of every array of kvs (summed in float32), and of sink (None without one).

    Takes blocks of query rows and 64 indices of them at a time, so that no more than one block's gathered rows exist
    at once, besides float32 sums of the size of kvs. On a GPU those are sums of atomic additions: their order, and with
    it the last bits of dkv, may change from run to run.
    """
    results, cotangents = tuple(results), tuple(cotangents)
    sink32 = None if sink is None else sink.astype(jnp.float32)
    columns = [indices.shape[1] for indices in lists]
    starts = [sum(columns[:i]) for i in range(len(columns))]

    def rows(sums, arrays):
        q, lists, lengths, results, cotangents = arrays
        out, lse = results[0].astype(jnp.float32), results[1]
        dout, dlse = cotangents[0].astype(jnp.float32), cotangents[1]
        prefix = (results[2], cotangents[2]) if lse_prefix is not None else None
        total = lse if sink32 is None else jnp.logaddexp(lse, sink32)
        along = jnp.sum(jnp.where(jnp.isneginf(total)[..., None], 0, dout * out), axis=-1)
        dq = jnp.zeros(q.shape, jnp.float32)
        dkvs = []
        for kv, indices, length, dkv, start in zip(kvs, lists, lengths, sums, starts):
            valid = (indices >= 0) & (indices < kv.shape[0])
            if length is not None:
                valid &= jnp.arange(indices.shape[1]) < length[:, None]
            step = functools.partial(
                _step, q, kv, dout, along, lse, dlse, total, prefix, scale=scale, lse_prefix=lse_prefix
            )
            (dq, dkv), _ = lax.scan(step, (dq, dkv), _blocks(indices, valid, start))
            dkvs.append(dkv)
        dsink = None
        if sink32 is not None:
            # Nothing to attend: the output is 0 whatever the sink.
            share = jnp.where(jnp.isneginf(lse) | jnp.isposinf(sink32), 0, jnp.exp(sink32 - _finite(total)))
            dsink = -jnp.sum(share * along, axis=0)
        return tuple(dkvs), (dq.astype(q.dtype), dsink)

    lengths = (None,) * len(lists) if lengths is None else lengths
    arrays = (q, lists, lengths, results, cotangents)
    together = max(1, blocks.BUDGET // (4 * (3 * q.shape[1] * q.shape[2] + 64 * (2 * q.shape[2] + 4 * q.shape[1]))))
    sums = tuple(jnp.zeros(kv.shape, jnp.float32) for kv in kvs)
    sums, (dq, dsinks) = _fold_rows(rows, together, sums, arrays)
    dkvs = tuple(dkv.astype(kv.dtype) for kv, dkv in zip(kvs, sums))
    return dq, dkvs, None if sink is None else jnp.sum(dsinks, axis=0).astype(sink.dtype)


def _step(q, kv, dout, along, lse, dlse, total, prefix, carry, block, *, scale, lse_prefix):
    """Adds what 64 entries of every row give: carry (dq, dkv); block (indices, valid [R, 64], columns [64])."""
    dq, dkv = carry
    indices, valid, column = block
    einsum = functools.partial(jnp.einsum, precision=blocks.HIGHEST, preferred_element_type=jnp.float32)
    indices = jnp.where(valid, indices, -1)
    k = indexing.gather_rows(kv, indices)
    v_width = dout.shape[-1]
    mask = valid[:, None]
    s = jnp.where(mask, einsum("rhd,rkd->rhk", *online_softmax.operands(q, k)) * scale, -jnp.inf)
    k = k.astype(jnp.float32)

    def weight(log):  # exp(s - log), 0 where nothing is listed or the sink is +inf
        return jnp.where(mask & ~jnp.isposinf(log)[..., None], jnp.exp(s - _finite(log)[..., None]), 0)

    w = weight(total)
    ds = w * (einsum("rhv,rkv->rhk", dout, k[..., :v_width]) - along[..., None]) + weight(lse) * dlse[..., None]
    if prefix is not None:
        ds += jnp.where(column < lse_prefix, weight(prefix[0]) * prefix[1][..., None], 0)
    ds = jnp.where(mask, ds * scale, 0)
    dq += einsum("rhk,rkd->rhd", ds, k)
    dk = einsum("rhk,rhd->rkd", ds, q.astype(jnp.float32))
    dk = dk.at[..., :v_width].add(einsum("rhk,rhv->rkv", w, dout))
    dkv = indexing.add_rows(dkv, indices, dk)
    return (dq, dkv), None


def _finite(log):
    return jnp.where(jnp.isfinite(log), log, 0)


def _blocks(indices, valid, start):
    """[blocks, R, 64] of the list and of which entries count, and the columns [blocks, 64] among all lists."""
    block = online_softmax.BLOCK
    count = -(-indices.shape[1] // block)
    fill = ((0, 0), (0, count * block - indices.shape[1]))

    def cut(array):
        return jnp.moveaxis(jnp.pad(array, fill).reshape(len(array), count, block), 1, 0)

    return cut(indices), cut(valid), start + jnp.arange(count * block).reshape(count, block)


def _fold_rows(function, rows, carry, arrays):
    """`function(carry, block) -> carry, results` over blocks of `rows` along axis 0; the last block is filled up.

    Filled rows have empty lists. The first of the results is joined along axis 0; the second (or None) is stacked.
    """
    total = arrays[0].shape[0]
    count = max(1, -(-total // rows))
    rows = min(rows, total)
    fill = count * rows - total

    def split(array):
        constant = -1 if jnp.issubdtype(array.dtype, jnp.integer) else 0
        padding = [(0, fill)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, padding, constant_values=constant).reshape(count, rows, *array.shape[1:])

    carry, (joined, stacked) = lax.scan(function, carry, jax.tree.map(split, arrays))
    return carry, (joined.reshape(count * rows, *joined.shape[2:])[:total], stacked)
