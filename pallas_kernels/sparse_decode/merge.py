"""Parts of rows combined into rows, in place, on Hopper and Blackwell: one warpgroup for some heads of a row."""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.sparse_attention.online_softmax import START

_TOGETHER = 16  # parts that are read at once, at most


@functools.partial(jax.jit, donate_argnums=(0, 1))
def combine(out, lse, outs, lses, sink, schedule):
    """`out` [T * H, V] and `lse` [T * H] with the rows in parts filled in from outs [P * H, V] and lses [P * H].

    outs are normalised, float32; lses natural logarithms, -inf for a part that had nothing. The sink [H] enters here;
    None for none.
    """
    rows, values = schedule.merged.shape[0], out.shape[1]
    heads = out.shape[0] // rows
    layout = plgpu.Layout.WG_STRIDED((values,), vec_size=values // 128)
    # Few trips to memory one after the other, so a thread block has one row; and no more of them than run at once.
    wave = 8 if mosaic.is_interpreted() else 8 * mosaic.CORES
    blocks = next(n for n in range(heads, 0, -1) if heads % n == 0 and (rows * n <= wave or n == 1))
    own = heads // blocks
    together = min(_TOGETHER, schedule.most)
    even = schedule.even
    at_once = 2 if own % 2 == 0 and together <= 4 else 1  # heads

    def body(outs_ref, lses_ref, *refs):
        *given, out_ref, lse_ref = refs
        row, block = lax.axis_index("row"), lax.axis_index("block")
        if even:
            first, count, sink_refs = row * even.parts, even.parts, given
        else:
            merged_ref, *sink_refs = given
            first, count = merged_ref[row, 0], merged_ref[row, 1]

        def combined(head):
            sinks = [ref[head] for ref in sink_refs]

            def add(turn, state):
                acc, total, before = state
                index = [turn * together + k for k in range(together)]
                at = [(first + jnp.minimum(k, count - 1)) * heads + head for k in index]
                found = [plgpu.load(outs_ref.at[k], layout=layout) for k in at]
                parts = [lses_ref[k] for k in at]
                high = functools.reduce(jnp.maximum, parts, before)
                weights = [jnp.where(k < count, jnp.exp(x - high), 0.0) for k, x in zip(index, parts)]
                shrink = jnp.exp(before - high)
                acc, total = acc * shrink, total * shrink
                for value, weight in zip(found, weights):
                    acc, total = acc + value * weight, total + weight
                return acc, total, high

            zero = plgpu.layout_cast(jnp.zeros((values,), jnp.float32), layout)
            state = zero, jnp.float32(0), jnp.float32(START)
            if schedule.most <= together:
                acc, total, high = add(0, state)
            else:
                acc, total, high = lax.fori_loop(0, (count + together - 1) // together, add, state)
            nothing = total == 0
            weight = total + sum(jnp.exp(x - high) for x in sinks)
            factor = jnp.where(nothing, 0.0, 1 / weight)
            lse = jnp.where(nothing, -jnp.inf, high + jnp.log(jnp.where(nothing, 1.0, total)))
            return (acc * factor).astype(out_ref.dtype), lse

        def combine_some(i, _):
            some = [block * own + at_once * i + k for k in range(at_once)]
            for head, (out, lse) in zip(some, [combined(head) for head in some]):  # all are read before one is stored
                out_ref[row * heads + head] = out
                lse_ref[row * heads + head] = lse

        @pl.when(count > 1)
        def _():
            lax.fori_loop(0, own // at_once, combine_some, None)

    given = ([] if even else [schedule.merged]) + ([] if sink is None else [sink])
    out_box, lse_box = jax.new_ref(out), jax.new_ref(lse)
    plgpu.kernel(
        body,
        grid=(rows, blocks),
        grid_names=("row", "block"),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(outs, lses, *given, out_box, lse_box)
    return out_box[...], lse_box[...]
