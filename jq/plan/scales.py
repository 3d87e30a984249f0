"""Scales from statistics, the last step of calibration.

Power of two: Quark's MinMSE compares five exponents (see `jq.arithmetic.exponents`), NonOverflow takes that of the
observed range. Float: a range by one of the methods of `jq.plan.ranges`, then scale and zero point.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jq.arithmetic import layout
from jq.arithmetic.exponents import base_exponent, error_sums, least_squares, minmse_candidates, residual
from jq.arithmetic.formats import Integer
from jq.arithmetic.numerics import inverse_power, power_of_two
from jq.calibration.observed import cuts_alone
from jq.calibration.observers import REACHES, Histogram
from jq.calibration.stats import Stats
from jq.config import QuantConfig, resolve
from jq.errors import DataError, ModelError
from jq.graph import Graph
from jq.ops.linear import linear_layer
from jq.ops.table import lookup
from jq.plan import QParams, ranges
from jq.util.mapped import ends, is_finite, one_by_one, release

_ROW = 4096  # elements of a weight that are searched at a time
_ROWS = 32  # rows per step of the compiled search
_TOGETHER = 1 << 13  # rows that are searched at once, 128 MB
_PIECE = 128  # elements of each row that are accumulated at a time: those of all rows stay in the cache


def activation_qparams(graph: Graph, stats: Stats, config: QuantConfig | str | None = None) -> dict[str, QParams]:
    """Return scale and zero point of every calibrated activation, and of those that take another's range.

    >>> import jq
    >>> graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")))
    >>> stats = jq.calibrate(graph, jq.zoo.calibration_set()[0][:16])
    >>> jq.activation_qparams(graph, stats)["input"]
    QParams(scale=0.015625, zero_point=128, uint8)
    """
    config = stats.config if config is None else resolve(config)
    qparams = {tensor: _activation(stats, tensor, config) for tensor in stats.tensors}
    for node in graph.nodes:
        entry = lookup(node, graph.opset(node.domain))
        if cuts_alone(graph, node) and node.outputs[0] in qparams:
            qparams[node.inputs[0]] = qparams[node.outputs[0]]
        elif entry is not None and entry.bounds is not None and node.outputs[0] in qparams:
            qparams[node.outputs[0]] = _from_range(*entry.bounds, config)
    return qparams


def calibrated(graph: Graph, stats: Stats) -> frozenset[str]:
    """Return the tensors that `activation_qparams` finds scales of."""
    before = {n.inputs[0] for n in graph.nodes if cuts_alone(graph, n) and n.outputs[0] in stats.tensors}
    return frozenset(before | stats.tensors.keys())


def activation_ranges(stats: Stats, config: QuantConfig | str | None = None) -> dict[str, tuple[float, float]]:
    """Return the range of every calibrated tensor by a float method, as onnxruntime's calibrators do.

    >>> import jq
    >>> graph = jq.load(jq.zoo.path("fashion_resnet"))
    >>> config = jq.presets["A8W8"].replace(method="percentile", percentile=90.0)
    >>> stats = jq.calibrate(graph, jq.zoo.calibration_set()[0][:16], config)
    >>> [round(v, 2) for v in jq.activation_ranges(stats)["input"]]
    [-0.81, 1.56]
    """
    config = stats.config if config is None else resolve(config)
    return {tensor: _range(stats, tensor, config) for tensor in stats.tensors}


def _activation(stats: Stats, tensor: str, config: QuantConfig) -> QParams:
    if config.method not in ("minmse", "minmse_hist"):
        low, high = _range(stats, tensor, config)
        alike = config.method == "minmax" and config.scale == "float" and config.activation == stats.config.activation
        losses = stats.errors_behind(tensor) if alike else None
        return _from_range(*((low, high) if losses is None else _focused(low, high, losses)), config)
    if config.method == "minmse_hist":
        exponent = _histogram_exponent(stats.histogram(tensor), *stats.range(tensor), config.activation_grid)
        return _power_of_two(exponent, config)
    one_sided = config.one_sided_grid if stats.range(tensor)[0] >= 0 else None
    grid = one_sided or config.activation_grid
    zero_point = config.activation.qmin if one_sided and isinstance(config.activation, Integer) else grid.middle
    if stats.config.measured_grid != grid:
        return _power_of_two(_regridded_exponent(stats, tensor, grid), config, zero_point)
    best = _exponent_behind(stats, tensor)
    best = stats.best_exponent(tensor) if best is None else best
    if best is None:
        raise DataError(
            f"tensor {tensor!r} exceeds the range of its candidate exponents; calibrate it with all of its data"
        )
    return _power_of_two(best, config, zero_point)


def _exponent_behind(stats: Stats, tensor: str) -> int | None:
    """The exponent that loses least behind the function that reads a tensor; None without one, or if it is not among the
    candidates but beyond their ends."""
    losses = stats.errors_behind(tensor)
    if losses is None:
        return None
    octaves = np.log2(REACHES)
    whole = np.flatnonzero(octaves % 1 == 0)
    best = int(losses[whole].argmin())
    grid = stats.config.activation_grid
    bits = (grid.qmax - grid.middle).bit_length()
    return int(octaves[whole[best]]) - bits if 0 < best < whole.size - 1 else None


def _regridded_exponent(stats: Stats, tensor: str, grid: Integer) -> int:
    """MinMSE for other codes than those of the error table.

    Saturation depends on the reach of the codes alone, and rounding, where nothing saturates, on the square of the
    step. Both are known of the coarsest candidate, and so of the others and of any number of codes.
    """
    table, measured = stats.errors(tensor), stats.config.measured_grid
    exponent, total, codes = table["exponent"], table["total"], measured.qmax - measured.middle
    finer = round(math.log2((grid.qmax - grid.middle + 1) / (codes + 1)))
    rounding = (total[0] - table["clipped"][0]) * 4.0 ** (exponent - exponent[0])
    reaches = codes * np.exp2(exponent.astype(np.float64)) >= max(map(abs, stats.range(tensor)))
    saturation = np.where(reaches, 0, np.maximum(total - rounding, 0))
    return int(exponent[(saturation + rounding / 4.0**finer).argmin()]) - finer


def _range(stats: Stats, tensor: str, config: QuantConfig) -> tuple[float, float]:
    low, high = stats.range(tensor)
    if config.method in ("nonoverflow", "minmax", "minmse", "minmse_hist"):
        return low, high
    histogram, grid, symmetric = stats.histogram(tensor), config.activation_grid, config.symmetric
    match config.method:
        case "percentile":
            ends = ranges.percentile(histogram, low, high, config.percentile, symmetric=symmetric)
        case "entropy":
            ends = ranges.entropy(histogram, low, high, config.quantized_bins)
        case "mse":
            ends = ranges.mse(histogram, low, high, grid, symmetric=symmetric)
        case "layerwise_percentile":
            percents, metric = config.percentiles, config.percentile_metric
            ends = ranges.layerwise_percentile(
                histogram, low, high, grid, symmetric=symmetric, percents=percents, metric=metric
            )
    return float(ends[0]), float(ends[1])


def _focused(low: float, high: float, losses: np.ndarray) -> tuple[float, float]:
    """The part of a range that loses least behind the function that reads it; all of it where no part loses less.

    Where nothing is clipped, the error is that of rounding, which grows with the square of the scale.
    """
    whole = max(-low, high)
    wide, least = whole <= REACHES, int(losses.argmin())
    known = losses[wide][-1] * (whole / REACHES[wide][-1]) ** 2 if wide.any() else losses[0]
    if wide[least] or not losses[least] < known:
        return low, high
    return max(low, -REACHES[least]), min(high, REACHES[least])


def _from_range(low: float, high: float, config: QuantConfig) -> QParams:
    if config.scale == "power_of_two":
        return _power_of_two(base_exponent(low, high, config.activation_grid), config)
    scale, zero_point = ranges.scale_zero_point(low, high, config.activation_grid, symmetric=config.symmetric)
    return QParams(scale, zero_point.astype(np.int32), config.activation)


def _power_of_two(exponent: Any, config: QuantConfig, zero_point: int | None = None) -> QParams:
    # At run time values saturate at the ends of the type; only scales are searched on the symmetric grid.
    zero_point = config.activation_grid.middle if zero_point is None else zero_point
    return QParams(power_of_two(exponent), np.int32(zero_point), config.activation)


def _histogram_exponent(histogram: Histogram, low: float, high: float, grid: Integer) -> int:
    """Quark's MinMSE on a histogram: bin centres in float32, sums in float64."""
    exponents = minmse_candidates(low, high, grid)
    centres = ((histogram.edges[:-1] + histogram.edges[1:]) / 2).astype(np.float32)
    steps = centres / power_of_two(exponents)[:, None]
    errors = residual(steps, grid.qmin - grid.middle, grid.qmax - grid.middle).astype(np.float64)
    return int(least_squares(exponents, (np.square(errors) * histogram.counts).sum(1)))


