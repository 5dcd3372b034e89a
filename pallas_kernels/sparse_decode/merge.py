"""Parts of rows combined into rows, in place, on Hopper and Blackwell: one warpgroup per head of a row."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.sparse_attention.online_softmax import START

_TOGETHER = 8  # parts that are read at once


@functools.partial(jax.jit, donate_argnums=(0, 1))
def combine(out, lse, outs, lses, sink, schedule):
    """`out` [T * H, V] and `lse` [T * H] with the rows in parts filled in from outs [P * H, V] and lses [P * H].

    outs are normalised, float32; lses natural logarithms, -inf for a part that had nothing. The sink [H] enters here.
    """
    heads, values = sink.shape[0], out.shape[1]
    layout = plgpu.Layout.WG_STRIDED((values,), vec_size=values // 128)
    threads = 1 if mosaic.is_interpreted() else 8 * mosaic.CORES

    def body(outs_ref, lses_ref, sink_ref, merged_ref, count_ref, out_ref, lse_ref):
        block = lax.axis_index("block")
        last = merged_ref.shape[0] * heads - 1

        def place(i):
            """Row, first part and number of parts of an item, which there may be none of."""
            entry = jnp.minimum(block + i * threads, last) // heads
            return tuple(merged_ref[entry, k] for k in range(3))

        def item(i, state):
            row, first, count = state
            head = lax.rem(block + i * threads, heads)
            sink = sink_ref[head]

            def add(turn, state):
                acc, total, before = state
                index = [turn * _TOGETHER + k for k in range(_TOGETHER)]
                at = [(first + jnp.minimum(k, count - 1)) * heads + head for k in index]
                found = [plgpu.load(outs_ref.at[k], layout=layout) for k in at]
                own = [lses_ref[k] for k in at]
                high = functools.reduce(jnp.maximum, own, before)
                weights = [jnp.where(k < count, jnp.exp(x - high), 0.0) for k, x in zip(index, own)]
                shrink = jnp.exp(before - high)
                acc, total = acc * shrink, total * shrink
                for value, weight in zip(found, weights):
                    acc, total = acc + value * weight, total + weight
                return acc, total, high

            zero = plgpu.layout_cast(jnp.zeros((values,), jnp.float32), layout)
            rounds = (count + _TOGETHER - 1) // _TOGETHER
            acc, total, high = lax.fori_loop(0, rounds, add, (zero, jnp.float32(0), jnp.float32(START)))
            nothing = total == 0
            factor = jnp.where(nothing, 0.0, 1 / (total + jnp.exp(sink - high)))
            out_ref[row * heads + head] = (acc * factor).astype(out_ref.dtype)
            lse_ref[row * heads + head] = jnp.where(nothing, -jnp.inf, high + jnp.log(jnp.where(nothing, 1.0, total)))
            return place(i + 1)

        first = place(0)  # while it is looked up how many there are
        items = count_ref[0] * heads
        lax.fori_loop(0, (items - block + threads - 1) // threads, item, first)

    out_box, lse_box = jax.new_ref(out), jax.new_ref(lse)
    plgpu.kernel(
        body,
        grid=(threads,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(outs, lses, sink, schedule.merged, schedule.merged_count[None], out_box, lse_box)
    return out_box[...], lse_box[...]
