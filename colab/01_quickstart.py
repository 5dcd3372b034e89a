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
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/dsa-jax/dsa-jax/blob/main/colab/01_quickstart.ipynb)
#
# # Quickstart: from a checkpoint to tokens
#
# A small random DeepSeek-V4.1 checkpoint in the official format is written to a temporary folder, loaded the ordinary way,
# and generates. The weights are random, so the text is noise; every layer kind of the real model is there. Runs on a CPU.

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
import time
from pathlib import Path

from dsa_jax import plots
from dsa_jax.decode import generate, stream
from dsa_jax.demo import write_demo_checkpoint
from dsa_jax.inspect import inspect_checkpoint
from dsa_jax.loading import load_model
from dsa_jax.sampling import Sampling

folder = Path(tempfile.mkdtemp()) / "checkpoint"
write_demo_checkpoint(folder)
report = inspect_checkpoint(folder, context=4096)
print("\n".join(report.lines()))

# %% [markdown]
# ## The layer plan
#
# Most layers own nothing: they read the compressed KV of one layer and the top-k list of another. The plan is computed from
# the config once; a layer is told its role and never reads the config again.

# %%
plots.layer_plan(report.plan);

# %% [markdown]
# ## Load and generate
#
# `mode` chooses the numerics: `"bf16"` as released, `"f32q"` with float32 results, `"f32"` without any quantiser, taken here
# because nothing rounds to a few bits in it, so that nearly equal logits of a random model keep their order.
# The first call compiles; the rest of the loop runs compiled bursts of eight steps.

# %%
lm = load_model(folder, mode="f32", progress=False)
prompt = [0, 17, 4, 33, 9]
started = time.perf_counter()
for (new,) in stream(lm, [prompt], max_new_tokens=24, every=8):
    print(f"{time.perf_counter() - started:6.2f} s", new)

# %% [markdown]
# Requests of different lengths run side by side, each with its own sampling; alone or in a batch, a request gets the same
# tokens.

# %%
together = generate(lm, [prompt, [0, 9]], max_new_tokens=8, sampling=Sampling.of(2))
alone = generate(lm, [prompt], max_new_tokens=8)
assert together[0] == alone[0]
print(together)
