"""Walking a graph: the one loop over nodes that all readings share, and a node's evaluation by its float rule."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jq.arithmetic import layout
from jq.errors import Error, ModelError, UnsupportedOp
from jq.graph import Graph, Node
from jq.graph.bodies import inline
from jq.graph.schemas import defaults, schema
from jq.ops.table import Context, Op, demanded, lookup

Scope = Mapping[str, Any]  # tensor name -> numpy array, jax array, ChannelsLast, list (a sequence) or None
Stage = Callable[[Node, Scope], Scope]  # the tensors that a node makes, or changes

LARGE = 1 << 29  # bytes of a tensor that is believed, whatever the model's size
_SAMPLE = 256  # elements by which an array is seen to repeat one value


def walk(nodes: Iterable[Node], scope: Scope, *stages: Stage) -> dict[str, Any]:
    """Return the scope after all nodes, each taken through the stages: its rule, then what rounds or watches its outputs."""
    scope = dict(scope)
    for node in nodes:
        for stage in stages:
            scope.update(stage(node, scope))
    return scope


def within(nodes: Sequence[Node], kept: Collection[str], limit: int) -> Stage:
    """Return the stage that raises where values that are alive at the same time would take more bytes than the limit.

    A value is alive until its last reader has run, or to the end if it is one of those `kept`, or known while tracing.
    """
    last = {name: node for node in nodes for name in node.reads()}
    dying: dict[Node, list[str]] = {}
    for name, node in last.items():
        dying.setdefault(node, []).append(name)
    alive: dict[str, int] = {}

    def stage(node: Node, scope: Scope) -> Scope:
        for name in filter(None, node.outputs):
            alive[name] = sum(map(nbytes, jax.tree.leaves(layout.raw(scope.get(name)))))
        if (total := sum(alive.values())) > limit:
            most = ", ".join(f"{n!r} {b / 1e9:.1f} GB" for n, b in sorted(alive.items(), key=lambda item: -item[1])[:2])
            raise ModelError(
                f"node {node.label!r} ({node.qualified}): with its outputs the values in use would take {total / 1e9:.1f} GB "
                f"({most}), out of all proportion to the model and its inputs: are its dims and attributes right?"
            )
        for name in dying.get(node, ()):
            if name not in kept and not isinstance(scope.get(name), np.ndarray):
                alive.pop(name, None)
        return {}

    return stage


def best_lowering() -> str:
    """The lowering that is fast on the default backend: "cpu", or "native" for XLA's own convolutions."""
    return "cpu" if jax.default_backend() == "cpu" else "native"


@dataclasses.dataclass(frozen=True)
class Reader:
    """The float rules, which evaluate a node in a scope."""

    lowering: str
    demanded: frozenset[str]
    limit: int  # bytes of the largest tensor that is believed

    def step(self, node: Node, opset: int, scope: Scope) -> Scope:
        """The outputs of one node, and its first input where the rule wants that in another order."""
        values = [value_of(scope, name) if name else None for name in node.inputs]
        entry = lookup(node, opset)
        with locating(node, opset, values):
            _check_small_floats(node, opset, values)
            if entry is None:
                return _named(node, self._body(node, opset, values))
            return self._rule(entry, node, opset, values, scope)

    def on(self, graph: Graph) -> Stage:
        """The stage of a walk that evaluates the nodes of a graph."""
        return lambda node, scope: self.step(node, graph.opset(node.domain), scope)

    def run(self, graph: Graph, inputs: Sequence[Any], outer: Scope) -> list[Any]:
        """The outputs of a subgraph or function body on its inputs, inside the scope around it."""
        scope = {**outer, **graph.arrays}
        scope |= {v.name: value for v, value in zip(graph.inputs, inputs, strict=False)}
        scope |= {v.name: None for v in graph.inputs[len(inputs) :]}
        scope = walk(graph.nodes, scope, self.on(graph))
        return [layout.plain(value_of(scope, v.name)) if v.name else None for v in graph.outputs]

    def _body(self, node: Node, opset: int, values: Sequence[Any]) -> list[Any]:
        values = [layout.plain(v) for v in values]
        types = [None if v is None else (dtype_of(v), np.shape(v)) for v in values]
        body = inline(node, opset, types)
        inner = dataclasses.replace(self, demanded=self.demanded | demanded(body, steering=True))
        return inner.run(body, values, {})

    def _rule(self, entry: Op, node: Node, opset: int, values: list[Any], scope: Scope) -> Scope:
        moved: Scope = {}
        static = set(entry.static_positions(len(values)))
        for index in static:
            values[index] = _known(node, index, values[index])
        known = not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(values))
        # What a static operand depends on is computed now, even by rules that know jax arrays only.
        now = known and not entry.host and not self.demanded.isdisjoint(node.outputs)
        with jax.ensure_compile_time_eval() if now else contextlib.nullcontext(), np.errstate(all="ignore"):
            if not entry.host:
                values = [v if i in static else _traced(v) for i, v in enumerate(values)]
            elif not known:
                values = [v if i in static else _narrowed(v) for i, v in enumerate(values)]
            if entry.layout == "last" and not now and isinstance(values[0], jax.Array):  # what is known stays numpy
                values[0] = layout.moved(values[0])
                moved = {node.inputs[0]: values[0]}
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
            if nbytes(array) > self.limit:
                raise ModelError(
                    f"output {name!r} would have the shape {np.shape(layout.plain(result))}, {nbytes(array) / 1e9:.1f} GB, "
                    "out of all proportion to the model and its inputs: are its dims and attributes right?"
                )
        return {**moved, **_named(node, results)}


