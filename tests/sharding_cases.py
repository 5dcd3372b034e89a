"""Runs in a process of its own, which simulates devices: one family on several meshes against one device.

Arguments: the family, then meshes such as tp=2,ep=4. Prints a line for each; an assertion that fails ends the process.
With --operations alone: what selects and attends over divided caches, and experts that exchange rows, against the same
on one device.
With --processes ADDRESS COUNT INDEX FOLDER before them it is one of several processes whose devices make the mesh
together; they meet by files in the folder.
"""

import functools
import importlib
import math
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from dsa_jax import context, ops, ranks, sharding
from dsa_jax.cache.sizes import CacheSizes
from dsa_jax.decode import LanguageModel, generate
from dsa_jax.demo import write_demo_checkpoint
from dsa_jax.engine import Engine
from dsa_jax.layers import moe
from dsa_jax.loading import load_model
from dsa_jax.numerics import numerics
from dsa_jax.sampling import Sampling
from dsa_jax.tolerances import TOLERANCES

load = importlib.import_module("dsa_jax.weights.load")  # the package's name `load` is the function

# Heads, groups and experts that 8 devices divide, in whole tiles; a vocabulary that they do not. Ratios whose groups end
# often enough that few tokens make rows on every device.
COMMON = dict(vocab_size=61, num_attention_heads=8, index_n_heads=8, n_routed_experts=16)
CHANGES = {
    "v41": dict(o_groups=8, dspark_n_routed_experts=8, image_token_id=60),
    "v4": dict(o_groups=8, head_dim=96, qk_rope_head_dim=32, compress_ratios=(0, 4, 8, 0)),
    "v32": dict(qk_nope_head_dim=128, qk_rope_head_dim=128, v_head_dim=128, index_head_dim=128),
}
TINY = {"v41": "tiny", "v4": "tiny_v4", "v32": "tiny_v32"}
PAGE_TOKENS = 8  # of one device: whole groups and candidate blocks of all families


def one_device(family: str) -> LanguageModel:
    """The tiny model of the family, with all its weights on one device."""
    tiny = importlib.import_module(TINY[family])
    config = tiny.tiny_config(**COMMON | CHANGES[family])
    return LanguageModel(tiny.tiny_module(config), numerics("f32"))


def on_mesh(lm: LanguageModel, mesh: jax.sharding.Mesh) -> LanguageModel:
    """The same model on the devices of `mesh`."""
    parameters = lm.parameters()
    sharding.check(lm.config, {name: x.shape for name, x in parameters.items()}, mesh.shape)
    placed = sharding.place(parameters, mesh)
    graphdef, state = nnx.split(lm.model())
    state = jax.tree.unflatten(jax.tree.structure(state), [placed[name] for name in lm._names])
    return LanguageModel(nnx.merge(graphdef, state), lm.numerics, mesh=mesh)


meetings: list[tuple[Path, int, int]] = []
"""Where processes have met and are to meet: folder, this process, how many there are."""


def meet() -> None:
    """Waits until all processes are here."""
    if not meetings:
        return
    folder, index, count = meetings[-1]
    (folder / f"{len(meetings)}-{index}").touch()
    while not all((folder / f"{len(meetings)}-{other}").exists() for other in range(count)):
        time.sleep(0.05)
    meetings.append(meetings[-1])


