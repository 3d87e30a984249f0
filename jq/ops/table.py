"""The op table: `@op` binds a rule to an ONNX operator.

A rule is a plain function. Its positional parameters are the operator's inputs, in order, and its
keyword-only parameters are the attributes it reads. So a rule for both forms of an axes argument is

    @op("Squeeze", static=("axes",), host=True)
    def squeeze(x, axes=None): ...

because an attribute whose name is that of an input parameter fills that parameter: opsets moved many
arguments from attributes to inputs, and this is the one place that knows it. Missing attributes take
the default of the schema at the model's opset, then the rule's own, then None.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
import onnx

from jq.arithmetic.layout import Layout
from jq.graph import Graph, Node
from jq.graph.schemas import schema_versions

if TYPE_CHECKING:
    from jq.npu.targets import Target

Array = Any  # a numpy array where the value is known while tracing, else a jax array
Moves = Literal["by place", "by order"] | None  # outputs are elements of the input, selected by position or by rank


@dataclasses.dataclass(frozen=True)
class Context:
    """The surroundings of a node, for rules that have a parameter named `ctx`."""

    node: Node
    opset: int  # of the node's own domain
    lowering: str  # "cpu" for the forms that XLA's CPU backend is fast at, "native" elsewhere
    run: Callable[[Graph, Sequence[Array]], list[Array]]  # evaluates a subgraph on its inputs

    @property
    def outputs(self) -> int:
        """How many outputs the node names; trailing ones may be omitted."""
        return len(self.node.outputs)

    def wants(self, index: int) -> bool:
        """Whether the node names this output."""
        return index < self.outputs and bool(self.node.outputs[index])


@dataclasses.dataclass(frozen=True)
class IntegerContext(Context):
    """The surroundings of a node, for integer rules."""

    target: Target


Activation = Callable[[Mapping[str, Any], Sequence[Any]], bool]  # attributes and known operands -> whether


@dataclasses.dataclass(frozen=True)
class Product:
    """The operator as a matrix product, group by group: unfoldings of its input, in rows, and of its weight, in columns.

    Each position of an output has a row. `places` selects positions of an image, or of another item of a batch; None
    selects all.
    """

    rows: Callable[[Array, Array, Mapping[str, Any], np.ndarray | None], Array]
    """Input, weight, attributes and places to (positions, K, groups)."""
    columns: Callable[[Array, Mapping[str, Any]], Array]
    """Weight and attributes to (groups, K, outputs / groups)."""
    weights: Callable[[Array, Sequence[int], Mapping[str, Any]], Array]
    """Columns, shape and attributes to the weight: the inverse of `columns`."""
    when: Callable[[Mapping[str, Any], int], bool] = lambda attrs, rank: True
    """Whether a node is such a product, by its attributes and its weight's rank."""


@dataclasses.dataclass(frozen=True)
class Linear:
    """A linear operator's weight: see `ops.linear` for the view of a node."""

    weight: str  # the input parameter
    axis: Callable[[Mapping[str, Any]], int]  # of the weight's output channels, by the node's attributes
    product: Product | None = None


@dataclasses.dataclass(frozen=True)
class Quant:
    """The placement of quantizers at an operator: which of its tensors have a scale, and of whose values."""

    inputs: tuple[str, ...] | None = None  # the input parameters that are quantized; None for all that are floats
    outputs: int | None = None  # how many of the outputs, if not all
    shares: bool = False  # the outputs hold values of the first input, so they have its scale
    follows: bool = False  # quantized only where another operator quantizes its input
    absorbs: bool = False  # an activation that alone reads the output is computed before rounding
    absorbed: Activation | None = None  # the condition under which this is such an activation
    pads: bool = False  # puts values around its first input
    absorbs_pads: bool = False  # a Pad that this operator alone reads is part of it
    bias: str | None = None  # the input parameter that is added in the integer accumulator
    summed: Callable[[Mapping[str, Any], int], int] | None = None  # attributes and input index to the axis summed over
    when: Activation | None = None  # the condition under which it is quantized at all
    since: int = 1  # the first opset at which it is


