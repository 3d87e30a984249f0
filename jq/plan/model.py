"""How a network is quantized, as data: which tensors, and with which scales.

A plan is a pytree and an argument of the traced function, so that many plans can be stacked and tried at once,
and differentiated. `planning.py` makes one from calibration.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jq.arithmetic import blocks, layout
from jq.arithmetic.formats import Block, Float, Format, Integer
from jq.arithmetic.numerics import codes, divide, exponent_of, fake_quant, rounded
from jq.errors import ConfigError, suggest
from jq.util import mapped, markup

Array = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class QParams:
    """How one tensor is quantized: x is about (code - zero_point) * scale, or is cast to a float or block format.

    A pytree: scale and zero point are its leaves, so that a plan of them can be stacked, mapped and differentiated.
    """

    scale: Array  # float32, one number or one per channel
    zero_point: Array  # int32, likewise
    grid: Format = dataclasses.field(metadata={"static": True})
    axis: int | None = dataclasses.field(default=None, metadata={"static": True})  # of the channels, or of the blocks
    # The scale that the codes are made with, where they are read with another: the vendor's tool moves positions of
    # weights and leaves their codes, which `strict_quark` repeats.
    coded: Array | None = None
    dynamic: bool = dataclasses.field(default=False, metadata={"static": True})  # scale and zero point are x's own

    def __repr__(self) -> str:
        of = "" if self.axis is None else f", axis={self.axis}"
        return f"QParams(scale={self.scale}, zero_point={self.zero_point}, {self.grid}{of})"

    @property
    def exponent(self) -> np.ndarray:
        """The exponent of a power-of-two scale, scale = 2**exponent; the vendor's position is its negative."""
        return exponent_of(self.scale)

    @property
    def is_power_of_two(self) -> bool:
        """Whether the tensor has one scale, and that is a power of two."""
        return np.ndim(self.scale) == 0 and float(self.scale) == math.ldexp(1.0, int(self.exponent))

    def codes(self, x: Array, axis: int | None = None) -> Array:
        """The codes of x, as floats; `axis` is that of the channels where it is not ONNX's."""
        assert isinstance(self.grid, Integer)
        scale = self._along(self.scale if self.coded is None else self.coded, x, axis)
        return codes(x, scale, self._along(self.zero_point, x, axis), self.grid)

    def stored(self, array: np.ndarray) -> np.ndarray:
        """The codes of a weight as a file holds them.

        >>> from jq.arithmetic.formats import INT8
        >>> QParams(np.float32(0.5), np.int32(0), INT8).stored(np.float32([1.2, -99]))
        array([   2, -128], dtype=int8)
        """
        assert isinstance(self.grid, Integer)
        if array.size > mapped.BLOCK:
            made = np.empty(array.shape, self.grid.dtype)
            for part, own in self.parts(array):
                made[part] = own.stored(array[part])
            return made
        parameters = self.scale if self.coded is None else self.coded, self.zero_point
        scale, zero_point = (self._along(np.asarray(v), array, None) for v in parameters)
        whole = np.rint(array / scale.astype(np.float32)).astype(np.float64) + zero_point
        return np.clip(whole, self.grid.qmin, self.grid.qmax).astype(np.int64).astype(self.grid.dtype)

    def parts(self, array: np.ndarray) -> Iterator[tuple[slice, QParams]]:
        """Yield the parts of a large weight along its first axis, each with its own scales."""
        along = self.axis is not None and self.axis % array.ndim == 0
        for part in mapped.blocks(array):
            if along:
                own = {k: v[part] for k in ("scale", "zero_point", "coded") if (v := getattr(self, k)) is not None}
                yield part, dataclasses.replace(self, **own)
            else:
                yield part, self

    def given_back(self, array: np.ndarray) -> np.ndarray:
        """A weight as its codes give it back, in 64 bits.

        >>> from jq.arithmetic.formats import INT8
        >>> QParams(np.float32(0.5), np.int32(0), INT8).given_back(np.float32([1.2, -99]))
        array([  1., -64.])
        """
        array = np.asarray(array, np.float32)
        if not isinstance(self.grid, Integer):
            return np.asarray(self.fake_quant(array), np.float64)
        if self.axis is not None:
            return self.on_host(array).astype(np.float64)
        return QTensor(self.stored(array), self).value(np.float64)

    def on_host(self, x: np.ndarray) -> np.ndarray:
        """`fake_quant` to integers in numpy, bit for bit: for arrays of many shapes, as nothing is compiled for each.

        >>> from jq.arithmetic.formats import INT8
        >>> QParams(np.float32(0.25), np.int32(0), INT8).on_host(np.float32([0.3, 99]))
        array([ 0.25, 31.75], dtype=float32)
        """
        assert isinstance(self.grid, Integer)
        parameters = self.scale if self.coded is None else self.coded, self.scale, self.zero_point
        coded, scale, zero = (self._along(np.asarray(v), x, None) for v in parameters)
        steps = np.clip(np.rint(x / coded), self.grid.qmin - zero, self.grid.qmax - zero)
        return (steps * scale).astype(np.float32)

    def fake_quant(self, x: Array, axis: int | None = None) -> Array:
        """x quantized and dequantized, with a straight-through gradient.

        >>> from jq.arithmetic.formats import INT8
        >>> QParams(np.float32(0.25), np.int32(0), INT8).fake_quant(jnp.array([0.3, 0.9]))
        Array([0.25, 1.  ], dtype=float32)
        """
        if not isinstance(self.grid, Integer):
            along = self.axis if axis is None else axis
            return _cast(x, self.grid, -1 if along is None else along)
        if self.dynamic:
            return dataclasses.replace(self, dynamic=False, **_from_data(x, self.grid)).fake_quant(x)
        scale, zero_point = self._along(self.scale, x, axis), self._along(self.zero_point, x, axis)
        if self.coded is None:
            return fake_quant(x, scale, zero_point, self.grid)
        return rounded((self.codes(x, axis) - zero_point) * scale)

    def _along(self, parameter: Array, x: Array, axis: int | None) -> Array:
        """Scale or zero point, so that it broadcasts against x."""
        if self.axis is None:
            return parameter
        axis = self.axis if axis is None else axis
        return layout.along(parameter, x.ndim, axis)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class QTensor:
    """A quantized tensor: an array of codes, and the scale and zero point that they are read with.

    The codes have the type of `qparams.grid`, integers or small floats; a block format has no codes of its own. A scale
    per channel has a number for each index of `qparams.axis`. Codes may be stacked with their `qparams`.

    >>> from jq.arithmetic.formats import UINT8
    >>> QTensor(np.uint8([0, 130]), QParams(np.float32(0.5), np.int32(128), UINT8)).value()
    array([-64.,   1.], dtype=float32)
    """

    array: Array
    qparams: QParams

    def __post_init__(self) -> None:
        kind, grid = getattr(self.array, "dtype", None), self.qparams.grid
        if isinstance(grid, Block) or (kind is not None and kind != grid.dtype):  # a pytree may hold no array
            raise ValueError(f"a QTensor of {grid} needs codes of that type; got {kind}")

    def value(self, dtype: Any = np.float32) -> Array:
        """The values that the codes stand for, (array - zero_point) * scale."""
        xp: Any = np if isinstance(self.array, (np.ndarray, np.generic)) else jnp
        parameters = (xp.asarray(v, dtype) for v in (self.qparams.zero_point, self.qparams.scale))
        zero, scale = (self.qparams._along(v, self.array, None) for v in parameters)
        return (self.array.astype(dtype) - zero) * scale


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _cast(x: Array, grid: Float | Block, axis: int) -> Array:
    # A block of one element is exact; the vendor's operator leaves a tensor of one element unchanged.
    return x if isinstance(grid, Block) and x.size == 1 else blocks.cast(x, grid, axis)


