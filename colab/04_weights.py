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
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/dsa-jax/dsa-jax/blob/main/colab/04_weights.ipynb)
#
# # Open a checkpoint
#
# A checkpoint is opened in three steps: headers are scanned, a plan says which tensors fill which parameter and lists every
# problem at once, and only then bytes are read. Set `CHECKPOINT` to a folder of a real one (only its headers and one layer are read) or leave it
# empty for the synthetic one.

# %%
import shutil
import subprocess
import sys

if "google.colab" in sys.modules:
    extras = "colab,cuda12" if shutil.which("nvidia-smi") else "colab"
    package = f"dsa-jax[{extras}] @ git+https://github.com/dsa-jax/dsa-jax"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", package], check=True)

# %%
import tempfile
from pathlib import Path

import jax.numpy as jnp
import matplotlib.pyplot as plt
import ml_dtypes
import numpy as np

import pallas_kernels as pk
from dsa_jax.config import load_config
from dsa_jax.demo import write_demo_checkpoint
from dsa_jax.families import family_of
from dsa_jax.inspect import inspect_checkpoint
from dsa_jax.loading import abstract_parameters
from dsa_jax.numerics import numerics
from dsa_jax.weights import load, make_plan
from dsa_jax.weights.plan import LoadPlan

CHECKPOINT = ""
if not CHECKPOINT:
    CHECKPOINT = Path(tempfile.mkdtemp()) / "checkpoint"
    write_demo_checkpoint(CHECKPOINT)
folder = Path(CHECKPOINT)
report = inspect_checkpoint(folder)
config = load_config(folder)
print("\n".join(report.lines()))

# %% [markdown]
# ## Where the bytes are

# %%
parts = {part: size for part, (_, size) in report.by_part.items()}
figure, axes = plt.subplots(figsize=(7, 0.3 * len(parts) + 1.2), layout="constrained")
axes.barh(list(parts), [size / 2**20 for size in parts.values()])
axes.invert_yaxis()
axes.set_xscale("log")
axes.set_xlabel("MiB in the files");

# %% [markdown]
# ## The plan
#
# Parameters carry the checkpoint's names; the experts of a layer are stacked on a first axis.

# %%
plan = make_plan(abstract_parameters(config), folder, family_of(config).left_out(config))
print(f"{len(plan.entries)} parameters from {sum(len(e.sources) for e in plan.entries)} tensors, {plan.nbytes:,} bytes")
for entry in [e for e in plan.entries if e.path.startswith("layers.0.")][:12]:
    print(f"{entry.path:45s} {str(entry.shape):18s} {entry.dtype!s:16s} from {len(entry.sources)} tensor(s), {entry.conversion}")
for note in plan.notes:
    print(note)

# %% [markdown]
# ## One layer
#
# A plan can be cut: here only layer 0 is read. Stored bytes stay as they are.

# %%
layer = load(LoadPlan(tuple(e for e in plan.entries if e.path.startswith("layers.0.")), ()), progress=False)
path = next(name.removesuffix(".scale") for name in layer if name.endswith(".scale") and layer[name.removesuffix("scale") + "weight"].ndim == 2)
weight, scale = layer[path + ".weight"], layer[path + ".scale"]
print(path, weight.dtype, weight.shape, "scales", scale.dtype, scale.shape)

# %% [markdown]
# ## Against the mathematics
#
# An FP8 weight is `E4M3 value x 2^(byte - 127)` with one scale byte per tile; F32 scales are factors as they are. The same in NumPy, from the bytes:

# %%
values = np.asarray(weight).view(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
factors = np.asarray(scale)
factors = np.exp2(factors.astype(np.float64) - 127) if factors.dtype == np.uint8 else factors.astype(np.float64)
block = config.weight_block_size
rows, columns = (block, block) if isinstance(block, int) else block
tiles = np.repeat(np.repeat(factors, rows, 0), columns, 1)[: values.shape[0], : values.shape[1]]
by_hand = values * tiles
ours = np.asarray(pk.dequantize_weight(weight, scale, (rows, columns), jnp.float32), np.float64)
assert np.array_equal(by_hand.astype(np.float32), ours.astype(np.float32))

# %% [markdown]
# A linear quantises its input to FP8 in groups as wide as a tile, multiplies, and rounds once. Without quantisers (mode
# `f32`) it is a plain product:

# %%
from dsa_jax.layers.linear import QuantizedLinear

linear = QuantizedLinear(*weight.shape, (rows, columns))
linear.weight[...] = weight
x = np.random.default_rng(0).normal(size=(8, weight.shape[1])).astype(np.float32)
if linear.scale[...].dtype == scale.dtype:
    linear.scale[...] = scale
    exact = x.astype(np.float64) @ by_hand.T
    for mode in ("f32", "f32q", "bf16"):
        y = np.asarray(linear(jnp.asarray(x, numerics(mode).dtype), numerics(mode)).astype(jnp.float32), np.float64)
        distance = np.linalg.norm(y - exact) / np.linalg.norm(exact)
        print(f"{mode:5s} relative distance from float64: {distance:.1e}")
        # E4M3 keeps three bits behind the first: each value moves by up to 6 %, by 2.6 % on average.
        assert distance < {"f32": 1e-6, "f32q": 0.04, "bf16": 0.04}[mode]

# %% [markdown]
# The stored values, and the values that they stand for:

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained")
left.hist(values.ravel(), bins=101)
left.set_xlabel("stored E4M3 value")
left.set_ylabel("weights")
right.hist(by_hand.ravel(), bins=101)
right.set_xlabel("weight");
