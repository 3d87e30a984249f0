"""The factors of all classes that minimize the predicted noise: with steps that follow ranges, then with real steps.

The first is a geometric program (see the package's docstring): in the logarithms of the factors the logarithm of the
noise is convex, except for what Clips pass. Adam descends it, with maxima as p-norms that sharpen from round to round.
A weight's range is taken over the elements that are largest in their row or column, chosen anew in each round. A step
that is a power of two may be up to twice as long as a range needs: a factor for a whole group changes no ratio within
it, but how its ranges lie to those powers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jq.recovery.equalization.groups import FIXED
from jq.recovery.equalization.noise import Noise, Weight
from jq.recovery.parts import program

_ROUNDS = 8
_SHARPNESS = (8.0, 24.0)  # p of the p-norm in the first and the last round
_RATE = (0.2, 0.02)  # and the longest step, in octaves
_STEPS = 24  # per round
_DECAY = (0.8, 0.95)  # of Adam's moments

_PARTS = 6  # of an octave, by which the factors of a group are shifted
_SWEEPS = 2
_AS_GOOD = 0.01  # more noise that powers of two may leave, which change no value of the float model by a bit
_TINY = 1e-30  # in place of ranges of zero

Arrays = dict[str, Any]
_State = tuple[jax.Array, jax.Array, jax.Array]


def optimize(noise: Noise) -> np.ndarray:
    """Return the factors [classes] of least predicted noise, with steps that follow the ranges continuously."""
    z, limit = np.zeros(noise.groups.count), np.log2(limits(noise))
    for sharpness, rate in zip(np.geomspace(*_SHARPNESS, _ROUNDS), np.geomspace(*_RATE, _ROUNDS), strict=True):
        problem = _problem(noise, np.exp2(z))
        room = np.asarray(limit - z, np.float32)
        z = z + np.asarray(_descend(problem, room, np.float32(sharpness), np.float32(rate)), np.float64)
    return np.exp2(z)


def limits(noise: Noise) -> np.ndarray:
    """The largest factors [classes] with which no Clip cuts more than before, on the data that were seen."""
    factors = np.full(noise.groups.count, np.inf)
    for tensor in noise.activations:
        if tensor.bound < np.inf:
            reach = np.clip(tensor.seen.reach, 2.0**-20 * tensor.bound, tensor.bound)
            np.minimum.at(factors, tensor.classes, tensor.bound / reach)
    return factors


def choose(noise: Noise, optimum: np.ndarray) -> np.ndarray:
    """Return factors [classes] near an optimum, group by group, or ones where these leave no more noise.

    The noise counted is that at steps of powers of two, of which MinMSE takes one.
    """
    noise = noise.near(optimum)
    group, limit = noise.groups.group, np.log2(limits(noise))
    members = {int(g): np.nonzero(group == g)[0] for g in np.unique(group) if g != group[FIXED]}
    of_group = {g: [i for i, (_, groups) in enumerate(noise.terms) if g in groups] for g in members}
    now = optimum.copy()
    values = {i: term(now) for i, (term, _) in enumerate(noise.terms)}
    for _ in range(_SWEEPS):
        before = now.copy()
        for g, classes in members.items():
            least = sum(values[i] for i in of_group[g])
            best = now[classes]
            for z, preferred in _candidates(np.log2(best)):
                # In place: a copy of all factors for each trial takes a time that grows with the square of a network.
                now[classes] = np.exp2(np.minimum(z, np.floor(limit[classes]) if preferred else limit[classes]))
                tried = {i: noise.terms[i][0](now) for i in of_group[g]}
                total = sum(tried.values())
                if total < least * (1 + preferred * _AS_GOOD):
                    best, least = now[classes], total
                    values |= tried
            now[classes] = best
        if np.array_equal(now, before):
            break
    ones = np.ones_like(now)
    return now if noise.total(now) < noise.total(ones) else ones


def _candidates(z: np.ndarray) -> Iterator[tuple[np.ndarray, bool]]:
    """Logarithms to try in place of a group's, and whether they are whole numbers."""
    for part in range(-_PARTS // 2, _PARTS // 2 + 1):
        if part:
            yield z + part / _PARTS, False
    yield np.zeros_like(z), True
    yield np.rint(z), True


def _problem(noise: Noise, s: np.ndarray) -> dict[str, Arrays]:
    """The noise as a function of further factors f: that of a tensor is (step of range)^2 * ups * downs.

    The range is the largest value * f[over] / f[under], as far as `cap` lets it grow; ups and downs are sums of
    value * (f[under] / f[over])^2. What Clips pass is added.
    """
    parts = _Parts()
    for tensor in noise.activations:
        f, classes = s[tensor.classes], tensor.classes
        parts.codes.append(tensor.grid.codes)
        parts.put("ranges", tensor.seen.reach * f, classes, FIXED, cap=tensor.bound)
        parts.put("ups", tensor.importance.white * tensor.seen.active / f**2, classes, FIXED)
        parts.put("downs", np.ones(1), FIXED, FIXED)
        if tensor.bound < np.inf:
            amount = tensor.importance.white * tensor.seen.beyond
            parts.put("passed", amount, classes, FIXED, bound=tensor.bound / tensor.tail, now=f)
    for weight in noise.weights:
        if weight.per_channel:
            parts.put_rows(weight, s)
            continue
        up, down = s[weight.made], s[weight.read]
        read = np.broadcast_to(weight.read, weight.size.shape[:2])
        parts.codes.append(weight.grid.codes)
        for rows, columns, size in weight.extremes(s):
            parts.put("ranges", size.astype(np.float64), weight.made[rows], read[rows, columns], cap=np.inf)
        counts, power = weight.importance * weight.size.shape[2] / up**2, weight.power * down**2
        if len(power) == 1:  # all outputs read the same, so the sum over products is one of products of sums
            parts.put("ups", counts, weight.made, FIXED)
            parts.put("downs", power[0], FIXED, weight.read[0])
        else:
            parts.put("ups", counts[:, None] * power, weight.made[:, None], weight.read)
            parts.put("downs", np.ones(1), FIXED, FIXED)
    return parts.joined()


class _Parts:
    """The terms of sums over tensors, as lists."""

    def __init__(self) -> None:
        names = ("ranges", "ups", "downs", "passed", "rows", "row_ranges", "row_powers")
        self.lists: dict[str, list[dict[str, np.ndarray]]] = {k: [] for k in names}
        self.codes: list[float] = []  # of each tensor so far
        self.rows = self.powers = 0  # so far

    def put(self, name: str, value: np.ndarray, over: Any, under: Any, **more: Any) -> None:
        """Add values of the last tensor, with the classes whose factors multiply and divide them."""
        whole = {"over": over, "under": under, "tensor": len(self.codes) - 1, **more}
        arrays = {k: np.ravel(np.broadcast_to(v, value.shape)) for k, v in whole.items()}
        self.lists[name].append({"value": np.ravel(value), **arrays})

    def put_rows(self, weight: Weight, s: np.ndarray) -> None:
        """Add the outputs of a weight in which each has a step: (largest value * f[under])^2 * sum of powers / f[under]^2."""
        size = weight.kernels / s[weight.read]
        read, power = np.broadcast_to(weight.read, size.shape), weight.power * s[weight.read] ** 2
        reach = np.maximum(size.max(1), _TINY)
        own = len(power) > 1  # else all outputs read the same
        counts = weight.importance * weight.size.shape[2] * np.square(reach / weight.grid.codes) / 12
        self.lists["rows"].append({"value": counts, "power": self.powers + np.arange(len(size)) * own})
        at = np.r_[np.arange(len(size)), size.argmax(0)], np.r_[size.argmax(1), np.arange(size.shape[1])]
        order = at[0].argsort(kind="stable")
        rows, columns = at[0][order], at[1][order]
        ranges = {"value": size[rows, columns] / reach[rows], "under": read[rows, columns], "row": self.rows + rows}
        self.lists["row_ranges"].append(ranges)
        which = np.broadcast_to(self.powers + np.arange(len(power))[:, None], power.shape)
        under = np.broadcast_to(weight.read, power.shape)
        self.lists["row_powers"].append(
            {k: np.ravel(v) for k, v in (("value", power), ("under", under), ("sum", which))}
        )
        self.rows, self.powers = self.rows + len(size), self.powers + len(power)

    def joined(self) -> dict[str, Arrays]:
        """All tensors' values as one array each, in the types that JAX computes in; ranges as parts of the largest."""
        joined = {
            name: {k: np.concatenate([part[k] for part in parts]) for k in parts[0]} if parts else {}
            for name, parts in self.lists.items()
        }
        ranges, reach = joined["ranges"], np.full(len(self.codes), _TINY)
        np.maximum.at(reach, ranges["tensor"], np.minimum(ranges["value"], ranges["cap"]))
        for key in ("value", "cap"):
            ranges[key] = np.minimum(ranges[key] / reach[ranges["tensor"]], 1 / _TINY)
        joined["steps"] = {"squares": np.square(reach / np.array(self.codes)) / 12}
        return jax.tree.map(lambda v: v.astype(np.float32 if v.dtype.kind == "f" else np.int32), joined)


@program(0)
def _descend(problem: dict[str, Arrays], room: jax.Array, sharpness: jax.Array, rate: jax.Array) -> jax.Array:
    """The logarithms, at most `room`, after Adam's steps."""
    slope = jax.grad(lambda z: jnp.log(_noise(problem, z, sharpness)))
    a, b = _DECAY

    def step(state: _State, i: jax.Array) -> tuple[_State, None]:
        z, first, second = state
        g = slope(z).at[FIXED].set(0)
        first, second = a * first + (1 - a) * g, b * second + (1 - b) * g**2
        move = first / (1 - a ** (i + 1)) / (jnp.sqrt(second / (1 - b ** (i + 1))) + 1e-12)
        return (jnp.minimum(z - rate * (1 - i / _STEPS) * move, room), first, second), None

    zero = jnp.zeros(room.shape)
    return lax.scan(step, (zero, zero, zero), jnp.arange(_STEPS))[0][0]


def _noise(problem: dict[str, Arrays], z: jax.Array, p: jax.Array) -> jax.Array:
    """The predicted noise with ranges as p-norms."""
    squares = problem["steps"]["squares"]
    sums = functools.partial(jax.ops.segment_sum, num_segments=len(squares), indices_are_sorted=True)

    def octaves(of: Arrays) -> jax.Array:
        return z[of["over"]] - z[of["under"]]

    of = problem["ranges"]
    values = jnp.exp2(p * jnp.minimum(jnp.log2(of["value"]) + octaves(of), jnp.log2(of["cap"])))
    squares = squares * jnp.exp2(2 / p * jnp.log2(jnp.maximum(sums(values, of["tensor"]), _TINY)))
    for name in ("ups", "downs"):
        of = problem[name]
        squares = squares * sums(of["value"] * jnp.exp2(-2 * octaves(of)), of["tensor"])
    total = squares.sum()
    if of := problem["passed"]:
        u = of["bound"] * jnp.maximum(jnp.exp2(-octaves(of)) / of["now"] - 1, 0)
        total += (of["value"] * (1 - jnp.exp(-u) * (1 + u))).sum()
    return total + _noise_of_rows(problem, z, p) if problem["rows"] else total


def _noise_of_rows(problem: dict[str, Arrays], z: jax.Array, p: jax.Array) -> jax.Array:
    """The predicted noise of weights with a step for each output, whose own factor makes no difference."""
    rows, ranges, powers = (problem[name] for name in ("rows", "row_ranges", "row_powers"))

    def sums(values: jax.Array, index: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(values, index, len(rows["value"]), indices_are_sorted=True)

    values = jnp.exp2(p * (jnp.log2(jnp.maximum(ranges["value"], _TINY)) - z[ranges["under"]]))
    reach = jnp.exp2(2 / p * jnp.log2(jnp.maximum(sums(values, ranges["row"]), _TINY)))
    power = sums(powers["value"] * jnp.exp2(2 * z[powers["under"]]), powers["sum"])
    return (rows["value"] * reach * power[rows["power"]]).sum()
