"""How far a result may be from its expected value, and why. The only place where tests get tolerances from.

An entry is (value, reason). `of(name)` gives the value.
"""

TABLE: dict[str, tuple[float, str]] = {}


def of(name: str) -> float:
    """The tolerance called `name`."""
    return TABLE[name][0]


# ---------------------------------------------------------------- operations

TABLE |= {
    "ops.sparse_attn.f32": (2e-6, "float32 sums of 64-term blocks in another order; golden/README.md states 2e-6"),
    "ops.bf16_ulps": (1, "one bf16 rounding of nearly equal float32 sums; golden/README.md states 1 ulp"),
    "ops.gemm.f32": (1e-6, "relative to the largest output; exact products, float32 sums in another order"),
    "ops.scores.f32": (1e-5, "float32 dot products of up to 128 terms and up to 64 heads, scores of a few units"),
    "ops.lse.f32": (2e-6, "natural log of a float32 sum, values of a few units"),
    "ops.splits.f32": (1e-6, "the same sums cut at other places (AC-48 states 1e-6)"),
    "ops.rotation.f32": (1e-5, "an orthogonal transform of both operands in float32 (AC-25 states 1e-5)"),
}
