"""The measures of a quantized model beside the float one on evaluation data, as columns of a table's row."""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jq.data.arrays import Sample
from jq.data.sources import open_source
from jq.data.stream import Batch, Program, Stream
from jq.evaluation import metrics
from jq.evaluation.estimates import Estimate
from jq.evaluation.paired import classes_of, paired, rows_of
from jq.graph import Graph
from jq.passes.prepare import prepare
from jq.plan import Plan
from jq.readings.fake import fake_quant
from jq.readings.packing import pack
from jq.readings.tracing import trace
from jq.recovery.streams import CHUNK_BYTES

BOOTSTRAP_SEED = 0  # of all intervals in tables
_BATCH = 64  # samples that are measured at once, of data whose number is not known
_ESTIMATES = ("agreement", "kl", "sqnr")

Measure = Callable[[Graph, Mapping[str, Any], Plan], dict[str, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Bench:
    """The evaluation data of a model, and the float model's outputs on them."""

    stream: Stream
    batches: list[Batch]
    labels: np.ndarray | None
    reference: list[np.ndarray]  # each output [samples, ...]

    @classmethod
    def of(cls, original: Graph, evaluation: Any, labels: np.ndarray | None) -> Bench:
        """Float targets, once for all runs of a model."""
        graph = prepare(original)
        opened, fn = open_source(evaluation, graph.inputs), trace(graph)
        shapes = [[d for d in v.shape or () if isinstance(d, int)] for v in graph.values.values()]
        largest = 4 * max((math.prod(shape) for shape in shapes), default=1)
        stream = Stream.of(opened, max(1, min(CHUNK_BYTES // largest, opened.length or _BATCH)), fn)
        batches = list(stream.batches())
        program = _outputs(fn, stream)
        return cls(stream, batches, labels, stream.rows(program, pack(graph), batches, concurrent=True))

    def measurer(self, graph: Graph) -> Measure:
        """The function that measures quantizations of one graph; one program, as weights and plans are arguments."""
        qfn = fake_quant(graph)
        program = _outputs(lambda given, sample: qfn(given[0], given[1], sample), self.stream)

        def measure(own: Graph, params: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
            arguments = pack(own.with_arrays({**own.arrays, **params})), jax.tree.map(jnp.asarray, plan)
            return self.compared(self.stream.rows(program, arguments, self.batches, concurrent=True))

        return measure

    def compared(self, outputs: list[np.ndarray]) -> dict[str, Any]:
        """The columns of a row: measures, their intervals, and which samples are right."""
        beside = paired(self.reference, outputs, self.labels, seed=BOOTSTRAP_SEED)
        row: dict[str, Any] = {"samples": len(outputs[0])}
        row |= dict.fromkeys(("float_top1", "top1", "only_float", "only_quantized", "p"))
        for name in _ESTIMATES:
            row |= _columns(name, getattr(beside, name))
        row |= _columns("change", beside.top1)
        row["hits"] = ""
        if (classes := classes_of(self.reference)) is not None:
            one, two = (rows_of(v[classes]) for v in (self.reference, outputs))
            right = one.argmax(-1) == two.argmax(-1) if self.labels is None else metrics.hits(two, self.labels)
            row["hits"] = base64.b64encode(np.packbits(right).tobytes()).decode()
            if self.labels is not None:
                row |= {"float_top1": metrics.topk(one, self.labels), "top1": float(right.mean()), "p": beside.p}
                row |= {"only_float": beside.only_first, "only_quantized": beside.only_second}
        return row


def _columns(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    """A measure and its interval."""
    names = (name, f"{name}_low", f"{name}_high")
    return dict(zip(names, (None,) * 3 if estimate is None else dataclasses.astuple(estimate), strict=True))


def hits_of(row: Mapping[str, Any]) -> np.ndarray:
    """Which samples of a row are right or, without labels, agree with the float model; at the end some that never are.

    >>> hits_of({"hits": base64.b64encode(np.packbits([True, False, True])).decode()})[:3]
    array([1, 0, 1], dtype=uint8)
    """
    return np.unpackbits(np.frombuffer(base64.b64decode(row["hits"]), np.uint8))


def _outputs(fn: Callable[[Any, Sample], Mapping[str, Any]], stream: Stream) -> Program:
    """The compiled program of all outputs of a function of arguments and one sample."""

    def program(arguments: Any, inputs: Sample, _: Any) -> list[Any]:
        return list(jax.vmap(lambda sample: fn(arguments, {**sample, **stream.known}))(inputs).values())

    return stream.spread(program)