def weight_qparams(
    graph: Graph, config: QuantConfig | str = "XINT8", params: Mapping[str, Any] | None = None
) -> dict[str, QParams]:
    """Return scale and zero point of every weight and bias.

    >>> import jq
    >>> graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")))
    >>> int(jq.weight_qparams(graph)["stem.weight"].exponent)
    -5
    """
    config = resolve(config)
    params = graph.params if params is None else params
    arrays = {k: np.asarray(v, np.float32) for k, v in params.items() if jnp.issubdtype(v.dtype, jnp.floating)}
    for name, array in one_by_one(arrays):
        if not is_finite(array):
            raise ModelError(f"weight {name!r} holds NaN or Inf")
    grid, symmetric = config.weight_grid, config.weight_symmetric
    axes = channel_axes(graph) if config.per_channel else {}
    if config.weight_method == "minmse":
        if axes:
            return {k: _by_channel(array, axes.get(k), grid) for k, array in arrays.items()}
        exponents = minmse_exponents(list(arrays.values()), grid)
        best = dict(zip(arrays, exponents, strict=True))
        return {k: QParams(power_of_two(e), np.int32(grid.middle), grid) for k, e in best.items()}
    qparams = {}
    for name, array in one_by_one(arrays):
        low, high = ranges.weight_range(array, axes.get(name), config.weight_method, grid=grid, symmetric=symmetric)
        if config.scale == "power_of_two":
            qparams[name] = QParams(power_of_two(base_exponent(low, high, grid)), np.int32(grid.middle), grid)
            continue
        scale, zero_point = ranges.scale_zero_point(low, high, grid, symmetric=symmetric)
        qparams[name] = QParams(scale, zero_point.astype(np.int32), grid, axes.get(name))
    return qparams


