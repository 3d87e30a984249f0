"""A model's interface, operators, parameters and multiply-accumulates, without running it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jq.errors import ConfigError, ModelError, UnsupportedOp, suggest
from jq.graph import Graph, Value
from jq.ops.kinds import macs, multiplies
from jq.readings.diagnosis import blames_model
from jq.readings.tracing import trace, unsupported

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Inspection:
    """The result of `inspect`. Node counts include subgraphs, multiply-accumulates do not."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    opsets: Mapping[str, int]  # by domain; "" is ONNX's own
    ops: Mapping[str, int]  # nodes by operator, as in "Conv" or "com.microsoft::Gelu"
    parameters: int  # elements of all weights
    parameter_bytes: int  # as held in memory
    shapes: Mapping[str, Shape]  # of the inputs, as `macs` was counted
    macs: Mapping[str, int] | None  # by operator; None where the shapes cannot be had
    reason: str | None  # why `macs` is None
    unsupported: tuple[str, ...]  # operators without a rule: `trace` refuses the model if there are any

    @property
    def total_macs(self) -> int | None:
        """Multiply-accumulates of all operators together."""
        return None if self.macs is None else sum(self.macs.values())

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts, lists, strings and numbers, for JSON."""
        fields = dataclasses.asdict(self)
        for side in ("inputs", "outputs"):
            fields[side] = [dataclasses.asdict(v) | {"dtype": v.dtype and str(v.dtype)} for v in getattr(self, side)]
        return fields | {"total_macs": self.total_macs}


@blames_model
def inspect(graph: Graph, shapes: Mapping[str, Sequence[int]] | None = None) -> Inspection:
    """Return the graph's interface, operators, parameter count and multiply-accumulates.

    Multiply-accumulates are those of convolutions, matrix products and recurrences, float or integer,
    bias left out. They depend on shapes, which come from an abstract evaluation: nothing is computed. Free
    dims of the inputs are 1 unless `shapes` gives the input's shape. A graph with no free dim that
    cannot be evaluated is malformed and raises; with free dims, 1 may be what does not fit, so that
    becomes the `reason`. So do operators without a rule.

    >>> import jq.zoo
    >>> from jq.graph.read import load
    >>> resnet = inspect(load(jq.zoo.path("fashion_resnet")), {"input": (8, 1, 28, 28)})
    >>> resnet.ops["Conv"], resnet.shapes["input"]
    (15, (8, 1, 28, 28))
    """
    given = {name: tuple(shape) for name, shape in (shapes or {}).items()}
    bound, free = _bind(graph.inputs, given)
    missing = tuple(unsupported(graph))
    macs: Mapping[str, int] | None = None
    reason: str | None = None
    if missing:
        reason = "there are unsupported ops"
    elif odd := next((v for v in graph.inputs if not _numeric(v) or v.name not in bound), None):
        reason = f"input {odd} is not a tensor of numbers, or its shape is not declared"
    else:
        try:
            macs = _count(graph, bound)
        except (UnsupportedOp, ModelError) as error:
            if isinstance(error, ModelError) and not free:
                raise
            reason = str(error)
    return Inspection(
        inputs=graph.inputs,
        outputs=graph.outputs,
        opsets=dict(graph.opsets),
        ops=dict(collections.Counter(node.qualified for node in graph.walk()).most_common()),
        parameters=sum(a.size for a in graph.params.values()),
        parameter_bytes=sum(a.nbytes for a in graph.params.values()),
        shapes=bound,
        macs=macs,
        reason=reason,
        unsupported=missing,
    )


def _bind(inputs: Sequence[Value], given: Mapping[str, Shape]) -> tuple[dict[str, Shape], bool]:
    """The inputs' shapes, and whether a dim had to be guessed. A symbol is the same number everywhere."""
    declared = {v.name: v for v in inputs}
    symbols: dict[str, int] = {}
    for name, shape in given.items():
        if name not in declared:
            near = suggest(name, declared)
            raise ConfigError(f"the model has no input {name!r}.{near} It has: {', '.join(declared)}")
        wanted = declared[name].shape or (None,) * len(shape)
        symbols |= {w: s for w, s in zip(wanted, shape, strict=False) if isinstance(w, str) and w not in symbols}
        bound = tuple(
            w if isinstance(w, int) else s if w is None else symbols[w] for w, s in zip(wanted, shape, strict=False)
        )
        if len(wanted) != len(shape) or bound != shape or min(shape, default=0) < 0:
            raise ConfigError(f"input {declared[name]} cannot have the shape {list(shape)}")
    bound_all, free = dict(given), False
    for value in inputs:
        if value.name not in given and value.shape is not None:
            bound_all[value.name] = tuple(d if isinstance(d, int) else symbols.get(d or "", 1) for d in value.shape)
            free = free or any(not isinstance(d, int) and d not in symbols for d in value.shape)
    return bound_all, free


def _numeric(value: Value) -> bool:
    return value.dtype is not None and value.dtype != object and not value.containers


def _count(graph: Graph, shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Multiply-accumulates by operator."""
    nodes = [n for n in graph.nodes if multiplies(n) and n.outputs[0]]
    seen: dict[str, Shape] = {}

    def recorder(name: str) -> Callable[[Any], None]:  # called while JAX traces; the tap itself keeps nothing
        return lambda tensor: seen.update({name: tuple(tensor.shape)})

    fn = trace(graph, taps={t: recorder(t) for n in nodes for t in (*filter(None, n.inputs), n.outputs[0])})
    with jax.enable_x64(fn.wide):
        inputs = {v.name: jax.ShapeDtypeStruct(shapes[v.name], v.dtype) for v in graph.inputs}
        jax.eval_shape(lambda params, inputs: fn(params, inputs) and None, dict(graph.params), inputs)
    counts: collections.Counter[str] = collections.Counter()
    for node in nodes:
        counts[node.qualified] += macs(node, [seen.get(i, ()) for i in node.inputs], seen[node.outputs[0]]) or 0
    return dict(counts.most_common())
