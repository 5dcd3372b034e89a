"""How clear a choice was."""

import numpy as np

NEG_INF = np.float32(-np.inf)


def edge_margin(score: np.ndarray, k: int) -> np.ndarray:
    """Gap between the k-th and the next score of each row; inf where nothing finite is cut."""
    if score.shape[1] <= k:
        return np.full(len(score), np.inf, np.float32)
    ordered = -np.sort(-score, axis=-1)
    nothing_cut = ordered[:, k] == NEG_INF
    with np.errstate(invalid="ignore"):
        return np.where(nothing_cut, np.float32(np.inf), ordered[:, k - 1] - ordered[:, k])
