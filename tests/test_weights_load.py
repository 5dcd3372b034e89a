"""From files to parameters: the plan refuses everything at once, the load writes each parameter exactly once."""

import dataclasses
import shutil
import threading
import tracemalloc
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import read_golden
from safetensors_files import write_raw, write_sharded

from dsa_jax import sharding
from dsa_jax.weights import LoadPlan, as_exponents, load, make_plan
from dsa_jax.weights.names import left_out_reason, target


def struct(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


def quiet(plan, **options):
    return load(plan, progress=False, **options)


def refused(abstract, directory):
    with pytest.raises(ValueError) as caught:
        make_plan(abstract, directory)
    return str(caught.value)


def bf16(*values):
    return np.array(values, ml_dtypes.bfloat16).tobytes()


def f32(*values):
    return np.array(values, np.float32).tobytes()


# ---------------------------------------------------------------- the golden checkpoint


@pytest.fixture(scope="module")
def stored():
    """Every tensor of the golden checkpoint, read by the tests' own reader."""
    parts = [read_golden(f"v41/checkpoint/model-0000{i}-of-00002") for i in (1, 2)]
    return {name: array for part in parts for name, array in part.items()}


@pytest.fixture(scope="module")
def wanted(stored):
    """Path -> array as it should be in memory: experts stacked, scales and packed FP4 as bytes."""
    result, experts = {}, {}
    for name, array in stored.items():
        if left_out_reason(name):
            continue
        if array.dtype == np.int8 or array.dtype == ml_dtypes.float8_e8m0fnu:
            array = array.view(np.uint8)
        place = target(name)
        if place.expert is None:
            result[place.path] = array
        else:
            experts.setdefault(place.path, {})[place.expert] = array
    return result | {path: np.stack([found[e] for e in range(len(found))]) for path, found in experts.items()}


@pytest.fixture(scope="module")
def abstract(wanted):
    return {path: struct(array.shape, array.dtype) for path, array in wanted.items()}


@pytest.fixture
def checkpoint(request):
    return request.config.rootpath / "tests/golden/v41/checkpoint"


@pytest.fixture
def copied(tmp_path, checkpoint):
    """A copy of the golden checkpoint to be damaged."""
    return shutil.copytree(checkpoint, tmp_path / "checkpoint")


def test_golden_checkpoint_bytes(abstract, wanted, checkpoint):
    plan = make_plan(abstract, checkpoint)
    arrays = quiet(plan)
    assert arrays.keys() == wanted.keys()
    for path, array in arrays.items():
        assert isinstance(array, jax.Array) and array.dtype == wanted[path].dtype, path
        assert np.asarray(array).tobytes() == wanted[path].tobytes(), path
    assert arrays["layers.3.ffn.experts.w1.weight"].shape == (8, 64, 64)
    assert arrays["layers.3.attn.wq_a.weight"].dtype == jnp.float8_e4m3fn
    notes = "\n".join(plan.notes)
    assert len(plan.notes) == 2 and "11 tensors" in notes and "vision tower" in notes and "4 tensors" in notes


def test_widening_where_the_model_wants_float32(abstract, wanted, checkpoint):
    path = "layers.2.attn.compressor.wkv.weight"
    array = quiet(make_plan({**abstract, path: struct((64, 128), jnp.float32)}, checkpoint))[path]
    assert array.dtype == jnp.float32
    np.testing.assert_array_equal(array, wanted[path].astype(np.float32))


def test_files_may_go_away_after_the_load(abstract, wanted, copied):
    arrays = quiet(make_plan(abstract, copied))
    for path in copied.glob("*.safetensors"):
        size = path.stat().st_size
        path.write_bytes(b"\xff" * size)
    for path, array in wanted.items():
        assert np.asarray(arrays[path]).tobytes() == array.tobytes(), path


def test_progress_bar_shows_bytes(abstract, checkpoint, capsys):
    load(make_plan(abstract, checkpoint))
    shown = capsys.readouterr().err
    assert "weights: 100%" in shown and "B/s" in shown and "4." in shown


# ---------------------------------------------------------------- problems, all at once


def test_ac_62_missing_and_cut_shards_in_one_error(tmp_path, monkeypatch):
    shards = {
        f"model-0000{i}-of-00003.safetensors": {f"t{i}.{j}": ("F32", (4,), f32(1, 2, 3, 4)) for j in range(2)}
        for i in (1, 2, 3)
    }
    write_sharded(tmp_path, shards)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    cut = tmp_path / "model-00003-of-00003.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    abstract = {f"t{i}.{j}": struct((4,), jnp.float32) for i in (1, 2, 3) for j in range(2)}
    monkeypatch.setattr(np, "memmap", None)  # nothing may be read before the check
    message = refused(abstract, tmp_path)
    assert "model-00002-of-00003.safetensors is missing (with 2 tensors)" in message
    assert "model-00003-of-00003.safetensors is cut: 1 of" in message and "(1 tensors not whole)" in message
    assert "2 of 3 shards found, 3 of 6 tensors whole" in message
    assert f"hf download REPOSITORY --local-dir {tmp_path}" in message
    assert "nothing was allocated" in message
    assert "missing tensors" not in message  # those of the missing shard are said with the shard


def test_ac_62_on_the_golden_checkpoint(abstract, copied):
    (copied / "model-00001-of-00002.safetensors").unlink()
    other = copied / "model-00002-of-00002.safetensors"
    other.write_bytes(other.read_bytes()[:-70_000])
    message = refused(abstract, copied)
    assert "model-00001-of-00002.safetensors is missing (with " in message
    assert "model-00002-of-00002.safetensors is cut: 70000 of" in message
    assert "1 of 2 shards found" in message and "of 957 tensors whole" in message


def test_missing_unexpected_and_misshapen_tensors_together(tmp_path):
    write_sharded(
        tmp_path,
        {
            "one.safetensors": {
                "norm.weight": ("BF16", (4,), bf16(1, 2, 3, 4)),
                "strange.weight": ("BF16", (1,), bf16(1)),
                "layers.0.attn.wkv.weight": ("F32", (2, 2), f32(1, 2, 3, 4)),
                "vision.norm.weight": ("BF16", (1,), bf16(1)),
            }
        },
    )
    abstract = {
        "norm.weight": struct((5,), jnp.bfloat16),
        "head.weight": struct((4, 4), jnp.bfloat16),
        "layers.0.attn.wkv.weight": struct((2, 2), jnp.float8_e4m3fn),
    }
    message = refused(abstract, tmp_path)
    assert "norm.weight in one.safetensors is [4]; needed: [5]" in message
    assert "head.weight is in no file" in message
    assert "strange.weight in one.safetensors belongs to no parameter" in message
    assert (
        "layers.0.attn.wkv.weight in one.safetensors is F32; allowed for layers.0.attn.wkv.weight: F8_E4M3" in message
    )
    assert "vision" not in message and "hf download" not in message


def test_experts_missing_surplus_and_mixed(tmp_path):
    def expert(layer, e, dtype="I8"):
        return {f"layers.{layer}.ffn.experts.{e}.w1.weight": (dtype, (2, 2 if dtype == "I8" else 4), b"abcd")}

    tensors = expert(0, 0) | expert(0, 2) | expert(0, 9) | expert(1, 0) | expert(1, 1, "F4")
    write_raw(tmp_path / "model.safetensors", tensors)
    abstract = {
        "layers.0.ffn.experts.w1.weight": struct((4, 2, 2), jnp.uint8),
        "layers.1.ffn.experts.w1.weight": struct((2, 2, 2), jnp.uint8),
    }
    message = refused(abstract, tmp_path)
    assert "layers.0.ffn.experts.w1.weight has no tensor for 2 of 4 experts: 1, 3" in message
    assert "layers.0.ffn.experts.w1.weight has 4 experts, but the files also hold 9" in message
    assert "layers.1.ffn.experts.w1.weight is stored as F4 and I8; its tensors must agree" in message


def test_the_same_tensor_under_two_names(tmp_path):
    write_raw(
        tmp_path / "model.safetensors",
        {"norm.weight": ("BF16", (1,), bf16(1)), "model.norm.weight": ("BF16", (1,), bf16(2))},
    )
    message = refused({"norm.weight": struct((1,), jnp.bfloat16)}, tmp_path)
    assert "model.norm.weight and norm.weight are the same tensor" in message


def test_many_problems_are_counted(tmp_path):
    write_raw(tmp_path / "model.safetensors", {"norm.weight": ("BF16", (1,), bf16(1))})
    abstract = {f"layers.{i}.norm": struct((1,), jnp.bfloat16) for i in range(50)}
    message = refused(abstract, tmp_path)
    assert "missing tensors (50):" in message and "and 30 more" in message


def test_empty_folder(tmp_path):
    message = refused({"norm.weight": struct((1,), jnp.bfloat16)}, tmp_path)
    assert "neither model.safetensors.index.json nor a .safetensors file" in message


# ---------------------------------------------------------------- dtypes


def one(tmp_path, name, kind, shape, data, wanted_shape, wanted_dtype):
    write_raw(tmp_path / "model.safetensors", {name: (kind, shape, data)})
    return make_plan({name: struct(wanted_shape, wanted_dtype)}, tmp_path)


def test_ac_28_exponent_bytes_stay_bytes(tmp_path):
    data = bytes([0, 1, 126, 127, 128, 254, 255])
    plan = one(tmp_path, "w.scale", "F8_E8M0", (1, 7), data, (1, 7), jnp.uint8)
    scale = quiet(plan)["w.scale"]
    assert scale.dtype == jnp.uint8 and scale.tolist() == [[0, 1, 126, 127, 128, 254, 255]]


def test_ac_28_float_scales_are_not_reinterpreted(tmp_path):
    plan = one(tmp_path, "w.scale", "F32", (1, 3), f32(0.5, 3.0, 1e-3), (1, 3), jnp.uint8)
    scale = quiet(plan)["w.scale"]
    assert scale.dtype == jnp.float32
    np.testing.assert_array_equal(scale, np.array([[0.5, 3.0, 1e-3]], np.float32))


def test_ac_28_float_scales_of_experts(tmp_path):
    names = [f"layers.0.ffn.experts.{e}.w1.scale" for e in range(2)]
    write_raw(tmp_path / "model.safetensors", {n: ("F32", (1, 2), f32(i + 1, i + 2)) for i, n in enumerate(names)})
    plan = make_plan({"layers.0.ffn.experts.w1.scale": struct((2, 1, 2), jnp.uint8)}, tmp_path)
    scale = quiet(plan)["layers.0.ffn.experts.w1.scale"]
    assert scale.dtype == jnp.float32 and scale.tolist() == [[[1, 2]], [[2, 3]]]


def test_float_scales_that_are_powers_of_two_become_their_exponents(caplog):
    """Every byte that E8M0 has for a number; where one factor is another number, infinite or NaN, a scale stays as it is."""
    powers = 2.0 ** (np.arange(255) - 127).reshape(5, 51)
    given = {"a.scale": jnp.asarray(powers, jnp.float32), "a.weight": jnp.ones(3), "b.scale": jnp.full((1, 2), 130, jnp.uint8)}
    for i, wrong in enumerate((3.0, -2.0, 0.0, 2.0**-128, np.inf, np.nan)):
        given[f"c{i}.scale"] = jnp.array([[1.0, wrong]], jnp.float32)
    found = as_exponents(given)
    assert found["a.scale"].dtype == jnp.uint8
    np.testing.assert_array_equal(found["a.scale"], np.arange(255).reshape(5, 51))
    assert list(found) == list(given) and all(found[name] is given[name] for name in given if name != "a.scale")
    assert "6 of 7 float scales have factors that are no powers of two" in caplog.text


@pytest.mark.parametrize("kind", ["F4", "I8", "U8"])
def test_ac_61_packed_fp4_by_any_name(tmp_path, kind):
    data = bytes(range(8))
    plan = one(tmp_path, "w.weight", kind, (2, 8) if kind == "F4" else (2, 4), data, (2, 4), jnp.uint8)
    assert quiet(plan)["w.weight"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_ac_50_attention_sink_is_float32(tmp_path, kind):
    values = [1.0, -2.5, 0.125, 20.0]
    data = f32(*values) if kind == "F32" else bf16(*values)
    plan = one(tmp_path, "layers.0.attn.attn_sink", kind, (4,), data, (4,), jnp.float32)
    sink = quiet(plan)["layers.0.attn.attn_sink"]
    assert sink.dtype == jnp.float32 and sink.tolist() == values


@pytest.mark.parametrize("kind", ["F16", "F64", "F8_E4M3", "I32", "U8"])
def test_ac_50_any_other_sink_is_refused(tmp_path, kind):
    size = {"F16": 2, "F64": 8, "I32": 4}.get(kind, 1)
    with pytest.raises(ValueError, match=f"attn_sink in model.safetensors is {kind}; allowed .*: F32, BF16"):
        one(tmp_path, "layers.0.attn.attn_sink", kind, (4,), bytes(4 * size), (4,), jnp.float32)


@pytest.mark.parametrize(
    ("name", "kind", "wanted"),
    [
        ("w.scale", "I8", jnp.uint8),  # packed FP4 is no scale
        ("w.weight", "F8_E8M0", jnp.uint8),  # and a scale is no weight
        ("w.weight", "F32", jnp.uint8),
        ("w.weight", "F32", jnp.bfloat16),  # would lose bits
        ("w.weight", "BF16", jnp.float8_e4m3fn),
        ("w.weight", "F16", jnp.float32),
        ("w.weight", "F4", jnp.float32),
        ("w.weight", "F64", jnp.float32),
    ],
)
def test_other_conversions_are_refused(tmp_path, name, kind, wanted):
    size = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8}.get(kind, 1)
    with pytest.raises(ValueError, match=f"is {kind}; allowed for {name}"):
        one(tmp_path, name, kind, (2, 4) if kind != "F4" else (2, 8), bytes(8 * size), (2, 4), wanted)


def test_token_tables_of_64_bits(tmp_path):
    table = np.array([[0, 5], [2**31 - 1, -(2**31)]], np.int64)
    plan = one(tmp_path, "tid", "I64", (2, 2), table.tobytes(), (2, 2), jnp.int32)
    assert quiet(plan)["tid"].dtype == jnp.int32
    np.testing.assert_array_equal(quiet(plan)["tid"], table)
    plan = one(tmp_path, "tid", "I64", (2,), np.array([0, 2**31], np.int64).tobytes(), (2,), jnp.int32)
    with pytest.raises(ValueError, match="values from 0 to 2147483648 do not fit in 32 bits"):
        quiet(plan)


# ---------------------------------------------------------------- coverage


def test_ac_58_scales_of_zero_bytes(tmp_path):
    names = [f"layers.0.ffn.experts.{e}.w1.scale" for e in range(3)]
    bytes_of = [b"\x7f\x7f", b"\0\0", b"\0\x01"]
    tensors = {name: ("F8_E8M0", (1, 2), data) for name, data in zip(names, bytes_of, strict=True)}
    tensors["v.scale"] = ("F32", (2,), f32(0, 0))
    tensors["v.weight"] = ("F8_E4M3", (2,), b"\0\0")  # a weight may be zero
    write_raw(tmp_path / "model.safetensors", tensors)
    abstract = {
        "layers.0.ffn.experts.w1.scale": struct((3, 1, 2), jnp.uint8),
        "v.scale": struct((2,), jnp.uint8),
        "v.weight": struct((2,), jnp.float8_e4m3fn),
    }
    with pytest.raises(ValueError) as caught:
        quiet(make_plan(abstract, tmp_path))
    message = str(caught.value)
    assert f"{names[1]} in model.safetensors: all bytes of this scale are zero" in message and "v.scale" in message
    assert names[0] not in message and names[2] not in message and "v.weight" not in message


def test_ac_58_every_parameter_is_written_once(abstract, checkpoint):
    plan = make_plan(abstract, checkpoint)
    stack = next(i for i, entry in enumerate(plan.entries) if entry.stacked)
    short = dataclasses.replace(plan.entries[stack], sources=plan.entries[stack].sources[:-1])
    single = next(i for i, entry in enumerate(plan.entries) if not entry.stacked)
    empty = dataclasses.replace(plan.entries[single], sources=())
    entries = list(plan.entries)
    entries[stack], entries[single] = short, empty
    entries.append(entries[-1])
    with pytest.raises(ValueError) as caught:
        quiet(LoadPlan(tuple(entries), ()))
    message = str(caught.value)
    assert f"{short.path} would be written in part: 7 tensors for 8 places" in message
    assert f"{empty.path} would be written in part: 0 tensors for 1 places" in message
    assert f"{entries[-1].path} would be written twice" in message


def test_put_must_keep_the_array(tmp_path):
    plan = one(tmp_path, "w", "F32", (2,), f32(1, 2), (2,), jnp.float32)
    with pytest.raises(ValueError, match=r"put\(\) made bfloat16\[2\] of w, which is float32\[2\]"):
        quiet(plan, put=lambda array: jnp.asarray(array, jnp.bfloat16))


@dataclasses.dataclass
class Placed:
    """Stands for an array on a device: the host keeps nothing of it."""

    shape: tuple
    dtype: np.dtype


def test_ac_61_memory_rise_is_bounded_by_the_largest_parameter(tmp_path, unchecked):
    megabyte = 2**20
    sizes = {"a": 4, "b": 16, "c": 8, "d": 4}
    rng = np.random.default_rng(0)
    tensors = {name: ("U8", (size * megabyte,), rng.bytes(size * megabyte)) for name, size in sizes.items()}
    for e in range(8):
        tensors[f"x.ffn.experts.{e}.w1.weight"] = ("I8", (2, megabyte), rng.bytes(2 * megabyte))
    write_raw(tmp_path / "model.safetensors", tensors)
    del tensors
    abstract = {name: struct((size * megabyte,), jnp.uint8) for name, size in sizes.items()}
    abstract["x.ffn.experts.w1.weight"] = struct((8, 2, megabyte), jnp.uint8)
    plan = make_plan(abstract, tmp_path)
    seen = {}

    def put(array):
        seen[array.shape] = int(array.reshape(-1)[-1])
        return Placed(array.shape, array.dtype)

    tracemalloc.start()
    quiet(plan, put=put)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(seen) == 4  # "a" and "d" share a shape
    assert peak < 16 * megabyte + megabyte // 2


def test_readers_share_the_bytes_of_the_largest_parameter(tmp_path, unchecked):
    """Four small parameters are under way at once; one as large as they together is alone."""
    readers, size = 4, 2**20
    names = [f"small{n}" for n in range(readers)] + ["large"] + [f"small{n}" for n in range(readers, 2 * readers)]
    sizes = {name: readers * size if name == "large" else size for name in names}
    tensors = {name: ("U8", (nbytes,), bytes([n]) * nbytes) for n, (name, nbytes) in enumerate(sizes.items())}
    write_raw(tmp_path / "model.safetensors", tensors)
    plan = make_plan({name: struct((nbytes,), jnp.uint8) for name, nbytes in sizes.items()}, tmp_path)
    assert [entry.path for entry in plan.entries] == names
    together, lock, under_way, seen = threading.Barrier(readers), threading.Lock(), [], []

    def put(array):
        with lock:
            under_way.append(array.nbytes)
            seen.append(sum(under_way))
        if array[0] < readers:  # the first ones, in front of which the large one cannot come
            together.wait(timeout=60)  # breaks where fewer are under way at once
        assert array.min() == array.max()
        with lock:
            under_way.remove(array.nbytes)
        return Placed(array.shape, array.dtype)

    tracemalloc.start()
    quiet(plan, put=put, readers=readers)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(seen) == len(names) and max(seen) == readers * size
    assert peak < 1.3 * readers * size


@pytest.mark.parametrize("readers", [1, 4])
def test_memory_rise_on_a_mesh_is_bounded_by_the_largest_part(tmp_path, unchecked, monkeypatch, readers):
    """Of four devices, which stand for more memory than the host has: each part is given away before the next is read."""
    parts, megabyte = 4, 2**20
    rng = np.random.default_rng(0)
    tensors = {
        f"layers.{layer}.ffn.experts.{e}.w{n}.weight": ("I8", (2, megabyte), rng.bytes(2 * megabyte))
        for layer in range(2) for e in range(8) for n in (1, 2, 3)
    }  # fmt: skip
    tensors["embed.weight"] = ("BF16", (4 * megabyte, 2), rng.bytes(16 * megabyte))
    write_raw(tmp_path / "model.safetensors", tensors)
    del tensors
    abstract = {
        f"layers.{layer}.ffn.experts.w{n}.weight": struct((8, 2, megabyte), jnp.uint8)
        for layer in range(2) for n in (1, 2, 3)
    } | {"embed.weight": struct((4 * megabyte, 2), jnp.bfloat16)}  # fmt: skip
    plan, seen = make_plan(abstract, tmp_path), []

    def own_parts(path, shape, mesh):
        size = shape[0] // parts
        return {((n * size, (n + 1) * size), *((0, other) for other in shape[1:])): [n] for n in range(parts)}

    def device_put(array, device):
        seen.append(array.nbytes)
        return Placed(array.shape, array.dtype)

    monkeypatch.setattr(sharding, "own_parts", own_parts)
    monkeypatch.setattr(jax, "device_put", device_put)
    monkeypatch.setattr(jax, "make_array_from_single_device_arrays", lambda shape, *rest, dtype: Placed(shape, dtype))
    monkeypatch.setattr(sharding, "NamedSharding", lambda *rest: None)
    mesh = types.SimpleNamespace(shape={"tp": parts, "ep": 1, "cp": 1})
    tracemalloc.start()
    load(plan, progress=False, mesh=mesh, readers=readers)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(seen) == plan.nbytes == 112 * megabyte and max(seen) == 4 * megabyte
    assert peak < 1.3 * max(seen)
