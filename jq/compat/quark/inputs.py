"""Changes that Quark makes to a model and its data before quantizing: types, shapes and layouts of inputs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jq.arithmetic import layout
from jq.data.arrays import Sample
from jq.data.sources import open_source, readable_again
from jq.errors import ConfigError, suggest
from jq.exchange.conversion import fix_shapes, nhwc_inputs, to_float32
from jq.graph import Graph, Value


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Where calibration data come from: a reader, or a generator if there is none."""

    values: tuple[Value, ...]  # inputs, as the data have them
    channels_last: tuple[str, ...] = ()  # those that the model takes in another layout than the data have
    samples: int | None = None  # of the data; None for all
    random: bool = False  # whether to calibrate on random data, whatever data there are
    shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)  # of random data
    ranges: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)  # of random data

    def sampled(self, data: Any, seed: int) -> Any:
        """Return data that `jq.quantize` can read more than once."""
        made = data is None or self.random
        if not (self.channels_last or self.samples):
            if not made:
                return readable_again(data, self.values)  # readers of Quark's guides can be read once
            if not (self.shapes or self.ranges):
                return None
        values = [dataclasses.replace(v, shape=self.shapes.get(v.name, v.shape)) for v in self.values]
        source = open_source(None, values, seed=seed) if made else open_source(data, self.values)
        samples = list(itertools.islice(source.samples(), self.samples))
        if made:
            samples = [self._in_range(sample, [seed, i]) for i, sample in enumerate(samples)]
        return [self._moved(sample) for sample in samples]

    def _in_range(self, sample: Sample, seed: list[int]) -> Sample:
        rng, scaled = np.random.default_rng(seed), dict(sample)
        for name, (low, high) in self.ranges.items():
            shape, dtype = sample[name].shape, sample[name].dtype
            whole = dtype.kind in "iu"
            made = rng.integers(int(low), int(high) + 1, shape) if whole else rng.uniform(low, high, shape)
            scaled[name] = np.asarray(made).astype(dtype)
        return scaled

    def _moved(self, sample: Sample) -> Sample:
        return {k: layout.channels_last(v) if k in self.channels_last else v for k, v in sample.items()}


def converted(graph: Graph, *, float32: bool, shapes: Any, channels_last: bool) -> tuple[Graph, Graph]:
    """Return two graphs: with inputs as the data have them, and as the quantized model takes them."""
    if float32:
        graph = to_float32(graph)
    if shapes:
        given = shapes_of("FixShapes", shapes)
        outputs = {v.name for v in graph.outputs}
        graph = fix_shapes(graph, {name: shape for name, shape in given.items() if name not in outputs})
        for value in graph.outputs:
            if value.name in given and value.shape is not None and tuple(value.shape) != given[value.name]:
                raise ConfigError(f"FixShapes: output {value} cannot have the shape {list(given[value.name])}")
    return graph, nhwc_inputs(graph) if channels_last else graph


def shapes_of(option: str, given: Any, inputs: Sequence[Value] = ()) -> dict[str, tuple[int, ...]]:
    """Return shapes by name: from a dict, from `x:[1,3,224,224];y:[1,10]`, or from lists in the order of the inputs.

    >>> shapes_of("FixShapes", "x:[1,3,8,8];y:[1,10]")
    {'x': (1, 3, 8, 8), 'y': (1, 10)}
    """
    error = ConfigError(f"{option} is {given!r}; expected shapes by name, such as {{'input': [1, 3, 224, 224]}}")
    if isinstance(given, str):
        pairs = [part.rpartition(":") for part in given.split(";") if part.strip()]
        given = {name.strip(): dims.strip(" []").split(",") for name, _, dims in pairs}
    elif isinstance(given, (list, tuple)) and inputs:
        each = given if all(isinstance(shape, (list, tuple)) for shape in given) else [given]
        given = dict(zip((v.name for v in inputs), each, strict=False)) if len(each) <= len(inputs) else None
    if not isinstance(given, Mapping):
        raise error
    try:
        shapes = {name: tuple(int(d) for d in shape) for name, shape in given.items()}
    except (TypeError, ValueError):
        raise error from None
    if not all(d > 0 for shape in shapes.values() for d in shape):
        raise error
    return shapes


def ranges_of(option: str, given: Any) -> dict[str, tuple[float, float]]:
    """Return least and largest values by name.

    >>> ranges_of("RandomDataReaderInputDataRange", {"x": [0, 255]})
    {'x': (0.0, 255.0)}
    """
    try:
        ranges = {name: (float(low), float(high)) for name, (low, high) in given.items()}
    except (AttributeError, TypeError, ValueError):
        ranges = None
    if ranges is None or not all(-np.inf < low <= high < np.inf for low, high in ranges.values()):
        raise ConfigError(
            f"{option} is {given!r}; expected the lowest and highest values by name, such as {{'input': [0, 1]}}"
        )
    return ranges


def check_names(option: str, given: Mapping[str, Any], inputs: Sequence[Value]) -> None:
    """Raise a ConfigError for a name that is no input."""
    known = [v.name for v in inputs]
    for name in given:
        if name not in known:
            raise ConfigError(f"{option}: no input {name!r}.{suggest(str(name), known)} Available: {', '.join(known)}")
