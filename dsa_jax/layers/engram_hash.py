"""Engram's table rows: tokens -> compressed ids (host, once) -> hashed n-grams (device, exact).

The hash is defined in 64-bit integers, which JAX does not have by default: products, xor and remainder are carried out
on pairs of uint32. Source: the Engram part of DeepSeek-V4.1's inference code.
"""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32
from tokenizers import Regex, Tokenizer, normalizers

from dsa_jax.config import V41Config

_BLANK = "\ue000"  # stands for a lone space while the ends are stripped
_SEED = 10007


@dataclasses.dataclass(frozen=True, eq=False)
class EngramTokenMap:
    """Token id -> compressed id. ids: int32 [vocab]. pad_id: what the pad token maps to, used for every n-gram place
    before the start of the sequence and from an image token back."""

    ids: np.ndarray
    pad_id: int

    @classmethod
    def from_checkpoint(cls, directory: str | Path, config: V41Config) -> "EngramTokenMap":
        """The map that the checkpoint's tokenizer.json defines.

        Raises ValueError: no tokenizer.json, a token count other than vocab_size, or another number of compressed ids
        than engram_compressed_vocab_size (the hash would address rows of other n-grams).
        """
        path = Path(directory) / "tokenizer.json"
        if not path.is_file():
            raise ValueError(
                f"{directory} has no tokenizer.json, and the Engram layers {list(config.engram_layer_ids)} hash token "
                "texts. Download it into the folder of the checkpoint."
            )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(f"{path} cannot be read as a tokenizer ({error}). Download it again.") from error
        ids = compressed_token_map(tokenizer)
        if len(ids) != config.vocab_size:
            raise ValueError(
                f"{path} defines {len(ids)} tokens, but vocab_size is {config.vocab_size}. "
                "Use the tokenizer that belongs to the checkpoint."
            )
        distinct = int(ids.max()) + 1
        if distinct != config.engram_compressed_vocab_size:
            raise ValueError(
                f"{path} compresses to {distinct} distinct tokens, but engram_compressed_vocab_size is "
                f"{config.engram_compressed_vocab_size}. Use the tokenizer that belongs to the checkpoint."
            )
        return cls(ids, int(ids[config.engram_pad_token_id]))


def compressed_token_map(tokenizer: Tokenizer) -> Int32[np.ndarray, "vocab"]:
    """Compressed id of every token id: tokens whose text differs only in case, accents, width or blanks share one.

    Ids are given in order of first appearance, 0 .. distinct - 1. Tokens that are no whole UTF-8 text keep their own.
    Raises ValueError where the tokenizer's ids have a hole.
    """
    normalise = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex("[ \t\r\n]+"), " "),
            normalizers.Replace(Regex("^ $"), _BLANK),
            normalizers.Strip(),
            normalizers.Replace(_BLANK, " "),
        ]
    )
    compressed: dict[str, int] = {}
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    ids = np.empty(size, np.int32)
    for token in range(size):
        name = tokenizer.id_to_token(token)
        if name is None:
            raise ValueError(f"The tokenizer counts {size} tokens but has none with id {token}; ids must run from 0.")
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = name if "\ufffd" in text else normalise.normalize_str(text) or text
        ids[token] = compressed.setdefault(key, len(compressed))
    return ids


@dataclasses.dataclass(frozen=True)
class EngramLayerHash:
    """Constants of one layer's hash; hashable, so a jitted function may close over it or take it as static.

    multipliers: one per n-gram place, newest first, each times a compressed id below 2^63. primes, offsets: one row per
    n-gram size (2, 3, ..), one column per head; offsets count the table rows before.
    """

    layer: int
    multipliers: tuple[int, ...]
    primes: tuple[tuple[int, ...], ...]
    offsets: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class EngramHash:
    """The hashes of all Engram layers, in the order of `engram_layer_ids`."""

    layers: tuple[EngramLayerHash, ...]

    @classmethod
    def from_config(cls, config: V41Config) -> "EngramHash":
        """Raises ValueError where the table sizes that follow differ from `engram_num_embeddings`."""
        layers = []
        for layer, rows, primes in zip(
            config.engram_layer_ids, config.engram_num_embeddings, engram_primes(config), strict=True
        ):
            sizes = [prime for row in primes for prime in row]
            if sum(sizes) != rows:
                raise ValueError(
                    f"engram_num_embeddings gives layer {layer} {rows} rows, but its buckets, the primes from "
                    f"engram_vocab_size = {config.engram_vocab_size} on, need {sum(sizes)}. Check config.json."
                )
            starts = np.cumsum([0, *sizes[:-1]]).reshape(len(primes), -1)
            layers.append(
                EngramLayerHash(
                    layer=layer,
                    multipliers=engram_multipliers(config, layer),
                    primes=primes,
                    offsets=tuple(tuple(int(start) for start in row) for row in starts),
                )
            )
        return cls(tuple(layers))

    def of_layer(self, layer: int) -> EngramLayerHash:
        """The hash of backbone layer `layer`. Raises ValueError where it has no Engram."""
        for found in self.layers:
            if found.layer == layer:
                return found
        raise ValueError(
            f"Layer {layer} has no Engram; the layers that have: {[found.layer for found in self.layers]}."
        )


