"""What indexers are trained against, in all three families: scores, and the log-sum-exp over what was selected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_v4
import tiny_v32
import tolerances

from dsa_jax import ops
from dsa_jax.families import family_of
from dsa_jax.layer_plan_v4 import layer_plan
from dsa_jax.layer_plan_v32 import latent_plan
from dsa_jax.layers.latent_attention import LatentAttention
from dsa_jax.layers.rope import rope_angles
from dsa_jax.layers.shared_kv import SharedKVAttention
from dsa_jax.numerics import F32
from dsa_jax.selection import forward_with_selections
from dsa_jax.tap import Tap

# Family: (its tiny models, layers that score and choose freely, layers that take another's choice or every row)
FAMILIES = {"v41": (tiny, (1, 3), (2, 4, 5)), "v4": (tiny_v4, (1,), (2,)), "v32": (tiny_v32, (0, 1, 2), ())}


def logsumexp(scores: np.ndarray) -> np.ndarray:
    high = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), -1e300)
    with np.errstate(divide="ignore"):
        return (high + np.log(np.exp(scores - high).sum(-1, keepdims=True)))[..., 0]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_choices_belong_together(family):
    models, scoring, others = FAMILIES[family]
    config = models.tiny_config()
    model, n = models.tiny_module(config), 24
    cache = family_of(config).new_cache(config, F32, 2, 128)
    tokens = np.random.default_rng(4).integers(3, 60, (2, 32)).astype(np.int32)

    @jax.jit
    def run(cache, tokens, count):
        return forward_with_selections(model, cache, tokens, count, F32, return_scores=True, return_lse=True)

    _, after, found = run(cache, tokens, jnp.array([n, 0], jnp.int32))
    assert list(np.asarray(after.length)) == [n, 0] and sorted(found) == sorted(scoring + others)
    for layer in scoring:
        chosen, scores, lse = (np.asarray(part) for part in (found[layer].topk_indices, found[layer].scores, found[layer].lse))
        for t in range(n):
            visible = np.flatnonzero(np.isfinite(scores[0, t]))
            best = visible[np.argsort(-scores[0, t, visible], kind="stable")[: config.index_topk]]
            assert np.array_equal(chosen[0, t][chosen[0, t] >= 0], np.sort(best)), f"layer {layer}, row {t}"
        assert lse.shape == (2, 32, config.num_attention_heads)
        assert np.array_equal(np.isneginf(lse).all(-1), (chosen < 0).all(-1)) and not np.isnan(lse).any()
    for layer in others:
        lse = np.asarray(found[layer].lse)
        assert np.isneginf(lse[1]).all() and not np.isnan(lse).any()


def test_what_was_not_asked_for_is_not_computed():
    config = tiny_v4.tiny_config()
    model, cache = tiny_v4.tiny_module(config), family_of(config).new_cache(config, F32, 1, 128)
    run = jax.eval_shape(
        lambda cache: forward_with_selections(model, cache, jnp.ones((1, 8), jnp.int32), jnp.array([8]), F32), cache
    )
    assert set(run[2]) == {1} and run[2][1].scores is None and run[2][1].lse is None


def test_lse_of_selected_rows_beside_a_window():
    """Two caches under one softmax; the selected rows' own sum leaves out window and sink."""
    rng, config = np.random.default_rng(0), tiny_v4.tiny_config()
    layer = SharedKVAttention(config, layer_plan(config)[1].rope, norm_heads=True)
    layer.attn_sink.set_value(jnp.array([1.0, -2.0]))
    q = rng.standard_normal((1, 3, 2, 80)).astype(np.float32)
    rows = rng.standard_normal((2, 6, 80)).astype(np.float32)
    caches = tuple(
        ops.PagedRows.zeros(ops.Plain(80, jnp.float32), 6, 1).scatter(jnp.arange(6, dtype=jnp.int32), jnp.asarray(r))
        for r in rows
    )
    window = np.array([[[0, -1], [0, 1], [1, 2]]], np.int32)
    selected = np.array([[[-1, -1, -1], [4, -1, -1], [0, 3, 5]]], np.int32)
    tap, angles = Tap(only={"selected_lse"}), rope_angles(16, layer.rope, jnp.arange(3, dtype=jnp.int32)[None])
    table = jnp.arange(6, dtype=jnp.int32)[None]
    layer.attend(jnp.asarray(q), caches, (jnp.asarray(window), jnp.asarray(selected)), table, angles, F32, tap)
    for t in range(3):
        listed = selected[0, t][selected[0, t] >= 0]
        expected = logsumexp(q[0, t].astype(np.float64) @ rows[1, listed].T * 80**-0.5)
        np.testing.assert_allclose(tap.values["selected_lse"][0, t], expected, atol=tolerances.of("ops.lse.f32"))


def test_both_forms_of_latent_attention_give_the_same_lse():
    rng, config = np.random.default_rng(1), tiny_v32.tiny_config()
    layer = LatentAttention(config, latent_plan(config)[0].rope)
    weight = rng.standard_normal(layer.wkv_b.weight.shape).astype(jnp.float8_e4m3fn)
    layer.wkv_b.weight.set_value(jnp.asarray(weight))
    layer.wkv_b.scale.set_value(jnp.full(layer.wkv_b.scale.shape, 127 - 4, jnp.uint8))
    rows = rng.standard_normal((1, 7, 128 + 16)).astype(np.float32)
    q = rng.standard_normal((1, 4, 2, 32 + 16)).astype(np.float32)
    cache = ops.PagedRows.zeros(ops.Plain(144, jnp.float32), 7, 1).scatter(jnp.arange(7, dtype=jnp.int32), jnp.asarray(rows[0]))
    slots = np.array([[[0, -1, -1], [0, 1, -1], [2, 3, 6], [-1, -1, -1]]], np.int32)
    mask = (slots[..., None] == np.arange(7)).any(-2)
    table = jnp.arange(7, dtype=jnp.int32)[None]
    absorbed = layer.attend(jnp.asarray(q), cache, jnp.asarray(slots), table, F32)
    expanded = layer.attend_expanded(jnp.asarray(q), jnp.asarray(rows), jnp.asarray(mask), F32)
    up = weight.astype(np.float64).reshape(2, -1, 128)[:, :32] / 16
    key = np.concatenate([np.einsum("hnc,tc->htn", up, rows[0, :, :128]), np.tile(rows[:, :, 128:], (2, 1, 1))], axis=-1)
    scores = np.einsum("shd,htd->sht", q[0], key) * layer.scale
    expected = logsumexp(np.where(mask[0][:, None], scores, -np.inf))
    for out, lse in (absorbed, expanded):
        np.testing.assert_allclose(np.asarray(lse)[0], expected, atol=tolerances.of("model.latent_forms.f32"))
    np.testing.assert_allclose(absorbed[0], expanded[0], atol=tolerances.of("model.latent_forms.f32"))
