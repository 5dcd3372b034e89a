"""Engram's token map and hash: published answers, golden data, and exact integers."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import read_golden
from hypothesis import given, settings
from hypothesis import strategies as st
from official_v41 import official_config
from reference import engram as oracle
from tokenizers import Tokenizer, models

from dsa_jax.config import V41Config, load_config
from dsa_jax.layers.engram_hash import (
    EngramHash,
    EngramLayerHash,
    EngramTokenMap,
    compressed_token_map,
    engram_multipliers,
    engram_primes,
    hash_rows,
)

PRIMES = {
    1: (
        (16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183),
        (16000189, 16000207, 16000211, 16000253, 16000277, 16000289, 16000307, 16000321),
        (16000339, 16000381, 16000393, 16000399, 16000403, 16000409, 16000447, 16000463),
    ),
    14: (
        (16000477, 16000487, 16000499, 16000507, 16000511, 16000573, 16000609, 16000627),
        (16000667, 16000669, 16000693, 16000697, 16000711, 16000729, 16000759, 16000769),
        (16000781, 16000799, 16000813, 16000819, 16000841, 16000877, 16000879, 16000889),
    ),
}
MULTIPLIERS = {
    1: (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    14: (67716810739261, 51510806800915, 30921347202721, 82619226485591),
}
HASHES = {
    1: [
        *(12013311, 19589167, 45006560, 56352444, 73396926, 95085389, 97930840, 125571061),
        *(139496094, 154390218, 168372840, 187320647, 207399159, 217467923, 232607951, 249747568),
        *(268309477, 274083286, 289509718, 313233695, 334386990, 342122088, 359270622, 380048014),
    ],
    14: [1915295, 31448111, 41304315, 58552781, 67180214, 81174207, 111213027, 126297219],
}


@pytest.fixture(scope="module")
def official():
    return V41Config.from_dict(official_config())


@pytest.fixture(scope="module")
def folder(request):
    return request.config.rootpath / "tests/golden/v41"


@pytest.fixture(scope="module")
def golden():
    return read_golden("v41/ops/engram_hash")


def test_published_primes(official):
    assert engram_primes(official) == (PRIMES[1], PRIMES[14])
    assert [sum(map(sum, PRIMES[layer])) for layer in (1, 14)] == list(official.engram_num_embeddings)


@pytest.mark.parametrize("layer", [1, 14])
def test_published_multipliers(official, layer):
    assert engram_multipliers(official, layer) == MULTIPLIERS[layer]


@pytest.mark.parametrize("layer", [1, 14])
def test_published_hashes(official, layer):
    rows = hash_rows(EngramHash.from_config(official).of_layer(layer), jnp.array([100, 200, 300, 400], jnp.int32))
    assert rows.shape == (24,) and rows.dtype == jnp.int32
    assert rows[: len(HASHES[layer])].tolist() == HASHES[layer]


def test_golden_constants(folder, golden):
    layers = EngramHash.from_config(load_config(folder / "checkpoint")).layers
    assert [layer.layer for layer in layers] == [1, 4]
    np.testing.assert_array_equal([layer.multipliers for layer in layers], golden["multipliers"])
    np.testing.assert_array_equal([layer.primes for layer in layers], golden["primes"])
    np.testing.assert_array_equal([np.ravel(layer.offsets) for layer in layers], golden["offsets"])


def test_golden_token_map(folder, golden):
    found = EngramTokenMap.from_checkpoint(folder / "checkpoint", load_config(folder / "checkpoint"))
    assert found.ids.dtype == np.int32
    np.testing.assert_array_equal(found.ids, golden["token_map"])
    assert found.pad_id == golden["token_map"][2]


def test_token_map_equals_the_oracle(folder):
    tokenizer = Tokenizer.from_file(str(folder / "checkpoint/tokenizer.json"))
    np.testing.assert_array_equal(compressed_token_map(tokenizer), oracle.token_map(tokenizer))


def test_token_map_folds_case_accents_width_and_blanks():
    texts = ["a", "A", "á", "Ａ", "ab", " ", "\t", "\n\n", " a", "a ", "b", "̈", "ﬁ", "fi", "\u3000", "İ"]
    vocabulary = {text: i for i, text in enumerate(texts)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    found = compressed_token_map(tokenizer).tolist()
    # A lone combining mark folds to nothing and keeps its own text; a blank of any kind is one space.
    assert found == [0, 0, 0, 0, 1, 2, 2, 2, 0, 0, 3, 4, 5, 5, 2, 6]


@pytest.mark.parametrize("masked", [False, True])
def test_golden_hashes(folder, golden, masked):
    config = load_config(folder / "checkpoint")
    tokens = EngramTokenMap.from_checkpoint(folder / "checkpoint", config)
    ids = tokens.ids[golden["input_ids"][0]]
    is_text = golden["token_mask"] if masked else np.ones(len(ids))
    places = jnp.array(oracle.context(ids, is_text, tokens.pad_id, 4), jnp.int32)
    for column, layer in enumerate(EngramHash.from_config(config).layers):
        rows = jax.jit(hash_rows, static_argnums=0)(layer, places)
        np.testing.assert_array_equal(rows, golden["hash_ids_masked" if masked else "hash_ids"][:, column])


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    vocabulary=st.sampled_from([2, 3, 312, 99092, 2**20, 2**31 - 1]),
    primes=st.lists(st.lists(st.integers(2, 2**31 - 1), min_size=2, max_size=2), min_size=1, max_size=3),
)
def test_hash_is_exact(data, vocabulary, primes):
    """Any moduli below 2^31 (their primality plays no part in the arithmetic) and any product below 2^63."""
    places = len(primes) + 1
    largest = (2**63 - 1) // max(vocabulary - 1, 1)
    multipliers = data.draw(st.lists(st.integers(0, largest), min_size=places, max_size=places))
    ids = data.draw(
        st.lists(st.lists(st.integers(0, vocabulary - 1), min_size=places, max_size=places), min_size=1, max_size=4)
    )
    zero = tuple(tuple(0 for _ in row) for row in primes)
    constants = EngramLayerHash(0, tuple(multipliers), tuple(map(tuple, primes)), zero)
    starts = np.cumsum([0, *np.ravel(primes)[:-1]])
    wanted = [np.array(oracle.rows(multipliers, primes, row)) - starts for row in ids]
    np.testing.assert_array_equal(hash_rows(constants, jnp.array(ids, jnp.int32)), wanted)


def test_hash_keeps_leading_axes_and_works_without_x64(official):
    layer = EngramHash.from_config(official).of_layer(1)
    ids = jnp.arange(2 * 3 * 4, dtype=jnp.int32).reshape(2, 3, 4) * 4000
    rows = jax.jit(lambda x: hash_rows(layer, x))(ids)
    assert rows.shape == (2, 3, 24)
    np.testing.assert_array_equal(rows[1, 2], oracle.rows(layer.multipliers, layer.primes, ids[1, 2].tolist()))
    assert not jax.config.jax_enable_x64


# ---------------------------------------------------------------- refusals


def test_wrong_number_of_places(official):
    with pytest.raises(ValueError, match="has 3 places; layer 1 hashes 4"):
        hash_rows(EngramHash.from_config(official).of_layer(1), jnp.zeros((5, 3), jnp.int32))


def test_layer_without_engram(official):
    with pytest.raises(ValueError, match=r"Layer 2 has no Engram.*\[1, 14\]"):
        EngramHash.from_config(official).of_layer(2)


def test_table_sizes_are_checked(official):
    wrong = dataclasses.replace(official, engram_num_embeddings=(384006168, 384016683))
    with pytest.raises(ValueError, match="gives layer 14 384016683 rows.*need 384016682"):
        EngramHash.from_config(wrong)


def test_missing_tokenizer(tmp_path, folder):
    with pytest.raises(ValueError, match=r"has no tokenizer\.json.*\[1, 4\]"):
        EngramTokenMap.from_checkpoint(tmp_path, load_config(folder / "checkpoint"))


def test_damaged_tokenizer(tmp_path, folder):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read as a tokenizer"):
        EngramTokenMap.from_checkpoint(tmp_path, load_config(folder / "checkpoint"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"engram_compressed_vocab_size": 311},
            "compresses to 312 distinct tokens, but engram_compressed_vocab_size is 311",
        ),
        ({"vocab_size": 385}, "defines 384 tokens, but vocab_size is 385"),
    ],
)
def test_tokenizer_of_another_checkpoint(tmp_path, folder, change, sentence):
    shutil.copy(folder / "checkpoint/tokenizer.json", tmp_path)
    config = dataclasses.replace(load_config(folder / "checkpoint"), **change)
    with pytest.raises(ValueError, match=sentence):
        EngramTokenMap.from_checkpoint(tmp_path, config)
