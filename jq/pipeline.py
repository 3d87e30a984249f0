"""The whole flow on one page: a float model and a little data in, a quantized model and its evidence out."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from onnx import ModelProto

from jq.calibration.calibrate import calibrate, compile_ahead
from jq.calibration.stats import Stats
from jq.calibration.stats import read as read_stats
from jq.calibration.stats import write as write_stats
from jq.config import QuantConfig, presets, resolve
from jq.data.images import ImageFolder
from jq.data.preprocessing import Pixels
from jq.data.sources import calibration_samples, open_source, preprocessing_of
from jq.errors import DataError, ModelError
from jq.evidence.compare import name_of
from jq.evidence.layers import CHIP, layers_of
from jq.evidence.lint import lint
from jq.evidence.outputs import Reference, output_error, output_losses, warn_of_outputs
from jq.evidence.report import Report, report_of
from jq.evidence.stages import equalization_sections, finetuning_sections
from jq.evidence.verdict import OutputsVerdict
from jq.exchange.export import Format, check_format, export, pairs_of, quantized_graph
from jq.graph import Graph
from jq.graph.quantizers import is_quantized
from jq.graph.read import ModelLike, load
from jq.graph.write import finished
from jq.npu.facts import CHIPS
from jq.npu.placing import place
from jq.passes.opset import check_opset
from jq.passes.prepare import prepare
from jq.plan import Plan
from jq.plan.forms import sigmoid_choice
from jq.plan.outputs import left_to_host, ties_of_outputs
from jq.plan.planning import check_weights, plan_and_moves
from jq.plan.selection import float_heads, selected
from jq.readings.data_shapes import untraceable
from jq.readings.diagnosis import blames_model
from jq.recovery.bias_correction import correct_biases, shifts_of_tails
from jq.recovery.bounds import BoundChoice, bound_choice, fitted_bounds, without_clips
from jq.recovery.checkpoint import Progress
from jq.recovery.equalization import equalized
from jq.recovery.finetuning import check_roundings, finetune, tuned
from jq.recovery.guard import Guarded, Mend, guarded, warn_of_mends
from jq.recovery.rounding import Rounding
from jq.util import files, programs
from jq.util.digest import digest
from jq.util.machine import cores
from jq.util.mapped import all_like, release
from jq.util.memory import trim
from jq.util.progress import log
from jq.version import __version__


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """The quantized model, and everything that it was made from."""

    model: ModelProto
    plan: Plan
    report: Report
    graph: Graph  # prepared, equalized and tuned: the plan is for it
    stats: Stats | None
    guard: tuple[Mend, ...] = ()  # the tensors that rounding would have ruined, and what was done
    complete: bool = True  # whether `time_budget` was enough for all of the finetuning

    def _repr_html_(self) -> str:
        return self.report._repr_html_()


@blames_model
def quantize(
    model: ModelLike,
    data: Any = None,
    config: QuantConfig | str = "XINT8",
    *,
    output: str | os.PathLike[str] | None = None,
    format: Format = "qdq",
    opset: int | None = None,
    mesh: Mesh | None = None,
    time_budget: float | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    spill: str | os.PathLike[str] | None = None,
    roundings: Mapping[str, Rounding] | None = None,
    measured: Measured | None = None,
    stats: str | os.PathLike[str] | None = None,
) -> Result:
    """Return a float ONNX model quantized by a preset or config, calibrated on `data`; write it to `output`.

    `data` is what `jq.calibrate` takes; None means random data, with a warning. The preprocessing of images is stored in
    the model's metadata, and used when the model is later compared or run on images. `time_budget`, `checkpoint`, `spill` and
    `roundings` are those of `jq.finetune`. `measured` is a dict that keeps what this call measures and tunes: later calls
    with the same dict, model and data, and different options for the plan, do not measure it again, and begin behind the
    stages of finetuning that they share. `stats` is a file that `jq-quant calibrate -o` wrote for this model
    and config; the network is then not calibrated again.

    >>> import jq
    >>> images, labels = jq.zoo.calibration_set()
    >>> result = jq.quantize(jq.zoo.path("fashion_resnet"), images[:64], "XINT8")
    >>> result.plan
    Plan(26 activations, 32 weights)
    """
    config, start = resolve(config), time.perf_counter()
    check_format(format)
    check_opset(opset)
    files.check_writable(output, model)
    check_roundings(config, roundings or {})
    original = model if isinstance(model, Graph) else load(model)
    ready = calibrated(original, data, config, mesh, measured, stats)
    config = ready.guarded.config
    for sentence in _left_in_float(ready, config):
        log.warning("%s", sentence)
    if not config.finetune:
        ready = _shifts_mended(ready, corrected(ready), original)
    graph, made = ready.graph, ready.guarded
    warn_of_mends(made)
    params, plan, progress = graph.params, made.plan, Progress(made.plan)
    if config.finetune and len(plan):
        limits: dict[str, Any] = {"time_budget": time_budget, "checkpoint": checkpoint, "spill": spill}
        (params, plan), progress = tuned(graph, plan, ready.data, config, roundings=roundings, known=measured, **limits)
    clips = bound_choice(graph, plan, config, ready.data, ready.moved)
    log.info("clips: %s", clips or "none whose bound is left to rounding")
    graph = without_clips(graph, clips)
    params = {name: params[name] for name in graph.params}
    if not len(plan):
        warnings.warn("nothing is quantized: no operator named by the config has a float32 tensor", stacklevel=2)
    log.info("planned: %s, %d moved for the NPU", plan, len(made.moves))
    pixels = preprocessing_of(data, original.inputs)
    metadata = _metadata(model, original, made.config) | (pixels.to_metadata() if pixels is not None else {})
    whole = quantized_graph(graph, plan, params, format, opset, pairs_of(config))
    watches = config.guard is not None and not config.strict_quark and format == "qdq" and len(plan)
    reference = Reference.of(original, ready.data, config.seed) if watches else None  # before codes take memory as well
    placed = place(whole, CHIPS[CHIP].backends[0]).nodes
    quantized = finished(whole.replace(metadata={**graph.metadata, **metadata}), output)
    progress.forget()  # which a run that is stopped while it exports goes on from
    log.info("exported as %s", format)
    del whole  # whose arrays the model holds
    kept = output_losses(reference, quantized) if reference is not None else OutputsVerdict()
    warn_of_outputs(kept.outputs)
    facts = _facts(graph, config, ready.stats, quantized, metadata) | _choices(ready, config, plan, clips)
    facts |= {"seconds": f"{time.perf_counter() - start:.1f}"}
    title = f"{name_of(model, original.name)} in {_preset_name(config)}"
    report = report_of(
        title, graph, plan, ready.stats, facts, made.moves, lint(original, config), shipped=params, guard=made
    )
    sections = [*equalization_sections(ready.prepared, graph, plan)]
    if config.finetune and reference is not None:
        untuned = output_losses(reference, export(graph, made.plan))
        sections += finetuning_sections((graph.params, made.plan, untuned), (params, plan, kept))
    report = dataclasses.replace(
        report,
        verdict=kept,
        sections=tuple(sections),
        layers=layers_of(graph, plan, placed),
        subject=_preset_name(config),
    )
    shipped = graph.with_arrays({**graph.arrays, **params})
    return Result(quantized, plan, report, shipped, ready.stats, made.mends, progress.complete)


@dataclasses.dataclass(frozen=True, eq=False)
class Calibrated:
    """A prepared, equalized and calibrated model with its plan; biases are not corrected, nothing is tuned."""

    graph: Graph  # prepared and equalized
    stats: Stats | None
    data: Any  # that can be read again
    prepared: Graph  # before equalization
    guarded: Guarded  # the plan, and the config that it is by, with what the guard changed
    moved: Mapping[str, float] = dataclasses.field(default_factory=dict)  # Clips that were, and what that loses


# Equalized graphs and their statistics, planned models, and tuned params and plans, by all that they depend on but the data.
Measured = MutableMapping[str, Any]
# Options that only what is tuned depends on, and with them those that only the plan depends on.
_TUNING = (
    "finetune", "finetune_steps", "finetune_rate", "finetune_batch", "finetune_drop", "finetune_norm",
    "tune_weight_exponents",
)  # fmt: skip
_LATER = ("overrides", "exclude", "exclude_subgraphs", "float_tensors", "guard", "pairs", *_TUNING)


def calibrated(
    original: Graph,
    data: Any,
    config: QuantConfig,
    mesh: Mesh | None = None,
    measured: Measured | None = None,
    saved: str | os.PathLike[str] | None = None,
) -> Calibrated:
    """Return a float graph prepared, equalized and calibrated, with its plan; `saved` is a file of its statistics."""
    refuse_quantized(original)
    graph = prepare(original, config)
    graph = graph.with_arrays(all_like(graph.arrays, original.arrays))
    log.info("prepared: %d of %d nodes are left", len(graph.nodes), len(original.nodes))
    check_weights(graph, config)
    data = calibration_samples(data, graph.inputs, config.held_out, config.seed)
    key, known = "" if measured is None else _identity(graph, config), {} if measured is None else measured
    if key not in known:
        known[key] = equalized_and_measured(graph, data, config, mesh, saved)
    tuning = {name: getattr(config, name) for name in _TUNING}
    planned = f"{key} {digest({k: v for k, v in config.to_dict().items() if k not in tuning})}"
    if planned not in known:
        equal, stats = known[key]
        known[planned] = _planned(graph, equal, stats, data, config, mesh)
    ready: Calibrated = known[planned]
    guard = dataclasses.replace(ready.guarded, config=ready.guarded.config.replace(**tuning))
    return dataclasses.replace(ready, guarded=guard)


def _planned(
    prepared: Graph, graph: Graph, stats: Stats | None, data: Any, config: QuantConfig, mesh: Mesh | None
) -> Calibrated:
    """A prepared model, equalized and calibrated, with its plan."""
    trim()
    made = guarded(graph, stats, config, data)
    fitted = fitted_bounds(graph, made.plan, config, data)
    if fitted.graph is not graph:
        graph, stats = fitted.graph, calibrate(fitted.graph, data, config, mesh=mesh)
        made = guarded(graph, stats, config, data)
    return Calibrated(graph, stats, data, prepared, made, fitted.moved)


def equalized_and_measured(
    graph: Graph,
    data: Any,
    config: QuantConfig,
    mesh: Mesh | None = None,
    saved: str | os.PathLike[str] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> tuple[Graph, Stats | None]:
    """Return a prepared graph equalized, and its statistics: those in the file `saved`, or of a pass over the data."""
    measures = config.calibrates and saved is None
    with _calibration_ahead(graph, data, config, mesh) if measures and config.cle else _nothing() as wait:
        reaches: Mapping[str, float] = {}
        if config.cle:
            made = equalized(graph, config, data, mesh)
            log.info("equalized" if made.graph is not graph else "equalization changed nothing")
            graph, reaches = made.graph, made.reaches
            trim()  # what a pass over the data leaves is more than the rest needs
        if not config.calibrates:
            return graph, None
        if saved is not None:
            return graph, _saved_stats(saved, graph, config)
        wait()
        return graph, calibrate(graph, data, config, mesh=mesh, checkpoint=checkpoint, reaches=reaches)


def _calibration_ahead(
    graph: Graph, data: Any, config: QuantConfig, mesh: Mesh | None
) -> contextlib.AbstractContextManager[Callable[[], None]]:
    """Compile the program of calibration while equalization reads the data, as it changes weights alone.

    Yields a function that waits for it. Where equalization takes no time, where samples come from the user's own code,
    where several processes compile a program together, and on a single core, where two compilations only take more memory,
    nothing is compiled ahead.
    """
    given = data.data if isinstance(data, Pixels) else data
    stored = isinstance(given, (str, os.PathLike, Mapping, Sequence, ImageFolder)) or hasattr(given, "__array__")
    if config.cle == "nagel" or config.strict_quark or not stored or jax.process_count() > 1 or cores() == 1:
        return _nothing()
    with warnings.catch_warnings(action="ignore"):  # they come where the data are read
        source = open_source(data, graph.inputs, seed=config.seed)
    return programs.meanwhile(lambda: compile_ahead(graph, source, config, mesh))


def _nothing() -> contextlib.AbstractContextManager[Callable[[], None]]:
    return contextlib.nullcontext(lambda: None)


def save_stats(path: str | os.PathLike[str], stats: Stats, graph: Graph, config: QuantConfig) -> None:
    """Write statistics with the identity of what they were measured on, by which `quantize(stats=...)` knows them."""
    write_stats(path, stats, {"identity": _identity(graph, config)})


def _saved_stats(path: str | os.PathLike[str], graph: Graph, config: QuantConfig) -> Stats:
    """The statistics in a file; a DataError if they are of another model or config."""
    stats, extra = read_stats(path)
    if extra.get("identity") != _identity(graph, config):
        ours, theirs = stats.config.to_dict(), config.to_dict()
        other = [k for k in theirs if k not in _LATER and ours.get(k) != theirs[k]]
        why = (
            f"a config with another {', '.join(other)}"
            if other
            else "another model, or other data for its equalization"
        )
        raise DataError(
            f"the statistics in {os.fspath(path)} belong to {why}; measure again: jq-quant calibrate MODEL --data DATA --config "
            f"CONFIG -o {os.fspath(path)}"
        )
    return stats


def _identity(graph: Graph, config: QuantConfig) -> str:
    """A hash of all that measurements of a prepared graph depend on, but for the data."""
    options = config.to_dict()
    return digest(graph, config.calibrates, {k: v for k, v in options.items() if k not in _LATER})


def corrected(ready: Calibrated) -> Calibrated:
    """Return the same with biases corrected and planned anew, if the config says so."""
    made = ready.guarded
    if ready.stats is None or not made.config.corrects_bias:
        return ready
    shifts = shifts_of_tails(ready.graph, made.plan, ready.stats, ready.data, made.config)
    log.info("negative tails: %d inputs of layers are shifted by rounding", len(shifts))
    graph = correct_biases(ready.graph, made.plan, ready.stats, shifts)
    log.info("biases corrected")
    plan, moves = plan_and_moves(graph, ready.stats, made.config)
    return dataclasses.replace(ready, graph=graph, guarded=dataclasses.replace(made, plan=plan, moves=moves))


def _shifts_mended(ready: Calibrated, plain: Calibrated, original: Graph) -> Calibrated:
    """Return the better of two, by the outputs: biases corrected, or, where the guard proposes that, fitted."""
    made = ready.guarded
    if made.shift is None:
        return plain
    config = made.config.replace(finetune="bias")
    params, plan = finetune(ready.graph, made.plan, ready.data, config)
    guard = dataclasses.replace(made, plan=plan, config=config, mends=(*made.mends, made.shift))
    fitted = dataclasses.replace(ready, graph=ready.graph.with_arrays({**ready.graph.arrays, **params}), guarded=guard)
    reference = Reference.of(original, ready.data, config.seed)
    errors = [output_error(reference, export(c.graph, c.guarded.plan)) for c in (plain, fitted)]
    log.info("biases: error of the outputs %.3g corrected, %.3g fitted", *errors)
    return fitted if errors[1] < errors[0] else plain


def _left_in_float(ready: Calibrated, config: QuantConfig) -> Iterator[str]:
    """Yield a sentence for each part of the network that could be quantized and is not."""
    if left := float_heads(ready.graph, config):
        nodes, entries = [n for head in left for n in head.nodes], [e for head in left for e in head.entries]
        yield (
            f"left in float: {len(nodes)} nodes that decode boxes and scores, behind {len(entries)} tensors "
            f"({nodes[0].label!r} to {nodes[-1].label!r}); head='int8' quantizes them"
        )
    heads = {n for head in left for n in head.nodes}
    if behind := [n for n in untraceable(ready.graph) if n not in heads]:
        yield f"left in float: {len(behind)} nodes from {behind[0].label!r} on, where data values determine shapes"
    yield from left_to_host(ready.graph, ready.guarded.plan, ready.stats, selected(ready.graph, config))


def refuse_quantized(graph: Graph) -> None:
    """Raise a ModelError for a model that is quantized already."""
    node = next(filter(is_quantized, graph.walk()), None)
    if node is not None:
        raise ModelError(
            f"the model is quantized already: node {node.label!r} is a {node.qualified}. Give the float model; "
            "to look at this one, see jq.split_quantizers"
        )


def _metadata(model: ModelLike, graph: Graph, config: QuantConfig) -> dict[str, str]:
    """The provenance that a quantized model carries as metadata."""
    return {
        "jq.version": __version__,
        "jq.config": json.dumps(config.to_dict(), sort_keys=True),
        "jq.seed": str(config.seed),
        "jq.source_sha256": _source_sha256(model, graph),
    }


def _source_sha256(model: ModelLike, graph: Graph) -> str:
    """The SHA-256 of a model's bytes, with its external data behind them, or of a graph's nodes and arrays.

    It is published, so its form stays what it is.
    """
    if isinstance(model, (str, os.PathLike, bytes)):
        sha256 = hashlib.sha256(model if isinstance(model, bytes) else files.content(model, error=ModelError))
        for name, array in sorted(graph.arrays.items()):
            if isinstance(array, np.memmap):
                sha256.update(name.encode())
                sha256.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
                release(array)
        return sha256.hexdigest()
    sha256 = hashlib.sha256()
    for node in graph.nodes:
        sha256.update(repr((node.op_type, node.inputs, node.outputs, sorted(map(str, node.attrs.items())))).encode())
    for name, array in sorted(graph.arrays.items()):
        # Of strings, an array's bytes are addresses.
        sha256.update(name.encode() + (repr(array.tolist()).encode() if array.dtype == object else array.tobytes()))
    return sha256.hexdigest()


def _facts(
    graph: Graph, config: QuantConfig, stats: Stats | None, model: ModelProto, metadata: Mapping[str, str]
) -> dict[str, str]:
    float_bytes, bytes_now = sum(a.nbytes for a in graph.arrays.values()), model.ByteSize()
    return {
        "config": _preset_name(config),
        "method": config.method if stats is not None else "none: activations need no calibration",
        "samples": str(stats.samples) if stats is not None else "0",
        "nodes": f"{len(graph.nodes)}, quantized: {len(model.graph.node)}",
        "size": f"{float_bytes:,} bytes of weights, quantized: {bytes_now:,} bytes of model",
        "source sha256": metadata["jq.source_sha256"],
        "jq": metadata["jq.version"],
        "seed": metadata["jq.seed"],
    }


def _choices(ready: Calibrated, config: QuantConfig, plan: Plan, clips: BoundChoice | None) -> dict[str, str]:
    """The facts of a report about what was chosen for this network."""
    chosen = {}
    sigmoids = sigmoid_choice(ready.graph, ready.stats, config, plan.nodes)
    log.info("sigmoids: %s", sigmoids or "none whose form is chosen")
    if sigmoids is not None:
        chosen["sigmoids"] = str(sigmoids)
    if clips is not None:
        chosen["clips"] = str(clips)
    if ties := ties_of_outputs(ready.graph, plan, ready.stats):
        chosen["ties"] = ", ".join(f"{name} {share:.1%}" for name, share in ties.items())
        chosen["ties"] += " of the samples, in which the two largest values get the same code"
    return chosen


def _preset_name(config: QuantConfig) -> str:
    return next((name for name, preset in presets.items() if preset == config), "a config of your own")