def _check_small_floats(node: Node, opset: int, values: Sequence[Any]) -> None:
    """Refuse operands of fewer than 8 bits where the operator takes none: XLA ends the process over sums of them."""
    for index, value in enumerate(values):
        name = getattr(getattr(layout.raw(value), "dtype", None), "name", "")
        if name.startswith(("float4_", "float6_")) and (definition := schema(node.op_type, node.domain, opset)):
            taken = definition.inputs[min(index, len(definition.inputs) - 1)].types
            if f"tensor({name.replace('_', '').removesuffix('fn')})" not in taken:
                raise ModelError(f"the operator takes no {name}; put a Cast in front of it")


@contextlib.contextmanager
def locating(node: Node, opset: int, values: Sequence[Any]) -> Iterator[None]:
    """Make an error that names the node and its operands of what fails while a rule evaluates it."""
    try:
        yield
    except Error as error:
        if getattr(error, "located", False):
            raise
        raise _located(type(error), node, opset, values, error) from error
    except Exception as error:  # numpy and JAX raise many kinds when shapes or types do not fit
        raise _located(ModelError, node, opset, values, error) from error


def evaluate(node: Node, opset: int, arrays: Mapping[str, np.ndarray]) -> list[Any]:
    """The outputs of one node as numpy arrays of ONNX's types, computed now."""
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        made = Reader("native", frozenset(node.outputs), LARGE).step(node, opset, arrays)
        return [jax.tree.map(np.asarray, layout.plain(made[name])) if name else None for name in node.outputs]


def _named(node: Node, results: Sequence[Any]) -> dict[str, Any]:
    return {name: result for name, result in zip(node.outputs, results, strict=False) if name}


def value_of(scope: Scope, name: str) -> Any:
    """A tensor's value in a scope, or a ModelError."""
    if name not in scope:  # the graph names more outputs than the operator has, which is harmless until one is read
        raise ModelError(f"tensor {name!r} has no value: the node that lists it as an output returns fewer outputs")
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
        return jnp.asarray(_narrowed(value))
    return [jnp.asarray(_narrowed(v)) for v in value] if isinstance(value, list) else value


def _narrowed(value: Any) -> Any:
    """A known operand beside a traced one, in the types that JAX has now.

    JAX remembers an int64 constant as int64 if it saw it in 64-bit mode first, and then compares int32 with it. What
    fewer bits do not hold becomes their nearest end: it bounds values of these bits, else 64 are computed (`widths`).
    """
    if not isinstance(value, np.ndarray) or value.dtype == object:
        return value
    narrow = np.dtype(jax.dtypes.canonicalize_dtype(value.dtype))
    if narrow != value.dtype and value.dtype.kind in "iu":
        value = np.clip(value, np.iinfo(narrow).min, np.iinfo(narrow).max)
    return value.astype(narrow, copy=False)


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
    value = layout.plain(getattr(value, "array", value))  # of integers with a scale, the integers
    return f"sequence of {len(value)}" if isinstance(value, list) else f"{dtype_of(value)}{list(np.shape(value))}"


def dtype_of(value: Any) -> Any:
    """The element type of an array; None for anything else."""
    return getattr(layout.plain(value), "dtype", None)


def nbytes(value: Any) -> int:
    """The size of an array in bytes; 0 for anything else."""
    size, dtype = getattr(value, "size", 0), getattr(value, "dtype", None)
    return 0 if dtype is None else size * dtype.itemsize


def stated(value: Any) -> int:
    """The bytes that a file needs for an array: of one that repeats a value, as a fill does, those of the value.

    >>> stated(np.arange(1 << 20)), stated(np.full(1 << 20, 0.5))
    (8388608, 8)
    """
    if not isinstance(value, np.ndarray) or not value.size:
        return nbytes(value)
    some = value.flat[:: max(1, value.size // _SAMPLE)]
    return value.itemsize if some.tobytes() == some[:1].tobytes() * some.size else value.nbytes
