"""Several devices: the rules, what they refuse, the plan; and, in processes of their own, models on simulated devices."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
import tiny_v4
import tiny_v32
from official_v4 import official_v4_config
from official_v41 import official_config

from dsa_jax import cli, context, ranks, sharding
from dsa_jax.cache.requests import arrays_of
from dsa_jax.cache.sizes import CacheSizes
from dsa_jax.config import V41Config, load_config
from dsa_jax.config_v4 import V4Config
from dsa_jax.demo import write_demo_checkpoint
from dsa_jax.device_plan import GIB, plan_devices
from dsa_jax.families import family_of
from dsa_jax.inventory import inventory_of
from dsa_jax.layers.engram import HostTable, Table
from dsa_jax.loading import abstract_parameters, load_model
from dsa_jax.numerics import numerics

HERE = Path(__file__).parent


def shapes_of(config):
    return {path: leaf.shape for path, leaf in abstract_parameters(config).items()}


# ---------------------------------------------------------------- rules


@pytest.fixture(scope="module")
def shapes():
    """Parameters of the three families by path."""
    return {name: shapes_of(module.tiny_config()) for name, module in (("v41", tiny), ("v4", tiny_v4), ("v32", tiny_v32))}


def divided(shapes):
    """Parameter without numbers -> logical axes, of those that a rule divides."""
    found = {re.sub(r"(?<=\.)\d+\.", "", path): sharding.logical_axes(path) for path in shapes}
    return {path: axes for path, axes in found.items() if axes}


EXPERTS = {f"layers.ffn.experts.w{i}.{kind}": ("experts",) for i in (1, 2, 3) for kind in ("weight", "scale")}
QUANTISED = ("weight", "scale")
COMMON = (
    EXPERTS
    | {"embed.weight": ("vocabulary",), "head.weight": ("vocabulary",)}
    | {f"layers.attn.{name}.{kind}": ("heads",) for name in ("wq_b",) for kind in QUANTISED}
    | {f"layers.attn.indexer.wq_b.{kind}": ("index_heads",) for kind in QUANTISED}
    | {"layers.attn.indexer.weights_proj.weight": ("index_heads",)}
)
SHARED_KV = (
    {f"layers.attn.wo_a.{kind}": ("heads",) for kind in QUANTISED}
    | {f"layers.attn.wo_b.{kind}": (None, "heads") for kind in QUANTISED}
    | {"layers.attn.attn_sink": ("heads",)}
)
DRAFTS = {
    "mtp." + path.removeprefix("layers."): axes
    for path, axes in (COMMON | SHARED_KV).items()
    if path.startswith("layers.") and ".indexer." not in path
}
EXPECTED = {
    "v41": COMMON
    | SHARED_KV
    | DRAFTS
    | {f"layers.engram.embed.{kind}": ("table_rows",) for kind in QUANTISED}
    | {f"mtp.markov_head.{name}.weight": ("vocabulary",) for name in ("embed", "head")},
    "v4": COMMON | SHARED_KV | DRAFTS,
    "v32": COMMON
    | {f"layers.attn.wkv_b.{kind}": ("heads",) for kind in QUANTISED}
    | {f"layers.attn.wo.{kind}": (None, "heads") for kind in QUANTISED},
}


@pytest.mark.parametrize("family", EXPECTED)
def test_what_is_divided_and_nothing_else(shapes, family):
    assert divided(shapes[family]) == EXPECTED[family]


def test_rows_of_tables_and_vocabulary_are_filled_up_and_nothing_else():
    sizes = {"ep": 4, "tp": 2}
    assert sharding.placed_shape("embed.weight", (61, 64), sizes) == (62, 64)
    assert sharding.placed_shape("layers.1.engram.embed.scale", (1001, 8), sizes) == (1008, 8)
    assert sharding.placed_shape("layers.1.ffn.experts.w1.scale", (16, 3, 5), sizes) == (16, 3, 5)


def test_a_layer_outside_of_a_mesh_exchanges_nothing():
    x, ids = jnp.arange(6.0).reshape(3, 2), jnp.array([2, -1, 3])
    assert ranks.total(x, "heads") is x and ranks.joined(x, "vocabulary", 0) is x and ranks.own(ids, "experts", 3) is ids
    np.testing.assert_array_equal(ranks.lookup(x, ids, "vocabulary"), [[4, 5], [0, 0], [0, 0]])


def test_meshes_that_are_refused():
    one = jax.devices()[:1]
    with pytest.raises(ValueError, match="A mesh of tp=2 has 2 places for 1 devices: give sizes that multiply"):
        sharding.make_mesh(one, tp=2)
    with pytest.raises(ValueError, match="its axes are dp, ep, tp, cp"):
        sharding.make_mesh(one, sp=1)
    assert dict(sharding.make_mesh(one).shape) == {"dp": 1, "ep": 1, "tp": 1, "cp": 1}


def test_the_command_line_asks_for_a_mesh(tmp_path, capsys):
    write_demo_checkpoint(tmp_path)
    command = ["generate", str(tmp_path), "--tokens", "3,4", "--tp", "2", "--cp", "3"]
    assert cli.main(command) == cli.REFUSED
    assert f"A mesh of tp=2 x cp=3 x ep=1 has 6 places for {jax.device_count()} devices" in capsys.readouterr().err


def refused(config, shapes, **sizes):
    with pytest.raises(ValueError) as caught:
        sharding.check(config, shapes, sizes)
    return str(caught.value)


def test_a_mesh_that_does_not_divide_the_model_is_refused(shapes):
    config = tiny.tiny_config(num_attention_heads=4)
    message = refused(config, shapes["v41"], tp=4)
    assert "The model does not fit a mesh of tp=4" in message
    assert "tp = 4 does not divide o_groups = 2: use 1, 2" in message
    assert "tp = 4 does not divide index_n_heads = 2" in message
    assert "num_attention_heads" not in message
    assert "ep = 3 does not divide n_routed_experts = 4: use 1, 2, 4" in refused(config, shapes["v41"], ep=3)
    assert "dp x ep = 8 does not divide n_routed_experts = 4" in refused(config, shapes["v41"], dp=4, ep=2)
    # Tiles of 128 rows and 64 values of a head: a scale would belong to two devices.
    message = refused(tiny_v32.tiny_config(), shapes["v32"], tp=2)
    assert "layers.0.attn.wo.weight" in message and "would cut its tiles of 128" in message
    assert message.count(".attn.wo.weight") == 1  # of three layers alike
    sharding.check(tiny.tiny_config(), shapes["v41"], {"tp": 2, "ep": 2})
    sharding.check(tiny.tiny_config(), shapes["v41"], {"dp": 2, "ep": 2})
    sharding.check(tiny_v32.tiny_config(), shapes["v32"], {"cp": 4})


# ---------------------------------------------------------------- caches divided by context


@pytest.mark.parametrize("ways, rows", [(1, 4), (2, 4), (3, 5), (4, 1)])
def test_every_position_is_on_one_device(ways, rows, monkeypatch):
    positions = np.arange(-1, 61, dtype=np.int32)
    monkeypatch.setattr(ranks, "parts", lambda logical: ways)
    found, counts = [], []
    for place in range(ways):
        monkeypatch.setattr(ranks, "place", lambda logical, place=place: place)
        own = np.asarray(context.own(jnp.asarray(positions), rows))
        here = own >= 0
        np.testing.assert_array_equal(own[here], np.arange(here.sum()))  # in order, and none left out
        np.testing.assert_array_equal(context.of_all(jnp.asarray(own), rows)[here], positions[here])
        assert ways == 1 or (np.asarray(context.of_all(jnp.asarray(own), rows))[~here] == -1).all()
        for count in positions[1:]:
            seen = int(context.own_count(jnp.asarray(count), rows))
            assert seen == here[1 : count + 1].sum() and seen <= context.own_most(int(count), rows)
        found.append(here)
        counts.append(here[1 : 1 + 60 // (ways * rows) * ways * rows].sum())
    np.testing.assert_array_equal(np.sum(found, axis=0), positions >= 0)
    assert len(set(counts)) == 1  # whole pages are spread evenly


@pytest.mark.parametrize("module, unit", [(tiny, 8), (tiny_v4, 128), (tiny_v32, 1)])
def test_pages_of_a_divided_cache_hold_whole_groups_on_every_device(module, unit, monkeypatch):
    config, four = module.tiny_config(), 4
    family = family_of(config)
    assert family.page_unit(config) == unit
    one = jax.eval_shape(lambda: family.new_cache(config, numerics("bf16"), 1, 64))
    monkeypatch.setattr(ranks, "parts", lambda logical: four)
    divided = jax.eval_shape(lambda: family.new_cache(config, numerics("bf16"), 1, 64))
    assert divided.page_tokens == four * one.page_tokens
    pools = [[pool.shape[1:] for pool in arrays_of(cache)[1]] for cache in (one, divided)]
    assert pools[0] == pools[1]  # what kernels see of a page does not change
    for tokens in (unit * four - 1, unit * four + unit, 2 * unit):
        if tokens % (unit * four):
            with pytest.raises(ValueError, match=rf"on 4 devices \(cp\), in equal parts, .* multiple of {unit * four}\."):
                family.new_cache(config, numerics("bf16"), 1, 64, CacheSizes(page_tokens=tokens))


# ---------------------------------------------------------------- tables on the host


def test_a_table_on_the_host_gives_the_rows_of_one_on_the_device():
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((50, 64)).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.integers(120, 134, (50, 2)).astype(np.uint8)
    device = Table(50, 64)
    device.weight[...], device.scale[...] = jnp.asarray(weight), jnp.asarray(scale)
    ids = jnp.asarray(np.concatenate([[-1, 50, 2**31 - 1], rng.integers(0, 50, 21)]).reshape(2, 4, 3), jnp.int32)
    for mode in ("f32", "bf16"):
        wanted = device(ids, numerics(mode))
        found = jax.jit(lambda ids, mode=mode: HostTable(weight, scale)(ids, numerics(mode)))(ids)
        assert found.dtype == wanted.dtype and np.abs(np.asarray(wanted, np.float32)).max() > 1
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))


def is_mapped(array):
    """Whether an array's bytes are those of a mapped file."""
    while array is not None and not isinstance(array, np.memmap):
        array = getattr(array, "base", None)
    return array is not None


