"""What one row of a cache looks like in memory, and paged arrays of such rows.

A record format is a small frozen object (hashable, so it can be static under jit) that knows its bytes: the fields of
a page (offset, stride from row to row, size), how rows are encoded and how they are decoded. Writer, reader, tests
and the memory plan all ask it. Source: the cache layouts of FlashMLA and DeepGEMM, with widths as parameters.

`row_bytes` is what one row takes, all fields together. Row bytes outside a page are these fields one after another;
inside a page the fields of MODEL1 and of the index keys lie apart.
"""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped, UInt8

from pallas_kernels import blocks, checks, indexing, quantize


class Field(NamedTuple):
    """Bytes of one field within a page: row r has `size` bytes at ``offset + r * stride``."""

    offset: int
    stride: int
    size: int


class RecordFormat(abc.ABC):
    """What all formats share. A format gives `width`, `sizes`, `encode` and `decode`."""

    width: int

    alignment = 1  # page strides are multiples of this many bytes

    @property
    @abc.abstractmethod
    def sizes(self) -> tuple[int, ...]:
        """Bytes of every field of a row."""

    @property
    def row_bytes(self) -> int:
        """Bytes that a row takes."""
        return sum(self.sizes)

    def fields(self, page_size: int) -> tuple[Field, ...]:
        """Where a page keeps the fields of its rows: planar, one field of all rows after another."""
        fields, offset = [], 0
        for size in self.sizes:
            fields.append(Field(offset, size, size))
            offset += page_size * size
        return tuple(fields)

    def page_bytes(self, page_size: int) -> int:
        """The least page stride in bytes, alignment included."""
        return -(-page_size * self.row_bytes // self.alignment) * self.alignment

    @abc.abstractmethod
    def encode(self, x: Float[Array, "*s width"]) -> Shaped[Array, "*s stored"]:
        """Rows of `width` values as they are stored: uint8 [..., row_bytes], except for `Plain`."""

    @abc.abstractmethod
    def decode(self, rows: Shaped[Array, "*s stored"], dtype=jnp.float32) -> Float[Array, "*s width"]:
        """Stored rows as `dtype`."""


@dataclasses.dataclass(frozen=True)
class Plain(RecordFormat):
    """Rows of `width` values of `dtype`, as they are. Its pages hold values, not bytes."""

    width: int
    dtype: Any

    def __post_init__(self):
        checks.positive("width", self.width)
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        if self.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise ValueError(
                f"dtype is {self.dtype}; plain rows are float32, bfloat16 or float16. FP8 rows need a scale."
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """One contiguous field."""
        return (self.width * self.dtype.itemsize,)

    def encode(self, x: Float[Array, "*s width"]) -> Float[Array, "*s width"]:
        """`x` in the dtype of the format (no bytes)."""
        _width(self, x)
        return blocks.cast(x.astype(jnp.float32), self.dtype)

    def decode(self, rows: Float[Array, "*s width"], dtype=jnp.float32) -> Float[Array, "*s width"]:
        """Stored rows as `dtype`."""
        return blocks.cast(rows.astype(jnp.float32), dtype)


@dataclasses.dataclass(frozen=True)
class V32(RecordFormat):
    """V3.2 latent rows, 656 bytes: `latent` values in FP8, a float32 scale per 128, `rope` values in bf16.

    Row-contiguous. Scales are written as powers of two and read as any positive float32.
    """

    latent: int = 512
    rope: int = 64

    def __post_init__(self):
        _multiple("latent", self.latent, 128)
        checks.positive("rope", self.rope)

    @property
    def width(self) -> int:
        """Values in a row."""
        return self.latent + self.rope

    @property
    def sizes(self) -> tuple[int, ...]:
        """One contiguous field."""
        return (self.latent + 4 * (self.latent // 128) + 2 * self.rope,)

    def encode(self, x: Float[Array, "*s width"]) -> UInt8[Array, "*s bytes"]:
        """Rows of `width` values as bytes."""
        _width(self, x)
        values, scales = quantize.quantize_fp8(x[..., : self.latent], 128)
        return _join(values, scales, _bf16(x[..., self.latent :]))

    def decode(self, rows: UInt8[Array, "*s bytes"], dtype=jnp.float32) -> Float[Array, "*s width"]:
        """Row bytes as `dtype`: float32 products, rounded once."""
        values, scales, rope = _split(
            rows, (self.latent, jnp.float8_e4m3fn), (self.latent // 128, jnp.float32), (self.rope, jnp.bfloat16)
        )
        return jnp.concatenate([quantize.dequantize_fp8(values, scales, dtype), rope.astype(dtype)], -1)


@dataclasses.dataclass(frozen=True)
class Model1(RecordFormat):
    """V4 rows, 584 bytes: FP8 with an E8M0 scale per 64 for all but the last `rope` values, which are bf16.

    The scales of a page lie behind all its rows, padded to 8 bytes a row; page strides are multiples of `alignment` =
    576 bytes.
    """

    width: int = 512
    rope: int = 64

    alignment = 576

    def __post_init__(self):
        checks.positive("rope", self.rope)
        _multiple("width - rope", self.width - self.rope, 64)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Values with the bf16 part, then scales with their padding."""
        groups = (self.width - self.rope) // 64
        return (self.width - self.rope + 2 * self.rope, -(-groups // 8) * 8)

    def encode(self, x: Float[Array, "*s width"]) -> UInt8[Array, "*s bytes"]:
        """Rows of `width` values as bytes; the padding is 0."""
        _width(self, x)
        plain = self.width - self.rope
        values, scales = quantize.quantize_fp8(x[..., :plain], 64)
        exponents = _exponents(scales)
        padding = jnp.zeros((*x.shape[:-1], self.sizes[1] - plain // 64), jnp.uint8)
        return _join(values, _bf16(x[..., plain:]), exponents, padding)

    def decode(self, rows: UInt8[Array, "*s bytes"], dtype=jnp.float32) -> Float[Array, "*s width"]:
        """Row bytes as `dtype`, exact in bf16."""
        plain = self.width - self.rope
        values, rope, exponents = _split(
            rows, (plain, jnp.float8_e4m3fn), (self.rope, jnp.bfloat16), (plain // 64, jnp.uint8)
        )
        return jnp.concatenate([quantize.dequantize_fp8(values, exponents, dtype), rope.astype(dtype)], -1)


@dataclasses.dataclass(frozen=True)
class V41MXFP8(RecordFormat):
    """V4.1 window rows, 528 bytes at width 512: all values in FP8 with an E8M0 scale per 32. Row-contiguous.

    The Blackwell kernels that read this record want page strides that are multiples of 512 bytes; `alignment` says so
    to whoever allocates for them, and is 1 otherwise.
    """

    width: int = 512
    alignment: int = 1

    def __post_init__(self):
        _multiple("width", self.width, 32)
        checks.positive("alignment", self.alignment)

    @property
    def sizes(self) -> tuple[int, ...]:
        """One contiguous field."""
        return (self.width + self.width // 32,)

    def encode(self, x: Float[Array, "*s width"]) -> UInt8[Array, "*s bytes"]:
        """Rows of `width` values as bytes."""
        _width(self, x)
        values, scales = quantize.quantize_fp8(x, 32)
        return _join(values, _exponents(scales))

    def decode(self, rows: UInt8[Array, "*s bytes"], dtype=jnp.float32) -> Float[Array, "*s width"]:
        """Row bytes as `dtype`, exact in bf16."""
        values, exponents = _split(rows, (self.width, jnp.float8_e4m3fn), (self.width // 32, jnp.uint8))
        return quantize.dequantize_fp8(values, exponents, dtype)


@dataclasses.dataclass(frozen=True)
class V41NVFP4(RecordFormat):
    """V4.1 compressed rows, 288 bytes at width 512: FP4 with an E4M3 scale per 16. Row-contiguous."""

    width: int = 512

    def __post_init__(self):
        _multiple("width", self.width, 16)

    @property
    def sizes(self) -> tuple[int, ...]:
        """One contiguous field."""
        return (self.width // 2 + self.width // 16,)

    def encode(self, x: Float[Array, "*s width"]) -> UInt8[Array, "*s bytes"]:
        """Rows of `width` values as bytes."""
        _width(self, x)
        return _join(*quantize.quantize_nvfp4(x, 16))

    def decode(self, rows: UInt8[Array, "*s bytes"], dtype=jnp.float32) -> Float[Array, "*s width"]:
        """Row bytes as `dtype`, exact in bf16."""
        packed, scales = _split(rows, (self.width // 2, jnp.uint8), (self.width // 16, jnp.float8_e4m3fn))
        return quantize.dequantize_fp4(packed, scales, dtype)


@dataclasses.dataclass(frozen=True)
class IndexFP8(RecordFormat):
    """Indexer keys, 132 bytes at width 128: FP8 with one float32 scale a row, planar in a page (all values first)."""

    width: int = 128

    alignment = 4

    def __post_init__(self):
        _multiple("width", self.width, 4)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Values, then the scale."""
        return (self.width, 4)

    def encode(self, x: Float[Array, "*s width"]) -> UInt8[Array, "*s bytes"]:
        """Rows of `width` values as bytes; the scale is a power of two."""
        _width(self, x)
        return _join(*quantize.quantize_fp8(x, self.width))

    def decode(self, rows: UInt8[Array, "*s bytes"], dtype=jnp.float32) -> Float[Array, "*s width"]:
        """Row bytes as `dtype`: float32 products, rounded once."""
        values, scales = _split(rows, (self.width, jnp.float8_e4m3fn), (1, jnp.float32))
        return quantize.dequantize_fp8(values, scales, dtype)


@dataclasses.dataclass(frozen=True)
class IndexMXFP4(RecordFormat):
    """Indexer keys, 68 bytes at width 128: FP4 with an E8M0 scale per 32, planar in a page (all values first)."""

    width: int = 128

    def __post_init__(self):
        _multiple("width", self.width, 32)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Packed values, then exponents."""
        return (self.width // 2, self.width // 32)

    def encode(self, x: Float[Array, "*s width"]) -> UInt8[Array, "*s bytes"]:
        """Rows of `width` values as bytes."""
        _width(self, x)
        return _join(*quantize.quantize_mxfp4(x, 32))

    def decode(self, rows: UInt8[Array, "*s bytes"], dtype=jnp.float32) -> Float[Array, "*s width"]:
        """Row bytes as `dtype`, exact in bf16."""
        packed, exponents = _split(rows, (self.width // 2, jnp.uint8), (self.width // 32, jnp.uint8))
        return quantize.dequantize_fp4(packed, exponents, dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedRows:
    """A paged cache: slot s is row s % page_size of page s // page_size. A pytree; format and page_size are static.

    pages: [num_pages, page_size, width] of the format's dtype for `Plain`, uint8 [num_pages, page stride] for every
    other format. The stride may be larger than the format needs.
    """

    pages: Any
    format: RecordFormat = dataclasses.field(metadata={"static": True})
    page_size: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def zeros(cls, format: RecordFormat, num_pages: int, page_size: int) -> "PagedRows":
        """An empty cache."""
        checks.positive("num_pages", num_pages)
        checks.positive("page_size", page_size)
        if isinstance(format, Plain):
            return cls(jnp.zeros((num_pages, page_size, format.width), format.dtype), format, page_size)
        return cls(jnp.zeros((num_pages, format.page_bytes(page_size)), jnp.uint8), format, page_size)

    @property
    def num_slots(self) -> int:
        """Rows that the cache holds."""
        return self.pages.shape[0] * self.page_size

    def gather_bytes(self, slots: Int32[Array, "*s"]) -> Shaped[Array, "*s bytes"]:
        """Stored rows (bytes, or values for `Plain`); zeros where a slot is below 0 or beyond the last page."""
        if isinstance(self.format, Plain):
            return indexing.gather_paged(self.pages, slots)
        fields = self._fields()
        return jnp.concatenate([indexing.gather_bytes(self.pages, slots, self.page_size, f) for f in fields], -1)

    def gather(self, slots: Int32[Array, "*s"], dtype=jnp.float32) -> Float[Array, "*s width"]:
        """Decoded rows as `dtype`; zeros where a slot is below 0 or beyond the last page."""
        rows = self.format.decode(self.gather_bytes(slots), dtype)
        _, _, inside = indexing.page_and_row(slots, self.page_size, self.pages.shape[0])
        return jnp.where(inside[..., None], rows, jnp.zeros((), rows.dtype))

    def scatter(self, slots: Int32[Array, " M"], x: Float[Array, "M width"]) -> "PagedRows":
        """The cache with rows `x` encoded and stored at `slots`; a slot below 0 or beyond the last page writes nothing.

        Slots that do write must differ from one another.
        """
        checks.shape("x", x, "M width", {"M": slots.shape[0], "width": self.format.width})
        rows = self.format.encode(x)
        if isinstance(self.format, Plain):
            return dataclasses.replace(self, pages=indexing.scatter_paged(self.pages, slots, rows))
        pages, at = self.pages, 0
        for field in self._fields():
            part = rows[:, at : at + field.size]
            pages, at = indexing.scatter_bytes(pages, slots, self.page_size, field, part), at + field.size
        return dataclasses.replace(self, pages=pages)

    def _fields(self):
        needed, stride = self.page_size * self.format.row_bytes, self.pages.shape[1]
        if stride < needed:
            raise ValueError(
                f"pages have shape {tuple(self.pages.shape)}; a page of {self.page_size} rows of {self.format} needs "
                f"{needed} bytes. Allocate with PagedRows.zeros, or give pages at least that wide."
            )
        return self.format.fields(self.page_size)


def _width(format, x):
    if x.shape[-1] != format.width:
        raise ValueError(f"x has shape {tuple(x.shape)}; rows of {format} have {format.width} values.")


def _multiple(name, value, of):
    if not isinstance(value, int) or value < of or value % of:
        raise ValueError(f"{name} is {value!r}; it must be a positive multiple of {of}.")


def _bf16(x):
    return blocks.cast(x.astype(jnp.float32), jnp.bfloat16)


def _exponents(scales):
    """E8M0 bytes of float32 scales that are powers of two (255 for NaN)."""
    return ((lax.bitcast_convert_type(scales, jnp.uint32) >> 23) & 255).astype(jnp.uint8)


def _join(*parts):
    """Arrays [..., n] of any dtypes as bytes, one after another along the last axis."""
    flat = []
    for part in parts:
        part = lax.bitcast_convert_type(part, jnp.uint8)
        flat.append(part.reshape(*parts[0].shape[:-1], -1))
    return jnp.concatenate(flat, axis=-1)


def _split(rows, *parts):
    """The counterpart of _join: (count, dtype) of every part. Bytes behind the last part are padding."""
    found, at = [], 0
    for count, dtype in parts:
        size = count * jnp.dtype(dtype).itemsize
        part = rows[..., at : at + size]
        if jnp.dtype(dtype).itemsize > 1:
            part = part.reshape(*rows.shape[:-1], count, -1)
        found.append(lax.bitcast_convert_type(part, dtype))
        at += size
    return found
