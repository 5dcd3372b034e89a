# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/dsa-jax/dsa-jax/blob/main/colab/03_two_level_indexer.ipynb)
#
# # The two-level indexer, drawn
#
# DeepSeek-V4.1 scores every visible position once, in one source layer. That layer keeps its own best positions and, beside
# them, the best *blocks*. Later layers score only the positions inside those blocks. Below: scores, block maxima, the pinned
# newest block, the candidates, what consumers pick, and what the filter costs and saves as the context grows.

# %%
import shutil
import subprocess
import sys

if "google.colab" in sys.modules:
    extras = "colab,cuda12" if shutil.which("nvidia-smi") else "colab"
    package = f"dsa-jax[{extras}] @ git+https://github.com/dsa-jax/dsa-jax"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", package], check=True)

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import pallas_kernels as pk

BLOCK, BLOCKS, TOPK = 8, 12, 24
rng = np.random.default_rng(4)

# %% [markdown]
# ## Scores
#
# A score is `sum over heads of w * relu(q . k)`. Keys here drift slowly from position to position, as neighbouring tokens
# do, so high scores come in runs: that is what makes blocks a good filter.

# %%
context, heads, width = 400, 8, 64


def drifting(n, width, keep, rng):
    out = np.empty((n, width))
    out[0] = rng.normal(size=width)
    for i in range(1, n):
        out[i] = keep * out[i - 1] + np.sqrt(1 - keep**2) * rng.normal(size=width)
    return out


keys = drifting(context, width, 0.8, rng)


def scores_of(query, weights, keys):
    return np.einsum("h,hj->j", weights, np.maximum(query @ keys.T, 0))


query, weights = rng.normal(size=(heads, width)), np.abs(rng.normal(size=heads))
source = scores_of(query, weights, keys)
# A later layer asks a similar question: the same query, disturbed.
consumer = scores_of(query + 0.5 * rng.normal(size=query.shape), weights, keys)

