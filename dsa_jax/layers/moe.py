"""Mixture of experts: routing by sqrt-softplus scores with a selection bias, FP4 routed experts, one shared expert."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from dsa_jax import ops, ranks
from dsa_jax.config import V41Config
from dsa_jax.layers.linear import ExpertLinears, QuantizedLinear, tile_rows
from dsa_jax.numerics import Numerics, f32, matmul_f32
from dsa_jax.tap import Tap

ROWS_OF_DEQUANTIZING = 250
"""To dequantise an expert takes about as long as its products with so many rows: at V4.1's widths an H200 took 25 us for the
three weights, and 27 us for the products with 256 rows."""

ROWS_OF_READING = 128
"""Products with fewer rows take no less time: reading the dequantised weights bounds them (21 us with 32 rows)."""

SINGLE_ROWS = 2
"""So many pairs of an expert are multiplied row by row in the time that its weights are dequantised and multiplied in: an H200
took 30 us for a row, and 57 us for an expert's tile."""

SPREAD = 1.5
"""Where weights are multiplied as they are stored, a tile has room for the pairs of an average expert and so many of their
standard deviations: of experts chosen at random, nine in ten and more need one tile, and their weights are read once."""

EXCHANGED_BYTES = 256 << 20
"""Most bytes of rows that a device sends at one time to the devices of other requests. A decode step sends far fewer."""


class Gate(nnx.Module):
    """Router weights: weight bf16 [E, D]; bias and bias_vl (for image positions) float32 [E]."""

    def __init__(self, experts: int, width: int):
        self.weight = nnx.Param(jnp.zeros((experts, width), jnp.bfloat16))
        self.bias = nnx.Param(jnp.zeros((experts,), jnp.float32))
        self.bias_vl = nnx.Param(jnp.zeros((experts,), jnp.float32))


def expert_scores(x: Float[Array, "T d"], weight: Float[Array, "E d"], scoring_func: str) -> Float[Array, "T E"]:
    """Every expert's score in float32: "sqrtsoftplus", "softmax" or "sigmoid" of float32 products."""
    logits = matmul_f32(x, weight)
    if scoring_func == "sqrtsoftplus":
        # The reference's softplus is linear above 20.
        return jnp.sqrt(jnp.where(logits > 20, logits, jnp.log1p(jnp.exp(jnp.minimum(logits, 20)))))
    return jax.nn.softmax(logits, axis=-1) if scoring_func == "softmax" else jax.nn.sigmoid(logits)


def route(
    x: Float[Array, "T d"],
    weight: Float[Array, "E d"],
    bias: Float[Array, "#T E"] | None,
    k: int,
    *,
    scoring_func: str,
    routed_scaling_factor: float,
) -> tuple[Int32[Array, "T k"], Float[Array, "T k"]]:
    """Expert ids in descending biased score (ties: lower id) and their weights from the unbiased scores, float32.

    With more than one expert per token the weights are normalised to sum to the scaling factor.
    """
    scores = expert_scores(x, weight, scoring_func)
    _, chosen = lax.top_k(scores if bias is None else scores + bias, k)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if k > 1:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return chosen.astype(jnp.int32), weights * routed_scaling_factor


def swiglu(
    gate: Float[Array, "*rows f"], up: Float[Array, "*rows f"], limit: float, weight: Float[Array, "*rows 1"] | None
) -> Float[Array, "*rows f"]:
    """silu(min(gate, limit)) · clip(up, ±limit) · weight, in float32: the clamps come before the product.

    A limit of 0 means no clamp.
    """
    gate, up = f32(gate), f32(up)
    if limit:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    a = jax.nn.silu(gate) * up
    return a if weight is None else a * weight


class SharedExpert(nnx.Module):
    """The expert that every token passes through: FP8 linears w1 (gate), w3 (up), w2 (down)."""

    def __init__(self, width: int, inner: int, block: tuple[int, int], limit: float):
        self.limit = limit
        self.w1 = QuantizedLinear(inner, width, block)
        self.w2 = QuantizedLinear(width, inner, block)
        self.w3 = QuantizedLinear(inner, width, block)

    def __call__(self, x: Float[Array, "T d"], numerics: Numerics) -> Float[Array, "T d"]:
        a = swiglu(*self.w1.both(self.w3, x, numerics), self.limit, None)
        return self.w2(numerics.round(a), numerics)


