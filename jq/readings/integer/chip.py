"""A quantized model on a simulated chip: load it, run it, explain its results."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from onnx import ModelProto

from jq.arithmetic import layout
from jq.arithmetic.formats import INTEGERS
from jq.errors import ModelError, UnsupportedOp
from jq.graph import Graph, Node
from jq.graph.quantizers import is_pair, rounds
from jq.graph.read import load as load_graph
from jq.graph.unused import remove_unused
from jq.npu.targets import ORT, Target, target_of
from jq.ops.table import lookup
from jq.readings.batches import chunked
from jq.readings.data_shapes import finished, parted
from jq.readings.diagnosis import blames_model
from jq.readings.integer.explain import Explained, Log
from jq.readings.integer.reading import Reading, centred
from jq.readings.integer.recognition import recognize
from jq.readings.packing import read_order
from jq.readings.tracing import Traced, trace, unsupported
from jq.readings.walk import best_lowering
from jq.util import cache

Program = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]


@blames_model
def load(
    model: str | os.PathLike[str] | bytes | ModelProto | Graph,
    target: str | Target = "aie2_x1",
    lowering: str | None = None,
) -> Chip:
    """Return a quantized model, in QDQ or QOperator form and of any tool, as the target computes it: in integers.

    Targets are "ort" (onnxruntime), "dpu", "aie2_x1" and "aie2_even", which model AMD's public reference emulators, not
    silicon, or a `Target` of your own. A scale that is no power of two is refused where the target can only shift.

    >>> import jq
    >>> images, _ = jq.zoo.calibration_set()
    >>> model = jq.quantize(jq.zoo.path("fashion_resnet"), images[:16], "XINT8").model
    >>> chip = load(model, target="aie2_x1")
    >>> chip({"input": images[:2]})["logits"].shape
    (2, 10)
    """
    chip = target_of(target)
    whole = remove_unused(model if isinstance(model, Graph) else load_graph(model))
    if missing := unsupported(whole):
        raise UnsupportedOp("; ".join(missing))
    program = remove_unused(recognize(whole, chip))
    if not any(is_pair(n) or rounds(n) for n in program.nodes):
        raise ModelError(
            "the model is not quantized to integers: it has no QuantizeLinear and no integer operator; quantize it first, "
            "or run it with jq.trace"
        )
    cache.enable()
    front, behind = parted(program)
    return Chip(whole, Reading(front, chip, lowering or best_lowering()), behind)


@dataclasses.dataclass(frozen=True, eq=False)
class Chip:
    """A quantized model as a chip computes it."""

    graph: Graph  # as it was loaded
    reading: Reading
    behind: tuple[Node, ...] = ()  # nodes from where values of the data decide shapes: in float, on the host

    @property
    def target(self) -> Target:
        """How the chip computes."""
        return self.reading.target

    def trace(self) -> tuple[Program, dict[str, Any]]:
        """Return the integer program `fn(params, inputs) -> outputs` and its params, to jit, vmap or shard.

        Inputs and outputs are the model's; in between there are integers, but for what `floats` lists. Where values of the
        data decide shapes, the program ends there. The params are the integers of the weights, in the order in which
        convolutions read them.
        """
        return (lambda params, inputs: self.reading.run(params, inputs).outputs), self.params

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The model's outputs."""
        return self._finished(inputs, self._run(self.params, self.checked(inputs)))

    def codes(self, inputs: Mapping[str, Any], given: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The integers of every quantized tensor, by the name that they have in the model, as the model stores them.

        Those that are `given`, a board's or onnxruntime's, are what the nodes behind them read: then a difference
        between the given and the returned codes is due to one node alone.
        """
        return self._codes(self.params, self.checked(inputs), dict(given or {}))

    def explain(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Log]:
        """The model's outputs, and a log that counts for each rounding its ties, saturations and differences."""
        outputs, log = self._explained.run(self.params, self.checked(inputs))
        return self._finished(inputs, outputs), log

    def _finished(self, inputs: Mapping[str, Any], made: dict[str, Any]) -> dict[str, Any]:
        return finished(self.graph, self.behind, {**inputs, **made}) if self.behind else made

    @functools.cached_property
    def _explained(self) -> Explained:
        reference = load(self.graph, ORT, self.reading.lowering)
        return Explained(self.reading, reference.reading, reference.params)

    def floats(self, inputs: Mapping[str, Any]) -> dict[str, str]:
        """Nodes that are computed in float32 on inputs of these shapes, each with the reason; nothing is computed."""
        learned = jax.eval_shape(lambda *args: self.reading.run(*args).learned, self.params, self.checked(inputs))
        return dict(learned.floats)

    @functools.cached_property
    def params(self) -> dict[str, Any]:
        """The weights on the device: integers as a signed type, those of convolutions in the order that XLA reads."""
        graph = self.reading.graph
        grids = {i for n in graph.nodes if is_pair(n) for i in n.inputs[1:]}
        read = {i for n in graph.nodes for i in n.inputs[: 1 if is_pair(n) else None]}
        names = [n for n in graph.params if n in read | graph.output_names or n not in grids]
        return {name: self._placed(name, graph.params[name]) for name in names}

    def _placed(self, name: str, array: np.ndarray) -> Any:
        if str(array.dtype) not in INTEGERS:
            return jax.device_put(array)
        graph, held = self.reading.graph, centred(array)
        ends = [e for n in graph.consumers.get(name, ()) for e in _ends(graph, n, name)]
        order, *others = {_order(graph, reader, tensor) for reader, tensor in ends} or {None}
        return jax.device_put(held) if order is None or others else layout.packed(held, order)

    @functools.cached_property
    def _run(self) -> Program:
        run = self.trace()[0]
        return jax.jit(chunked(run) if self.any_batch else run)

    @property
    def any_batch(self) -> bool:
        """Whether the model takes any number of samples, which it treats apart."""
        values = [*self.graph.inputs, *self.graph.outputs]
        dims = {v.shape[0] if v.shape else None for v in values}
        return not self.behind and len(dims) == 1 and all(isinstance(d, str) for d in dims)

    @functools.cached_property
    def _codes(self) -> Callable[..., dict[str, Any]]:
        return jax.jit(lambda *given: self.reading.run(*given).codes)

    def checked(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs as arrays, if they are those that the model declares."""
        arrays = {k: v if hasattr(v, "dtype") else np.asarray(v) for k, v in inputs.items()}
        return self._float.checked(arrays)

    @functools.cached_property
    def _float(self) -> Traced:
        return trace(self.graph)


def _ends(graph: Graph, node: Node, name: str) -> list[tuple[Node, str]]:
    """The readers of what a node makes of an array of integers; itself, if it does not dequantize it."""
    if not (is_pair(node) and not rounds(node)) or node.inputs[0] != name:
        return [(node, "")]
    return [(reader, node.outputs[0]) for reader in graph.consumers.get(node.outputs[0], ())]


def _order(graph: Graph, reader: Node, tensor: str) -> tuple[int, ...] | None:
    """The order in which a reader multiplies integers, if that is its weight."""
    entry = lookup(reader, graph.opset(reader.domain))
    if entry is None or entry.integer is None or not tensor:
        return None
    value = graph.values.get(tensor)
    return None if value is None else read_order(graph, reader, tensor, len(value.shape or ()))