def whole(x: jax.Array, groups: int = 1) -> np.ndarray:
    """The value of an array of which every device of a group holds the group's requests, alike to the bit."""
    alike(x)
    assert x.addressable_shards[0].data.shape == (x.shape[0] // groups, *x.shape[1:])
    return sharding.on_host(x)


def alike(x: jax.Array) -> None:
    """Fails where devices that should hold the same part of an array hold other bits."""
    parts = {}
    for shard in x.addressable_shards:
        first = parts.setdefault(str(shard.index), np.asarray(shard.data))
        np.testing.assert_array_equal(first, np.asarray(shard.data))


LENGTHS = (40, 35, 3, 20)


def outputs(lm: LanguageModel, requests: int, *, decode: bool) -> dict[str, np.ndarray]:
    """Logits and taps of a chunk of some requests; with `decode` also tokens: of a model that drafts those that
    decoding adds, and a draft; of one that does not, what an engine generates, or, for more than two requests, `generate`."""
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, 59, (requests, 40)).astype(np.int32)
    lengths = np.array(LENGTHS[:requests], np.int32)
    page = PAGE_TOKENS if lm.mesh is None else PAGE_TOKENS * lm.mesh.shape["cp"]
    of_groups = functools.partial(whole, groups=lm.groups)
    cache = lm.new_cache(requests, 64, CacheSizes(page_tokens=page, max_rollback=1))
    arguments = (lm.leaves, cache, tokens, lengths, None)
    program = lm._forward.lower(*arguments).compile()
    meet()  # collectives wait half a minute for one another, and processes that share cores compile for longer
    logits, cache, taps = program(*arguments)
    found = {name: of_groups(x) for name, x in taps.items()} | {"logits": of_groups(logits)}
    for leaf in jax.tree.leaves(cache):
        alike(leaf)
    if not decode:
        return found
    if not hasattr(lm.family.model, "draft"):
        if requests > 2:
            return found | generated(lm, [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)])
        # The same bytes of each device hold as many pages, and in those of a divided cache more tokens.
        sized = Engine(lm, 2, 48, page_size=page, memory_bytes=4_250_000, prefill_shapes=((1, 8),))
        return found | {"generated": served(lm, page), "pages": np.array(sized.pages)}
    last = jnp.asarray(found["logits"][np.arange(requests), lengths - 1])
    done, stop = jnp.zeros(requests, bool), jnp.zeros(0, jnp.int32)
    cache, after, _, new = lm.decode(cache, last, done, Sampling.of(requests), stop, steps=4, drafts=1)
    drafted = lm.draft(cache, np.array([3, 5, 1, 0][:requests], np.int32))
    found |= {"after": of_groups(after), "generated": of_groups(new), "draft": of_groups(drafted.logits)}
    return found


def generated(lm: LanguageModel, prompts: list[list[int]]) -> dict[str, np.ndarray]:
    """What four requests generate: sampled, and greedily up to stop ids that end the first two long before the others."""
    drawn = generate(lm, prompts, 7, stop_ids=[], every=3, sampling=Sampling.of(4, temperature=[0.0, 0.0, 1.0, 1.0]))
    stops = [drawn[0][1], drawn[1][0]]
    greedy = generate(lm, prompts, 7, stop_ids=stops, every=3)
    assert max(map(len, greedy[:2])) <= 2 and max(map(len, greedy[2:])) == 7
    return {"drawn": np.array(drawn), "greedy": np.array([row + [-1] * (7 - len(row)) for row in greedy])}


def served(lm: LanguageModel, page: int) -> np.ndarray:
    """What an engine generates for three requests, of which the third starts with what is kept of the first."""
    engine = Engine(
        lm, 2, 48, page_size=page, prefill_shapes=((2, 16),), decode_rows=(2,), steps=3, snapshots=4, boundary=16
    )
    engine.warm_up()
    warm, prompt = dict(lm.traces), list(range(1, 20))
    ids = [engine.add(prompt[:length], 7, stop_ids=[]) for length in (19, 3)]
    generated = {}
    while not engine.is_idle or len(ids) < 3:
        if engine.is_idle:
            ids.append(engine.add(prompt + [3, 5], 7, stop_ids=[]))
        for event in engine.step():
            generated.setdefault(event.id, []).extend(event.tokens)
    assert engine.stats.hits == 1 and lm.traces == warm
    return np.array([generated[id] for id in ids], np.int32)