@_cast.defjvp
def _straight_through(grid: Float | Block, axis: int, primals: tuple[Array], tangents: tuple[Array]) -> Any:
    return _cast(*primals, grid, axis), tangents[0]


def _from_data(x: Array, grid: Integer) -> dict[str, Array]:
    """Scale and zero point as DynamicQuantizeLinear computes them from its operand."""
    low, high = jnp.minimum(jnp.min(x), 0), jnp.maximum(jnp.max(x), 0)
    scale = jnp.where(high == low, 1, divide(high - low, jnp.float32(grid.qmax - grid.qmin)))
    return {"scale": scale, "zero_point": jnp.round(jnp.clip(grid.qmin - divide(low, scale), grid.qmin, grid.qmax))}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """How a network is quantized: its quantized weights and activations, each with its `QParams`.

    >>> import jq
    >>> graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")), "XINT8")
    >>> plan = jq.make_plan(graph, jq.calibrate(graph, jq.zoo.calibration_set()[0][:16]))
    >>> plan
    Plan(26 activations, 32 weights)
    >>> plan["input"]
    QParams(scale=0.015625, zero_point=128, uint8)
    """

    activations: Mapping[str, QParams]
    weights: Mapping[str, QParams]
    nodes: frozenset[str] = dataclasses.field(
        metadata={"static": True}
    )  # the first outputs of the nodes that are quantized
    forms: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})  # of `passes.npu.FORMS`

    def __repr__(self) -> str:
        return f"Plan({len(self.activations)} activations, {len(self.weights)} weights)"

    def _repr_html_(self) -> str:
        kinds = (("activation", self.activations), ("weight", self.weights))
        rows = [(name, kind, repr(qparams)) for kind, part in kinds for name, qparams in part.items()]
        return markup.preview(repr(self), ("tensor", "kind", "quantized as"), rows)

    def get(self, tensor: str) -> QParams | None:
        """How a tensor is quantized; None if it is not."""
        return self.activations.get(tensor) or self.weights.get(tensor)

    def __getitem__(self, tensor: str) -> QParams:
        qparams = self.get(tensor)
        if qparams is None:
            known = [*self.activations, *self.weights]
            raise ConfigError(f"tensor {tensor!r} is not quantized.{suggest(tensor, known)}")
        return qparams

    def __contains__(self, tensor: object) -> bool:
        return tensor in self.activations or tensor in self.weights

    def __iter__(self) -> Iterator[str]:
        yield from self.activations
        yield from self.weights

    def __len__(self) -> int:
        return len(self.activations) + len(self.weights)

    def replace(self, tensors: Mapping[str, QParams | None]) -> Plan:
        """A copy with some tensors quantized otherwise, or (None) not at all."""
        for name in tensors:
            self[name]

        def changed(part: Mapping[str, QParams]) -> dict[str, QParams]:
            changes = {k: tensors.get(k, q) for k, q in part.items()}
            return {k: q for k, q in changes.items() if q is not None}

        return dataclasses.replace(self, activations=changed(self.activations), weights=changed(self.weights))

    def fake_quant(self, name: str, value: Any) -> Any:
        """A tensor as its readers get it: rounded if the plan has it, with its axes in the order that they have."""
        qparams = self.get(name)
        if qparams is None:
            return value
        axis = None if qparams.axis is None else layout.axis_of(value, qparams.axis)
        return layout.mapped(lambda x: qparams.fake_quant(jnp.asarray(x), axis), value)
