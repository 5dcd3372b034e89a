"""How far a numerics run may be from a golden file, with the reasons. One table for the command and the tests.

f32    All quantisers off, so only the order of float32 sums differs: 1e-5 is expected on logits (their spread is 1) and
       relative on hidden states; 2e-4 is allowed. Lists, masks, experts and greedy ids are equal: the golden seeds keep
       every score gap at an edge above 1e-5.
f32q   One rounding flip of a quantiser changes a row and then, through the window, the rows after it. A faithful second
       implementation is within 1e-3 on most rows, and within 6e-2 over all rows after the last layer.
bf16   The released arithmetic differs from f32 by 0.014 (relative) after the first layer and 0.158 after the last; a
       correct implementation is no farther from the released one than that.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """Bounds of one mode.

    exact: integer tensors are equal, element for element. logits: largest absolute difference. hidden: relative
    Frobenius distance over all compared rows. hidden_first: the same after the first layer. median_row: relative
    distance of the median row. lists: smallest mean share of a selected list that agrees, on rows whose stored margin
    is positive. top1: smallest share of rows whose best token agrees.
    """

    exact: bool
    logits: float
    hidden: float
    hidden_first: float
    median_row: float
    lists: float
    top1: float


TOLERANCES = {
    "f32": Tolerance(
        exact=True, logits=2e-4, hidden=2e-4, hidden_first=2e-4, median_row=2e-4, lists=1.0, top1=1.0
    ),
    "f32q": Tolerance(
        exact=False, logits=1.0, hidden=6e-2, hidden_first=6e-2, median_row=1e-3, lists=0.95, top1=0.95
    ),
    "bf16": Tolerance(
        exact=False, logits=1.0, hidden=0.158, hidden_first=0.014, median_row=0.158, lists=0.8, top1=0.85
    ),
}
