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
    "ops.scores.exact_products": (2e-5, "dots are exact, scores of up to 60 take one float32 rounding per head"),
    "ops.rounded_p.f32": (2e-5, "exp of a float32 score may fall on the other side of a bf16 tie for a few terms"),
    "ops.sparse_attn.bf16": (0.01, "probabilities and output rounded to bf16 (2^-9 relative each), outputs below 2"),
    "ops.lse.f32": (2e-6, "natural log of a float32 sum, values of a few units"),
    "ops.splits.f32": (1e-6, "the same sums cut at other places (AC-48 states 1e-6)"),
    "ops.attention_gradient.f32": (1e-5, "float32 sums of up to 80 products of a few units in another order"),
    "ops.attention_gradient.differences": (0.01, "steps of 0.01 in float32: curvature 1e-4, a sum's rounding over 0.02"),
    "ops.rotation.f32": (1e-5, "an orthogonal transform of both operands in float32 (AC-25 states 1e-5)"),
}

# ---------------------------------------------------------------- model

TABLE |= {
    "model.arrival.f32": (1e-5, "float32 sums in another order over six layers, logits of about 1; AC-31 states 1e-5"),
    "model.arrival.bf16": (0.05, "a flipped bf16 or FP8 rounding spreads; golden/README.md gives 0.7 in a logit for ten layers"),
}

TABLE |= {
    "model.drafts.f32": (2e-5, "float32 sums of two layers and two heads against float64, logits of a few units"),
    "model.rope": (1e-6, "one float32 rotation; golden/README.md states 1e-6"),
    "model.rope.table": (1e-5, "cosine and sine of float32 angles; golden/README.md states 1e-5 at later positions"),
    "model.rope.far": (1e-6, "float32 cosine against float64's of the same float32 angle (AC-29 states 1e-6)"),
    "model.yarn.listed": (2e-6, "the specification lists nine digits of float32 values; powers differ in the last bits"),
    "model.gate": (1e-6, "float32 scores of 96 terms; golden/README.md states 1e-6"),
    "model.modules": (2e-6, "float32 sums in another order; golden/README.md states 2e-6"),
    "model.hc": (2e-6, "float32 Sinkhorn normalisations; golden/README.md states 2e-6"),
    "model.experts": (1e-5, "three float32 products of up to 64 terms against float64, relative to the largest output"),
    "model.compressor.f32": (2e-6, "float32 sums in another order; golden/README.md states 2e-6"),
    "model.compressor.bf16": (0.02, "one bf16 rounding on values of a few units; golden/README.md states 0.02"),
    "model.attention.f32": (2e-6, "float32 sums in another order, relative to the largest value; README states 2e-6"),
    "model.attention.bf16": (0.02, "bf16 roundings of scores and outputs; golden/README.md states 0.02"),
}

# ---------------------------------------------------------------- indexer kernels

TABLE |= {
    "kernels_indexer.logits": (2e-6, "of the largest score: exact products, float32 sums of 64 heads in another order"),
    "kernels_indexer.hopper": (5e-4, "as above; the tensor cores add FP8 products with about 14 bits (2^-13 of the largest)"),
    "kernels_indexer.hopper.rounded": (8e-3, "such a score rounded to bf16 before and after the sum: one step of 2^-8 each"),
}

TABLE |= {
    "kernels.sparse_attention.lse": (1e-5, "float32 sums in another order, and exp2 and log2 in place of exp and log"),
    "kernels.gemm.f32": (5e-6, "of a tile's largest: exact products, of which tensor cores cut sums off 48 times at 2^-24"),
    "kernels.lse": (1e-3, "stated bound for any inputs: float32 sums of bf16 products over 512 values in another order"),
    "kernels.products_in_bf16": (2e-3, "of the norm: exact products, float32 sums in another order, rounded to bf16 (2^-9) in both"),
    "kernels.sparse_attention": (3e-3, "of the output's norm: probabilities and output rounded to bf16 (2^-9 each)"),
}

# ---------------------------------------------------------------- V4

TABLE |= {
    "v4.gate.ratio": (1e-6, "float32 scores of 128 terms, normalised; golden/README.md states 1e-6"),
    "v4.gate.softmax": (1e-5, "the file's logits reach 2000, so a float32 sum's last bits move a probability by 1e-5"),
}

# ---------------------------------------------------------------- V3.2

TABLE |= {
    "model.hadamard": (1e-6, "float32 sums of up to 128 terms; golden/README.md states 1e-6"),
    "model.mla.f32": (3e-6, "float32 sums in another order; golden/README.md states 3e-6"),
    "model.latent_forms.f32": (2e-5, "float32 products of 128 terms before and after a softmax, scores of up to 20"),
    "model.mla.bf16": (0.03, "bf16 roundings of scores and outputs; golden/README.md states 0.03"),
}

# ---------------------------------------------------------------- decode kernels

TABLE |= {
    "kernels_decode.out": (1.5e-3, "relative; bf16 probabilities, 2^-9 each, rounded against other maxima; products exact"),
    "kernels_decode.lse": (3e-6, "natural log of a float32 sum in another order, through powers of two"),
}
