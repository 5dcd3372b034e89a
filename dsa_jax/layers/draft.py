"""DSpark: draft stages that propose a block of tokens at once (spec deepseek-v41 section 11).

Context enters through the backbone's taps: every processed token leaves one window row in each stage. A draft then runs
the last token and noise tokens through the stages, all of which see each other, and a small Markov head makes every
token depend on the one before it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from dsa_jax import ops, ranks
from dsa_jax.config import SharedKVConfig, V41Config
from dsa_jax.layer_plan import LayerRole
from dsa_jax.layers.decoder import Block
from dsa_jax.layers.hyper_connections import collapse, start_stream
from dsa_jax.layers.linear import Linear, QuantizedLinear, VocabularyLinear
from dsa_jax.layers.norm import RMSNorm
from dsa_jax.numerics import Numerics, f32, matmul
from dsa_jax.pytree import Leaf
from dsa_jax.step import Step

Attend = Callable[[Float[Array, "B S d"]], tuple[Float[Array, "B S d"], Any]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Draft:
    """ids: the last token, then the greedy drafts, int32 [B, n+1]. logits: float32 [B, n, V].

    confidence: float32 [B, n], or None where the head gives none.
    """

    ids: Leaf
    logits: Leaf
    confidence: Leaf


class Embedding(nnx.Module):
    """A bf16 table [V, d]."""

    def __init__(self, rows: int, width: int):
        self.weight = nnx.Param(jnp.zeros((rows, width), jnp.bfloat16))

    def __call__(self, ids: Int32[Array, "*rows"], numerics: Numerics) -> Float[Array, "*rows d"]:
        return numerics.round(ranks.lookup(self.weight[...], ids, "vocabulary"))


class MarkovHead(nnx.Module):
    """Logits that a draft token gets from the token before it: embed bf16 [V, rank], head bf16 [V, rank]."""

    def __init__(self, vocab: int, rank: int):
        self.embed = Embedding(vocab, rank)
        self.head = VocabularyLinear(vocab, rank)

    def row(self, ids: Int32[Array, "*rows"], numerics: Numerics) -> Float[Array, "*rows r"]:
        """What is known of the token before."""
        return self.embed(ids, numerics)

    def logits(self, row: Float[Array, "*rows r"]) -> Float[Array, "*rows V"]:
        """Float32 logits of a row."""
        return self.head.in_float32(row)


class ConfidenceHead(nnx.Module):
    """How likely a draft token is to be accepted: proj bf16 [1, D + rank]."""

    def __init__(self, width: int):
        self.proj = Linear(1, width)


class DraftHeads(nnx.Module):
    """A draft stage without its block: the first stage projects the taps, the last one holds the draft's own heads.

    The block's class gives `attn`, and:
    run(stream, mix, attend, step, numerics): the stream after the block whose attention is `attend`, and the next mix.
    read(stream, mix, numerics): the stream collapsed for the heads.
    """

    def __init__(self, config: SharedKVConfig, taps: int, markov_head: nnx.Module, rank: int, *, first: bool, last: bool):
        width, eps = config.hidden_size, config.rms_norm_eps
        if first:
            self.main_proj = QuantizedLinear(width, taps * width, config.weight_block_size)
            self.main_norm = RMSNorm(width, eps)
        if last:
            self.norm = RMSNorm(width, eps)
            self.markov_head = markov_head
            self.confidence_head = ConfidenceHead(width + rank)


class DraftStage(Block, DraftHeads):
    """A stage whose block delays its mixes."""

    def __init__(self, config: V41Config, role: LayerRole, *, first: bool, last: bool):
        Block.__init__(self, config, role, config.dspark_n_routed_experts, config.dspark_num_experts_per_tok)
        rank = config.dspark_markov_rank
        DraftHeads.__init__(
            self, config, len(config.dspark_target_layer_ids), MarkovHead(config.vocab_size, rank), rank,
            first=first, last=last,
        )  # fmt: skip

    def run(
        self, stream: Float[Array, "B S c d"], mix: Float[Array, "B S c"], attend: Attend, step: Step, numerics: Numerics
    ) -> tuple[Float[Array, "B S c d"], Float[Array, "B S c"]]:
        """The stream after the stage, and the mix for the next one."""
        stream, mix, _ = self(stream, mix, attend, step.valid, None, numerics)
        return stream, mix

    def read(
        self, stream: Float[Array, "B S c d"], mix: Float[Array, "B S c"], numerics: Numerics
    ) -> Float[Array, "B S d"]:
        """The stream collapsed by the last mix."""
        return collapse(stream, mix, numerics)


def tap_stream(stream: Float[Array, "B S c d"], numerics: Numerics) -> Float[Array, "B S d"]:
    """What the stages read of the backbone at a tapped layer: the mean of the copies."""
    return numerics.round(jnp.mean(f32(stream), axis=-2))


def remember(
    stages: Sequence[DraftHeads],
    windows: tuple[ops.PagedRows, ...],
    main_hidden: Float[Array, "B S td"],
    step: Step,
    numerics: Numerics,
) -> tuple[ops.PagedRows, ...]:
    """The stages' windows after the tokens of this step: one row of each from the taps."""
    main = stages[0].main_norm(stages[0].main_proj(main_hidden, numerics), numerics)
    kept = []
    for stage, window in zip(stages, windows, strict=True):
        rows = stage.attn.window_rows(main, stage.attn.angles(step.positions), numerics)
        kept.append(stage.attn.extend_window(window, rows, step, numerics)[1])
    return tuple(kept)