def compare(wanted: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> float:
    """Integers equal, floats within the tolerance of the mode. Returns the largest difference of logits."""
    for name, other in found.items():
        array = wanted[name]
        assert array.shape == other.shape, name
        if not np.issubdtype(array.dtype, np.inexact):
            np.testing.assert_array_equal(array, other, err_msg=name)
            continue
        seen = np.isfinite(array)
        np.testing.assert_array_equal(seen, np.isfinite(other), err_msg=name)
        size = max(1.0, float(np.abs(array[seen]).max(initial=0)))
        np.testing.assert_allclose(other[seen], array[seen], rtol=0, atol=TOLERANCES["f32"].logits * size, err_msg=name)
    return float(np.abs(wanted["logits"] - found["logits"]).max())


def check_tables_on_host(one: LanguageModel, host: LanguageModel) -> None:
    """Engram tables that stay on the host of a mesh change nothing, and are no parameters."""
    assert {name for name in one.parameters() if name not in host.parameters()} == {
        f"layers.{layer}.engram.embed.{kind}" for layer in one.config.engram_layer_ids for kind in ("weight", "scale")
    }
    tokens = np.random.default_rng(5).integers(9, 59, (2, 24)).astype(np.int32)
    found = []
    for lm in (one, host):
        logits, _, taps = lm.forward(lm.new_cache(2, 64), tokens, np.array([24, 11], np.int32))
        ids = {name: whole(x, lm.groups) for name, x in taps.items() if name.endswith("engram_hash_ids")}
        found.append(ids | {"logits": whole(logits, lm.groups)})
    assert len(found[0]) == 1 + len(one.config.engram_layer_ids)
    print(f"tables on the host: logits agree to {compare(*found):.1e}", flush=True)


def check_load(family: str, *, groups: bool) -> None:
    """A checkpoint on four devices, of which two have other requests with `groups`: every part has the file's bytes, and
    no process reads what its devices do not hold."""
    devices = jax.devices()[::2] if jax.process_count() > 1 else jax.devices()[:4]
    sizes = {"dp": 2, "ep": 2} if groups else {"ep": 2, "tp": 2} if family == "v41" else {"ep": 4}
    mesh = sharding.make_mesh(devices, **sizes)
    copied = []
    read = load._read
    load._read = lambda entry, index, out: copied.append(out.nbytes) or read(entry, index, out)
    with tempfile.TemporaryDirectory() as directory:
        write_demo_checkpoint(directory, family=family)
        one = load_model(directory, progress=False)
        everything = sum(copied)
        copied.clear()
        lm = load_model(directory, progress=False, mesh=mesh)
        load._read = read
        if family == "v41" and jax.process_count() == 1:
            check_tables_on_host(one, load_model(directory, progress=False, mesh=mesh, engram_tables="host"))
    held = 0
    for name, wanted in one.parameters().items():
        found, wanted = lm.parameter(name), np.asarray(wanted)
        assert found.dtype == wanted.dtype, name
        filled = np.zeros(found.shape, wanted.dtype)
        filled[tuple(slice(size) for size in wanted.shape)] = wanted
        parts = {}
        for shard in found.addressable_shards:
            np.testing.assert_array_equal(bits(shard.data), bits(filled[shard.index]), err_msg=name)
            stored = 4 if family == "v32" and name.endswith(".scale") else wanted.itemsize  # as float32, made exponents
            parts[str(shard.index)] = wanted[shard.index].size * stored
        held += sum(parts.values()) if name != "token_map" else 0
    assert sum(copied) == held, (sum(copied), held)
    assert jax.process_count() == 1 or held < 0.8 * everything
    print(f"{family}: {held} of {everything} bytes read", flush=True)


def check_divided_operations() -> None:
    """Selection, candidates and attention over a divided cache against the operations on the whole one: ties, infinite and
    NaN scores, rows that see nothing, one page or part of it."""
    ways, rows, pages, block, width = 4, 4, 3, 2, 8
    mesh = sharding.make_mesh(jax.devices()[:ways], cp=ways)
    rng = np.random.default_rng(3)
    small = rng.integers(-2, 3, (2 * pages, ways * rows, width)).astype(np.float32)  # few values: many equal scores
    small[0, 5] = np.inf
    small[2, 7] = np.nan
    table = rng.permutation(2 * pages).reshape(2, pages).astype(np.int32)
    lengths = np.array([[0, 1, 3, 16, 17], [5, 20, 33, 47, 48]], np.int32)
    q = rng.integers(-2, 3, (2, 5, 3, width)).astype(np.float32)
    weights = rng.integers(-1, 3, (2, 5, 3)).astype(np.float32)

    def on_all(function, arrays):
        """`function(page_size, pages, *arrays)` of a mapped program, and of the whole cache."""
        specs = (PartitionSpec(None, "cp"), *(PartitionSpec(),) * len(arrays))
        mapped = jax.shard_map(
            lambda *a: function(rows, *a), mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False
        )
        return jax.jit(mapped)(small, *arrays), jax.jit(lambda *a: function(ways * rows, *a))(small, *arrays)

    def select(page, pages, q, weights, lengths, table, blocks):
        keys = ops.PagedRows(pages, ops.Plain(width, jnp.float32), page)
        options = dict(context_lens=lengths, block_table=table)
        source = context.select(q, keys, weights, 6, **options, candidate_topk_blocks=blocks, candidate_block_size=block)
        chosen = context.candidates(source.candidate_blocks, lengths, block, page)
        user = context.select(q, keys, -weights, 6, **options, candidates=chosen)
        alone = context.select(q, keys, weights, 6, **options)
        score = context.scores(q, keys, weights, **options)
        return source, user, alone, context.candidate_blocks(chosen, page), score

    for blocks in (1, 3, 100):
        divided, one = on_all(functools.partial(select, blocks=blocks), (q, weights, lengths, table))
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(whole, divided), jax.tree.map(np.asarray, one))

    small = rng.standard_normal(small.shape).astype(np.float32)
    window = rng.standard_normal((2, 7, width)).astype(np.float32)
    chosen = np.where(rng.random((2, 5, 48)) < 0.3, np.arange(48), -1)
    chosen = np.sort(np.where(chosen < lengths[..., None], chosen, -1))[..., ::-1]
    chosen = np.where(chosen < 0, -1, np.sort(np.where(chosen < 0, 99, chosen))).astype(np.int32)
    seen = np.where(rng.random((2, 5, 7)) < 0.7, np.arange(7) + 7 * np.arange(2)[:, None, None], -1).astype(np.int32)
    seen[:, 0] = -1
    sink = np.array([0.3, np.inf, -np.inf], np.float32)

    def attend(page, pages, q, chosen, seen, table, lengths, window, sink):
        plain = ops.Plain(width, jnp.float32)
        cache, recent = ops.PagedRows(pages, plain, page), ops.PagedRows(window, plain, 7)
        listed = context.listed(chosen, table, page, lengths)
        every = context.every_listed(table, page, lengths)
        both = context.attend(
            q, (recent, cache), (seen, listed), whole=1, block_table=table, sink=sink, scale=0.2, p_dtype=jnp.float32
        )
        alone = [context.attend(q, (cache,), (each,), whole=0, block_table=table, scale=0.2, v_width=5) for each in (listed, every)]
        return both, alone

    divided, one = on_all(attend, (q, chosen, seen, table, lengths, window, sink))
    for ours, theirs in zip(jax.tree.leaves(divided), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(whole(ours), np.asarray(theirs), rtol=0, atol=TOLERANCES["f32"].logits)
    check_divided_records(mesh, table, lengths)
    print("operations agree", flush=True)


def check_exchange() -> None:
    """Experts of devices that have different tokens against one device with all: any routing, the worst among them, in
    one round and in several."""
    experts, k, tokens, width = 8, 3, 24, 64
    module, mode = moe.Experts(experts, width, 32, 10.0), numerics("f32")
    rng = np.random.default_rng(6)
    graphdef, state = nnx.split(module)
    leaves, structure = jax.tree.flatten(state)
    leaves = [rng.integers(*((0, 256) if leaf.shape[-1] > 2 else (120, 128)), leaf.shape).astype(np.uint8) for leaf in leaves]
    x = rng.standard_normal((tokens, width)).astype(np.float32)
    weights = rng.random((tokens, k)).astype(np.float32)
    valid = np.arange(tokens) % 5 != 1
    any_three = np.stack([rng.permutation(experts)[:k] for _ in range(tokens)]).astype(np.int32)
    routings = {"any": any_three, "all to the last": np.broadcast_to(np.array([7, 2, 6], np.int32), (tokens, k))}

    def called(leaves, *arguments):
        return nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))(*arguments, mode)

    one = {name: np.asarray(jax.jit(called)(leaves, x, chosen, weights, valid)) for name, chosen in routings.items()}
    largest = moe.EXCHANGED_BYTES
    for sizes in ({"dp": 4}, {"dp": 2, "ep": 2}):
        mesh = sharding.make_mesh(jax.devices()[:4], **sizes)
        ways, rows = sizes["dp"], PartitionSpec("dp")
        pairs = tokens // ways * k
        for bucket in (pairs, 5):  # 5 pairs fill the last round in part
            moe.EXCHANGED_BYTES = ways * bucket * width * 4
            mapped = jax.shard_map(
                called, mesh=mesh, in_specs=(PartitionSpec(ranks.DIVIDED_OVER["experts"]), rows, rows, rows, rows),
                out_specs=rows, check_vma=False,
            )  # fmt: skip
            program = jax.jit(mapped)
            for name, chosen in routings.items():
                found = program(leaves, x, chosen, weights, valid)
                assert np.abs(one[name]).max() > 1 and not one[name][~valid].any()
                tolerance = TOLERANCES["f32"].logits * np.abs(one[name]).max()
                np.testing.assert_allclose(whole(found, ways), one[name], rtol=0, atol=tolerance, err_msg=f"{sizes} {name}")
    moe.EXCHANGED_BYTES = largest
    print("exchange agrees", flush=True)


