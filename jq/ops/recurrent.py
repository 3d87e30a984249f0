"""RNN, GRU and LSTM: one scan over time each; what the input contributes is one product before it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jq.errors import ModelError
from jq.ops.table import Array, op

Activation = Callable[[Array], Array]
Cell = Callable[..., tuple[Array, ...]]

# name -> function of (x, alpha, beta), and the defaults of those of alpha and beta that it takes
_ACTIVATIONS: dict[str, tuple[Callable[..., Array], tuple[float, ...]]] = {
    "relu": (jax.nn.relu, ()),
    "tanh": (jnp.tanh, ()),
    "sigmoid": (jax.nn.sigmoid, ()),
    "softsign": (jax.nn.soft_sign, ()),
    "softplus": (jax.nn.softplus, ()),
    "leakyrelu": (jax.nn.leaky_relu, (0.01,)),
    "elu": (jax.nn.elu, (1.0,)),
    "thresholdedrelu": (lambda x, alpha: jnp.where(x >= alpha, x, 0), (1.0,)),
    "affine": (lambda x, alpha, beta: alpha * x + beta, (1.0, 0.0)),
    "scaledtanh": (lambda x, alpha, beta: alpha * jnp.tanh(beta * x), (1.0, 1.0)),
    "hardsigmoid": (lambda x, alpha, beta: jnp.clip(alpha * x + beta, 0, 1), (0.2, 0.5)),
}


def _activations(names: Sequence[str], alphas: Any, betas: Any, clip: float | None, per: int) -> list[Activation]:
    """The named functions, `per` of a direction; those that take alpha or beta consume the given values in order.

    `clip` bounds what f and g get; the third, h of an LSTM, gets the cell itself, which onnxruntime does not clip.
    """
    values = [iter(alphas or ()), iter(betas or ())]
    rules: list[Activation] = []
    for index, name in enumerate(names):
        if name.lower() not in _ACTIVATIONS:
            raise ModelError(f"unknown activation {name!r}; known: {', '.join(_ACTIVATIONS)}")
        rule, defaults = _ACTIVATIONS[name.lower()]
        parameters = [next(v, default) for v, default in zip(values, defaults, strict=False)]
        rules.append(functools.partial(_activate, rule, parameters, clip if index % per < 2 else None))
    return rules


def _activate(rule: Callable[..., Array], parameters: Sequence[float], clip: float | None, x: Array) -> Array:
    return rule(x if clip is None else jnp.clip(x, -clip, clip), *parameters)


def _recurrent(
    cell: Cell, x: Array, w: Array, r: Array, b: Array | None, lengths: Array | None, initial: Sequence[Array | None],
    extra: Array | None, *, activations: Sequence[str], activation_alpha: Any, activation_beta: Any, clip: float | None,
    direction: str, layout: int,
) -> tuple[Array, ...]:  # fmt: skip
    """Scan `cell` over time, all directions at once, and return Y and the final states as ONNX shapes them.

    `cell(gates, state, r, bias, extra, activations)` gets the input's contribution `gates`, biases of
    the input included. A step at or behind a sequence's length keeps the state and outputs zeros.
    """
    turn = layout or 0
    x = jnp.swapaxes(x, 0, 1) if turn else x
    time, batch, hidden = x.shape[0], x.shape[1], r.shape[-1]
    backward = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[direction.lower()]
    per = len(activations) // len(backward)
    functions = _activations(activations, activation_alpha, activation_beta, clip, per)
    bias = jnp.zeros((len(backward), 2, w.shape[1]), x.dtype) if b is None else b.reshape(len(backward), 2, -1)
    gates = jnp.einsum("tbi,dgi->dtbg", x, w) + bias[:, None, :1]
    places = jnp.arange(time)
    inputs = [(jnp.flip(g, 0), places[::-1]) if back else (g, places) for g, back in zip(gates, backward, strict=True)]
    zeros = jnp.zeros((len(backward), batch, hidden), x.dtype)
    begin = [zeros if s is None else jnp.swapaxes(s, 0, 1) if turn else s for s in initial]

    def step(states: Any, row: Any) -> tuple[Any, list[Array]]:
        kept, outputs = [], []
        for d, (state, (gate, place)) in enumerate(zip(states, row, strict=True)):
            own = None if extra is None else extra[d]
            y, *_ = after = cell(gate, state, r[d], bias[d, 1], own, functions[d * per : (d + 1) * per])
            if lengths is not None:
                alive = (place < lengths)[:, None]
                after = tuple(jnp.where(alive, new, old) for new, old in zip(after, state, strict=True))
                y = jnp.where(alive, y, jnp.zeros_like(y))
            kept.append(after)
            outputs.append(y)
        return kept, outputs

    states = [tuple(s[d] for s in begin) for d in range(len(backward))]
    final, outputs = lax.scan(step, states, inputs)
    y = jnp.stack([jnp.flip(o, 0) if back else o for o, back in zip(outputs, backward, strict=True)], 1)
    last = [jnp.stack(parts) for parts in zip(*final, strict=True)]
    return (jnp.transpose(y, (2, 0, 1, 3)), *(jnp.swapaxes(s, 0, 1) for s in last)) if turn else (y, *last)


def _rnn_cell(
    gates: Array, state: Any, r: Array, bias: Array, _: None, activations: Sequence[Activation]
) -> tuple[Array, ...]:
    return (activations[0](gates + state[0] @ r.T + bias),)


@op("RNN")
def rnn(
    X: Array, W: Array, R: Array, B: Array | None = None, sequence_lens: Array | None = None,
    initial_h: Array | None = None, *, activations: Any = None, activation_alpha: Any, activation_beta: Any,
    clip: float | None, direction: str = "forward", layout: int = 0,
) -> tuple[Array, ...]:  # fmt: skip
    return _recurrent(
        _rnn_cell, X, W, R, B, sequence_lens, (initial_h,), None, activations=activations or ("Tanh",) * len(W),
        activation_alpha=activation_alpha, activation_beta=activation_beta, clip=clip, direction=direction,
        layout=layout,
    )  # fmt: skip


def _gru_cell(
    linear_before_reset: int, gates: Array, state: Any, r: Array, bias: Array, _: None,
    activations: Sequence[Activation],
) -> tuple[Array, ...]:  # fmt: skip
    """z, r, h: H = (1 - z) h + z H', with the reset gate on H' or, `linear_before_reset`, on its product."""
    f, g = activations
    (before,) = state
    size = before.shape[-1]
    two = f(gates[:, : 2 * size] + before @ r[: 2 * size].T + bias[: 2 * size])
    update, reset = two[:, :size], two[:, size:]
    if linear_before_reset:
        own = reset * (before @ r[2 * size :].T + bias[2 * size :])
    else:
        own = (reset * before) @ r[2 * size :].T + bias[2 * size :]
    return ((1 - update) * g(gates[:, 2 * size :] + own) + update * before,)


@op("GRU")
def gru(
    X: Array, W: Array, R: Array, B: Array | None = None, sequence_lens: Array | None = None,
    initial_h: Array | None = None, *, activations: Any = None, activation_alpha: Any, activation_beta: Any,
    clip: float | None, direction: str = "forward", layout: int = 0, linear_before_reset: int = 0,
) -> tuple[Array, ...]:  # fmt: skip
    return _recurrent(
        functools.partial(_gru_cell, linear_before_reset or 0), X, W, R, B, sequence_lens, (initial_h,), None,
        activations=activations or ("Sigmoid", "Tanh") * len(W), activation_alpha=activation_alpha,
        activation_beta=activation_beta, clip=clip, direction=direction, layout=layout,
    )  # fmt: skip


def _lstm_cell(
    input_forget: int, gates: Array, state: Any, r: Array, bias: Array, peepholes: Array | None,
    activations: Sequence[Activation],
) -> tuple[Array, ...]:  # fmt: skip
    """i, o, f, c: C = f C' + i c, H = o h(C); peepholes (i, o, f) let the gates see the cell, o the new one."""
    f, g, h = activations
    hidden, cell = state
    i, o, forget, c = jnp.split(gates + hidden @ r.T + bias, 4, axis=-1)
    p = (0, 0, 0) if peepholes is None else jnp.split(peepholes, 3)
    i = f(i + p[0] * cell)
    forget = 1 - i if input_forget else f(forget + p[2] * cell)
    cell = forget * cell + i * g(c)
    return f(o + p[1] * cell) * h(cell), cell


@op("LSTM")
def lstm(
    X: Array, W: Array, R: Array, B: Array | None = None, sequence_lens: Array | None = None,
    initial_h: Array | None = None, initial_c: Array | None = None, P: Array | None = None, *,
    activations: Any = None, activation_alpha: Any, activation_beta: Any,
    clip: float | None, direction: str = "forward", input_forget: int = 0, layout: int = 0,
) -> tuple[Array, ...]:  # fmt: skip
    return _recurrent(
        functools.partial(_lstm_cell, input_forget or 0), X, W, R, B, sequence_lens, (initial_h, initial_c), P,
        activations=activations or ("Sigmoid", "Tanh", "Tanh") * len(W), activation_alpha=activation_alpha,
        activation_beta=activation_beta, clip=clip, direction=direction, layout=layout,
    )  # fmt: skip
