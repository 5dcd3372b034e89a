"""The two kinds of index keys on Hopper: how a tile of 64 lies in shared memory and gets to the tensor cores.

A key is a row of values and one word of 4 bytes: FP8 values with a float32 scale, or packed MXFP4 values with four E8M0
exponents. Values are rows of `row_bytes`, words lie apart; in a page all values come before all words.
"""

import dataclasses
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic, quantize
from pallas_kernels.indexer_logits import lanes
from pallas_kernels.records import IndexFP8, IndexMXFP4

WIDTH = 128
HEADS = (8, 16, 32, 64)
PAGE_SIZES = (32, 64, 128)
FP8 = jnp.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Fp8Keys:
    """FP8 values, read by the tensor cores where they arrive; the scale multiplies a finished score."""

    scaled: bool = True
    row_bytes = WIDTH
    swizzle = WIDTH  # of the tile as copies write it
    value_dtype = FP8
    word_dtype = jnp.float32
    query_dtype = FP8
    query_tile = (plgpu.TilingTransform((8, WIDTH)), plgpu.SwizzleTransform(128))
    in_registers = False

    def queries(self, q):
        """The queries with their columns where the keys' are."""
        return q

    def scratch(self, stages):
        """Tiles of values and words, and what `operand` needs beside them."""
        words = [plgpu.SMEM((stages, lanes.KEYS), jnp.float32)] * self.scaled
        return [mosaic.row_tile((stages, lanes.KEYS, WIDTH), FP8), *words]

    def rows(self, tiles, slot):
        """The values of a slot as copies write them: [64, row_bytes]."""
        return mosaic.row_tile_views(tiles[0])[1].at[slot]

    def operand(self, tiles, slot):
        """A slot's keys as the left operand of a wgmma."""
        return mosaic.row_tile_views(tiles[0])[0].at[slot]

    def scale(self, tiles, slot):
        """A slot's scales [64], or None."""
        return plgpu.load(tiles[1].at[slot], layout=lanes.PER_KEY) if self.scaled else None


@dataclasses.dataclass(frozen=True)
class MxFp4Keys:
    """Packed MXFP4 values, unpacked in registers to bf16, exactly, for a bf16 wgmma.

    A thread unpacks groups of 32 values under one exponent. It holds them where a wgmma expects other columns, so the
    queries' columns are moved to match: the order of a dot product's terms is free.
    """

    scaled = True
    row_bytes = WIDTH // 2
    swizzle = 0
    value_dtype = jnp.uint8
    word_dtype = jnp.int32
    query_dtype = jnp.bfloat16
    query_tile = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    in_registers = True

    def queries(self, q):
        return lanes.unpacked_columns(q)

    def scratch(self, stages):
        values = plgpu.SMEM((stages, lanes.KEYS, self.row_bytes), jnp.uint8)
        words = plgpu.SMEM((stages, lanes.KEYS), jnp.int32)
        if not mosaic.is_interpreted():
            return [values, words]
        # The interpreter's wgmma takes no operand in registers: it gets one in memory.
        return [values, words, plgpu.SMEM((stages, lanes.KEYS, WIDTH), jnp.bfloat16, transforms=self.query_tile)]

    def rows(self, tiles, slot):
        return tiles[0].at[slot]

    def operand(self, tiles, slot):
        unpacked = lanes.unpack_mxfp4(tiles[0].at[slot], tiles[1].at[slot])
        if not mosaic.is_interpreted():
            return unpacked
        tiles[2][slot] = unpacked
        return tiles[2].at[slot]

    def scale(self, tiles, slot):
        return None


@dataclasses.dataclass(frozen=True)
class Pages:
    """Where keys lie in pages of bytes: `stride` bytes from page to page, `page_size` keys in each."""

    page_size: int
    stride: int
    row_bytes: int

    @property
    def page_rows(self) -> int:
        """Rows of values from a page to the next (the words count as rows among them)."""
        return self.stride // self.row_bytes

    @property
    def page_words(self) -> int:
        """Words from a page to the next."""
        return self.stride // 4

    @property
    def first_word(self) -> int:
        """Words in front of a page's first one."""
        return self.page_size * self.row_bytes // 4


