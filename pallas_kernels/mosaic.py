"""Shared Mosaic GPU pieces, and everything of Mosaic GPU that is private or changes between jax releases.

Kernels import `plgpu` and these helpers; only this file, and `platform.is_interpreted`, may reach into ``jax._src`` or write MLIR
by hand. Importing it raises NotImplementedError where jax has no Mosaic GPU bindings; nothing that runs everywhere does. Code written
by hand cannot be simulated, so each such helper carries a twin in plain Pallas that runs when a kernel is interpreted.
"""

import contextlib
import functools
import os

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np

from pallas_kernels.platform import CORES as CORES, is_interpreted as is_interpreted

try:
    from jax._src.lib import mosaic_gpu as mosaic_gpu_lib
except ModuleNotFoundError as missing:
    raise NotImplementedError(
        "GPU kernels, interpreted ones too, need jax's Mosaic GPU bindings, which are not installed: pip install "
        "'dsa-jax[cuda13]' or 'dsa-jax[cuda12]' with an NVIDIA GPU, 'dsa-jax[interpret]' without one (Linux x86-64). "
        "The references run without them."
    ) from missing

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

INTERPRETER_THREADS = 6  # the largest kernels have five warpgroups


@contextlib.contextmanager
def interpreter():
    """Runs Mosaic GPU kernels called inside it on the CPU in the GPU interpreter; a race is an error.

    Wait for the results (`jax.block_until_ready`) before leaving: the interpreter works asynchronously. Every warpgroup
    takes a thread of XLA's CPU client, and with fewer threads than warpgroups a kernel never ends; where there are few
    cores, set the environment variable NPROC (8 is enough) before jax first runs anything.
    """
    os.environ.setdefault("NPROC", "16")  # in time only if nothing has run yet
    threads = int(os.environ.get("NPROC") or os.cpu_count() or 1)
    if threads < INTERPRETER_THREADS:
        raise RuntimeError(
            f"The GPU interpreter runs a kernel's warpgroups on threads of XLA's CPU client, which has {threads} here, and "
            f"the kernels need {INTERPRETER_THREADS}. Set NPROC={INTERPRETER_THREADS} in the environment before starting Python."
        )
    gpu_callbacks.reset_gpu_interpret_mode_state()  # what a failed run left behind would fail the next one
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield
    races = gpu_callbacks._races  # of the last kernel; jax 0.12 raises at the race, 0.11 logs it and goes on
    if races is not None and races.races_found:
        raise RuntimeError("RACE DETECTED in an interpreted kernel; the log says between which accesses.")


def lane_code(*, arg_types, return_type=None, twin):
    """Decorator: a function ``(ctx, *args)`` of MLIR builders, inlined in a kernel; `twin(*args)` when interpreted.

    `arg_types` and `return_type` are those of `plgpu.inline_mgpu`. Inlined code gets no implicit warpgroup barriers.
    """

    def wrap(function):
        compiled = plgpu.inline_mgpu(arg_types=arg_types, return_type=return_type)(function)

        @functools.wraps(function)
        def call(*args):
            return twin(*args) if is_interpreted() else compiled(*args)

        return call

    return wrap


def row_tile(shape: tuple[int, ...], dtype):
    """Scratch for tiles of rows of 128 bytes [..., rows, 128 bytes] that tensor cores read and TMA fills from any row.

    Tensor cores want a tiling of 8 rows, and TMA into a tiled reference only starts at every eighth row of device
    memory. With rows of 128 bytes both have the same bytes, so the scratch is both: `row_tile_views` takes it apart.
    """
    width = 128 // jnp.dtype(dtype).itemsize
    if shape[-1] != width:
        raise ValueError(f"shape={shape} of {jnp.dtype(dtype)}: rows must have 128 bytes, {width} values.")
    swizzle = plgpu.SwizzleTransform(128)
    tiled = plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, width)), swizzle))
    if is_interpreted():  # where references have no layout, and aliases are not allowed to meet
        return tiled
    return plgpu.RefUnion(tiled, plgpu.SMEM(shape, dtype, transforms=(swizzle,)))


def row_tile_views(ref):
    """The two views of a `row_tile` scratch: for tensor cores, and for TMA."""
    return (ref, ref) if is_interpreted() else tuple(ref)


PLACES = 32  # places that `load_places` holds
_EACH_WARP = plgpu.Layout.WG_STRIDED((128,), vec_size=1)