def tiling(tokens: int, pairs: int, experts: int) -> tuple[int, int]:
    """(rows of a tile, the most tiles that a routing needs) where the weight of every tile is dequantised.

    The rows are a power of two: where experts + pairs / tile tiles of ROWS_OF_DEQUANTIZING + tile rows cost least. With no
    more than SINGLE_ROWS pairs an expert these are single rows, whose products need no dequantised weight in memory.
    """
    if pairs <= SINGLE_ROWS * experts:
        return 1, pairs
    next_to_root = 1 << ((ROWS_OF_DEQUANTIZING * pairs // experts).bit_length() // 2)
    tile = min(max(next_to_root, ROWS_OF_READING), 1 << (tokens - 1).bit_length())
    return tile, most_tiles(tokens, pairs, experts, tile)


def stored_tiling(tokens: int, pairs: int, experts: int, ways: int = 1) -> tuple[int, int]:
    """`tiling` where weights are multiplied as they are stored: tiles cost next to nothing, and an expert's weights are read
    once for each of its tiles. ways: in how many equal parts experts are divided, of which one has `experts`."""
    average = pairs / (experts * ways)
    tile = tile_rows(min(tokens, math.ceil(average + SPREAD * average**0.5)))
    return tile, most_tiles(tokens, pairs, experts, tile)


def most_tiles(tokens: int, pairs: int, experts: int, tile: int) -> int:
    """The most tiles of one expert each that a routing needs. A token's experts differ."""
    return min(pairs, experts if tile >= tokens else experts + pairs // tile)


def tiles_of_pairs(
    by_expert: Int32[Array, " P"], experts: int, tile: int, tiles: int
) -> tuple[Int32[Array, " tiles"], Int32[Array, "tiles tile"]]:
    """Pairs in ascending order of their experts, `experts` for none, cut into tiles: the expert of each tile and the places
    of its pairs in that order, -1 for none."""
    number = jnp.arange(tiles, dtype=jnp.int32)
    if tile == 1:
        is_held = by_expert[:tiles] < experts
        return jnp.where(is_held, by_expert[:tiles], -1), jnp.where(is_held, number, -1)[:, None]
    ids = jnp.arange(experts, dtype=jnp.int32)
    starts, ends = (jnp.searchsorted(by_expert, ids, side=side, method="compare_all") for side in ("left", "right"))
    tiles_of = -((starts - ends) // tile)
    last_tile = jnp.cumsum(tiles_of)
    expert = jnp.searchsorted(last_tile, number, side="right", method="compare_all").astype(jnp.int32)
    own = jnp.minimum(expert, experts - 1)
    first = starts[own] + (number - (last_tile - tiles_of)[own]) * tile
    place = first[:, None] + jnp.arange(tile, dtype=jnp.int32)
    is_used = number < last_tile[-1]
    return jnp.where(is_used, expert, -1), jnp.where(is_used[:, None] & (place < ends[own][:, None]), place, -1)


Tiles = tuple[Int32[Array, " tiles"], Int32[Array, "tiles tile"], Int32[Array, " P"]]
"""The expert of each tile, its pairs, and the row of each pair among those of all tiles; -1 for none."""


def sorted_tiles(expert: Int32[Array, " P"], experts: int, tile: int, tiles: int) -> Tiles:
    """Tiles of pairs that have these experts, `experts` for none."""
    by_expert, order = lax.sort((expert, jnp.arange(len(expert), dtype=jnp.int32)), num_keys=1)
    expert, place = tiles_of_pairs(by_expert, experts, tile, tiles)
    pair = jnp.where(place < 0, -1, ops.gather_rows(order, place))
    row = jnp.arange(tiles * tile, dtype=jnp.int32)
    return expert, pair, ops.scatter_rows(jnp.full(by_expert.shape, -1, jnp.int32), pair.reshape(-1), row)


def tiles_of_one_token(expert: Int32[Array, " k"], experts: int, tile: int) -> Tiles:
    """`sorted_tiles` of one token, whose experts differ: each has a tile, and nothing needs to be sorted."""
    is_held, number = expert < experts, jnp.arange(len(expert), dtype=jnp.int32)
    pair = jnp.where(is_held, number, -1)
    others = jnp.full((len(expert), tile - 1), -1, jnp.int32)
    row = jnp.where(is_held, number * tile, -1)
    return jnp.where(is_held, expert, -1), jnp.concatenate([pair[:, None], others], axis=1), row


class Experts(nnx.Module):
    """The routed experts, stacked: FP4 linears w1 (gate), w3 (up), w2 (down); inputs in FP8 groups of `group`."""

    def __init__(self, experts: int, width: int, inner: int, limit: float, group: int = 32):
        self.limit = limit
        self.w1 = ExpertLinears(experts, inner, width, group)
        self.w2 = ExpertLinears(experts, width, inner, group)
        self.w3 = ExpertLinears(experts, inner, width, group)

    def __call__(
        self,
        x: Float[Array, "T d"],
        chosen: Int32[Array, "T k"],
        weights: Float[Array, "T k"],
        valid: Bool[Array, " T"],
        numerics: Numerics,
    ) -> Float[Array, "T d"]:
        """Σ over the chosen experts of expert(x)·weight: float32 sum in ascending expert id, not rounded.

        Rows that are not valid are left out and give 0. On several devices each computes the experts that it holds: rows
        of other requests (dp) come to it and go back, and the sums of devices with the same requests are added.
        """
        (T, d), k = x.shape, chosen.shape[1]
        expert = jnp.where(valid[:, None], chosen, -1)
        if ranks.parts("requests") > 1:
            out = self.of_pairs_elsewhere(x, expert, weights, numerics)
        else:
            own = ranks.own(chosen, "experts", len(self.w1.weight[...]))
            out = self.of_pairs(x, jnp.where(expert < 0, -1, own), weights, numerics)
        out = jnp.take_along_axis(out.reshape(T, k, d), jnp.argsort(chosen, axis=-1)[..., None], axis=1)
        y = jnp.zeros((T, d), jnp.float32)
        for i in range(k):
            y = y + f32(out[:, i])
        return ranks.total(y, "experts")

    def of_pairs(
        self, x: Float[Array, "T d"], expert: Int32[Array, "T k"], weights: Float[Array, "T k"], numerics: Numerics
    ) -> Float[Array, "Tk d"]:
        """expert(x)·weight of every pair of a token and an expert, counted from the first that this device holds; 0 for
        others.

        Pairs are cut into tiles that belong to one expert each. There are always as many tiles as the worst routing needs,
        some of no expert: a count that depended on the routing would be read back to the host.
        """
        (T, d), k, E = x.shape, expert.shape[1], len(self.w1.weight[...])
        pairs = T * k
        tile, tiles = self.cut(T, pairs, numerics)
        expert_of = jnp.where((expert >= 0) & (expert < E), expert, E).reshape(-1)
        expert, pair, row_of = tiles_of_one_token(expert_of, E, tile) if T == 1 else sorted_tiles(expert_of, E, tile, tiles)
        x = self.w1.quantized(x, numerics)  # once for all experts of a token, and for w3, whose inputs are the same
        rows = ops.gather_rows(x, jnp.where(pair < 0, -1, pair // k))
        weight = ops.gather_rows(weights.reshape(-1), pair)[..., None]
        out = self.weighted(rows, expert, weight, numerics)
        return ops.gather_rows(out.reshape(-1, d), row_of)

    def cut(self, tokens: int, pairs: int, numerics: Numerics) -> tuple[int, int]:
        """(rows of a tile, tiles) for pairs of so many tokens."""
        experts = len(self.w1.weight[...])
        tile, tiles = stored_tiling(tokens, pairs, experts, ranks.parts("experts"))
        return (tile, tiles) if self.multiplies_stored(tiles, tile, numerics) else tiling(tokens, pairs, experts)

    def multiplies_stored(self, tiles: int, rows: int, numerics: Numerics) -> bool:
        """Whether so many tiles of rows are multiplied without dequantised weights in memory."""
        return all(linear.multiplies_stored(tiles, rows, numerics) for linear in (self.w1, self.w2, self.w3))

    def of_pairs_elsewhere(
        self, x: Float[Array, "T d"], expert: Int32[Array, "T k"], weights: Float[Array, "T k"], numerics: Numerics
    ) -> Float[Array, "Tk d"]:
        """`of_pairs` for experts of all devices, -1 for none, where devices that have other requests hold some: pairs go
        to the device that holds their expert, and what it makes of them comes back. 0 for pairs that one of the devices
        with the same requests sends.

        Every device sends equally large buckets, one to each. Where one holds all pairs of the device no routing needs a
        second; else there are as many rounds as the fullest bucket of any device needs.
        """
        (T, d), k, E = x.shape, expert.shape[1], len(self.w1.weight[...])
        ways = ranks.parts("requests")
        alike = ranks.parts("experts") // ways  # devices that have these requests, and of which one sends a pair
        part = expert // E
        sent = (expert >= 0) & (part % alike == ranks.place("experts") % alike)
        holder = jnp.where(sent, part // alike, ways).reshape(-1)
        order = jnp.argsort(holder, stable=True).astype(jnp.int32)
        sizes = jnp.bincount(holder, length=ways).astype(jnp.int32)
        first = jnp.cumsum(sizes) - sizes
        bucket = min(T * k, max(1, EXCHANGED_BYTES // (ways * d * x.dtype.itemsize)))

        def one_round(i, out):
            place = i * bucket + jnp.arange(bucket, dtype=jnp.int32)
            pair = jnp.where(place < sizes[:, None], ops.gather_rows(order, first[:, None] + place), -1)
            rows = ops.gather_rows(x, jnp.where(pair < 0, -1, pair // k))
            weight = ops.gather_rows(weights.reshape(-1), pair)
            own = jnp.where(pair < 0, -1, ops.gather_rows(expert.reshape(-1), pair) % E)
            rows, own, weight = (
                ranks.swapped(each, "requests").reshape(ways * bucket, -1) for each in (rows, own, weight)
            )
            made = self.of_pairs(rows, own, weight, numerics).reshape(ways, bucket, d)
            back = ranks.swapped(made, "requests").reshape(-1, d)
            return ops.scatter_rows(out, pair.reshape(-1), back)

        out = jnp.zeros((T * k, d), self.weighted_dtype(numerics))
        if bucket == T * k:
            return one_round(0, out)
        rounds = ranks.largest(jnp.max(-(-sizes // bucket)), "experts")
        return lax.fori_loop(0, rounds, one_round, out)

    def weighted(
        self,
        rows: Float[Array, "tiles R d"],
        expert: Int32[Array, " tiles"],
        weight: Float[Array, "tiles R 1"],
        numerics: Numerics,
    ) -> Float[Array, "tiles R d"]:
        """expert(rows)·weight, of rows that are quantised for w1: the weight enters before w2."""
        gate, up = self.w1.both(self.w3, rows, expert, numerics)
        a = numerics.round(swiglu(gate, up, self.limit, weight))
        return self.w2(self.w2.quantized(a, numerics), expert, numerics)

    def weighted_dtype(self, numerics: Numerics) -> Any:
        """The dtype that `weighted` returns."""
        return numerics.dtype


class MoE(nnx.Module):
    """Gate, routed experts and shared expert of one layer."""

    def __init__(self, config: V41Config, experts: int, k: int):
        self.k = k
        self.scoring_func = config.scoring_func
        self.routed_scaling_factor = config.routed_scaling_factor
        width, inner, limit = config.hidden_size, config.moe_intermediate_size, config.swiglu_limit
        self.gate = Gate(experts, width)
        self.experts = Experts(experts, width, inner, limit)
        self.shared_experts = SharedExpert(
            width, inner * config.n_shared_experts, config.weight_block_size, limit
        )

    def __call__(
        self,
        x: Float[Array, "*rows d"],
        valid: Bool[Array, "*rows"],
        is_image: Bool[Array, "*rows"] | None,
        numerics: Numerics,
        tap: Tap | None = None,
    ) -> Float[Array, "*rows d"]:
        """Routed sum plus shared expert, float32, rounded once. Image positions are routed with bias_vl."""
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        bias = self.gate.bias[...][None]
        if is_image is not None:
            bias = jnp.where(is_image.reshape(-1, 1), self.gate.bias_vl[...], bias)
        chosen, weights = route(
            x, self.gate.weight[...], bias, self.k,
            scoring_func=self.scoring_func, routed_scaling_factor=self.routed_scaling_factor,
        )  # fmt: skip
        if tap is not None:
            tap("gate_indices", chosen.reshape(*shape[:-1], self.k))
            tap("gate_weights", weights.reshape(*shape[:-1], self.k))
        routed = self.experts(x, chosen, weights, valid.reshape(-1), numerics)
        return numerics.round(routed + f32(self.shared_experts(x, numerics))).reshape(shape)