@dataclasses.dataclass(frozen=True)
class Declaration:
    """An operator from one opset version on; called with a rule on floats, it puts the rule into the table.

    Names are checked against ONNX's own schema.
    """

    name: str
    _: dataclasses.KW_ONLY
    since: int = 1
    domain: str = ""
    static: Sequence[str] = ()  # input parameters whose values must be known while tracing
    settled: Sequence[str] = ()  # known while tracing where they are constants, as XLA makes less of unknown bounds
    steering: Sequence[str] = ()  # input parameters that decide control flow: known while tracing where they can be
    weight: str | None = None  # the input parameter that is a convolution's weight, in whatever order it lies
    shape_only: bool = False  # the rule reads its operand's shape, never its values
    host: bool = False  # the rule is right on numpy arrays too, and then stays in numpy: for shape computations
    layout: Layout = "plain"  # what the rule does with channels-last operands: see `layout.py`
    cuts: bool = False  # the output is the first input cut to an interval: what lies outside needs no codes
    bounds: tuple[float, float] | None = None  # of what the operator can give, in place of what was observed
    linear: Linear | None = None  # the weight of a linear operator
    quant: Quant = Quant()  # a scale for each input and output
    moves: Moves = None  # the outputs are elements of the first input, so that the rule serves its integers too

    def __call__(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """The rule itself, registered."""
        signature = _signature(rule)
        named = [*self.static, *self.settled, *self.steering, *([self.weight] if self.weight else [])]
        _check_names(self.name, self.domain, self.since, signature, named)
        declared = {f.name: getattr(self, f.name) for f in dataclasses.fields(Declaration)}
        versions = _TABLE.setdefault((self.domain, self.name), [])
        if any(v.since == self.since for v in versions):
            raise ValueError(f"op {self.name} since {self.since} is registered twice")
        versions.append(Op(**declared, rule=rule, **signature))
        versions.sort(key=lambda v: v.since)
        return rule


op = Declaration


class Signature(TypedDict):
    """The parameters of a rule."""

    inputs: tuple[str, ...]
    variadic: str | None  # the one that takes all other inputs
    attributes: Mapping[str, Any]  # keyword-only parameters and their Python defaults
    takes_context: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Op(Declaration):
    """One entry of the table: a declared operator with its rules."""

    rule: Callable[..., Any]
    integer: Op | None = None  # the rule on integers with an exact scale
    inputs: tuple[str, ...]
    variadic: str | None
    attributes: Mapping[str, Any]
    takes_context: bool

    def static_positions(self, count: int) -> list[int]:
        """Which of a node's `count` inputs must be known while tracing."""
        if self.variadic in self.static:
            return list(range(count))
        return [i for i, name in enumerate(self.inputs[:count]) if name in self.static]

    def operands(self, node: Node, parameters: Collection[str]) -> list[str]:
        """The tensors that a node gives to these input parameters."""
        return [t for name, t in zip(self.inputs, node.inputs, strict=False) if name in parameters and t]

    def bind(
        self, node: Node, inputs: Sequence[Array], schema: Mapping[str, Any], ctx: Context
    ) -> tuple[list[Any], dict[str, Any]]:
        """The rule's arguments for a node: attributes joined with the schema's defaults."""
        given = dict(schema) | dict(node.attrs)
        arguments = list(inputs)
        if self.variadic is None:
            arguments += [None] * (len(self.inputs) - len(arguments))
            for index, name in enumerate(self.inputs):
                if arguments[index] is None and given.get(name) is not None:
                    value = given[name]
                    arguments[index] = np.asarray(value) if isinstance(value, tuple) else value
        keywords = {name: given.get(name, default) for name, default in self.attributes.items()}
        if self.takes_context:
            keywords["ctx"] = ctx
        return arguments, keywords


_NEWEST_OPSET = 28  # that the table knows
_TABLE: dict[tuple[str, str], list[Op]] = {}


def integer(
    *names: str,
    since: int = 1,
    domain: str = "",
    static: Sequence[str] = (),
    settled: Sequence[str] = (),
    layout: Layout | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the integer rule of operators, beside their rule on floats.

    Operands are `jq.integer.Fixed`; `static` ones are numpy arrays of the graph, and `settled` ones either. `ctx.target`
    is the chip. The rule returns the exact result as a Fixed, or NotImplemented where there is none, and the node is
    computed in floats. The layout is that of the float rule, if it does not state another.
    """

    def register(rule: Callable[..., Any]) -> Callable[..., Any]:
        signature = _signature(rule)
        for name in names:
            _check_names(name, domain, since, signature, [*static, *settled])
            versions = _TABLE[domain, name]
            for index, entry in enumerate(versions):
                if entry.since >= since:
                    own = dataclasses.replace(entry, rule=rule, static=static, settled=settled, **signature)
                    own = own if layout is None else dataclasses.replace(own, layout=layout)
                    versions[index] = dataclasses.replace(entry, integer=own)
        return rule

    return register


def _signature(rule: Callable[..., Any]) -> Signature:
    parameters = inspect.signature(rule).parameters.values()
    keywords = {p.name: None if p.default is p.empty else p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    return {
        "inputs": tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD),
        "variadic": next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None),
        "takes_context": "ctx" in keywords,
        "attributes": {name: default for name, default in keywords.items() if name != "ctx"},
    }


def _check_names(name: str, domain: str, since: int, signature: Signature, static: Sequence[str]) -> None:
    if unknown := set(static) - {*signature["inputs"], signature["variadic"]}:
        raise ValueError(f"op {name}: {unknown} are not inputs of the rule")
    versions = schema_versions(name, domain)
    if not versions or onnx.defs.onnx_opset_version() < _NEWEST_OPSET:
        return  # a custom domain has no schema to check against, an older onnx not all of the attributes
    known = {a for v in versions if v.since_version >= min(since, versions[-1].since_version) for a in v.attributes}
    if unknown := signature["attributes"].keys() - known:
        raise ValueError(
            f"op {name}: {unknown} are not attributes of any version from {since} on; known: {sorted(known)}"
        )


def lookup(node: Node, opset: int) -> Op | None:
    """The newest rule registered for the node that is not newer than the opset."""
    import jq.ops.families  # noqa: F401  registration happens on the first look-up, not at import

    versions = _TABLE.get((node.domain, node.op_type), ())
    return next((v for v in reversed(versions) if v.since <= opset), None)


def demanded(graph: Graph, *, steering: bool = False) -> frozenset[str]:
    """Tensors whose values must be known while tracing, because a rule needs them or computes such values from them.

    With `steering`, those that decide control flow as well, which is better known but need not be.
    """
    tensors: set[str] = set()
    for node in reversed(graph.nodes):
        inner = node.subgraphs.values()
        tensors.update(*(demanded(g, steering=steering) for g in inner))
        entry = lookup(node, graph.opset(node.domain))
        if entry is not None:
            tensors.update(node.inputs[i] for i in entry.static_positions(len(node.inputs)))
            tensors.update(name for name in entry.operands(node, entry.settled) if name in graph.params)
            if steering:
                tensors.update(entry.operands(node, entry.steering))
            if entry.shape_only:
                continue
        if not tensors.isdisjoint(filter(None, node.outputs)):
            tensors.update(node.reads())
            for g in inner:
                tensors.update(*(n.reads() for n in g.walk()))
    return frozenset(tensors - {""})


def namespace(*arrays: Array) -> Any:
    """`numpy` when every array is known while tracing, else `jax.numpy`: for rules marked `host`.

    >>> namespace(np.ones(2)).__name__
    'numpy'
    """
    return jnp if any(isinstance(a, jax.Array) for a in arrays) else np


def astype(x: Array, dtype: Any) -> Array:
    """`x` as another type; 64-bit types narrow where JAX's 64-bit mode is off, as everywhere in JAX."""
    return x.astype(dtype if isinstance(x, (np.ndarray, np.generic)) else jax.dtypes.canonicalize_dtype(dtype))