def test_a_checkpoint_whose_tables_stay_in_their_files(tmp_path):
    write_demo_checkpoint(tmp_path / "v41")
    lm = load_model(tmp_path / "v41", progress=False)
    host = load_model(tmp_path / "v41", progress=False, engram_tables="host")
    gone = sorted(set(lm.parameters()) - set(host.parameters()))
    assert gone == sorted(f"layers.{n}.engram.embed.{kind}" for n in (1, 4) for kind in ("scale", "weight"))
    for layer in (1, 4):
        rows = host.model().layers[layer].engram.embed.rows
        for kind in ("weight", "scale"):
            array = getattr(rows, kind)
            assert is_mapped(array)
            wanted = np.asarray(lm.parameter(f"layers.{layer}.engram.embed.{kind}"))
            np.testing.assert_array_equal(array.view(np.uint8), wanted.view(np.uint8))
    with pytest.raises(ValueError, match="engram_tables='disk' is not known. Allowed: device, host"):
        load_model(tmp_path / "v41", progress=False, engram_tables="disk")
    write_demo_checkpoint(tmp_path / "v32", family="v32")
    with pytest.raises(ValueError, match="this model has no Engram tables. Leave the option out."):
        load_model(tmp_path / "v32", progress=False, engram_tables="host")


# ---------------------------------------------------------------- the plan


