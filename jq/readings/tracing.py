"""Graph -> pure function.

`trace` reads a graph as a JAX function. Evaluation walks the nodes once, while JAX traces. A value is
either *known* (a numpy array: shapes, axes, index arithmetic) or a jax array. Rules marked `host`
stay in numpy on known operands, so what ONNX computes on shapes never reaches XLA. Where a rule needs
a known operand, what leads to it is computed while tracing, from the graph's own arrays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from onnx import TensorProto

from jq.arithmetic import layout
from jq.errors import ConfigError, DataError, Error, ModelError, UnsupportedOp, suggest
from jq.graph import Graph, Node, Value
from jq.graph.bodies import has_body, inline
from jq.graph.schemas import defaults
from jq.ops.table import Array, Context, Op, demanded, lookup
from jq.util import cache
from jq.util.digest import digest

Scope = dict[str, Any]  # tensor name -> numpy array, jax array, ChannelsLast, list (a sequence) or None


@dataclasses.dataclass(frozen=True)
class AnyOrder:
    """A tap that takes its tensor in whatever order it lies (see `layout`): nothing is transposed for it."""

    tap: Callable[[Any], Any]


Tap = Callable[[Array], Any] | AnyOrder


class Quantizer(Protocol):
    """What rounds tensors on their way: a `jq.Plan`."""

    def __contains__(self, tensor: object, /) -> bool:
        """Whether a tensor is quantized."""
        ...

    def fake_quant(self, name: str, value: Any, /) -> Any:
        """What the tensor's readers get."""
        ...


# A model cannot honestly blow its weights and inputs up so far: a damaged dim or pad can. Refused
# while tracing, before anything is allocated.
_LARGE, _GROWTH = 1 << 29, 256
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
    `AnyOrder` it costs no transpose. `outputs`
    picks other tensors than the graph's outputs; nodes that nothing asks for are not computed.
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
    return Traced(graph, names, tapped, lowering or ("cpu" if jax.default_backend() == "cpu" else "native"))


def unsupported(graph: Graph) -> list[str]:
    """What in the graph has no rule: one line per operator, with its first node and the count."""
    found: dict[str, list[Node]] = {}
    for node in graph.walk():
        opset = graph.opset(node.domain)
        if lookup(node, opset) is None and not has_body(node, opset):
            found.setdefault(f"{node.qualified} (opset {opset})", []).append(node)
    return [f"no rule for {op}: {len(nodes)} node(s), first {nodes[0].label!r}" for op, nodes in found.items()]


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A graph read as a function of its params and inputs."""

    graph: Graph
    outputs: tuple[str, ...]
    taps: Mapping[str, Tap]
    lowering: str

    def __call__(self, params: Mapping[str, Any], inputs: Mapping[str, Any], plan: Quantizer | None = None) -> Any:
        """The outputs by name, and what was tapped if anything is; of fake-quantized tensors, with a plan."""
        inputs = self.checked(inputs)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((params, inputs, plan))):
            return self._evaluate(params, inputs, plan)
        known = {k: jax.tree.map(np.asarray, v) for k, v in inputs.items() if k in self.static_inputs or _has_text(v)}
        traced = {k: v for k, v in inputs.items() if k not in known}
        with jax.enable_x64(True) if self.wide else contextlib.nullcontext():
            try:
                outputs = self._compiled(_Known(known), dict(params), traced, plan)
            except jax.errors.JaxRuntimeError as error:
                raise ModelError(f"the model does not run on this machine: {str(error).splitlines()[0]}") from error
        return jax.tree.map(_Known.unwrap, outputs, is_leaf=lambda v: isinstance(v, _Known))

    @functools.cached_property
    def static_inputs(self) -> frozenset[str]:
        """Graph inputs that must be known while tracing (a shape given as input): not for `jit`."""
        switches = self._steering & {v.name for v in self.graph.inputs if _is_switch(v)}
        return switches | (self._demanded & {v.name for v in self.graph.inputs})

    @functools.cached_property
    def _demanded(self) -> frozenset[str]:
        return demanded(self.graph)

    @functools.cached_property
    def _steering(self) -> frozenset[str]:
        return demanded(self.graph, steering=True)

    @functools.cached_property
    def wide(self) -> bool:
        """Whether the graph's interface, weights or casts have 64-bit types that are data."""
        interface = {v.dtype for v in (*self.graph.inputs, *self.graph.outputs)}
        casts = {n.attrs.get("to") for n in self.graph.walk() if n.op_type == "Cast"}
        wide = {TensorProto.DOUBLE, TensorProto.UINT64, TensorProto.COMPLEX128}
        params = {a.dtype for a in self.graph.params.values()}
        return bool((interface | params) & _WIDE) or bool(casts & wide)

    @functools.cached_property
    def _compiled(self) -> Callable[..., Any]:
        def run(known: _Known, params: Mapping[str, Any], inputs: Mapping[str, Any], plan: Quantizer | None) -> Any:
            return jax.tree.map(_Known.wrap, self._evaluate(params, {**known.values, **inputs}, plan))

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

    def _evaluate(self, params: Mapping[str, Any], inputs: Mapping[str, Any], plan: Quantizer | None = None) -> Any:
        if absent := self.graph.params.keys() - params.keys():
            raise DataError(f"params lack {sorted(absent)[:3]}: pass graph.params, or a dict with the same keys")
        scope: Scope = {**self.graph.constants, **params, **inputs}
        # A weight that a rule must know while tracing (the scales of a Resize) is the graph's own.
        scope |= {k: a for k, a in self.graph.params.items() if k in self._demanded}
        if plan is not None:
            scope |= {k: plan.fake_quant(k, v) for k, v in scope.items() if k in plan}
        size = sum(_nbytes(leaf) for leaf in jax.tree.leaves((params, inputs)))
        reader = Reader(self.lowering, self._steering, max(_LARGE, _GROWTH * size))
        tapped = {name: _tap(tap, scope[name]) for name, tap in self.taps.items() if name in scope}
        for node in self._nodes:
            reader.step(node, self.graph.opset(node.domain), scope)
            for name in node.outputs:
                if plan is not None and name in plan:
                    scope[name] = plan.fake_quant(name, _read(scope, name))
                if name in self.taps:
                    tapped[name] = _tap(self.taps[name], _read(scope, name))
        given = {**params, **inputs}  # what no node makes is passed on as it is: a model holds it only once
        result = {name: layout.plain(_read(given if name in given else scope, name)) for name in self.outputs}
        return (result, tapped) if self.taps else result

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


