"""Pictures of plans, errors and verdicts. Needs matplotlib (the colab extra); nothing else in the package does."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_MODES = ("window", "full", "indexed", "reindex", "reuse", "all", "dense", "moe")
_SMALLEST = 1e-9  # where an error of nothing is drawn on a logarithmic axis


def _pyplot():
    try:
        import matplotlib.pyplot as plt
    except ImportError as missing:
        raise RuntimeError("A picture needs matplotlib: pip install 'dsa-jax[colab]'.") from missing
    return plt


def layer_plan(plan: Sequence[Any]):
    """The layers in order, coloured by what they do, with an arc from each source to the layers that take from it.

    `plan`: the roles of any family (`LanguageModel.plan`). Above: whose compressed KV a layer reads. Below: whose top-k
    list. A family without sharing has no arcs. Returns the matplotlib Figure.
    """
    plt = _pyplot()
    from matplotlib.patches import Patch, Rectangle

    roles = [getattr(role, "mode", None) or role.ffn for role in plan]
    colours = {role: f"C{_MODES.index(role)}" for role in dict.fromkeys(roles)}
    figure, axes = plt.subplots(figsize=(max(6.0, 0.45 * len(plan) + 1.5), 3.6), layout="constrained")
    for place, (role, kind) in enumerate(zip(plan, roles, strict=True)):
        axes.add_patch(Rectangle((place - 0.4, -0.4), 0.8, 0.8, facecolor=colours[kind], edgecolor="black"))
        ratio = getattr(role, "ratio", 0)
        label = f"{role.index}\n1:{ratio}" if ratio else str(role.index)
        axes.text(place, 0, label, ha="center", va="center", fontsize=7)
        _arc(axes, getattr(role, "kv_source", None), place, +1)
        _arc(axes, getattr(role, "index_source", None), place, -1)
        if getattr(role, "makes_candidates", False):
            axes.annotate("candidates", (place, -0.4), (place, -1.9), ha="center", fontsize=7, arrowprops={"arrowstyle": "<-"})
    axes.set_xlim(-0.8, len(plan) - 0.2)
    axes.set_ylim(-2.2, 2.2)
    axes.set_yticks([1.2, 0, -1.2], ["KV taken from", "layer, rows : tokens", "list taken from"], fontsize=8)
    axes.set_xticks([])
    axes.legend(handles=[Patch(facecolor=colours[k], label=k) for k in colours], ncols=len(colours), loc="upper left", fontsize=8)
    return figure


def _arc(axes, source: int | None, place: int, side: int) -> None:
    if source is None or source == place:
        return
    x = np.linspace(source, place, 40)
    height = 0.3 + 0.9 * min(1.0, (place - source) / 8)
    axes.plot(x, side * (0.42 + height * np.sin(np.pi * (x - source) / (place - source))), color="gray", linewidth=0.8)


def errors(values: Mapping[str, np.ndarray], title: str, xlabel: str = "absolute error"):
    """Histograms of error sizes, one line a name, on logarithmic axes: few large errors are seen. Returns the Figure."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(7, 3.7), layout="constrained")
    edges = np.logspace(np.log10(_SMALLEST), 1, 61)
    for name, value in values.items():
        sizes = np.abs(np.asarray(value, np.float64)).ravel()
        count, _ = np.histogram(np.clip(sizes, _SMALLEST, 9.9), edges)
        axes.stairs(count / max(1, len(sizes)), edges, label=f"{name} (largest {sizes.max(initial=0):.1e})")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(0.5 / max([1, *(np.size(value) for value in values.values())]), 2)
    axes.set_xlabel(f"{xlabel} ({_SMALLEST:g} stands for none)")
    axes.set_ylabel("share of elements")
    axes.set_title(title)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return figure


def verdicts(rows: Sequence[Any], title: str):
    """The compared tensors of `dsa_jax.golden` against what is allowed: one mark a tensor. Returns the Figure.

    A mark right of 1 is a failure. Measures where more is better (overlaps) are drawn as allowed / found; a difference where
    none is allowed, and a tensor that is not there, at 10.
    """
    plt = _pyplot()
    drawn = [row for row in rows if row.ok is False or None not in (row.value, row.limit)]
    kinds = list(dict.fromkeys(row.name.rpartition(".")[2] for row in drawn))
    figure, axes = plt.subplots(figsize=(7, 0.28 * len(kinds) + 1.6), layout="constrained")
    for ok, colour, label in ((True, "tab:green", "within"), (False, "tab:red", "outside"), (None, "tab:gray", "not judged")):
        marks = [
            (max(_SMALLEST, _against_limit(row)), kinds.index(row.name.rpartition(".")[2])) for row in drawn if row.ok is ok
        ]
        if marks:
            axes.scatter(*zip(*marks, strict=True), s=14, color=colour, label=label)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yticks(range(len(kinds)), kinds, fontsize=8)
    axes.set_ylim(len(kinds) - 0.5, -0.5)
    axes.set_xlabel(f"found / allowed ({_SMALLEST:g} stands for none)")
    axes.set_title(title)
    figure.legend(loc="outside lower right", ncols=3, fontsize=8)
    return figure


def _against_limit(row: Any) -> float:
    if row.value is None or not row.limit:
        return 0.0 if row.value == 0 else 10.0
    more_is_better = row.measure in ("list overlap", "rows agreeing")
    return row.limit / max(row.value, _SMALLEST) if more_is_better else row.value / row.limit


def stacked_times(
    names: Sequence[str], parts: Mapping[str, Sequence[float]], floors: Sequence[float | None], title: str
):
    """Microseconds of steps as bars, one colour a part, on a logarithmic axis of totals. `floors` are drawn as marks.

    Returns the matplotlib Figure.
    """
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(9, 0.34 * len(names) + 1.6), layout="constrained")
    left = np.zeros(len(names))
    for part, values in parts.items():
        axes.barh(range(len(names)), values, left=left, label=part)
        left = left + np.asarray(values)
    known = [(floor, place) for place, floor in enumerate(floors) if floor is not None]
    if known:
        axes.scatter(*zip(*known, strict=True), color="black", marker="|", s=90, label="floor", zorder=3)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("microseconds a step")
    axes.set_title(title)
    axes.legend(fontsize=8)
    return figure
