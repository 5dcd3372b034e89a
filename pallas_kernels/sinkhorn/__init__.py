"""Square matrices made nearly doubly stochastic, as the copies of a residual stream are mixed."""

from jaxtyping import Array, Float

from pallas_kernels import checks, dispatch


def sinkhorn(
    logits: Float[Array, "*rows c _"], *, iterations: int, eps: float, implementation: str | None = None
) -> Float[Array, "*rows c _"]:
    """softmax(logits) + eps over the last axis, whose columns and rows are then divided by their sums + eps in turn.

    Columns come first and last: `iterations` times, and rows one time less. Source: hyper-connections of DeepSeek's
    released inference code.
    """
    if logits.shape[-1] != logits.shape[-2]:
        raise ValueError(f"logits have shape {tuple(logits.shape)}; their last two axes must be those of square matrices.")
    checks.floating("logits", logits)
    checks.positive("iterations", iterations)
    return dispatch.call(__name__, "sinkhorn", implementation, logits, iterations=iterations, eps=eps)