def check_refusals(lm: LanguageModel) -> None:
    """What does not divide over dp is refused, and so is an engine."""
    ways = lm.groups
    for refused, sentence in (
        (lambda: lm.new_cache(ways + 1, 64), f"A cache of {ways + 1} requests on a mesh of dp={ways}"),
        (lambda: lm.new_cache(ways, 64, CacheSizes(ways + 1)), f"A cache of {ways + 1} pages on a mesh of dp={ways}"),
        (lambda: generate(lm, [[3, 4]] * (ways + 1), 2), f"Give a multiple of {ways}, or a mesh without dp"),
        (lambda: Engine(lm, ways, 48), "An Engine on a mesh of dp="),
    ):
        try:
            refused()
        except ValueError as reason:
            assert sentence in str(reason), reason
        else:
            raise AssertionError(f"Not refused: {sentence}")


def check_divided_records(mesh: jax.sharding.Mesh, table: np.ndarray, lengths: np.ndarray) -> None:
    """Rows of every format, written to a divided cache and to a whole one: the same scores, and the same attention."""
    ways, rows = mesh.shape["cp"], 4
    requests, pages = table.shape
    held = ways * rows * pages
    rng = np.random.default_rng(4)
    positions = np.stack([rng.permutation(held) for _ in range(requests)]).astype(np.int32)[..., None]
    for kind in (
        ops.IndexFP8(32), ops.IndexMXFP4(32), ops.Model1(80, 16), ops.V32(128, 16), ops.V41NVFP4(64), ops.V41MXFP8(64)
    ):  # fmt: skip
        is_key = isinstance(kind, ops.IndexFP8 | ops.IndexMXFP4)
        x = rng.standard_normal((requests, held, kind.width)).astype(np.float32)
        q = rng.standard_normal((requests, lengths.shape[1], 2, kind.width)).astype(np.float32)

        def results(page, positions, x, q, table, lengths, kind=kind, is_key=is_key):
            cache = ops.PagedRows.zeros(kind, requests * pages, page)
            slots = context.slots(positions, table, page).reshape(-1)
            cache = cache.scatter(slots, x.reshape(-1, x.shape[-1]))
            if is_key:
                return context.scores(q, cache, q[..., 0], context_lens=lengths, block_table=table)
            listed = context.every_listed(table, page, lengths)
            return context.attend(q, (cache,), (listed,), whole=0, block_table=table, scale=0.2)

        arrays = (positions, x, q, table, lengths)
        everywhere = (PartitionSpec(),) * len(arrays)
        mapped = jax.shard_map(
            functools.partial(results, rows), mesh=mesh, in_specs=everywhere, out_specs=PartitionSpec(), check_vma=False
        )
        divided, one = jax.jit(mapped)(*arrays), jax.jit(functools.partial(results, ways * rows))(*arrays)
        for ours, theirs in zip(jax.tree.leaves(divided), jax.tree.leaves(one), strict=True):
            tolerance = TOLERANCES["f32"].logits
            np.testing.assert_allclose(whole(ours), np.asarray(theirs), rtol=tolerance, atol=tolerance, err_msg=str(kind))


