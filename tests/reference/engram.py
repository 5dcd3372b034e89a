"""Engram's token map and hash in plain Python integers, from the model's description."""

import re
import unicodedata


def fold(text):
    """The normalised key of a token's text."""
    key = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    key = "".join(c for c in key if unicodedata.category(c) != "Mn").lower()
    key = re.sub("[ \t\r\n]+", " ", key)
    key = key if key == " " else key.strip()
    return key or text


def token_map(tokenizer):
    """Compressed id of each token id."""
    numbers, result = {}, []
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = tokenizer.id_to_token(token) if "\ufffd" in text else fold(text)
        result.append(numbers.setdefault(key, len(numbers)))
    return result


def context(ids, is_text, pad, places):
    """c_0 .. c_(places-1) of every token: from a cut (sequence start, image) back, the pad."""
    rows = []
    for t in range(len(ids)):
        row = [pad] * places
        for k in range(places):
            if t - k < 0 or not is_text[t - k]:
                break
            row[k] = int(ids[t - k])
        rows.append(row)
    return rows


def rows(multipliers, primes, places):
    """Table rows of one token. primes: one list per n-gram size 2, 3, ..; places: its compressed ids, newest first."""
    value = places[0] * multipliers[0]
    start, result = 0, []
    for n, sizes in enumerate(primes, 1):
        value ^= places[n] * multipliers[n]
        for prime in sizes:
            result.append(value % prime + start)
            start += prime
    return result
