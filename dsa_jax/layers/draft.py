"""DSpark: draft stages that propose a block of tokens at once (spec deepseek-v41 section 11).

Context enters through the backbone's taps: every processed token leaves one window row in each stage. A draft then runs
the last token and noise tokens through the stages, all of which see each other, and a small Markov head makes every
token depend on the one before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from dsa_jax import ops
from dsa_jax.config import V41Config
from dsa_jax.layer_plan import LayerRole
from dsa_jax.layers.attention import extend_window
from dsa_jax.layers.decoder import Block
from dsa_jax.layers.hyper_connections import collapse, start_stream
from dsa_jax.layers.linear import Linear, QuantizedLinear
from dsa_jax.layers.norm import RMSNorm
from dsa_jax.numerics import Numerics, f32, matmul
from dsa_jax.pytree import Leaf
from dsa_jax.step import Step


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
        return numerics.round(ops.gather_rows(self.weight[...], ids))


class MarkovHead(nnx.Module):
    """Logits that a draft token gets from the token before it: embed bf16 [V, rank], head bf16 [V, rank]."""

    def __init__(self, vocab: int, rank: int):
        self.embed = Embedding(vocab, rank)
        self.head = Linear(vocab, rank)


class ConfidenceHead(nnx.Module):
    """How likely a draft token is to be accepted: proj bf16 [1, D + rank]."""

    def __init__(self, width: int):
        self.proj = Linear(1, width)


class DraftStage(Block):
    """A window-only block. The first stage also projects the taps, the last one holds the draft's own heads."""

    def __init__(self, config: V41Config, role: LayerRole, *, first: bool, last: bool):
        super().__init__(config, role, config.dspark_n_routed_experts, config.dspark_num_experts_per_tok)
        width, eps = config.hidden_size, config.rms_norm_eps
        if first:
            taps = len(config.dspark_target_layer_ids)
            self.main_proj = QuantizedLinear(width, taps * width, config.weight_block_size)
            self.main_norm = RMSNorm(width, eps)
        if last:
            self.norm = RMSNorm(width, eps)
            self.markov_head = MarkovHead(config.vocab_size, config.dspark_markov_rank)
            self.confidence_head = ConfidenceHead(width + config.dspark_markov_rank)


def remember(
    stages: Sequence[DraftStage],
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
        kept.append(extend_window(window, rows, step)[1])
    return tuple(kept)


def draft(
    stages: Sequence[DraftStage],
    windows: tuple[ops.PagedRows, ...],
    embed: Embedding,
    head: Linear,
    step: Step,
    tokens: Int32[Array, " B"],
    config: V41Config,
    numerics: Numerics,
) -> Draft:
    """Drafts that follow `tokens`, which follow the tokens remembered so far. `step` places one row per draft token.

    The windows are read, not changed: what is accepted later enters them through the backbone.
    """
    n = config.dspark_block_size
    noise = jnp.full((len(tokens), n - 1), config.dspark_noise_token_id, jnp.int32)
    stream, mix = start_stream(embed(jnp.concatenate([tokens[:, None], noise], axis=1), numerics), config.hc_mult)
    for stage, window in zip(stages, windows, strict=True):

        def attend(x, stage=stage, window=window):
            angles = stage.attn.angles(step.positions)
            _, q = stage.attn.query(x, angles, numerics)
            recent, _ = extend_window(window, stage.attn.window_rows(x, angles, numerics), step)
            slots = step.recent(seen_by_drafts(step, config.sliding_window), config.sliding_window)
            return stage.attn.attend(q, (recent,), (slots,), angles, numerics), None

        stream, mix, _ = stage(stream, mix, attend, step.valid, None, numerics)
    last = stages[-1]
    h = collapse(stream, mix, numerics)
    base = head.in_float32(last.norm(h, numerics))

    ids, logits, confidence = [tokens], [], []
    for i in range(n):
        before = last.markov_head.embed(ids[-1], numerics)
        logits.append(base[:, i] + last.markov_head.head.in_float32(before))
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