visible = context - 3  # the newest block is not full
length = jnp.asarray([visible], jnp.int32)
row = jnp.asarray(source[None], jnp.float32)
own, _ = pk.top_k(row, TOPK, lengths=length)
blocks = pk.candidate_blocks(row, length, BLOCKS, BLOCK)
chosen = np.asarray(blocks)[0]
chosen = chosen[chosen >= 0]
inside = np.isin(np.arange(context) // BLOCK, chosen)
masked = jnp.where(inside, jnp.asarray(consumer), -jnp.inf)[None].astype(jnp.float32)
filtered = np.asarray(pk.top_k(masked, TOPK, lengths=length)[0])[0]
full = np.asarray(pk.top_k(jnp.asarray(consumer[None], jnp.float32), TOPK, lengths=length)[0])[0]

figure, axes = plt.subplots(3, 1, figsize=(10, 6.5), sharex=True, layout="constrained")
axes[0].plot(source, linewidth=0.7, color="black", label="score of the source layer")
maxima = [source[b * BLOCK : min((b + 1) * BLOCK, visible)].max() for b in range(-(-visible // BLOCK))]
axes[0].stairs(maxima, np.arange(len(maxima) + 1) * BLOCK, color="tab:orange", label="block maximum")
axes[0].scatter(own[0], source[np.asarray(own)[0]], s=12, color="tab:blue", zorder=3, label=f"its own best {TOPK}")
newest = (visible - 1) // BLOCK
for b in chosen:
    axes[1].axvspan(b * BLOCK, (b + 1) * BLOCK, color="tab:red" if b == newest else "tab:green", alpha=0.35)
axes[1].plot(source, linewidth=0.5, color="gray")
axes[1].set_title(f"{len(chosen)} candidate blocks of {BLOCK} (green), the newest always among them (red)", fontsize=9)
axes[2].plot(consumer, linewidth=0.7, color="black", label="score of a consumer")
axes[2].scatter(filtered, consumer[filtered], s=14, color="tab:green", zorder=3, label="picked inside the candidates")
lost = np.setdiff1d(full, filtered)
axes[2].scatter(lost, consumer[lost], s=20, color="tab:red", marker="x", zorder=3, label="in the full top-k, but outside")
for part in axes:
    part.set_ylabel("score")
for part in (axes[0], axes[2]):
    part.legend(fontsize=8, ncols=3, frameon=False, loc="lower left", bbox_to_anchor=(0, 1))
axes[2].set_xlabel("position");
assert newest in chosen and inside[filtered].all()

# %% [markdown]
# ## The same through the library's calls
#
# `expand_candidates` is made once per step, `candidate_logits` scores only the listed blocks, `candidate_positions` maps
# the chosen columns back. The picks are those of the masked scores above.

# %%
page = 16
cache = pk.PagedRows.zeros(pk.Plain(width, jnp.float32), context // page, page)
cache = cache.scatter(jnp.arange(context, dtype=jnp.int32), jnp.asarray(keys, jnp.float32))
table = jnp.arange(context // page, dtype=jnp.int32)[None]
candidates = pk.expand_candidates(blocks[None], length[None], BLOCK)
selection = pk.select(
    jnp.asarray(query, jnp.float32)[None, None], cache, jnp.asarray(weights, jnp.float32)[None, None], TOPK,
    context_lens=length[None], block_table=table, candidates=candidates,
)
exact = pk.select(
    jnp.asarray(query, jnp.float32)[None, None], cache, jnp.asarray(weights, jnp.float32)[None, None], TOPK,
    context_lens=length[None], block_table=table, candidate_topk_blocks=BLOCKS, candidate_block_size=BLOCK,
)
assert np.array_equal(np.asarray(exact.candidate_blocks)[0, 0][: len(chosen)], chosen)
assert np.isin(np.asarray(selection.topk_indices)[0, 0] // BLOCK, chosen).all()
print(selection.topk_indices[0, 0])

# %% [markdown]
# ## What it costs, and what it saves
#
# The released sizes: 512 positions from at most 2048 blocks of 8, which is 16384 positions. Up to 16384 positions of context
# the filter drops nothing. Beyond, recall against the full top-k depends on how much the consumer's question
# differs from the source's: 1 is the same question, 0 an unrelated one. Scores scored per token stay at 16384.

# %%
K, C, B = 512, 2048, 8
lengths = [8192, 16384, 32768, 65536, 131072, 262144]
recall = {}
for alike in (0.95, 0.8, 0.5):
    recall[alike] = []
    for n in lengths:
        local = np.repeat(rng.normal(size=n // 4), 4)  # neighbours score alike
        first = local + 0.7 * rng.normal(size=n)
        second = alike * first + np.sqrt(1 - alike**2) * first.std() * rng.normal(size=n)
        ids = pk.candidate_blocks(jnp.asarray(first[None], jnp.float32), jnp.asarray([n], jnp.int32), C, B)
        allowed = np.isin(np.arange(n) // B, np.asarray(ids)[0])
        want = np.argpartition(-second, K)[:K]
        recall[alike].append(allowed[want].mean())
        assert n > C * B or recall[alike][-1] == 1
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
for alike, values in recall.items():
    left.plot(lengths, values, marker="o", label=f"correlation {alike}")
left.set_xscale("log", base=2)
left.set_ylim(0, 1.05)
left.set_xlabel("context, positions")
left.set_ylabel("share of the full top-512 kept")
left.legend(fontsize=8)
right.plot(lengths, lengths, marker="o", label="all positions")
right.plot(lengths, [min(n, C * B) for n in lengths], marker="o", label="candidates only")
right.set_xscale("log", base=2)
right.set_yscale("log", base=2)
right.set_xlabel("context, positions")
right.set_ylabel("positions scored per token and layer")
right.legend(fontsize=8);
