"""Graph -> pure function.

`trace` reads a graph as a JAX function, which walks the nodes once, while JAX traces. A value is
either *known* (a numpy array: shapes, axes, index arithmetic) or a jax array. Rules marked `host`
stay in numpy on known operands, so shape arithmetic never reaches XLA. Where a rule needs
a known operand, what leads to it is computed while tracing, from the graph's own arrays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from onnx import TensorProto

from jq.arithmetic import layout
from jq.errors import ConfigError, DataError, ModelError, UnsupportedOp, suggest
from jq.graph import Graph, Node, Value
from jq.graph.bodies import has_body
from jq.ops.kinds import is_cast
from jq.ops.table import Array, demanded, lookup
from jq.readings.walk import LARGE, Reader, Scope, best_lowering, dtype_of, nbytes, stated, value_of, walk, within
from jq.readings.widths import computes_wide
from jq.util import cache
from jq.util.digest import digest


@dataclasses.dataclass(frozen=True)
class AnyOrder:
    """A tap that takes its tensor in either order of axes (see `layout`): nothing is transposed for it."""

    tap: Callable[[Any], Any]


Tap = Callable[[Array], Any] | AnyOrder


class Quantizer(Protocol):
    """A rounding of tensors by name, as a `jq.Plan` is."""

    def __contains__(self, tensor: object, /) -> bool:
        """Whether a tensor is quantized."""
        ...

    def fake_quant(self, name: str, value: Any, /) -> Any:
        """The rounded tensor, which its readers get."""
        ...


# No sound model makes a tensor so many times larger than its weights and inputs; one with a damaged dim
# or pad does. Refused while tracing, before anything is allocated.
_GROWTH = 256
_TOGETHER = 2  # of such tensors, what is in use at the same time
_WIDE = frozenset(map(np.dtype, (np.int64, np.uint64, np.float64, np.complex128)))


def trace(
    graph: Graph,
    *,
    outputs: Sequence[str] | None = None,
    taps: Iterable[str] | Mapping[str, Tap] = (),
    lowering: str | None = None,
) -> Traced:
    """Return the graph as a pure function `fn(params, inputs) -> outputs`, to jit, vmap, grad or shard.

    With `taps` it returns `(outputs, tapped)`: the named tensors, or what a function makes of each;
    a tap that reduces its tensor keeps the result only, XLA frees or fuses the tensor, and wrapped in
    `AnyOrder` it costs no transpose. `outputs` picks other tensors than the graph's; the rest is not computed.
    `lowering` is "cpu" or "native" (XLA's own convolutions); by default the backend decides.

    Called on concrete arrays the function compiles itself, and computes 64-bit types as such where
    the graph's interface or casts ask for them; inside `jit`, JAX's own 64-bit mode holds.

    >>> import jq, numpy as np
    >>> graph = jq.load(jq.zoo.path("fashion_resnet"))
    >>> fn = jq.trace(graph)
    >>> fn(graph.params, {"input": np.zeros((2, 1, 28, 28), np.float32)})["logits"].shape
    (2, 10)
    """
    cache.enable()
    names = tuple(v.name for v in graph.outputs) if outputs is None else tuple(outputs)
    tapped = dict(taps) if isinstance(taps, Mapping) else {t: (lambda x: x) for t in taps}
    tensors = graph.producer.keys() | graph.arrays.keys() | {v.name for v in graph.inputs}
    for name in (*names, *tapped):
        if name not in tensors:
            raise ConfigError(f"the graph has no tensor {name!r}.{suggest(name, tensors)}")
    if missing := unsupported(graph):
        raise UnsupportedOp("; ".join(missing))
    return Traced(graph, names, tapped, lowering or best_lowering())


def unsupported(graph: Graph) -> list[str]:
    """Operators of the graph without a rule: one line for each, with its first node and the count."""
    missing: dict[str, list[Node]] = {}
    for node in graph.walk():
        opset = graph.opset(node.domain)
        if lookup(node, opset) is None and not has_body(node, opset):
            missing.setdefault(f"{node.qualified} (opset {opset})", []).append(node)
    return [f"no rule for {op}: {len(nodes)} node(s), first {nodes[0].label!r}" for op, nodes in missing.items()]


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A graph read as a function of its params and inputs."""

    graph: Graph
    outputs: tuple[str, ...]
    taps: Mapping[str, Tap]
    lowering: str

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any]) -> Any:
        """The outputs by name, and what was tapped if anything is."""
        return self.quantized(params, None, inputs)

    def quantized(self, params: Mapping[str, Any], plan: Quantizer | None, inputs: Mapping[str, Any]) -> Any:
        """The outputs where each tensor in the plan is rounded before it is read."""
        inputs = self.checked(inputs)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((params, plan, inputs))):
            return self._evaluate(params, plan, inputs)
        known = {k: jax.tree.map(np.asarray, v) for k, v in inputs.items() if k in self.static_inputs or _has_text(v)}
        traced = {k: v for k, v in inputs.items() if k not in known}
        with jax.enable_x64(True) if self.wide else contextlib.nullcontext():
            try:
                outputs = self._compiled(_Known.of(known), dict(params), plan, traced)
            except jax.errors.JaxRuntimeError as error:
                raise ModelError(f"the model does not run on this machine: {str(error).splitlines()[0]}") from error
        return jax.tree.map(_Known.unwrap, outputs, is_leaf=lambda v: isinstance(v, _Known))

    @functools.cached_property
    def static_inputs(self) -> frozenset[str]:
        """Graph inputs that must be known while tracing (a shape given as input): not for `jit`."""
        needed = (v for v in self.graph.inputs if v.name in (self._steering if _is_switch(v) else self._demanded))
        return frozenset(v.name for v in needed)

    @functools.cached_property
    def _demanded(self) -> frozenset[str]:
        return demanded(self.graph)

    @functools.cached_property
    def _steering(self) -> frozenset[str]:
        return demanded(self.graph, steering=True)

    @functools.cached_property
    def wide(self) -> bool:
        """Whether 64-bit types are data: in the graph's interface, weights or casts, or computed from its inputs."""
        interface = {v.dtype for v in (*self.graph.inputs, *self.graph.outputs)}
        casts = {n.attrs.get("to") for n in self.graph.walk() if is_cast(n)}
        wide = {TensorProto.DOUBLE, TensorProto.UINT64, TensorProto.COMPLEX128}
        params = {a.dtype for a in self.graph.params.values()}
        return bool((interface | params) & _WIDE) or bool(casts & wide) or computes_wide(self.graph, self.static_inputs)

    @functools.cached_property
    def _compiled(self) -> Callable[..., Any]:
        def run(known: _Known, params: Mapping[str, Any], plan: Quantizer | None, inputs: Mapping[str, Any]) -> Any:
            return jax.tree.map(_Known.wrap, self._evaluate(params, plan, {**known.values, **inputs}))

        return jax.jit(run, static_argnums=0)

    @functools.cached_property
    def _nodes(self) -> tuple[Node, ...]:
        """The nodes that the outputs and taps need."""
        needed = {*self.outputs, *self.taps}
        kept = []
        for node in reversed(self.graph.nodes):
            if not needed.isdisjoint(node.outputs):
                needed.update(node.reads())
                kept.append(node)
        return tuple(reversed(kept))

    def _evaluate(self, params: Mapping[str, Any], plan: Quantizer | None, inputs: Mapping[str, Any]) -> Any:
        if absent := self.graph.params.keys() - params.keys():
            raise DataError(f"params lack {sorted(absent)[:3]}: pass graph.params, or a dict with the same keys")
        scope = {**self.graph.constants, **params, **inputs}
        # A weight that a rule must know while tracing (the scales of a Resize) is the graph's own.
        scope |= {k: a for k, a in self.graph.params.items() if k in self._demanded}
        if plan is not None:
            scope |= {k: plan.fake_quant(k, v) for k, v in scope.items() if k in plan}
        seen = {name: tapped(tap, scope[name]) for name, tap in self.taps.items() if name in scope}

        def rounded(node: Node, scope: Scope) -> Scope:
            if plan is None:
                return {}
            return {name: plan.fake_quant(name, value_of(scope, name)) for name in node.outputs if name in plan}

        def watched(node: Node, scope: Scope) -> Scope:
            seen.update({n: tapped(self.taps[n], value_of(scope, n)) for n in node.outputs if n in self.taps})
            return {}

        # A file of a kilobyte fills gigabytes, and says no more for it.
        weights = sum(stated(self.graph.params.get(name, value)) for name, value in params.items())
        size = weights + sum(map(nbytes, jax.tree.leaves(inputs)))
        limit = max(LARGE, _GROWTH * size)
        reader, together = (
            Reader(self.lowering, self._steering, limit),
            within(self._nodes, self.outputs, _TOGETHER * limit),
        )
        scope = walk(self._nodes, scope, reader.on(self.graph), together, rounded, watched)
        given = {**params, **inputs}  # values that no node makes are passed on unchanged: a model holds them only once
        result = {name: layout.plain(value_of(given if name in given else scope, name)) for name in self.outputs}
        return (result, seen) if self.taps else result

    def checked(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs, after names, types and shapes were compared with what the graph declares."""
        declared = {v.name: v for v in self.graph.inputs}
        for name in inputs.keys() - declared.keys():
            raise DataError(f"the model has no input {name!r}.{suggest(name, declared)} It has: {', '.join(declared)}")
        dims: dict[str, int] = {}
        for name, value in declared.items():
            if name not in inputs:
                raise DataError(f"input {name!r} is missing; the model needs {value}")
            _check(value, inputs[name], dims)
        return dict(inputs)


def tapped(tap: Tap, value: Any) -> Any:
    """The result of a tap on a traced value."""
    return tap.tap(value) if isinstance(tap, AnyOrder) else tap(layout.plain(value))


def _has_text(value: Any) -> bool:
    return any(dtype_of(leaf) == np.dtype(object) for leaf in jax.tree.leaves(value))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Known:
    """Known values as a static argument of `jit`, or, as strings are, a static part of its outputs."""

    key: str  # the same for the same bytes
    values: dict[str, Any] = dataclasses.field(compare=False)

    @classmethod
    def of(cls, values: dict[str, Any]) -> _Known:
        return cls(digest(values), values)

    @staticmethod
    def wrap(value: Any) -> Any:
        """Text in a form that leaves `jit`."""
        return _Known.of({"": value}) if _has_text(value) else value

    @staticmethod
    def unwrap(value: Any) -> Any:
        """The text, outside of `jit`."""
        return value.values[""] if isinstance(value, _Known) else value


def _is_switch(value: Value) -> bool:
    """Whether a graph input is one number, as a sample rate or a trip count is."""
    return value.dtype is not None and value.shape is not None and all(d == 1 for d in value.shape)


def _check(value: Value, array: Any, dims: dict[str, int]) -> None:
    """Compare an input with its declaration; symbolic dims must agree with each other."""
    if value.dtype is None or value.containers or not hasattr(array, "dtype"):
        return
    problem = f"input {value.name!r}: expected {value}, found {array.dtype}{list(array.shape)}"
    narrow = value.dtype if value.dtype == object else np.dtype(jax.dtypes.canonicalize_dtype(value.dtype))
    if array.dtype not in {value.dtype, narrow}:
        raise DataError(f"{problem}; convert it first")
    if value.shape is None:
        return
    wanted = [
        dims.setdefault(d, n) if isinstance(d, str) else d for d, n in zip(value.shape, array.shape, strict=False)
    ]
    if len(value.shape) != array.ndim or any(d not in (None, n) for d, n in zip(wanted, array.shape, strict=True)):
        raise DataError(problem)