@functools.cache
def engram_primes(config: V41Config) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Bucket sizes [engram layer][n-gram size 2..max][head]: primes upward from engram_vocab_size, none used twice."""
    used: set[int] = set()

    def row() -> tuple[int, ...]:
        found: list[int] = []
        number = config.engram_vocab_size
        while len(found) < config.engram_n_heads:
            if number not in used and _is_prime(number):
                found.append(number)
                used.add(number)
            number += 1
        return tuple(found)

    sizes = range(2, config.engram_max_ngram_size + 1)
    return tuple(tuple(row() for _ in sizes) for _ in config.engram_layer_ids)


def _is_prime(number: int) -> bool:
    if number < 4:
        return number > 1
    divisors = np.arange(3, int(number**0.5) + 2, 2)
    return number % 2 == 1 and bool(np.all(number % divisors[divisors < number]))


def engram_multipliers(config: V41Config, layer: int) -> tuple[int, ...]:
    """The odd multipliers of layer `layer`, one per n-gram place; a compressed id times one stays below 2^63."""
    bound = (2**63 - 1) // config.engram_compressed_vocab_size // 2
    drawn = np.random.default_rng(_SEED * layer).integers(0, bound, size=config.engram_max_ngram_size, dtype=np.int64)
    return tuple(2 * int(value) + 1 for value in drawn)


def hash_rows(constants: EngramLayerHash, context_ids: Int32[Array, "*batch place"]) -> Int32[Array, "*batch rows"]:
    """Table rows of the n-grams that end in each token, for one layer; n-gram size major, then head.

    context_ids[..., k]: compressed id of the token k places back, the pad's id where there is none. Exact.
    Raises ValueError where the number of places is not the longest n-gram.
    """
    places = len(constants.multipliers)
    if context_ids.shape[-1] != places:
        raise ValueError(f"context_ids has {context_ids.shape[-1]} places; layer {constants.layer} hashes {places}.")
    ids = context_ids.astype(jnp.uint32)
    high, low = _times(ids[..., 0], constants.multipliers[0])
    grams = []
    for place in range(1, places):
        product = _times(ids[..., place], constants.multipliers[place])
        high, low = high ^ product[0], low ^ product[1]
        grams.append((high, low))
    high, low = (jnp.stack(words, -1)[..., None] for words in zip(*grams, strict=True))
    rows = _remainder(high, low, np.array(constants.primes, np.uint32)).astype(jnp.int32)
    rows = rows + np.array(constants.offsets, np.int32)
    return rows.reshape(*context_ids.shape[:-1], -1)


def _times(a: jax.Array, constant: int) -> tuple[jax.Array, jax.Array]:
    """The words (high, low) of a * constant modulo 2^64; a uint32."""
    low_word, high_word = constant & 0xFFFFFFFF, constant >> 32
    a0, a1 = a & 0xFFFF, a >> 16
    b0, b1 = np.uint32(low_word & 0xFFFF), np.uint32(low_word >> 16)
    low = a0 * b0
    # Each sum stays below 2^32: 16 x 16 bits plus two carries of at most 16 bits.
    middle = a1 * b0 + (low >> 16)
    other = a0 * b1 + (middle & 0xFFFF)
    high = a1 * b1 + (middle >> 16) + (other >> 16)
    return high + a * np.uint32(high_word), (other << 16) | (low & 0xFFFF)


def _remainder(high: jax.Array, low: jax.Array, primes: np.ndarray) -> jax.Array:
    """(high * 2^32 + low) modulo primes (each below 2^31): long division, as many bits at once as 32 allow."""
    step = 32 - int(primes.max()).bit_length()
    rest = high % primes
    position = 32
    while position:
        width = min(step, position)
        position -= width
        digit = (low >> position) & np.uint32(2**width - 1)
        rest = ((rest << width) | digit) % primes
    return rest
