"""What the project's pytrees share."""

from typing import Any

Leaf = Any
"""A field of a pytree: an array, or whatever stands for one while jax maps over the tree. Docstrings give the shapes."""