def bits(x: jax.Array | np.ndarray) -> np.ndarray:
    """The bytes of an array."""
    return np.ascontiguousarray(np.asarray(x)).view(np.uint8)


def main(family: str, meshes: list[str]) -> None:
    """Decodes on the last mesh alone, since a program takes long to compile. Groups of devices (dp) share four requests."""
    lm = one_device(family)
    requests = 4 if "dp=" in meshes[0] else 2
    wanted = outputs(lm, requests, decode=True)
    for name in meshes:
        sizes = {axis: int(size) for axis, size in (part.split("=") for part in name.split(","))}
        mesh = sharding.make_mesh(jax.devices()[: math.prod(sizes.values())], **sizes)
        placed = on_mesh(lm, mesh)
        found = outputs(placed, requests, decode=name == meshes[-1])
        print(f"{family} {name}: {len(found)} arrays agree, logits to {compare(wanted, found):.1e}", flush=True)
        if placed.groups > 1:
            check_refusals(placed)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments == ["--operations"]:
        check_divided_operations()
        check_exchange()
        sys.exit()
    if arguments[0] == "--processes":
        address, count, index, folder = arguments[1:5]
        jax.distributed.initialize(address, int(count), int(index))
        meetings.append((Path(folder), int(index), int(count)))
        arguments = arguments[5:]
    check_load(arguments[0], groups="dp=" in arguments[1])
    main(arguments[0], arguments[1:])