def packed_keys(k, k_scale):
    """The kind of packed keys k with k_scale, and their views (values, words if there are any)."""
    if k.dtype == jnp.uint8:
        return MxFp4Keys(), (k, lax.bitcast_convert_type(k_scale, jnp.int32))
    if k.dtype != FP8:
        raise NotImplementedError(f"the kernel takes float8_e4m3fn or packed MXFP4 keys (uint8), not {k.dtype}.")
    return Fp8Keys(k_scale is not None), (k,) if k_scale is None else (k, k_scale)


def paged_keys(keys) -> tuple[Any, Pages, tuple]:
    """The kind of paged keys, where they lie, and their views: values [rows, row_bytes], words [pages, page words]."""
    if isinstance(keys.format, IndexMXFP4):
        kind = MxFp4Keys()
    elif isinstance(keys.format, IndexFP8):
        kind = Fp8Keys()
    else:
        raise NotImplementedError(f"the kernel reads IndexFP8 or IndexMXFP4 keys, not {keys.format}.")
    where = Pages(keys.page_size, keys.pages.shape[1], kind.row_bytes)
    if where.page_size not in PAGE_SIZES or where.stride % kind.row_bytes:
        raise NotImplementedError(
            f"the kernel reads pages of {', '.join(map(str, PAGE_SIZES))} rows whose stride is a multiple of "
            f"{kind.row_bytes} bytes, not of {where.page_size} rows with stride {where.stride}."
        )
    values = keys.pages if kind.value_dtype == jnp.uint8 else lax.bitcast_convert_type(keys.pages, kind.value_dtype)
    words = lax.bitcast_convert_type(keys.pages.reshape(keys.pages.shape[0], -1, 4), kind.word_dtype)
    return kind, where, (values.reshape(-1, kind.row_bytes), words)


def load_paged(kind, where: Pages, views, tiles, page, row, slot, start, count, barrier):
    """Copies keys row .. row + count - 1 of a page to rows start .. of a tile; two arrivals at `barrier`."""
    values, words = views
    to = pl.ds(start, count)
    from_row = page * where.page_rows + row
    plgpu.copy_gmem_to_smem(values.at[pl.ds(from_row, count)], kind.rows(tiles, slot).at[to], barrier)
    plgpu.copy_gmem_to_smem(words.at[page, pl.ds(where.first_word + row, count)], tiles[1].at[slot, to], barrier)


def load_packed(kind, views, tiles, tile, slot, barrier):
    """Copies tile `tile` of packed keys; one arrival at `barrier` for values and one for words, if there are any."""
    rows = pl.ds(tile * lanes.KEYS, lanes.KEYS)
    plgpu.copy_gmem_to_smem(views[0].at[rows], kind.rows(tiles, slot), barrier)
    if kind.scaled:
        plgpu.copy_gmem_to_smem(views[1].at[rows], tiles[1].at[slot], barrier)


def unpacked_queries(q, q_scale):
    """Packed MXFP4 queries as bf16, exactly; other queries as they are."""
    return q if q_scale is None else quantize.dequantize_fp4(q, q_scale, jnp.bfloat16)


def require_heads(heads):
    """Raises NotImplementedError unless so many heads are carried."""
    if heads not in HEADS:
        raise NotImplementedError(f"the kernel takes {', '.join(map(str, HEADS))} heads, and q has {heads}.")


def require_queries(heads, width, dtype, wanted=FP8):
    """Raises NotImplementedError unless queries of this kind are carried."""
    require_heads(heads)
    if width != WIDTH:
        raise NotImplementedError(f"the kernel takes queries of width {WIDTH}, and q has width {width}.")
    if dtype != wanted:
        raise NotImplementedError(
            f"the kernel takes float8_e4m3fn queries with FP8 keys and bfloat16 or packed queries with MXFP4 keys; "
            f"here it needs {jnp.dtype(wanted)}, and q is {dtype}."
        )
