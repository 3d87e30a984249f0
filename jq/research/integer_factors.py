"""Cross-layer equalization by powers of two alone, as an integer program over the channels' exponents.

Such factors change no value of the float network by a bit, where no Clip is on the way, and need no channel's scale in
the file. The objective is the noise that `jq.equalize` predicts. The exponent n_c of each channel c and the step 2^k_t
of each tensor t are decided together: with the noise f_t(k, c, n) of channel c in tensor t,

    minimize  sum over t, c of f_t(k_t, c, n_c),

where a step must reach all values: with clipping allowed, fashion_mobilenet loses 1.2 dB. The prediction may be wrong,
as it takes one rounding of few weights for noise. So the network is quantized with these factors and without, and the
one nearer to the floats, on the data, is taken. Any positive factors, as of `jq.equalize`, are better on both bundled
models (experiments/results/pow2_factors.jsonl).

With the steps chosen, channels are independent; with the factors of other groups chosen, only the tensors of a group's
own channels depend on each other. So the program falls into one for each group of channels, which is solved exactly: over
all combinations of steps where they are few, else by SciPy's solver of mixed integer programs. Groups take turns
until nothing gets better.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from jq.calibration.calibrate import calibrate
from jq.config import QuantConfig, resolve
from jq.data.sources import readable_again
from jq.errors import ConfigError
from jq.graph import Graph
from jq.plan.planning import make_plan
from jq.recovery.bias_correction import correct_biases
from jq.recovery.equalization import predicted_noise
from jq.recovery.equalization.factors import choose, limits, optimize
from jq.recovery.equalization.groups import FIXED, scaled
from jq.recovery.equalization.noise import Activation, Noise, Weight
from jq.research.sensitivities import sensitivity
from jq.util.sparse import for_solver

_NEAR = np.arange(-2, 3)  # octaves by which a channel's exponent may change in a turn
_TURNS = 3
_FEW = 4096  # combinations of steps that are tried one by one
_SECONDS = 10.0  # for a group's program; what the solver has found by then is taken if it is better


def equalize_pow2(graph: Graph, config: QuantConfig | str = "XINT8", data: Any = None) -> Graph:
    """Return a prepared graph whose channels have powers of two as factors, with the least predicted noise.

    As `jq.equalize`, but the function of the graph stays bit by bit, where no Clip is between the layers. The graph
    itself is returned if nothing is better, which is measured if there are data.

    >>> import jq
    >>> graph = jq.prepare(jq.load(jq.zoo.path("fashion_mobilenet")), "XINT8")
    >>> images, _ = jq.zoo.calibration_set()
    >>> equalize_pow2(graph, "XINT8", images[:32]) is graph
    False
    """
    config = resolve(config)
    if config.scale != "power_of_two":
        raise ConfigError(f"equalize_pow2 needs scale='power_of_two'; got {config.scale!r}; use `jq.equalize`")
    data = None if data is None else readable_again(data, graph.inputs, config.seed)
    noise = predicted_noise(graph, config, data)
    exponents = np.zeros(1) if noise is None else integer_exponents(noise)
    if noise is None or not exponents.any():
        return graph
    equalized = scaled(graph, noise.groups, np.exp2(exponents))
    return equalized if data is None or _lost(equalized, config, data) < _lost(graph, config, data) else graph


def _lost(graph: Graph, config: QuantConfig, data: Any) -> float:
    """The mean squared error of the quantized network's outputs."""
    stats = calibrate(graph, data, config)
    if config.corrects_bias:
        graph = correct_biases(graph, make_plan(graph, stats, config), stats)
    plan = make_plan(graph, stats, config)
    return sensitivity(graph, plan, data, loss="mse", by={"all": list(plan)}).rows[0].loss


def integer_exponents(noise: Noise) -> np.ndarray:
    """Return the exponents [classes] of least predicted noise; zeros if none are better."""
    group, most = noise.groups.group, np.floor(np.log2(limits(noise)))
    near = np.log2(optimum := optimize(noise)), np.log2(choose(noise, optimum))
    starts = [np.zeros(len(group)), *(np.minimum(np.rint(n), most) for n in near)]
    for start in starts:
        start[FIXED] = 0
    now = min(starts, key=lambda n: noise.total(np.exp2(n)))
    tensors: tuple[Activation | Weight, ...] = (*noise.activations, *noise.weights)
    members = [np.flatnonzero(group == g) for g in np.unique(group) if g != group[FIXED]]
    for _ in range(_TURNS):
        before = noise.total(np.exp2(now))
        for classes in members:
            costs = [c for t in tensors if (c := _costs(t, now, classes)) is not None]
            barred = now[classes, None] + _NEAR > most[classes, None]
            trial = now.copy()
            trial[classes] += _NEAR[cheapest([np.where(barred, np.inf, c) for c in costs])] if costs else 0
            if noise.total(np.exp2(trial)) < noise.total(np.exp2(now)):
                now = trial
        if noise.total(np.exp2(now)) >= before:
            break
    return now.astype(np.int64)


