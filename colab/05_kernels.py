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
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/dsa-jax/dsa-jax/blob/main/colab/05_kernels.ipynb)
#
# # Kernels: what the compiler made of them, and what they do in time
#
# Every kernel is compiled here for an H200 and a B200, without either (on Linux x86-64 with the compile-only CUDA packages of
# the `test` extra). Then one kernel is read step by step, and the measured figures are drawn. On a GPU that the kernels know, the last
# cell times one.

# %%
import shutil
import subprocess
import sys

if "google.colab" in sys.modules:
    extras = "colab,cuda12" if shutil.which("nvidia-smi") else "colab,test"
    package = f"dsa-jax[{extras}] @ git+https://github.com/dsa-jax/dsa-jax"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", package], check=True)

# %%
import inspect
import json
import os
import urllib.request
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator

if shutil.which("nvidia-smi") is None:  # before jax starts
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

from pallas_kernels import aot, bench, platform

# %% [markdown]
# ## Compile reports
#
# `spills` must be 0: a spilled register is a trip to memory in the inner loop. `HGMMA`/`QGMMA` are Hopper's tensor cores,
# `UTC*MMA` Blackwell's; `UTMALDG` is TMA, `LDGSTS` is `cp.async`, `LDTM` reads tensor memory.

# %%
OPERATION = "candidate_logits"
reason = aot.missing()
report = None
if reason:
    print("Nothing to compile with:", reason)
else:
    report = aot.compile_report(operation=OPERATION)
    print(report.text())
    assert all(kernel.spill_stores + kernel.spill_loads == 0 for kernel in report.kernels)

# %% [markdown]
# Registers and shared memory bound how many warpgroups are in flight on one multiprocessor:

# %%
if report is not None:
    labels = [f"{k.target}: {k.section.split(', ')[-1]}, {k.shape}" for k in report.kernels]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 0.3 * len(labels) + 1.2), sharey=True, layout="constrained")
    left.barh(labels, [k.registers for k in report.kernels])
    left.set_xlabel("registers a thread, at entry")
    left.tick_params(axis="y", labelsize=7)
    right.barh(labels, [k.smem / 1024 for k in report.kernels], color="tab:orange")
    right.axvline(227, color="black", linewidth=0.8)
    right.set_xlabel("shared memory, KiB (line: all of it)")
    left.invert_yaxis();

# %% [markdown]
# ## One kernel, step by step
#
# Exact top-k is written as one program for lanes of a warp. It is compiled for Hopper and Blackwell, and runs in the GPU
# interpreter and in a simulator that looks for races too. It reads each row once:
#
# 1. a sample of the row gives a floor; scores above it go to a list in shared memory. If the list overflows, the floor rises
#    to the exact k-th best of what was seen;
# 2. a radix selection over the list finds the k-th best key; a key is a score as an unsigned number of the same order;
# 3. a bitmap puts the chosen positions in order; of scores equal to the k-th best, lower positions come first.
#
# What the program is made of, in its own words:

# %%
from pallas_kernels.top_k import program

for name, thing in vars(program).items():
    if inspect.isfunction(thing) and thing.__module__ == program.__name__ and thing.__doc__:
        print(f"{name:28s} {inspect.cleandoc(thing.__doc__).splitlines()[0]}")

# %% [markdown]
# ## Measured
#
# One H200, L2 cold, against the best public kernel of the same operation on the same card, and the floor: bytes over memory rate or operations
# over peak, whichever is larger.

# %%
folder = Path("../docs/measured")
if folder.is_dir():
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
else:
    with urllib.request.urlopen("https://api.github.com/repos/dsa-jax/dsa-jax/contents/docs/measured") as listing:
        files = [json.load(urllib.request.urlopen(entry["download_url"])) for entry in json.load(listing)]
for measured in files:
    rows = [row for row in measured["rows"] if row.get("peer_us")]
    labels = [row["shape"] for row in rows]
    figure, axes = plt.subplots(figsize=(9, 0.22 * len(rows) + 1.4), layout="constrained")
    places = range(len(rows))
    axes.barh(places, [row["peer_us"] / row["us"] - 1 for row in rows], left=1, label="this kernel")
    floors = [(row["peer_us"] / row["floor_us"], place) for place, row in enumerate(rows) if row["floor_us"]]
    axes.scatter(*zip(*floors, strict=True), marker="|", color="black", label="floor")
    axes.axvline(1, color="tab:red", linewidth=0.8, label="best public kernel")
    axes.set_yticks(places, labels, fontsize=7)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel("times as fast as the best public kernel")
    axes.set_title(f"{measured['operation']}, {measured['card']}, {measured['date']}", fontsize=9)
    figure.legend(loc="outside lower right", ncols=3, fontsize=7)

# %% [markdown]
# ## On this machine

# %%
if platform.kernel_name() is None:
    print("No GPU that the kernels know: nothing to time.")
else:
    shape = aot.cases("top_k")[0].shape
    print(bench.table(bench.run("top_k", shapes=[shape])))
