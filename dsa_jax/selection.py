"""What an indexer is trained against: its own scores, and the attention over what it selected.

An indexer learns to score tokens as the attention weighs them. The attention's weight of a selected row is
exp(scale · q·k - lse), with the log-sum-exp over the selected rows alone, per head.
"""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int32

from dsa_jax.numerics import Numerics
from dsa_jax.pytree import Leaf
from dsa_jax.tap import Tap


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Selection:
    """One layer's choice for rows [B, S].

    topk_indices: positions (tokens, or compressed rows of the layer's ratio) int32 [B, S, K], ascending, then -1; None
    where a layer takes every visible row. scores: the indexer's, float32 [B, S, N], -inf where a row does not see; None
    where the layer takes another's choice, or they were not asked for. lse: natural log of the sum of exp(scale · q·k)
    over the chosen rows, float32 [B, S, H], without window rows and sink, -inf where none is chosen; None if not asked for.
    """

    topk_indices: Leaf
    scores: Leaf
    lse: Leaf


def forward_with_selections(
    model: nnx.Module,
    cache: Any,
    tokens: Int32[Array, "B S"],
    count: Int32[Array, " B"],
    numerics: Numerics,
    *,
    return_scores: bool = False,
    return_lse: bool = False,
) -> tuple[Float[Array, "B S d"], Any, dict[int, Selection]]:
    """A model's forward pass (any family's), and the `Selection` of each layer that attends to chosen rows, by layer.

    Takes arguments and gives hidden rows and cache as the model does; to be traced by the caller's jit. All scores of a
    layer are held at once, 4 · B · S · context bytes. Rows behind `count` are padding.
    """
    wanted = {"selected"} | ({"index_score"} if return_scores else set()) | ({"selected_lse"} if return_lse else set())
    tap = Tap(only=wanted)
    h, cache = model(cache, tokens, count, numerics, tap=tap)
    names = {name.rpartition(".")[0] for name in tap.values}
    selections = {
        int(layer.removeprefix("layer")): Selection(
            *(tap.values.get(f"{layer}.{kind}") for kind in ("selected", "index_score", "selected_lse"))
        )
        for layer in names
    }
    return h, cache, dict(sorted(selections.items()))
