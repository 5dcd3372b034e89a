"""The operations in NumPy, one row at a time, written from the specification. Tests compare with these.

Slow and plain on purpose. Imports nothing of the project.
"""

import math

import ml_dtypes
import numpy as np

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def bf16(x):
    """x rounded to bfloat16, as float32."""
    return np.asarray(x, np.float32).astype(BF16).astype(np.float32)


# ---------------------------------------------------------------- number formats


def pow2ceil(v):
    """The smallest power of two that is at least v, for one positive number."""
    fraction, exponent = math.frexp(float(v))  # v = fraction * 2^exponent, 1/2 <= fraction < 1
    return np.float32(math.ldexp(1.0, exponent - 1 if fraction == 0.5 else exponent))


def quantize_fp8(x, group, power_of_two=True):
    """x [n] -> FP8 values [n], float32 scales [n / group]."""
    values, scales = [], []
    for part in np.asarray(x, np.float32).reshape(-1, group):
        amax = min(max(np.abs(part).max(), np.float32(1e-4)), np.finfo(np.float32).max)
        scale = np.float32(amax * np.float32(1 / 448))
        if power_of_two:
            scale = pow2ceil(scale)
        with np.errstate(over="ignore"):
            values.append(np.clip(part / scale, -448, 448).astype(E4M3))
        scales.append(scale)
    return np.concatenate(values), np.array(scales, np.float32)


def fp4_code(v):
    """The E2M1 code of one number: nearest magnitude, ties to the even code, 6 at most, sign of zero kept."""
    distance = [abs(min(abs(float(v)), 6.0) - m) for m in FP4_MAGNITUDES]
    tied = [code for code in range(8) if distance[code] == min(distance)]
    code = tied[0] if len(tied) == 1 else next(c for c in tied if c % 2 == 0)
    return code | (8 if np.signbit(v) else 0)


def quantize_fp4(x, group, kind):
    """x [n] -> packed bytes [n / 2], scales [n / group]: E8M0 bytes for kind "e8m0", E4M3 numbers for "e4m3"."""
    codes, scales = [], []
    for part in np.asarray(x, np.float32).reshape(-1, group):
        amax = min(np.abs(part).max(), np.finfo(np.float32).max)
        if kind == "e8m0":
            scale = pow2ceil(np.float32(max(amax, np.float32(6 * 2.0**-126)) * np.float32(1 / 6)))
            scales.append(np.uint8(math.frexp(scale)[1] - 1 + 127))
        else:
            scale = np.float32(min(np.float32(max(amax, np.float32(6 * 2.0**-9)) / np.float32(6)), np.float32(448)))
            scale = scale.astype(E4M3)
            scales.append(scale)
        codes += [fp4_code(np.float32(v) / np.float32(scale)) for v in part]
    codes = np.array(codes, np.uint8)
    return codes[0::2] | (codes[1::2] << 4), np.array(scales)


def fp4_value(code):
    return (-1.0 if code & 8 else 1.0) * FP4_MAGNITUDES[code & 7]


def unpack_fp4(packed):
    """Bytes [..., n / 2] -> float32 [..., n]."""
    values = np.array([[fp4_value(byte & 15), fp4_value(byte >> 4)] for byte in np.asarray(packed).reshape(-1)], np.float32)
    return values.reshape(*np.shape(packed)[:-1], -1)


def e8m0(byte):
    return math.nan if byte == 255 else math.ldexp(1.0, int(byte) - 127)


def scales_as_float(scales):
    if scales.dtype == np.uint8:
        return np.array([e8m0(b) for b in scales.reshape(-1)]).reshape(scales.shape)
    return scales.astype(np.float64)