def cheapest(costs: Sequence[np.ndarray]) -> np.ndarray:
    """Return the choice n [channels] that minimizes sum_t min_k sum_c costs[t][k, c, n_c]; inf is forbidden.

    >>> cheapest([np.array([[[0.0, 4.0]], [[9.0, 1.0]]]), np.array([[[2.0, 0.0]]])])
    array([1])
    """
    combinations = math.prod(len(c) for c in costs)
    return _by_steps(costs) if combinations <= _FEW else by_program(costs)


def _by_steps(costs: Sequence[np.ndarray]) -> np.ndarray:
    """The same over every combination of steps, with each of which channels are independent."""
    best, choice = np.inf, np.zeros(costs[0].shape[1], np.int64)
    for steps in itertools.product(*(range(len(c)) for c in costs)):
        together = np.sum([c[k] for c, k in zip(costs, steps, strict=True)], axis=0)
        if (total := together.min(1).sum()) < best:
            best, choice = total, together.argmin(1)
    return choice


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
    matrix = for_solver(sparse.csr_array((value, (row, column)), shape=(count, starts[-1])))
    cost = np.concatenate([np.zeros(starts[0]), *(c.ravel() for c in costs)])
    upper = np.where(np.isfinite(cost), 1.0, 0.0)
    cost = np.where(np.isfinite(cost), cost, 0.0)
    whole = np.arange(starts[-1]) < starts[0]
    solution = milp(
        cost / max(cost.max(), 1e-300), integrality=whole, bounds=Bounds(0, upper), options={"time_limit": seconds},
        constraints=LinearConstraint(matrix, np.concatenate(right), np.concatenate(right)),
    )  # fmt: skip
    return solution.x[z].argmax(1) if solution.x is not None else np.full(channels, choices // 2)


def _costs(tensor: Activation | Weight, now: np.ndarray, classes: np.ndarray) -> np.ndarray | None:
    """The noise [steps, classes, choices] of a tensor that has channels of these classes; None if it has none.

    A step that does not reach a channel is forbidden to it. The noise of other channels counts to the first class.
    """
    index = np.full(len(now), -1)
    index[classes] = np.arange(len(classes))
    shares = _activation(tensor, now, index) if isinstance(tensor, Activation) else _weight(tensor, now, index)
    if shares is None:
        return None
    own, reach, noise = shares
    reaches = np.zeros((len(classes), len(_NEAR)))
    np.maximum.at(reaches, own, reach)
    least, most = (np.ceil(np.log2(max(r, 1e-30) / tensor.grid.codes)) for r in (reaches.max(0).min(), reaches.max()))
    steps = np.exp2(np.arange(least, most + 1))
    costs = np.zeros((len(steps), *reaches.shape))
    for step, cost in zip(steps, costs, strict=True):
        np.add.at(cost, own, noise(step))
        cost[reaches > tensor.grid.codes * step] = np.inf
    return costs


# Classes, and of each choice, reach and noise.
_Shares: TypeAlias = tuple[np.ndarray, np.ndarray, Callable[[float], np.ndarray]]


def _activation(tensor: Activation, now: np.ndarray, index: np.ndarray) -> _Shares | None:
    own, seen = index[tensor.classes], tensor.seen
    if (own < 0).all():
        return None
    f = np.exp2(now[tensor.classes][:, None] + np.where(own[:, None] >= 0, _NEAR, 0))
    reach, passed = np.minimum(seen.reach[:, None] * f, tensor.bound), np.stack([tensor.passed(s) for s in f.T], 1)

    def noise(step: float) -> np.ndarray:
        rounding = np.minimum(np.square(step / f) / 12 * seen.active[:, None], seen.power[:, None])
        return (rounding + passed) * tensor.importance.white[:, None]

    return np.maximum(own, 0), reach, noise


def _weight(tensor: Weight, now: np.ndarray, index: np.ndarray) -> _Shares | None:
    """The same; where a weight reads and makes channels of the group, those that it reads keep their factors."""
    shape = tensor.kernels.shape
    own = np.broadcast_to(index[tensor.made][:, None], shape)
    sign = 1
    if (own < 0).all():
        own, sign = np.broadcast_to(index[tensor.read], shape), -1
    if (own < 0).all():
        return None
    ratio = np.exp2(now[tensor.made][:, None] - now[np.broadcast_to(tensor.read, shape)])
    factor = ratio[..., None] * np.exp2(np.where(own[..., None] >= 0, sign * _NEAR, 0))  # [O, J, choices]
    power = tensor.importance[:, None] * tensor.power * tensor.size.shape[2] / 12
    counts = (power[..., None] / factor**2).reshape(-1, len(_NEAR))
    reach = (tensor.kernels[..., None] * factor).reshape(-1, len(_NEAR))
    return np.maximum(own, 0).ravel(), reach, lambda step: counts * step**2
