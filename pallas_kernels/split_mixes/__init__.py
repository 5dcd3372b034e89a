"""The mixes of hyper-connections: how a sub-layer reads and writes the copies of a residual stream, and mixes them."""

from jaxtyping import Array, Float, Float32

from pallas_kernels import checks, dispatch

Mixes = tuple[Float32[Array, "*rows c"], Float32[Array, "*rows c"], Float32[Array, "*rows c c"]]


def split_mixes(
    values: Float[Array, "*rows n"],
    scale: Float[Array, " 3"],
    base: Float[Array, " n"],
    mean_square: Float[Array, "*means 1"] | None = None,
    *,
    copies: int,
    iterations: int,
    eps: float,
    norm_eps: float = 0.0,
    implementation: str | None = None,
) -> Mixes:
    """(pre, post, comb) of n = c (2 + c) values a row, for c copies, in float32.

    mean_square: of the row that the values are a product with; where it is given, they are first multiplied by
    1 / sqrt(mean_square + norm_eps). With v · scale + base, whose three scales belong to the three parts of a row: pre, to
    read, is sigmoid + eps; post, to write, 2 sigmoid; comb (old copy first, new copy second) is softmax + eps over the last
    axis, whose columns and rows are then divided by their sums + eps in turn. Columns come first and last: `iterations`
    times, and rows one time less.
    Raises ValueError for other shapes. Source: hc_split_sinkhorn of DeepSeek's released inference code.
    """
    checks.positive("copies", copies)
    checks.positive("iterations", iterations)
    for name, array in (("values", values), ("scale", scale), ("base", base)):
        checks.floating(name, array)
    wanted = copies * (2 + copies)
    if values.ndim == 0 or values.shape[-1] != wanted or base.shape != (wanted,) or scale.shape != (3,):
        raise ValueError(
            f"values, scale and base have shapes {tuple(values.shape)}, {tuple(scale.shape)} and {tuple(base.shape)}; for "
            f"{copies} copies they must be [..., {wanted}], [3] and [{wanted}]."
        )
    if mean_square is not None:
        checks.floating("mean_square", mean_square)
        if tuple(mean_square.shape) != (*values.shape[:-1], 1):
            raise ValueError(
                f"mean_square has shape {tuple(mean_square.shape)}; it must be {(*values.shape[:-1], 1)}, one for every row."
            )
    options = dict(copies=copies, iterations=iterations, eps=eps, norm_eps=norm_eps)
    return dispatch.call(__name__, "split_mixes", implementation, values, scale, base, mean_square, **options)
