"""onnxruntime as one more reading of a model, on the CPU or with any of its providers: from inputs to outputs."""

from __future__ import annotations

import dataclasses
import os
import time
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from onnx import ModelProto

from jq.errors import ConfigError, ModelError
from jq.graph import Graph
from jq.graph.read import load
from jq.graph.write import large_weights, to_model, to_model_beside, to_model_taking
from jq.readings.provider import CPU, Provider, compiled, keep_note, provider_names, short_name
from jq.util.digest import digest

_MANY = 4096  # nodes, from which on onnxruntime optimizes nothing: the time for that grows with their square
_LARGE = 1 << 29  # bytes of weights, from which on onnxruntime is given them anew with each sample, and has no copy
Reading: TypeAlias = Callable[[Mapping[str, Any]], dict[str, np.ndarray]]
Source: TypeAlias = str | os.PathLike[str] | bytes | ModelProto | Graph


@dataclasses.dataclass(frozen=True, eq=False)
class RuntimeReading:
    """A model in a session of onnxruntime: a function from inputs to outputs, and who runs what of it."""

    session: Any
    outputs: tuple[str, ...]
    provider: Provider
    taken: Mapping[str, int] | None  # nodes by the short name of the provider that runs them; None: not told
    seconds: float  # that loading and compiling took
    reused: bool = False  # a model that was compiled before
    held: tuple[Any, ...] = ()  # weights that the session was made of
    given: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)  # weights that it has as inputs

    @property
    def name(self) -> str:
        """The short name of the provider that was asked for."""
        return self.provider.short

    @property
    def providers(self) -> tuple[str, ...]:
        """The short names of the providers that the session has."""
        return tuple(map(short_name, self.session.get_providers()))

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The model's outputs."""
        try:
            sample = {k: np.asarray(v) for k, v in inputs.items()}
            arrays = self.session.run(list(self.outputs), {**self.given, **sample})
        except Exception as error:
            raise ModelError(f"onnxruntime does not run this model: {_first_line(error)}") from error
        return dict(zip(self.outputs, arrays, strict=True))


def onnxruntime_reading(model: Source, provider: Provider | None = None) -> RuntimeReading:
    """Return the model as onnxruntime runs it, on the CPU without a provider; one that it does not run is a ModelError.

    A provider that this onnxruntime lacks is a ConfigError. One that takes nothing of the model is a warning, as the CPU
    then runs all of it.

    >>> import jq.zoo
    >>> run = onnxruntime_reading(jq.zoo.path("fashion_resnet"))
    >>> run({"input": jq.zoo.evaluation_set()[0][:2]})["logits"].shape
    (2, 10)
    """
    import onnxruntime

    asked = Provider(CPU) if provider is None else provider
    asked.check()
    identity = "" if asked.context is None else digest(model if isinstance(model, Graph) else load(model))
    ready, start = compiled(asked, identity), time.perf_counter()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if asked.short != CPU:  # of the CPU it is known
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if asked.context is not None and ready is None:
        options.add_session_config_entry("ep.context_enable", "1")
        options.add_session_config_entry("ep.context_file_path", os.fspath(asked.context))
        options.add_session_config_entry("ep.context_embed_mode", str(int(asked.embed)))
    source, held, given = model, tuple[Any, ...](), dict[str, np.ndarray]()
    if asked.short == CPU and _nodes(model) > _MANY:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if isinstance(model, Graph):
        source, held, given = _beside(model, options) if asked.short == CPU else (to_model(model), (), {})
    providers = [(asked.whole, asked.words), *([] if asked.short == CPU else [provider_names()[CPU]])]
    try:
        source = source.SerializeToString() if isinstance(source, ModelProto) else source
        # Without the fallback an error of the provider's is an error, and no text on the terminal.
        session = onnxruntime.InferenceSession(ready or source, options, providers=providers, enable_fallback=0)
    except Exception as error:  # onnxruntime has no common class for its own, protobuf has a limit of 2 GB
        where = "" if asked.short == CPU else f" with provider {asked.short}"
        what = f"{ready}, compiled from this model" if ready else "this model"
        raise ModelError(f"onnxruntime does not load {what}{where}: {_first_line(error)}") from error
    seconds = time.perf_counter() - start
    if ready is None:
        keep_note(asked, identity)
    else:
        _check_alike(ready, session, model)
    names = tuple(output.name for output in session.get_outputs())
    reading = RuntimeReading(session, names, asked, _taken(session, asked), seconds, ready is not None, held, given)
    _warn_of_others(reading)
    return reading


def _nodes(model: Source) -> int:
    """The number of nodes of a model, as far as it is known without reading a file."""
    if isinstance(model, Graph):
        return len(model.nodes)
    return len(model.graph.node) if isinstance(model, ModelProto) else 0


def _beside(graph: Graph, options: Any) -> tuple[ModelProto, tuple[Any, ...], dict[str, np.ndarray]]:
    """The model for a session, its large weights as the session is made of them, and those that each call gives it.

    Of weights that a session is made of, onnxruntime has a copy while it reads them, and another one in the order of its
    kernels. An input it reads where it is: mapped from a file, it takes no memory but while it is read.
    """
    import onnxruntime

    weights = large_weights(graph)
    if sum(a.nbytes for a in weights.values()) > _LARGE:
        return to_model_taking(graph, weights), (), weights
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(np.require(a, None, ["C", "A"])) for a in weights.values()]
    if values:
        options.add_external_initializers(list(weights), values)
    return to_model_beside(graph, weights), tuple(values), {}


def _taken(session: Any, asked: Provider) -> Mapping[str, int] | None:
    """The number of nodes that each provider took, where this onnxruntime tells it."""
    if asked.short == CPU or not hasattr(session, "get_provider_graph_assignment_info"):
        return None
    try:
        parts = session.get_provider_graph_assignment_info()
        counts: dict[str, int] = {}
        for part in parts:
            name = short_name(part.ep_name)
            counts[name] = counts.get(name, 0) + len(part.get_nodes())
    except Exception:  # it is not recorded for all kinds of model
        return None
    return MappingProxyType(counts)


def _warn_of_others(reading: RuntimeReading) -> None:
    asked, taken = reading.provider, reading.taken
    if asked.short not in reading.providers:
        there = ", ".join(reading.providers)
        warnings.warn(
            f"provider {asked.short} did not take the model: the session has {there}; check its options and its output",
            stacklevel=3,
        )
    elif taken and not taken.get(asked.short):
        total = sum(taken.values())
        warnings.warn(
            f"provider {asked.short} runs none of the model's {total} nodes; {', '.join(taken)} does", stacklevel=3
        )


def _check_alike(path: os.PathLike[str], session: Any, model: Source) -> None:
    """Raise a ConfigError where a compiled model has other inputs and outputs than the model."""
    graph = model if isinstance(model, Graph) else load(model)
    ours = ({v.name for v in graph.inputs}, {v.name for v in graph.outputs})
    theirs = ({v.name for v in session.get_inputs()}, {v.name for v in session.get_outputs()})
    if ours != theirs:
        raise ConfigError(
            f"context {os.fspath(path)} belongs to another model: it maps {sorted(theirs[0])} to {sorted(theirs[1])}, but this "
            f"one {sorted(ours[0])} to {sorted(ours[1])}; give another name"
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