def _by_channel(array: np.ndarray, axis: int | None, grid: Integer) -> QParams:
    """A weight's power of two of least squared error, one for each channel along an axis, if it has one."""
    rows = layout.rows(array, axis)
    rows = rows.reshape(len(rows), -1)
    reach = np.abs(rows).max(1, initial=0)
    exponents = minmse_candidates(-reach, reach, grid)
    least, most = grid.qmin - grid.middle, grid.qmax - grid.middle
    errors = [residual(rows * power_of_two(-e)[:, None], least, most) for e in exponents.T]
    best = least_squares(exponents, np.stack([np.square(e, dtype=np.float64).sum(1) for e in errors], 1))
    scale, zero = power_of_two(best), np.zeros(best.shape, np.int32)
    return QParams(scale[0], zero[0], grid) if axis is None else QParams(scale, zero, grid, axis)


def channel_axes(graph: Graph) -> dict[str, int]:
    """The axis of the output channels of every weight that has one, for all of its readers."""
    axes_of: dict[str, set[int]] = {}
    for node in graph.nodes:
        layer = linear_layer(graph, node)
        if layer is not None:
            axes_of.setdefault(layer.weight, set()).add(layer.axis)
    return {name: axes.pop() for name, axes in axes_of.items() if len(axes) == 1}


def minmse_exponents(arrays: list[np.ndarray], grid: Integer) -> np.ndarray:
    """Return the exponent of least squared error for each array among Quark's five candidates; ties go to the coarser.

    Arrays are searched together: as rows of equal length, filled up with zeros, which cost nothing.

    >>> from jq.arithmetic.formats import INT8
    >>> minmse_exponents([np.array([0.5, -1.0], np.float32), np.array([100.0], np.float32)], INT8.narrow)
    array([-6,  1], dtype=int32)
    """
    if not arrays:
        return np.zeros(0, np.int32)
    reach = np.array([_reach(a) for a in arrays])
    exponents = minmse_candidates(-reach, reach, grid)
    errors = np.zeros(exponents.shape)
    for rows, owner in _rows_of(arrays):
        np.add.at(errors, owner, np.asarray(_row_errors(rows, exponents[owner], grid), np.float64))
    return least_squares(exponents, errors)


def _reach(array: np.ndarray) -> np.float32:
    """The largest magnitude of a weight, which is then given back to its file."""
    largest = np.abs(ends(array)).max()
    release(array)
    return largest


def _rows_of(arrays: list[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the arrays as rows, at most `_TOGETHER` at a time, with the index of each row's array."""
    flat = [a.reshape(-1) for a in arrays]
    pieces = ((i, start) for i, array in enumerate(flat) for start in range(0, array.size, _ROW))
    while group := list(itertools.islice(pieces, _TOGETHER)):
        count = math.ceil(len(group) / _ROWS) * _ROWS
        rows, owner = np.zeros((count, _ROW), np.float32), np.zeros(count, np.int64)
        for row, (i, start) in enumerate(group):
            part = flat[i][start : start + _ROW]
            rows[row, : part.size], owner[row] = part, i
        yield rows, owner
        for i in {i for i, _ in group}:
            release(arrays[i])


@functools.partial(jax.jit, static_argnums=2)
def _row_errors(rows: jax.Array, exponents: jax.Array, grid: Integer) -> jax.Array:
    """Squared error of each row at its own candidates, in units of the squared scale."""
    least, most = grid.qmin - grid.middle, grid.qmax - grid.middle

    def errors(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        return error_sums(pair[0], inverse_power(pair[1]), least, most, length=_PIECE).square

    return lax.map(errors, (rows, exponents), batch_size=_ROWS)
