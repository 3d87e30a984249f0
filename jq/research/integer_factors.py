"""Cross-layer equalization by powers of two alone, as an integer program over the channels' exponents.

Such factors change no value of the float network by a bit, where no Clip is on the way, and need no channel's scale in
the file. What is least is the noise that `jq.equalize` predicts. Which exponent n_c each channel c has and which step
2^k_t each tensor t is rounded with is decided together: with the noise f_t(k, c, n) of channel c in tensor t,

    minimize  sum over t, c of f_t(k_t, c, n_c).

Once the steps are chosen, every channel is by itself; once the factors of other groups are, only the tensors that a
group's channels are in hang together. So the program falls into one for each group of channels, which is solved
exactly: over all combinations of steps where they are few, else by SciPy's solver of mixed integer programs. Groups
take turns until nothing gets better.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jq.config import QuantConfig, resolve
from jq.equalize.channels import Channels, measure
from jq.equalize.factors import limits, optimize
from jq.equalize.groups import FIXED, find_groups
from jq.equalize.noise import Activation, Grid, Noise, Weight, predict
from jq.equalize.rewrite import scaled
from jq.errors import ConfigError
from jq.graph import Graph

_NEAR = np.arange(-2, 3)  # octaves by which a channel's exponent may change in a turn
_TURNS = 3
_FEW = 4096  # combinations of steps that are tried one by one
_SECONDS = 10.0  # for a group's program; what the solver has found by then is taken if it is better


def equalize_pow2(graph: Graph, config: QuantConfig | str = "XINT8", data: Any = None) -> Graph:
    """Return a prepared graph whose channels have factors that are powers of two, with the least noise that is predicted.

    What `jq.equalize` takes and gives, but for the factors: the function of the graph stays bit by bit, where no Clip is
    between the layers. The graph itself if nothing is better.

    >>> import jq
    >>> graph = jq.prepare(jq.load(jq.zoo.path("fashion_mobilenet")), "XINT8")
    >>> images, _ = jq.zoo.calibration_set()
    >>> equalize_pow2(graph, "XINT8", images[:32]) is graph
    False
    """
    config = resolve(config)
    if config.scale != "power_of_two":
        raise ConfigError(f"scale is {config.scale!r}: the steps of this program are powers of two")
    groups = find_groups(graph, clips=data is not None)
    if groups.count == 1 or not groups.layers:
        return graph
    if data is None:
        seen = {name: Channels.unknown(len(classes)) for name, classes in groups.channels.items()}
    else:
        seen = measure(graph, groups, data, config)
    if not all(c.is_finite for c in seen.values()):
        return graph  # calibration says where
    noise = predict(graph, groups, seen, config)
    exponents = integer_exponents(noise) if noise.terms else np.zeros(groups.count, np.int64)
    return scaled(graph, groups, np.exp2(exponents)) if exponents.any() else graph


def integer_exponents(noise: Noise) -> np.ndarray:
    """Return the exponents [classes] with which the least noise is predicted; zeros if none are better."""
    group, most = noise.groups.group, np.floor(np.log2(limits(noise)))
    now = np.minimum(np.rint(np.log2(optimize(noise))), most)
    now[FIXED] = 0
    now = min(now, np.zeros_like(now), key=lambda n: noise.total(np.exp2(n)))
    tensors: tuple[Activation | Weight, ...] = (*noise.activations, *noise.weights)
    members = [np.flatnonzero(group == g) for g in np.unique(group) if g != group[FIXED]]
    for _ in range(_TURNS):
        before = noise.total(np.exp2(now))
        for classes in members:
            costs = [c for t in tensors if (c := _costs(t, now, classes)) is not None]
            barred = now[classes, None] + _NEAR > most[classes, None]
            found = now.copy()
            found[classes] += _NEAR[cheapest([np.where(barred, np.inf, c) for c in costs])] if costs else 0
            if noise.total(np.exp2(found)) < noise.total(np.exp2(now)):
                now = found
        if noise.total(np.exp2(now)) >= before:
            break
    return now.astype(np.int64)


def cheapest(costs: Sequence[np.ndarray]) -> np.ndarray:
    """Return the choice n [channels] that makes the least of sum_t min_k sum_c costs[t][k, c, n_c]; inf is forbidden.

    >>> cheapest([np.array([[[0.0, 4.0]], [[9.0, 1.0]]]), np.array([[[2.0, 0.0]]])])
    array([1])
    """
    combinations = math.prod(len(c) for c in costs)
    return _by_steps(costs) if combinations <= _FEW else by_program(costs)


def _by_steps(costs: Sequence[np.ndarray]) -> np.ndarray:
    """Every combination of steps in turn: then channels are by themselves."""
    best, found = np.inf, np.zeros(costs[0].shape[1], np.int64)
    for steps in itertools.product(*(range(len(c)) for c in costs)):
        together = np.sum([c[k] for c, k in zip(costs, steps, strict=True)], axis=0)
        if (total := together.min(1).sum()) < best:
            best, found = total, together.argmin(1)
    return found


def by_program(costs: Sequence[np.ndarray], seconds: float = _SECONDS) -> np.ndarray:
    """The same by a mixed integer program.

    Its unknowns are z[c, n], 1 if channel c has choice n; u[t, k], 1 if tensor t has step k; and the shares
    y[t, k, c, n] of both, with sum_k y = z and sum_n y = u, for which whole numbers need not be asked.
    """
    from scipy import sparse
    from scipy.optimize import Bounds, LinearConstraint, milp

    (_, channels, choices), kinds = costs[0].shape, [len(c) for c in costs]
    z = np.arange(channels * choices).reshape(channels, choices)
    u = np.split(z.size + np.arange(sum(kinds)), np.cumsum(kinds)[:-1])
    sizes = [k * z.size for k in kinds]
    starts = z.size + sum(kinds) + np.cumsum([0, *sizes])
    y = [s + np.arange(n).reshape(c.shape) for s, n, c in zip(starts, sizes, costs, strict=False)]
    rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # each: unknowns of +1 [rows, any], of -1 [rows], result
    rows.append((z, np.full(channels, -1), np.ones(channels)))
    for own, steps in zip(y, u, strict=True):
        rows.append((steps[None], np.array([-1]), np.ones(1)))
        rows.append((own.transpose(1, 2, 0).reshape(-1, len(steps)), z.ravel(), np.zeros(z.size)))
        rows.append((own.reshape(-1, choices), np.repeat(steps, channels), np.zeros(len(steps) * channels)))
    entries, right, count = [], [], 0
    for plus, minus, result in rows:
        at = count + np.arange(len(plus))
        entries.append((np.repeat(at, plus.shape[1]), plus.ravel(), np.ones(plus.size)))
        entries.append((at[minus >= 0], minus[minus >= 0], -np.ones((minus >= 0).sum())))
        right.append(result)
        count += len(plus)
    row, column, value = (np.concatenate(part) for part in zip(*entries, strict=True))
    matrix = sparse.csr_array((value, (row, column)), shape=(count, starts[-1]))
    cost = np.concatenate([np.zeros(starts[0]), *(c.ravel() for c in costs)])
    upper = np.where(np.isfinite(cost), 1.0, 0.0)
    cost = np.where(np.isfinite(cost), cost, 0.0)
    whole = np.arange(starts[-1]) < starts[0]
    found = milp(
        cost / max(cost.max(), 1e-300), integrality=whole, bounds=Bounds(0, upper), options={"time_limit": seconds},
        constraints=LinearConstraint(matrix, np.concatenate(right), np.concatenate(right)),
    )  # fmt: skip
    return found.x[z].argmax(1) if found.x is not None else np.full(channels, choices // 2)


def _costs(tensor: Activation | Weight, now: np.ndarray, classes: np.ndarray) -> np.ndarray | None:
    """The noise [steps, classes, choices] of a tensor in which these classes are; None if they are not."""
    index = np.full(len(now), -1)
    index[classes] = np.arange(len(classes))  # what is not of the group has the same noise at all choices
    if isinstance(tensor, Activation):
        return _of_activation(tensor, now, index, len(classes))
    return _of_weight(tensor, now, index, len(classes))


def _steps(grid: Grid, reaches: np.ndarray) -> np.ndarray:
    """All steps that are in question for ranges between the least and the largest of these."""
    low, high = np.log2([grid.steps(float(reaches.min()))[-1], grid.steps(float(reaches.max()))[0]])
    return np.exp2(np.arange(low, high + 1))


def _of_activation(tensor: Activation, now: np.ndarray, index: np.ndarray, count: int) -> np.ndarray | None:
    own = index[tensor.classes]
    if (own < 0).all():
        return None
    seen = tensor.seen
    f = np.exp2(now[tensor.classes][:, None] + np.where(own[:, None] >= 0, _NEAR, 0))  # [C, N]
    bound = np.inf if tensor.bound is None else tensor.bound
    reach = np.minimum(seen.reach[:, None], bound / f)
    steps = _steps(tensor.grid, (reach * f).max(0))[:, None, None]
    largest = tensor.grid.codes * steps / f
    mean = np.sqrt(np.maximum(seen.power, 1e-30) / (2 * np.maximum(seen.active, 1e-3)))[:, None]
    cut = np.where(largest < reach, seen.power[:, None] * np.exp(-largest / mean), 0)
    lost = np.minimum(np.square(steps / f) / 12 * seen.active[:, None], seen.power[:, None]) + cut
    if tensor.bound is not None:
        lost = lost + np.stack([tensor.passed(column) for column in f.T], 1)
    found = np.zeros((len(steps), count, len(_NEAR)))
    np.add.at(found.swapaxes(0, 1), np.maximum(own, 0), (lost * tensor.importance.white[:, None]).swapaxes(0, 1))
    return found


def _of_weight(tensor: Weight, now: np.ndarray, index: np.ndarray, count: int) -> np.ndarray | None:
    """Where both what a weight reads and what it makes are of the group, what it reads stays as it is."""
    made, read = index[tensor.made], np.broadcast_to(index[tensor.read], tensor.size.shape[:2])
    outputs = (made >= 0).any()
    if not outputs and (read < 0).all():
        return None
    up, down = np.exp2(now[tensor.made])[:, None], np.broadcast_to(np.exp2(now[tensor.read]), read.shape)
    power = np.broadcast_to(tensor.power, read.shape)
    size = tensor.size * (up / down)[:, :, None]
    counts = tensor.importance[:, None] / up**2 * power * down**2  # [O, J]
    own = np.broadcast_to(made[:, None], read.shape) if outputs else read
    factor = np.exp2(_NEAR if outputs else -_NEAR)
    reaches = np.array([(size.max(2) * np.where(own >= 0, x, 1)).max() for x in factor])
    steps = _steps(tensor.grid, reaches)
    found, at = np.zeros((len(steps), count, len(factor))), np.maximum(own, 0).ravel()
    for n, x in enumerate(factor):
        scale = np.where(own >= 0, x, 1.0)
        sizes, weight = size * scale[:, :, None], counts / scale**2
        for k, step in enumerate(steps):
            cut = np.square(np.maximum(sizes - tensor.grid.codes * step, 0)).sum(2)
            lost = weight * (step**2 / 12 * size.shape[2] + cut)
            found[k, :, n] = np.bincount(at, lost.ravel(), count)
    return found
