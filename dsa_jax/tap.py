"""Taps: intermediate tensors of one forward pass, by name, for whoever compares them."""

from jaxtyping import Array


class Tap:
    """Collects values while a forward pass is traced; the traced function returns `values` as one of its results."""

    def __init__(self, values: dict[str, Array] | None = None, prefix: str = ""):
        self.values: dict[str, Array] = {} if values is None else values
        self.prefix = prefix

    def __call__(self, name: str, value: Array) -> None:
        self.values[self.prefix + name] = value

    def within(self, prefix: str) -> "Tap":
        """A tap into the same collection whose names start with `prefix`."""
        return Tap(self.values, self.prefix + prefix)