def dequantize(values, scales):
    """Values [..., n] times the scales of their groups [..., g], as float64 (exact)."""
    spread = np.repeat(scales_as_float(scales), values.shape[-1] // scales.shape[-1], axis=-1)
    return values.astype(np.float64) * spread


def dequantize_weight(weight, scale, block):
    """weight [out, in] FP8 with tiles of `block`, or packed FP4 [out, in / 2] with one scale per 32 -> float64."""
    if weight.dtype == np.uint8:
        return dequantize(unpack_fp4(weight), scale)
    out = np.empty(weight.shape)
    scale = scales_as_float(scale)
    for o in range(weight.shape[0]):
        for i in range(weight.shape[1]):
            out[o, i] = float(weight[o, i]) * scale[o // block[0], i // block[1]]
    return out


# ---------------------------------------------------------------- products


def quantized_matmul(x, weight, scale, block):
    """x [rows, K] times a stored weight, transposed: float64 sums of the float32 numbers that the weight stands for."""
    with np.errstate(over="ignore"):
        dense = dequantize_weight(weight, scale, block).astype(np.float32)
    return np.asarray(x).astype(np.float64) @ dense.astype(np.float64).T


def grouped_gemm(x, weight, scale, group, block):
    """Tiles x [tiles, R, K], each times the weight of its group; 0 for a group that is none of the weights."""
    out = np.zeros((*x.shape[:2], weight.shape[1]))
    for t, g in enumerate(group):
        if 0 <= g < len(weight):
            out[t] = quantized_matmul(x[t], weight[g], scale[g], block)
    return out


# ---------------------------------------------------------------- cache records


def raw(*arrays):
    """The bytes of arrays, one after another."""
    return np.frombuffer(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays), np.uint8)


def exponents(scales):
    return np.array([math.frexp(s)[1] - 1 + 127 for s in scales], np.uint8)


def record(kind, x):
    """One row x [width] in format `kind`: (bytes of the row region, bytes kept apart or b"")."""
    nothing = np.zeros(0, np.uint8)
    if kind == "v32":
        values, scales = quantize_fp8(x[:-64], 128)
        return raw(values, scales, x[-64:].astype(BF16)), nothing
    if kind == "model1":
        values, scales = quantize_fp8(x[:-64], 64)
        exps = exponents(scales)
        return raw(values, x[-64:].astype(BF16)), raw(exps, np.zeros(-len(exps) % 8, np.uint8))
    if kind == "v41_mxfp8":
        values, scales = quantize_fp8(x, 32)
        return raw(values, exponents(scales)), nothing
    if kind == "v41_nvfp4":
        return raw(*quantize_fp4(x, 16, "e4m3")), nothing
    if kind == "index_fp8":
        return tuple(raw(part) for part in quantize_fp8(x, len(x)))
    if kind == "index_mxfp4":
        return tuple(raw(part) for part in quantize_fp4(x, 32, "e8m0"))
    raise ValueError(kind)


def page(kind, rows, stride):
    """A page of `stride` bytes with every row filled: rows first, then what the format keeps behind them."""
    parts = [record(kind, x) for x in rows]
    filled = b"".join(p[0].tobytes() for p in parts) + b"".join(p[1].tobytes() for p in parts)
    return np.frombuffer(filled.ljust(stride, b"\0"), np.uint8)


def rotate(x, cos, sin, pairs):
    """One row x [width] turned by angles [half]: pairs "interleaved" at its end, or "half_split" at its start."""
    out, half = np.array(x, np.float32), len(cos)
    for i in range(half):
        a, b = (i, i + half) if pairs == "half_split" else (len(x) - 2 * half + 2 * i, len(x) - 2 * half + 2 * i + 1)
        out[a] = np.float32(x[a] * cos[i]) - np.float32(x[b] * sin[i])
        out[b] = np.float32(x[a] * sin[i]) + np.float32(x[b] * cos[i])
    return out


def hadamard(x):
    """One row times the Hadamard matrix in natural order, over the root of its width; float64 sums."""
    i = np.arange(len(x))
    signs = np.array([[-1.0 if bin(a & b).count("1") % 2 else 1.0 for b in i] for a in i])
    return (signs @ np.asarray(x, np.float64) * len(x) ** -0.5).astype(np.float32)


# ---------------------------------------------------------------- selection


def index_scores(q, k, weights, rounded=False):
    """q [T, H, D], k [S, D], weights [T, H] -> [T, S]. `rounded`: float32 with the released model's bf16 roundings."""
    if not rounded:
        dots = np.einsum("thd,sd->ths", q.astype(np.float64), k.astype(np.float64))
        return np.einsum("ths,th->ts", np.maximum(dots, 0), weights.astype(np.float64))
    dots = bf16(np.einsum("thd,sd->ths", q.astype(np.float64), k.astype(np.float64)))
    products = bf16(np.maximum(dots, 0) * weights[..., None].astype(np.float32))
    return bf16(products.astype(np.float64).sum(1))


def best(scores, k):
    """Indices of the k best of a list: higher first, then lower index; NaN and -inf never. Best first."""
    allowed = [i for i, s in enumerate(scores) if not math.isnan(s) and s != -math.inf]
    return sorted(allowed, key=lambda i: (-float(scores[i]), i))[:k]


def padded(indices, k):
    return list(indices) + [-1] * (k - len(indices))


def top_k(scores, k, length=None, order="position"):
    """One row: positions (ascending or best first), then -1 up to k."""
    found = best(list(scores[:length]), k)
    return padded(sorted(found) if order == "position" else found, k)


def candidate_blocks(scores, length, topk_blocks, block_size):
    """One row of scores: ids of the chosen blocks, ascending, then -1."""
    total = len(scores)
    blocks = -(-total // block_size)
    width = min(topk_blocks, blocks)
    length = min(length, total)
    if length <= 0:
        return padded([], width)
    newest = (length - 1) // block_size
    maxima = {}
    for b in range(newest):
        inside = scores[b * block_size : (b + 1) * block_size]
        maxima[b] = math.inf if any(math.isnan(s) for s in inside) else max(float(s) for s in inside)
    ranked = sorted((b for b in maxima if maxima[b] != -math.inf), key=lambda b: (-maxima[b], b))
    return padded(sorted([newest, *ranked][:width]), width)


def merge(scores, ids, k):
    """Results of shards [shards, k] -> the k best ids by (score descending, id ascending), ascending, then -1."""
    pairs = [
        (-float(s), int(i))
        for s, i in zip(np.ravel(scores), np.ravel(ids))
        if i >= 0 and not math.isnan(s) and s != -math.inf
    ]
    return padded(sorted(i for _, i in sorted(pairs)[:k]), k)


def slots(positions, table, page_size, length=None):
    """One row of positions -> slots (Python integers, so nothing wraps); -1 for none."""
    out = []
    for p in positions:
        p = int(p)
        none = p < 0 or p // page_size >= len(table) or (length is not None and p >= length)
        out.append(-1 if none or table[p // page_size] < 0 else int(table[p // page_size]) * page_size + p % page_size)
    return out


# ---------------------------------------------------------------- attention


def attention(q, rows, sink, scale, v_width):
    """One query row q [H, D] over listed rows [n, D]: out [H, V], lse [H], in float64 without online softmax."""
    heads = q.shape[0]
    out, lse = np.zeros((heads, v_width)), np.full(heads, -math.inf)
    if len(rows) == 0:
        return out, lse
    rows = rows.astype(np.float64)
    for h in range(heads):
        scores = rows @ q[h].astype(np.float64) * scale
        high = scores.max()
        weights = np.exp(scores - high)
        lse[h] = high + math.log(weights.sum())
        if sink is None or sink[h] == -math.inf:
            share = 1.0
        elif sink[h] == math.inf:
            share = 0.0
        else:
            share = 1 / (1 + math.exp(min(float(sink[h]) - lse[h], 700)))
        out[h] = share * (weights @ rows[:, :v_width]) / weights.sum()
    return out, lse


def sparse_attention(q, kvs, lists, lengths, sink, scale, v_width):
    """q [T, H, D]; several arrays of rows with a list each. Entries that are none are left out."""
    results = []
    for t in range(q.shape[0]):
        rows = []
        for kv, indices, length in zip(kvs, lists, lengths):
            listed = indices[t] if length is None else indices[t][: length[t]]
            rows += [kv[i] for i in listed if 0 <= i < len(kv)]
        results.append(attention(q[t], np.array(rows).reshape(-1, q.shape[2]), sink, scale, v_width))
    return tuple(np.stack(part) for part in zip(*results))