def draft(
    stages: Sequence[DraftHeads],
    windows: tuple[ops.PagedRows, ...],
    embed: Embedding,
    head: Linear,
    step: Step,
    tokens: Int32[Array, " B"],
    noise_token_id: int,
    copies: int,
    numerics: Numerics,
) -> Draft:
    """Drafts that follow `tokens`, which follow the tokens remembered so far. `step` places one row per draft token.

    The windows are read, not changed: what is accepted later enters them through the backbone.
    """
    n, window = step.positions.shape[1], stages[0].attn.window
    step = step.with_ring(seen_by_drafts(step, window), window, windows[0].page_size)
    noise = jnp.full((len(tokens), n - 1), noise_token_id, jnp.int32)
    stream, mix = start_stream(embed(jnp.concatenate([tokens[:, None], noise], axis=1), numerics), copies)
    for stage, window in zip(stages, windows, strict=True):

        def attend(x, attn=stage.attn, window=window):
            angles = attn.angles(step.positions)
            _, q = attn.query(x, angles, numerics)
            recent, _ = attn.extend_window(window, attn.window_rows(x, angles, numerics), step, numerics)
            return attn.attend(q, (recent,), (step.ring.seen,), step.block_table, angles, numerics), None

        stream, mix = stage.run(stream, mix, attend, step, numerics)
    last = stages[-1]
    h = last.read(stream, mix, numerics)
    base = head.in_float32(last.norm(h, numerics))

    ids, logits, confidence = [tokens], [], []
    for i in range(n):
        before = last.markov_head.row(ids[-1], numerics)
        logits.append(base[:, i] + last.markov_head.logits(before))
        evidence = jnp.concatenate([f32(h[:, i]), f32(before)], axis=-1)
        confidence.append(matmul(evidence, f32(last.confidence_head.proj.weight[...]))[:, 0])
        ids.append(jnp.argmax(logits[-1], axis=-1).astype(jnp.int32))
    return Draft(jnp.stack(ids, 1), jnp.stack(logits, 1), jnp.stack(confidence, 1))


def seen_by_drafts(step: Step, window: int) -> Int32[Array, "B S K"]:
    """Positions that every draft row sees: the window before the block, then the whole block, later rows included."""
    requests, rows = step.positions.shape
    before = step.start[:, None] - jnp.arange(window, 0, -1, dtype=jnp.int32)
    seen = jnp.concatenate([jnp.where(before < 0, -1, before), step.positions], axis=1)
    return jnp.broadcast_to(seen[:, None], (requests, rows, window + rows))