OFFICIAL = {
    "v41": lambda: V41Config.from_dict(official_config()),
    "v4": lambda: V4Config.from_dict(official_v4_config("flash")),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", OFFICIAL)
def test_official_models_are_planned(family, unchecked):
    config = OFFICIAL[family]()
    inventory = inventory_of(config)
    tensors = {name: spec for name, spec in inventory.tensors(config).items() if not re.match("vision|aligner", name)}
    cache = inventory.caches(config, 131072, 8)
    eight, more = (plan_devices(config, tensors, cache, n, 141 * GIB) for n in (8, 16))
    one = plan_devices(config, tensors, cache, 1, 1000 * GIB)
    of_experts, of_experts_on_eight = (
        next(share.nbytes for share in plan.shares if share.part == "work of experts") for plan in (one, eight)
    )
    assert one.total == sum(spec.nbytes for spec in tensors.values()) + cache.total + 2 * GIB + of_experts
    # Eight groups of the output projection.
    assert eight.mesh == {"ep": 1, "tp": 8, "cp": 1} and more.mesh == {"ep": 2, "tp": 8, "cp": 1}
    on_each = sum(share.nbytes for share in eight.shares if share.divided == "on each")
    alike = on_each - of_experts_on_eight
    assert eight.total - on_each == pytest.approx((one.total - of_experts - alike) / 8, rel=1e-6)
    assert more.total < eight.total and more.fits and eight.fits

    def experts(plan):
        return sum(share.nbytes for share in plan.shares if share.part == "experts")

    assert experts(one) == 8 * experts(eight) == 16 * experts(more)

    # Caches too large to be on every device are divided, no further than they have to be.
    def caches(plan):
        return {share.part: (share.nbytes, share.divided) for share in plan.shares if share.part.startswith("cache: ")}

    longest = config.max_position_embeddings
    large = inventory.caches(config, longest, 300 * GIB // inventory.caches(config, longest, 1).total)
    plan = plan_devices(config, tensors, large, 16, 141 * GIB)
    assert plan.fits and plan.mesh["cp"] > 1 and plan.mesh["ep"] * plan.mesh["tp"] * plan.mesh["cp"] == 16
    assert experts(plan) == experts(more)
    for part, size in large.parts.items():
        divided = part in ("compressed KV", "index keys")
        expected = (-(-size // plan.mesh["cp"]), "cp") if divided else (size, "on each")
        assert caches(plan)[f"cache: {part}"] == expected
    more_of_it = sum(large.parts[part] for part in ("compressed KV", "index keys")) / plan.mesh["cp"]
    assert plan.total + more_of_it > 141 * GIB  # half the cp would not do

    # Where the devices cannot hold the Engram tables, the host does.
    tables = sum(spec.nbytes for name, spec in tensors.items() if ".engram.embed." in name)
    assert eight.host == more.host == 0
    short = plan_devices(config, tensors, cache, 8, eight.total - 1)
    if family == "v41":
        assert short.host == tables > 0 and short.fits and short.total <= eight.total - tables // 8
        assert "Engram tables of" in short.verdict() and "engram_tables=host" in short.verdict()
        assert "not even with Engram tables in host memory" in plan_devices(config, tensors, cache, 8, GIB).verdict()
    else:
        assert tables == short.host == 0


def test_the_plan_says_what_is_too_large(tmp_path, capsys):
    """The command: exit status 0 where the model fits, 1 where it does not, and which parts take most."""
    write_demo_checkpoint(tmp_path)
    command = ["inspect", str(tmp_path), "--context", "4096", "--batch", "4", "--devices", "2"]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert "One of 2 devices of 80.00 GiB" in out and "Fits: mesh ep=1, tp=2, cp=1" in out
    assert cli.main([*command, "--device-memory", "1"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"Does not fit, not even with Engram tables in host memory: a device of mesh ep=\d, tp=\d, cp=\d would hold 2\.0", out)
    assert "Largest: work of a step 2.00 GiB (on each), " in out
    config = load_config(tmp_path)
    inventory = inventory_of(config)
    plan = plan_devices(config, inventory.tensors(config), inventory.caches(config, 4096, 4), 3, GIB)
    assert not plan.fits and plan.verdict().startswith("No mesh of 3 devices carries this model:\n  - cp = 3 ")


# ---------------------------------------------------------------- simulated devices


def started(devices, *arguments):
    environment = os.environ | {
        # On cores that are shared, a simulated device may come to a collective long after the others.
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0 "
        "--xla_cpu_collective_call_terminate_timeout_seconds=1200 --xla_cpu_collective_timeout_seconds=1200",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]),
    }
    return subprocess.Popen(
        [sys.executable, str(HERE / "sharding_cases.py"), *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finished(*processes):
    """What each printed; fails if one failed."""
    printed = []
    for process in processes:
        out, _ = process.communicate(timeout=3600)
        assert process.returncode == 0, out
        printed.append(out)
    return printed


DP_MESHES = {
    "v41": ("dp=2,tp=2,cp=2",),
    "v4": ("dp=4,tp=2", "dp=2,ep=2"),
    "v32": ("dp=2", "dp=4", "dp=2,tp=2", "dp=2,ep=2"),
}
MESHES = {
    "v41": ("ep=2", "tp=8", "cp=2", "tp=2,ep=4", "tp=2,cp=4"),
    "v4": ("ep=4", "tp=8", "cp=2", "ep=2,cp=4", "tp=2,ep=2"),
    "v32": ("tp=2", "tp=4", "ep=2", "tp=8", "cp=2", "cp=4", "tp=2,ep=4", "tp=2,ep=2,cp=2"),
}


def test_divided_caches_select_and_attend_as_whole_ones():
    (out,) = finished(started(4, "--operations"))
    assert "operations agree" in out and "exchange agrees" in out


@pytest.mark.slow
@pytest.mark.parametrize("family", MESHES)
def test_ac_51_52_meshes_give_the_result_of_one_device(family):
    (out,) = finished(started(8, family, *MESHES[family]))
    assert out.count("arrays agree") == len(MESHES[family]), out
    assert ("tables on the host: logits agree" in out) == (family == "v41")


@pytest.mark.slow
@pytest.mark.parametrize("family", DP_MESHES)
def test_groups_of_devices_with_requests_of_their_own_give_the_result_of_one_device(family):
    (out,) = finished(started(8, family, *DP_MESHES[family]))
    assert out.count("arrays agree") == len(DP_MESHES[family]), out


@pytest.mark.slow
@pytest.mark.parametrize("meshes", [("tp=2,ep=4", "cp=8"), ("dp=2,tp=2,ep=2",)])
def test_two_processes_give_the_result_of_one(tmp_path, meshes):
    """A step on every mesh; on the last also what an engine serves, or, where each process has requests of its own,
    `generate`."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    both = [started(4, "--processes", address, "2", str(index), str(tmp_path), "v32", *meshes) for index in range(2)]
    for out in finished(*both):
        assert re.findall(r"(\S+): (\d+) arrays agree", out) == [
            (name, "29" if name == meshes[-1] else "27") for name in meshes
        ], out
        assert re.search(r"v32: (\d+) of (?!\1)\d+ bytes read", out), out
