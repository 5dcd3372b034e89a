"""Argument checks shared by the public functions: sentences that say what was given and what is allowed."""

import jax.numpy as jnp


def shape(name: str, array, axes: str, sizes: dict[str, int]) -> None:
    """Checks `array` against `axes` ("B N H D"), binding axis sizes in `sizes` as they are first seen.

    An axis that starts with a digit is fixed. Raises ValueError on another rank or size.
    """
    letters = axes.split()
    if array.ndim != len(letters):
        raise ValueError(
            f"{name} has shape {tuple(array.shape)}, which has {array.ndim} axes; it must have {len(letters)}: "
            f"[{', '.join(letters)}]. Add or remove the axes in question."
        )
    for letter, size in zip(letters, array.shape):
        if sizes.setdefault(letter, size) != size:
            raise ValueError(
                f"{name} has shape {tuple(array.shape)} = [{', '.join(letters)}], but {letter} is "
                f"{sizes[letter]} in the arguments before it. Make the two agree."
            )


def integer(name: str, array) -> None:
    """Raises ValueError unless `array` is int32."""
    if array.dtype != jnp.int32:
        raise ValueError(f"{name} has dtype {array.dtype}; indices and lengths must be int32. Cast it first.")


def floating(name: str, array) -> None:
    """Raises ValueError unless `array` is of a floating dtype (FP8 included)."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{name} has dtype {array.dtype}; it must be a floating dtype.")


def positive(name: str, value: int) -> None:
    """Raises ValueError unless `value` is an int above 0."""
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be an int of at least 1.")
