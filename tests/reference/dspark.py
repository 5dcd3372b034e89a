"""DSpark's drafts of V4 in NumPy, float64, written from the specification (deepseek-v4 sections 4 to 9, v4.1 section 11).

`c` maps the names of the config to its values, `weights` the checkpoint's tensor names to stored arrays: E4M3 with scale
bytes of tiles, experts stacked with two E2M1 codes a byte and a scale byte for 32 columns, everything else as
numbers. No quantiser acts on activations.
"""

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def dense(c, weights, name):
    """A linear's matrix [out, in] in float64."""
    values = np.asarray(weights[name + ".weight"]).astype(np.float64)
    if name + ".scale" not in weights:
        return values
    scale = 2.0 ** (np.asarray(weights[name + ".scale"]).astype(np.float64) - 127)
    rows, columns = c["weight_block_size"]
    return values * np.repeat(np.repeat(scale, rows, 0), columns, 1)[: values.shape[0], : values.shape[1]]


def expert(weights, name, e):
    """Expert e's matrix of a stacked FP4 linear."""
    packed = np.asarray(weights[name + ".weight"])[e]
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    scale = 2.0 ** (np.asarray(weights[name + ".scale"])[e].astype(np.float64) - 127)
    return E2M1[codes] * np.repeat(scale, 32, axis=1)


def rms_norm(x, weight, eps):
    """x / sqrt(mean x² + eps), times a weight."""
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * np.asarray(weight).astype(np.float64)


def rotate(x, positions, theta, width, inverse=False):
    """Interleaved pairs of the last `width` values, turned by position · theta^(-2i/width)."""
    angle = positions[:, None] * theta ** (-np.arange(0, width, 2) / width) * (-1 if inverse else 1)
    angle = angle.reshape(len(x), *(1,) * (x.ndim - 2), -1)
    out, tail = x.copy(), x[..., -width:]
    out[..., -width::2] = tail[..., 0::2] * np.cos(angle) - tail[..., 1::2] * np.sin(angle)
    out[..., 1 - width :: 2] = tail[..., 0::2] * np.sin(angle) + tail[..., 1::2] * np.cos(angle)
    return out


def mixes(c, weights, prefix, stream):
    """pre [S, c], post [S, c], comb [S, c, c] of a sub-layer."""
    copies, x = c["hc_mult"], stream.reshape(len(stream), -1)
    fn, scale, base = (np.asarray(weights[prefix + part]).astype(np.float64) for part in ("fn", "scale", "base"))
    m = x @ fn.T / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + c["rms_norm_eps"])
    pre, post, comb = np.split(m, [copies, 2 * copies], axis=1)
    pre = 1 / (1 + np.exp(-(pre * scale[0] + base[:copies]))) + c["hc_eps"]
    post = 2 / (1 + np.exp(-(post * scale[1] + base[copies : 2 * copies])))
    comb = (comb * scale[2] + base[2 * copies :]).reshape(-1, copies, copies)
    comb = np.exp(comb - comb.max(-1, keepdims=True))
    comb = comb / comb.sum(-1, keepdims=True) + c["hc_eps"]
    comb /= comb.sum(-2, keepdims=True) + c["hc_eps"]
    for _ in range(c["hc_sinkhorn_iters"] - 1):
        comb /= comb.sum(-1, keepdims=True) + c["hc_eps"]
        comb /= comb.sum(-2, keepdims=True) + c["hc_eps"]
    return pre, post, comb


def through(c, weights, prefix, stream, sub_layer):
    """The stream [S, c, D] after one sub-layer between its mixes; prefix is "mtp.0.hc_attn_" or "mtp.0.hc_ffn_"."""
    pre, post, comb = mixes(c, weights, prefix, stream)
    x = np.einsum("sc,scd->sd", pre, stream)
    y = sub_layer(rms_norm(x, weights[prefix.replace("hc_", "") + "norm.weight"], c["rms_norm_eps"]))
    return post[..., None] * y[:, None] + np.einsum("sjk,sjd->skd", comb, stream)


def window_row(c, weights, prefix, x, positions):
    """Key and value rows [S, h] of the inputs x."""
    row = rms_norm(x @ dense(c, weights, prefix + "wkv").T, weights[prefix + "kv_norm.weight"], c["rms_norm_eps"])
    return rotate(row, positions, c["rope_theta"], c["qk_rope_head_dim"])


