"""Taps: intermediate tensors of one forward pass, by name, for whoever compares them or trains on them."""

from collections.abc import Collection

from jaxtyping import Array


class Tap:
    """Collects values while a forward pass is traced; the traced function returns `values` as one of its results.

    only: the last parts of the names that are kept; None keeps all that layers have at hand.
    """

    def __init__(
        self, values: dict[str, Array] | None = None, prefix: str = "", only: Collection[str] | None = None
    ):
        self.values: dict[str, Array] = {} if values is None else values
        self.prefix, self.only = prefix, only

    def __call__(self, name: str, value: Array) -> None:
        if self.only is None or name in self.only:
            self.values[self.prefix + name] = value

    def asked_for(self, name: str) -> bool:
        """Whether `name` is kept by name: what a layer would have to compute for the tap alone."""
        return self.only is not None and name in self.only

    def within(self, prefix: str) -> "Tap":
        """A tap into the same collection whose names start with `prefix`."""
        return Tap(self.values, self.prefix + prefix, self.only)
