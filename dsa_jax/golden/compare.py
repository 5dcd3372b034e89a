"""Compares a run with a golden file, tensor by tensor, within the tolerance table."""

import re
from dataclasses import dataclass

import numpy as np

from dsa_jax.golden.cases import Case, Tensors
from dsa_jax.tolerances import CLEAN_SHARE, TOLERANCES, Tolerance

INPUTS = ("input_ids", "positions", "patches", "token_types", "image_start_pos_hw", "encoded_image")
HIDDEN = (
    "h", "input_h", "final_hidden", "final_hidden_normed", "main_hidden", "engram_out", "latent", "logits",
    "logits_at_positions",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One tensor's verdict. ok None: reported only (a quantised mode, where one rounding flip spreads)."""

    name: str
    ok: bool | None
    measure: str
    value: float | None
    limit: float | None
    note: str = ""

    def as_dict(self) -> dict:
        return {"name": self.name, "ok": self.ok, "measure": self.measure, "value": self.value,
                "limit": self.limit, "note": self.note}  # fmt: skip


def compare_case(case: Case, ours: Tensors, mode: str) -> list[Row]:
    """A row for every tensor of the case. A tensor that the run did not compute is a failed row."""
    tolerance, golden = TOLERANCES[mode], case.tensors
    rows = []
    for name in sorted(golden):
        if name in INPUTS:
            continue
        own = name.replace("logits_at_positions", "logits")
        if own not in ours:
            rows.append(Row(case.prefix + name, False, "not computed", None, None))
            continue
        value = np.asarray(at_positions(own, ours[own], golden[name], golden.get("positions")))
        wanted = golden[name]
        if name in ("dspark.logits", "dspark.confidence") and value.shape == wanted.shape:
            same = same_drafts(ours["dspark.output_ids"], golden["dspark.output_ids"])
            value, wanted = value[same], wanted[same]
        rows.append(_judge(case, name, value, wanted, tolerance))
    if not tolerance.exact:
        rows += _agreement(case, ours, tolerance)
    return rows


def at_positions(name: str, ours: np.ndarray, golden: np.ndarray, positions: np.ndarray | None) -> np.ndarray:
    """The rows that the file keeps: `positions` of the large prefill tensors, every second of them for index_q."""
    if positions is None or not name.startswith(("prefill.", "mtp.")):
        return ours
    if name.endswith(".index_q"):
        return ours[positions[::2]]
    if len(ours) != len(golden) == len(positions):
        return ours[positions]
    return ours


def same_drafts(ours: np.ndarray, golden: np.ndarray) -> np.ndarray:
    """Which draft rows follow the same tokens in both, bool [T, n]: a draft depends on the one drafted before it."""
    return np.cumprod(ours[:, :-1] == golden[:, :-1], axis=1).astype(bool)


def _judge(case: Case, name: str, ours: np.ndarray, golden: np.ndarray, tolerance: Tolerance) -> Row:
    label, kind = case.prefix + name, name.rpartition(".")[2]
    if kind == "selected":
        return _judge_lists(case, name, ours, golden, tolerance)
    if ours.shape != golden.shape:
        return Row(label, False, "shape", None, None, f"{list(ours.shape)} instead of {list(golden.shape)}")
    if golden.dtype.kind in "iu":
        judged = tolerance.exact or kind in ("engram_hash_ids", "latent_steps")
        return _judge_equal(label, ours, golden, judged)
    golden = golden.astype(np.float32)
    finite = np.isfinite(golden)
    if not np.array_equal(finite, np.isfinite(ours)) or not np.array_equal(ours[~finite], golden[~finite], equal_nan=True):
        return Row(label, False if tolerance.exact else None, "infinities", None, None, "in different places")
    if not golden.size:
        return Row(label, True, "empty", None, None)
    gap = np.where(finite, ours, 0) - np.where(finite, golden, 0)
    if kind in ("logits", "logits_at_positions") and tolerance.logits is not None:
        largest = float(np.abs(gap).max())
        return Row(label, largest <= tolerance.logits, "largest", largest, tolerance.logits)
    if kind.endswith("margin"):
        # A margin is a difference of two scores, often near 0: a relative distance says nothing.
        scale = max(1.0, float(np.abs(golden[finite]).max(initial=0)))
        largest = float(np.abs(gap).max()) / scale
        return Row(label, largest <= tolerance.logits if tolerance.exact else None, "largest", largest, tolerance.logits)
    distance = float(np.linalg.norm(gap) / max(np.linalg.norm(golden[finite]), 1e-30))
    clean = _row_at(CLEAN_SHARE, gap, np.where(finite, golden, 0))
    first = name.split(".")[1] == "layer0"
    limit = tolerance.hidden_first if first else tolerance.hidden
    ok = distance <= limit and (not name.startswith("prefill.") or clean <= tolerance.clean_row)
    judged = tolerance.exact or kind in HIDDEN
    note = f"row at {CLEAN_SHARE:.0%} {clean:.1e} (allowed in prefill {tolerance.clean_row:.0e})"
    return Row(label, ok if judged else None, "relative", distance, limit, note)


def _row_at(share: float, gap: np.ndarray, golden: np.ndarray) -> float:
    """The relative distance that this share of the rows stays below."""
    gap, golden = gap.reshape(len(gap), -1), golden.reshape(len(golden), -1)
    size = np.maximum(np.linalg.norm(golden, axis=1), 1e-30)
    return float(np.quantile(np.linalg.norm(gap, axis=1) / size, share))


def _judge_equal(label: str, ours: np.ndarray, golden: np.ndarray, judged: bool) -> Row:
    wrong = (ours != golden).reshape(len(golden), -1).any(axis=1)
    share = float(wrong.mean()) if wrong.size else 0.0
    note = f"first differing row {int(np.argmax(wrong))}" if share else ""
    return Row(label, share == 0 if judged else None, "rows differing", share, 0.0, note)


def _judge_lists(case: Case, name: str, ours: np.ndarray, golden: np.ndarray, tolerance: Tolerance) -> Row:
    """Ours is always index_topk wide with -1 behind the list. The file's width follows the length; -1, or -2, may stand
    anywhere in it for none."""
    label = case.prefix + name
    wanted = np.full(ours.shape, -1, np.int64)
    entries = np.sort(np.where(golden < 0, np.iinfo(np.int64).max, golden.astype(np.int64)), axis=1)
    wanted[:, : golden.shape[1]] = np.where(entries == np.iinfo(np.int64).max, -1, entries)
    if golden.shape[1] > ours.shape[1] or len(golden) != len(ours):
        return Row(label, False, "shape", None, None, f"{list(ours.shape)} for {list(golden.shape)}")
    if tolerance.exact:
        return _judge_equal(label, ours, wanted, True)
    rows = _rows_with_margin(case, name, len(golden))
    shares = [
        len(np.intersect1d(a[a >= 0], b[b >= 0])) / max(1, (b >= 0).sum())
        for a, b in zip(ours[rows], wanted[rows], strict=True)
        if (b >= 0).any()
    ]
    share = float(np.mean(shares)) if shares else 1.0
    equal = float((ours[rows] == wanted[rows]).all(axis=1).mean()) if rows.any() else 1.0
    return Row(label, share >= tolerance.lists, "list overlap", share, tolerance.lists, f"{equal:.0%} of lists equal")


def _rows_with_margin(case: Case, name: str, n: int) -> np.ndarray:
    """Rows whose stored margin at the edge is positive, at the list's own source layer or one before it."""
    stage, layer, _ = name.split(".")
    for source in range(int(layer.removeprefix("layer")), -1, -1):
        margin = case.tensors.get(f"{stage}.layer{source}.index_topk_margin")
        if margin is not None:
            return margin > 0
    return np.ones(n, bool)


def _agreement(case: Case, ours: Tensors, tolerance: Tolerance) -> list[Row]:
    """The share of rows whose best token is the file's, prefill and decode together."""
    pairs = []
    for name in ("prefill.logits", "prefill.logits_at_positions", "decode.logits"):
        if name in case.tensors:
            own = name.replace("logits_at_positions", "logits")
            pairs.append((at_positions(own, ours[own], case.tensors[name], case.tensors.get("positions")), case.tensors[name]))
    same = np.concatenate([a.argmax(-1) == b.argmax(-1) for a, b in pairs])
    share = float(same.mean())
    return [Row(case.prefix + "best token", share >= tolerance.top1, "rows agreeing", share, tolerance.top1)]


def table(rows: list[Row]) -> list[str]:
    """Lines for the screen: tensors of the same kind in one line, with the worst value; failures one by one."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        kind = re.sub(r"\b(layer|len)\d+", r"\1*", row.name)
        groups.setdefault((kind, row.measure), []).append(row)
    lines = [f"{'tensor':40s} {'n':>4s}  {'verdict':8s} {'measure':15s} {'worst':>9s} {'allowed':>9s}"]
    for (kind, measure), group in groups.items():
        judged = [r.ok for r in group if r.ok is not None]
        verdict = "-" if not judged else "ok" if all(judged) else "FAIL"
        values = [r.value for r in group if r.value is not None]
        better_high = measure in ("list overlap", "rows agreeing")
        worst = "" if not values else f"{(min if better_high else max)(values):9.2e}"
        allowed = "" if group[0].limit is None or not judged else f"{max(r.limit for r in group):9.2e}"
        lines.append(f"{kind:40s} {len(group):4d}  {verdict:8s} {measure:15s} {worst:>9s} {allowed:>9s}")
    for row in rows:
        if row.ok is False:
            value = "" if row.value is None else f" {row.value:.3e} (allowed {row.limit:.3e})"
            lines.append(f"FAIL {row.name}: {row.measure}{value} {row.note}".rstrip())
    return lines