def load_places(places_ref, at):
    """``places_ref[at : at + 32]`` (int32 in device memory) in every warp of a warpgroup, for `gather_tile`."""

    def twin(places_ref, at):
        return jnp.tile(places_ref[pl.ds(at, PLACES)], 4)

    @lane_code(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct((128,), jnp.int32, layout=_EACH_WARP),
        twin=twin,
    )
    def load(_, places_ref, at):
        i32 = ir.IntegerType.get_signless(32)
        lane = arith.remui(utils.thread_idx(), arith.constant(i32, ir.IntegerAttr.get(i32, PLACES)))
        at = arith.addi(scalar(at), lane)
        found = llvm.load(i32, utils.getelementptr(global_pointer(places_ref), [at], i32))
        register = vector.from_elements(ir.VectorType.get((1,), i32), [found])
        layout = _EACH_WARP.to_mgpu()
        registers = np.array([register], dtype=object).reshape(layout.registers_shape((128,)))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    return load(places_ref, at)


def gather_tile(
    tile_ref, words_ref, values_ref, source_words_ref, places, offset, *, size: int, word_layout, swizzle: int
):
    """Starts copying 64 rows, in blocks of `size` rows, into one tile, by all of a warpgroup (cp.async).

    tile_ref: [64, n] with rows of 128 or 64 bytes (not tiled; `swizzle` is 128 or 64 as that of its reference, or 0);
    values_ref: device memory [rows, n]. Block i of the tile starts at row ``places[offset + i]``, `places` being an
    array of `load_places`; rows before the first or behind the last are taken as those. words_ref, 4-byte values [64],
    gets the word of every row (None, as source_words_ref: no words). word_layout: (rows a page, words a page, first word
    of a page), of which row r has word ``r // rows * words + first + r % rows`` of source_words_ref. The copies of one
    call are one group of `wait_copies`.
    """
    worded = words_ref is not None
    page_rows, page_words, first = word_layout
    blocks, last = 64 // size, values_ref.shape[0] - 1
    row_bytes = values_ref.shape[1] * jnp.dtype(values_ref.dtype).itemsize
    if row_bytes not in (64, 128) or swizzle not in (0, row_bytes):
        raise ValueError(
            f"rows of {row_bytes} bytes, swizzle={swizzle}: rows are of 64 or 128 bytes, the swizzle of as many or 0."
        )

    def twin(tile_ref, values_ref, places, offset, *words):
        for i in range(blocks):
            start = jnp.clip(places[offset + i], 0, last + 1 - size)
            row = jnp.clip(places[offset + i] + jnp.arange(size), 0, last) - start
            to = pl.ds(i * size, size)
            tile_ref[to] = values_ref[pl.ds(start, size)][row]
            if worded:
                at = start // page_rows * page_words + first + start % page_rows
                words[0][to] = words[1][pl.ds(at, size)][row]

    refs = (plgpu.RefType((plgpu.SwizzleTransform(swizzle),) if swizzle else ()), plgpu.RefType())
    types = (*refs, _EACH_WARP, plgpu.Layout.WG_SPLAT(()), *[plgpu.RefType()] * (2 * worded))

    @lane_code(arg_types=types, twin=twin)
    def gather(_, tile_ref, values_ref, places, offset, *words):
        i32, i64, i8 = [ir.IntegerType.get_signless(n) for n in (32, 64, 8)]
        constant = lambda value: arith.constant(i32, ir.IntegerAttr.get(i32, value))  # noqa: E731
        wide = lambda value, scale: arith.muli(  # noqa: E731
            arith.extui(i64, value), arith.constant(i64, ir.IntegerAttr.get(i64, scale))
        )
        thread = arith.remui(utils.thread_idx(), constant(128))
        offset = scalar(offset)
        (places,) = places.registers.flat
        places = vector.extract(places, [], ir.DenseI64ArrayAttr.get([0]))

        def place(row):
            block = arith.addi(offset, arith.divui(row, constant(size)))
            found = nvvm.shfl_sync(constant(0xFFFFFFFF - 2**32), places, block, constant(31), nvvm.ShflKind.idx)
            source = arith.addi(found, arith.remui(row, constant(size)))
            return arith.minsi(arith.maxsi(source, constant(0)), constant(last))

        # Eight or four threads copy a row, 16 bytes each, to where the swizzle wants them.
        parts = row_bytes // 16
        part, group = arith.remui(thread, constant(parts)), arith.divui(thread, constant(parts))
        turn = arith.remui(arith.divui(group, constant(8 // parts)), constant(parts)) if swizzle else constant(0)
        within = arith.muli(arith.xori(part, turn), constant(16))
        to = utils.memref_ptr(tile_ref)
        rows = [arith.addi(group, constant(128 // parts * i)) for i in range(parts // 2)]
        sources = [place(row) for row in rows]
        if worded:
            word_row = arith.remui(thread, constant(64))
            source = place(word_row)
            page = wide(arith.divui(source, constant(page_rows)), 4 * page_words)
            word = wide(arith.addi(constant(first), arith.remui(source, constant(page_rows))), 4)
            word = arith.addi(page, word)
        for row, source in zip(rows, sources):
            begin = arith.addi(wide(source, row_bytes), arith.extui(i64, arith.muli(part, constant(16))))
            nvvm.cp_async_shared_global(
                utils.getelementptr(to, [arith.addi(arith.muli(row, constant(row_bytes)), within)], i8),
                utils.getelementptr(global_pointer(values_ref), [begin], i8),
                16,
                nvvm.LoadCacheModifierKind.CG,
            )
        if worded:  # 64 of 128 threads would do; both halves write the same
            nvvm.cp_async_shared_global(
                utils.getelementptr(utils.memref_ptr(words[0]), [word_row], i32),
                utils.getelementptr(global_pointer(words[1]), [word], i8),
                4,
                nvvm.LoadCacheModifierKind.CA,
            )
        nvvm.cp_async_commit_group()

    gather(tile_ref, values_ref, places, offset, *([words_ref, source_words_ref] if worded else []))


def fence_proxies():
    """Orders what plain accesses and cp.async did to shared memory, as this thread has seen it, before TMA and MMA.

    `plgpu.commit_smem` without its barrier. In front of an arrival that frees a slot that was read; behind the wait for
    a slot that cp.async filled. Not for a thread with cp.async copies under way: it waits for all of them.
    """

    @lane_code(arg_types=(), twin=plgpu.commit_smem)
    def fence(_):
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)

    fence()


def synchronize():
    """Waits until all threads of the warpgroup are here, in a kernel without barriers of Pallas's own."""

    @lane_code(arg_types=(), twin=lambda: None)
    def wait(_):
        mgpu.warpgroup_barrier()

    wait()


def wait_copies(pending: int):
    """Waits until at most `pending` groups of this thread's cp.async copies are under way."""

    @lane_code(arg_types=(), twin=lambda: None)
    def wait(_):
        nvvm.cp_async_wait_group(pending)

    wait()


def accumulate(products, accs):
    """Accumulators (float32, in the layout of a wgmma) and what ``products(*their references)`` adds to them by wgmma."""

    def fresh(*refs):
        products(*refs)
        return [ref[...] for ref in refs]

    if is_interpreted():  # where an accumulator starts at zero
        added = pl.run_scoped(fresh, *[plgpu.ACC(acc.shape, acc.dtype) for acc in accs])
        return [acc + more for acc, more in zip(accs, added)]
    return list(pl.run_state(lambda refs: products(*refs))([plgpu.ACC.init(acc) for acc in accs]))


def scalar(array):
    """Inside lane code: the value of an array argument of shape ()."""
    (register,) = array.registers.flat
    if isinstance(register.type, ir.VectorType):
        return vector.extract(register, [], ir.DenseI64ArrayAttr.get([0]))
    return register


def global_pointer(ref):
    """Inside lane code: a pointer to device memory that says so, for ld.global and st.global, not generic accesses."""
    return llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(ref))


def kernel_times(f, args, iterations: int, before=None) -> list[float]:
    """Device time of all the GPU kernels that one call ``f(*args)`` launches, microseconds, per iteration (CUPTI).

    `before`, if given, is called in front of every iteration (to flush a cache, say) and is not counted. Launch gaps
    between kernels are not counted either.
    """
    before = before or (lambda: ())
    skipped = len(_timed(before, 1))
    launched = _timed(lambda: (before(), f(*args)), iterations)
    if len(launched) % iterations:
        raise RuntimeError(f"{len(launched)} kernels in {iterations} iterations: not the same number in each.")
    each = len(launched) // iterations
    return [1e3 * sum(time for _, time in launched[i * each + skipped : (i + 1) * each]) for i in range(iterations)]


def _timed(f, iterations) -> list[tuple[str, float]]:
    """Name and milliseconds of every kernel, in the order they were launched."""
    cupti = mosaic_gpu_lib._mosaic_gpu_ext
    jax.block_until_ready(f())
    cupti._cupti_init()
    try:
        for _ in range(iterations):
            out = f()
        jax.block_until_ready(out)
    finally:
        timings = cupti._cupti_get_timings(True)
    return timings or []