def _tap(tap: Tap, value: Any) -> Any:
    return tap.tap(value) if isinstance(tap, AnyOrder) else tap(layout.plain(value))


def _has_text(value: Any) -> bool:
    return any(_dtype_of(leaf) == np.dtype(object) for leaf in jax.tree.leaves(value))


@jax.tree_util.register_static
class _Known:
    """Known values as a static argument of `jit`, or as a static part of its outputs: strings leave so.

    Equal when their bytes are.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.key = digest(values)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Known) and self.key == other.key

    @staticmethod
    def wrap(value: Any) -> Any:
        """Text in a form that leaves `jit`."""
        return _Known({"": value}) if _has_text(value) else value

    @staticmethod
    def unwrap(value: Any) -> Any:
        """The text, outside of `jit`."""
        return value.values[""] if isinstance(value, _Known) else value


@dataclasses.dataclass(frozen=True)
class Reader:
    """Evaluates nodes in a scope."""

    lowering: str
    demanded: frozenset[str]
    limit: int  # bytes of the largest tensor that is believed

    def step(self, node: Node, opset: int, scope: Scope) -> None:
        """Evaluate one node and put its outputs into the scope."""
        values = [_read(scope, name) if name else None for name in node.inputs]
        entry = lookup(node, opset)
        try:
            results = (
                self._body(node, opset, values) if entry is None else self._rule(entry, node, opset, values, scope)
            )
        except Error as error:
            if getattr(error, "located", False):
                raise
            raise _located(type(error), node, opset, values, error) from error
        except Exception as error:  # numpy and JAX raise many kinds when shapes or types do not fit
            raise _located(ModelError, node, opset, values, error) from error
        for name, result in zip(node.outputs, results, strict=False):
            if name:
                scope[name] = result

    def run(self, graph: Graph, inputs: Sequence[Any], outer: Scope) -> list[Any]:
        """Evaluate a subgraph or function body on its inputs, inside the scope around it."""
        scope = {**outer, **graph.arrays}
        scope |= {v.name: value for v, value in zip(graph.inputs, inputs, strict=False)}
        scope |= {v.name: None for v in graph.inputs[len(inputs) :]}
        for node in graph.nodes:
            self.step(node, graph.opset(node.domain), scope)
        return [layout.plain(_read(scope, v.name)) if v.name else None for v in graph.outputs]

    def _body(self, node: Node, opset: int, values: Sequence[Any]) -> list[Any]:
        if not has_body(node, opset):  # `unsupported` does not look into bodies
            raise UnsupportedOp(f"no rule for {node.qualified} (opset {opset})")
        values = [layout.plain(v) for v in values]
        types = [None if v is None else (_dtype_of(v), np.shape(v)) for v in values]
        body = inline(node, opset, types)
        inner = dataclasses.replace(self, demanded=self.demanded | demanded(body, steering=True))
        return inner.run(body, values, {})

    def _rule(self, entry: Op, node: Node, opset: int, values: list[Any], scope: Scope) -> tuple[Any, ...]:
        static = set(entry.static_positions(len(values)))
        for index in static:
            values[index] = _known(node, index, values[index])
        known = not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(values))
        # What a static operand hangs on is computed now, even by rules that know jax arrays only.
        now = known and not entry.host and not self.demanded.isdisjoint(node.outputs)
        with jax.ensure_compile_time_eval() if now else contextlib.nullcontext(), np.errstate(all="ignore"):
            if not entry.host:
                values = [v if i in static else _traced(v) for i, v in enumerate(values)]
            elif not known:
                values = [v if i in static else _narrowed(v) for i, v in enumerate(values)]
            if entry.layout == "last" and not now and isinstance(values[0], jax.Array):  # what is known stays numpy
                scope[node.inputs[0]] = values[0] = layout.moved(values[0])
            context = Context(node, opset, self.lowering, lambda graph, inputs: self.run(graph, inputs, scope))
            arguments, keywords = entry.bind(node, values, defaults(node.op_type, node.domain, opset), context)
            results = layout.apply(entry.layout, entry.inputs, entry.rule, arguments, keywords)
            results = results if isinstance(results, tuple) else (results,)
            # numpy makes scalars of what it reduces to no dimension
            results = tuple(np.asarray(r) if isinstance(r, np.generic) else r for r in results)
            if now:
                results = jax.tree.map(np.asarray, tuple(map(layout.plain, results)))
        for name, result in zip(node.outputs, results, strict=False):
            array = layout.raw(result)
            if min(getattr(array, "shape", ()), default=0) < 0:  # some of JAX's functions let it pass
                raise ModelError(f"output {name!r} would have the shape {np.shape(layout.plain(result))}")
            if _nbytes(array) > self.limit:
                raise ModelError(
                    f"output {name!r} would have the shape {np.shape(layout.plain(result))}, {_nbytes(array) / 1e9:.1f} GB, "
                    "out of all proportion to the model and its inputs: are its dims and attributes right?"
                )
        return results


def evaluate(node: Node, opset: int, arrays: Mapping[str, np.ndarray]) -> list[Any]:
    """One node computed now, on arrays of the types that ONNX says: what it puts out, as numpy."""
    scope: Scope = dict(arrays)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        Reader("native", frozenset(node.outputs), _LARGE).step(node, opset, scope)
        return [jax.tree.map(np.asarray, layout.plain(scope[name])) if name else None for name in node.outputs]


def _is_switch(value: Value) -> bool:
    """Whether a graph input is one number, as a sample rate or a trip count is."""
    return value.dtype is not None and value.shape is not None and all(d == 1 for d in value.shape)


def _read(scope: Scope, name: str) -> Any:
    if name not in scope:  # the graph names more outputs than the operator has, which is harmless until one is read
        raise ModelError(f"tensor {name!r} has no value: the node that names it as an output gives fewer of them")
    return scope[name]


def _known(node: Node, index: int, value: Any) -> Any:
    if value is None or isinstance(value, (np.ndarray, list)):
        return value
    value = layout.plain(value)
    if isinstance(value, jax.core.Tracer):
        raise UnsupportedOp(
            f"its input {node.inputs[index]!r} decides shapes, so it must be known while tracing, but it depends on the "
            "data; if it comes from a graph input, call the function with numpy arrays and outside of jit"
        )
    return np.asarray(value)


def _traced(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype != object:
        return jnp.asarray(value)
    return [jnp.asarray(v) for v in value] if isinstance(value, list) else value


def _narrowed(value: Any) -> Any:
    """A known operand beside a traced one, in the types that JAX has now.

    JAX remembers an int64 constant as int64 if it saw it in 64-bit mode first, and then compares int32 with it.
    """
    if not isinstance(value, np.ndarray) or value.dtype == object:
        return value
    return value.astype(jax.dtypes.canonicalize_dtype(value.dtype), copy=False)


def _located(kind: type[Error], node: Node, opset: int, values: Sequence[Any], error: Exception) -> Error:
    shapes = ", ".join(
        f"{name}: {_described(v)}" for name, v in zip(node.inputs, values, strict=False) if name and v is not None
    )
    text = str(error).strip().splitlines()
    located = kind(
        f"node {node.label!r} ({node.qualified}, opset {opset}) on ({shapes}): {text[0] if text else type(error).__name__}"
    )
    located.located = True  # type: ignore[attr-defined]
    return located


def _described(value: Any) -> str:
    value = layout.plain(value)
    return f"sequence of {len(value)}" if isinstance(value, list) else f"{_dtype_of(value)}{list(np.shape(value))}"


def _dtype_of(value: Any) -> Any:
    return getattr(layout.plain(value), "dtype", None)


def _nbytes(value: Any) -> int:
    size, dtype = getattr(value, "size", 0), getattr(value, "dtype", None)
    return 0 if dtype is None else size * dtype.itemsize


def _check(value: Value, array: Any, dims: dict[str, int]) -> None:
    """Compare an input with its declaration; symbolic dims must agree with each other."""
    if value.dtype is None or value.containers or not hasattr(array, "dtype"):
        return
    accepted = {
        value.dtype,
        np.dtype(jax.dtypes.canonicalize_dtype(value.dtype)) if value.dtype != object else value.dtype,
    }
    if array.dtype not in accepted:
        raise DataError(
            f"input {value.name!r}: expected {value}, found {array.dtype}{list(array.shape)}; convert it first"
        )
    if value.shape is None:
        return
    fits = len(value.shape) == array.ndim
    for want, have in zip(value.shape, array.shape, strict=False):
        want = dims.setdefault(want, have) if isinstance(want, str) else want
        fits = fits and (want is None or want == have)
    if not fits:
        raise DataError(f"input {value.name!r}: expected {value}, found {array.dtype}{list(array.shape)}")
