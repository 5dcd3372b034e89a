"""The model benchmark on a CPU: every part is timed, floors follow the config, and every role stays in the cut model."""

import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from engines import small_model
from tiny import CHECKPOINT

from dsa_jax import bench_model
from dsa_jax.bench_floor import PARTS, layers_of, work_of
from dsa_jax.cache.requests import arrays_of
from dsa_jax.cli import main
from dsa_jax.config import load_config
from dsa_jax.layer_plan import layer_plan
from dsa_jax.numerics import F32


def test_a_cut_model_shows_every_role_at_the_config_s_widths():
    config = load_config(CHECKPOINT)
    cut = bench_model.cut(config, 2)
    modes = [role.mode for role in layer_plan(cut)]
    assert modes == ["window", "full", "reuse", "full", "full", "reuse", "reindex"]
    assert cut.n_routed_experts == 2 and cut.hidden_size == config.hidden_size and cut.index_topk == config.index_topk


def test_work_is_counted_from_the_records_and_lists():
    """One decode step of the small model at 32 tokens, by hand: two sources and a consumer of 3 blocks of 4 positions."""
    lm = small_model()
    key = 32 // 2 + 32 // 32  # MXFP4 index key of width 32
    listed = list(layers_of(lm.config, lm.plan, 32))
    assert [(layer.scored, layer.key_bytes) for layer in listed] == [(16, key), (32, key), (12, key)]
    assert [layer.attended for layer in listed] == [((8, 33), (6, 18))] * 3
    work = work_of(lm, batch=2, context=32, rows=1)
    assert work["indexer"] == (2 * (16 + 32 + 12) * (key + 4), 2 * 2 * (16 + 32 + 12) * 2 * 32)
    assert work["selection"][0] == 4 * 2 * (16 + 32 + 12 + 3 * 6)
    assert all(nbytes > 0 for nbytes, _ in work.values())


def test_a_filled_cache_shares_pages_that_do_not_fit(monkeypatch):
    """Three requests of five pages in a pool of seven: all pages are used, each by two or three requests."""
    lm = small_model()
    unit = lm.new_cache(1, 1).page_tokens
    pages, shared = bench_model.most_pages(lm, 3, 5 * unit)
    assert (pages, shared) == (15, 1)
    one = bench_model.page_bytes(lm.new_cache(1, unit))
    monkeypatch.setattr(bench_model, "_free_bytes", lambda: int(7.5 * one / bench_model.POOL_SHARE))
    pages, shared = bench_model.most_pages(lm, 3, 5 * unit)
    assert (pages, shared) == (7, 3)
    cache = bench_model.filled_cache(lm, 3, 4 * unit, unit, pages)
    table = np.asarray(cache.block_table)
    assert table.shape == (3, 5) and set(table.flat) == set(range(7)) and cache.length.tolist() == [4 * unit] * 3
    assert {len(pool) for pool in arrays_of(cache)[1]} == {7} and all(np.asarray(pool).any() for pool in arrays_of(cache)[1])


def test_parts_of_a_program_go_by_the_names_of_operations():
    program = """
      %fusion.1 = f32[4] fusion(%a), kind=kLoop, metadata={op_name="jit(decode)/while/body/indexer_logits/dot_general"}
      ROOT %sort.2 = f32[4] sort(%b), metadata={op_name="jit(decode)/top_k/sort"}
      %custom-call.3 = f32[4] custom-call(%c), metadata={op_name="jit(decode)/sparse_decode/pallas_call"}
      %dot.4 = f32[4] dot(%d), metadata={op_name="jit(decode)/experts/while/body/dot_general"}
      %copy.5 = f32[4] copy(%e)
      %custom-call.6 = bf16[4] custom-call(%f), metadata={op_name="jit(decode)/experts/grouped_gemm/jit(_multiply)/body"}
      %custom-call.7 = bf16[4] custom-call(%g), metadata={op_name="jit(decode)/grouped_gemm/jit(_multiply)/body"}
    """
    assert bench_model._part_of_instructions(program) == {
        "fusion.1": "indexer", "sort.2": "selection", "custom-call.3": "attention", "dot.4": "experts", "copy.5": "rest",
        "custom-call.6": "experts", "custom-call.7": "rest",
    }  # fmt: skip


def test_steps_that_share_fusions_are_not_compiled_at_the_same_time(monkeypatch):
    """Every step of the first context with kernels, at once, before any other: XLA would search for the fastest form of
    what they share in each of them."""
    calls, begun = [], threading.Barrier(3, timeout=60)

    class Step:
        def __init__(self, lm, kind, batch, count, context):
            self.lm, self.name = lm, ("kernels" if lm is kernels else "references", kind, batch, context)

        def compile(self, in_parts):
            assert in_parts == (self.lm is kernels)
            calls.append(("begin", self.name))
            if self.lm is kernels and self.name[-1] == 64:
                begun.wait()
            calls.append(("end", self.name))

    def measured(ours, theirs):
        assert ours.name[1:] == theirs.name[1:]
        _, kind, batch, context = ours.name
        return bench_model.StepRow(kind, batch, context, 1, 1.0, 1.0, {}, None, None, 1, (), "", "")

    kernels = SimpleNamespace(model=lambda: None)
    monkeypatch.setattr(bench_model, "_TimedStep", Step)
    monkeypatch.setattr(bench_model, "random_model", lambda *_: kernels)
    monkeypatch.setattr(bench_model, "LanguageModel", lambda *_: SimpleNamespace())
    monkeypatch.setattr(bench_model, "_measure", measured)
    monkeypatch.setattr(bench_model.os, "cpu_count", lambda: 3)
    rows = bench_model.run(load_config(CHECKPOINT), F32, batches=[1, 2], contexts=[64, 128], chunk=16, reference=True)
    first = {("kernels", kind, batch, 64) for kind, batch in (("prefill", 1), ("decode", 1), ("decode", 2))}
    assert {name for _, name in calls[:6]} == first and len(set(calls)) == len(calls) == 24
    assert [row.context for row in rows] == [64] * 3 + [128] * 3


@pytest.mark.slow
def test_bench_model_on_the_command_line(tmp_path, capsys):
    arguments = ["bench", "model", "--config", str(CHECKPOINT), "--batch", "2", "--context", "64", "--chunk", "16"]
    assert main([*arguments, "--mode", "f32", "--no-xla", "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["kind"], row["batch"], row["rows"]) for row in rows] == [("prefill", 1, 16), ("decode", 2, 1)]
    for row in rows:
        assert row["us"] > 0 and set(row["parts"]) == set(PARTS) and row["floors"] is None and row["shared"] == 1
        assert all(np.isfinite(us) and us >= 0 for us in row["parts"].values())
        assert row["parts"]["experts"] > 0 and row["parts"]["rest"] > 0
    assert "decode batch 2 at 64" in capsys.readouterr().out


def test_what_bench_model_cannot_do_is_said(capsys):
    assert main(["bench", "model"]) == 2
    assert "bench model needs --config" in capsys.readouterr().err
    assert main(["bench", "model", "--config", str(CHECKPOINT), "--context", "64"]) == 2
    assert "context=64 must hold the chunk of 2048 tokens" in capsys.readouterr().err
    assert main(["bench", "model", "--config", str(CHECKPOINT), "--context", "31", "--chunk", "16"]) == 2
    assert "context=31 must hold the chunk of 16 tokens, 32 decode steps," in capsys.readouterr().err
