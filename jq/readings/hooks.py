"""Tensors of a traced graph that are watched or changed on their way, as they would be rounded."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Container, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jq.errors import ModelError

Array = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Hook:
    """A function of some tensors, by name and value, that a reading takes in place of a plan's rounding."""

    tensors: Container[str]
    fake_quant: Callable[[str, Any], Any]

    def __contains__(self, tensor: object) -> bool:
        """Whether the function takes this tensor."""
        return tensor in self.tensors


def kept_apart(x: Array) -> Array:
    """Return x, not computed in the sum that reads it: XLA's CPU backend would give that whole arrays of its scalars."""
    return lax.clamp(*(jnp.asarray(v, x.dtype) for v in (-jnp.inf, x, jnp.inf)))


@jax.custom_vjp
def turned(x: Array, lost: Array, dial: Array) -> Array:
    """Return x + dial * lost at dial 0, which is x; autodiff's own would add the nothing in the forward pass."""
    return x


def _turned_forward(x: Array, lost: Array, dial: Array) -> tuple[Array, Array]:
    return x, lost


def _turned_backward(lost: Array, g: Array) -> tuple[Array, None, Array]:
    return g, None, jnp.sum(g * lost)


turned.defvjp(_turned_forward, _turned_backward)


@contextlib.contextmanager
def needing_gradients(what: str) -> Iterator[None]:
    """Name a model whose outputs have none: JAX raises a ValueError for loops whose length depends on data."""
    try:
        yield
    except ValueError as error:
        raise ModelError(f"the model's outputs have no gradients, which {what} needs: {error}") from error