def attention(c, weights, prefix, x, positions, context):
    """Every row sees the rows `context` and all rows of its own block."""
    heads, width, eps = c["num_attention_heads"], c["head_dim"], c["rms_norm_eps"]
    latent = rms_norm(x @ dense(c, weights, prefix + "wq_a").T, weights[prefix + "q_norm.weight"], eps)
    q = (latent @ dense(c, weights, prefix + "wq_b").T).reshape(len(x), heads, width)
    q = rotate(rms_norm(q, 1.0, eps), positions, c["rope_theta"], c["qk_rope_head_dim"])
    keys = np.concatenate([context, window_row(c, weights, prefix, x, positions)])
    p = np.exp(np.einsum("shd,kd->shk", q, keys) * width**-0.5)
    sink = np.exp(np.asarray(weights[prefix + "attn_sink"]).astype(np.float64))
    o = np.einsum("shk,kd->shd", p / (p.sum(-1, keepdims=True) + sink[:, None]), keys)
    o = rotate(o, positions, c["rope_theta"], c["qk_rope_head_dim"], inverse=True)
    groups = c["o_groups"]
    wo_a = dense(c, weights, prefix + "wo_a").reshape(groups, -1, heads * width // groups)
    u = np.einsum("sgi,goi->sgo", o.reshape(len(x), groups, -1), wo_a)
    return u.reshape(len(x), -1) @ dense(c, weights, prefix + "wo_b").T


def swiglu(gate, up, limit):
    """silu(gate) · up, clamped before the product."""
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate / (1 + np.exp(-gate)) * up


def experts(c, weights, prefix, x):
    """Routed and shared experts; a sqrt(softplus) gate with a bias for the choice alone."""
    scores = np.sqrt(np.log1p(np.exp(x @ dense(c, weights, prefix + "gate").T)))
    biased = scores + np.asarray(weights[prefix + "gate.bias"])
    shared = [dense(c, weights, f"{prefix}shared_experts.{name}") for name in ("w1", "w3", "w2")]
    out = swiglu(x @ shared[0].T, x @ shared[1].T, c["swiglu_limit"]) @ shared[2].T
    for s, row in enumerate(x):
        chosen = np.argsort(-biased[s], kind="stable")[: c["num_experts_per_tok"]]
        share = scores[s, chosen] / scores[s, chosen].sum() * c["routed_scaling_factor"]
        for e, w in zip(chosen, share, strict=True):
            w1, w3, w2 = (expert(weights, f"{prefix}experts.{name}", e) for name in ("w1", "w3", "w2"))
            out[s] += w2 @ (swiglu(w1 @ row, w3 @ row, c["swiglu_limit"]) * w)
    return out


def draft(c, weights, main_hidden, token, block, noise):
    """(ids [n+1], logits [n, V], confidence [n]) of the n = `block` drafts behind `token`.

    main_hidden [t+1, taps·D]: what the stages read of every token before `token`.
    """
    eps, n, start = c["rms_norm_eps"], block, len(main_hidden)
    stages = len({name.split(".")[1] for name in weights if name.startswith("mtp.")})
    main = rms_norm(main_hidden @ dense(c, weights, "mtp.0.main_proj").T, weights["mtp.0.main_norm.weight"], eps)
    embed = np.asarray(weights["embed.weight"]).astype(np.float64)
    stream = np.repeat(embed[[token] + [noise] * (n - 1)][:, None], c["hc_mult"], axis=1)
    first = max(0, start - c["sliding_window"])
    for s in range(stages):
        prefix = f"mtp.{s}."
        context = window_row(c, weights, prefix + "attn.", main[first:], np.arange(first, start))
        positions = start + np.arange(n)

        def attend(x, prefix=prefix, context=context, positions=positions):
            return attention(c, weights, prefix + "attn.", x, positions, context)

        def feed_forward(x, prefix=prefix):
            return experts(c, weights, prefix + "ffn.", x)

        stream = through(c, weights, prefix + "hc_attn_", stream, attend)
        stream = through(c, weights, prefix + "hc_ffn_", stream, feed_forward)
    x = stream.reshape(n, -1)
    fn, scale, base = (np.asarray(weights[f"{prefix}hc_head_{part}"]).astype(np.float64) for part in ("fn", "scale", "base"))
    mix = x @ fn.T / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + eps)
    h = np.einsum("sc,scd->sd", 1 / (1 + np.exp(-(mix * scale + base))) + c["hc_eps"], stream)
    logits = rms_norm(h, weights[prefix + "norm.weight"], eps) @ dense(c, weights, "head").T
    ids, confidence = [token], []
    for i in range(n):
        before = np.asarray(weights[prefix + "markov_head.markov_w1.weight"]).astype(np.float64)[ids[-1]]
        logits[i] += dense(c, weights, prefix + "markov_head.markov_w2") @ before
        confidence.append(dense(c, weights, prefix + "confidence_head.proj")[0] @ np.concatenate([h[i], before]))
        ids.append(int(logits[i].argmax()))
    return np.array(ids), logits, np.array(confidence)
