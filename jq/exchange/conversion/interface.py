"""Layouts of a model's inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jq.errors import ConfigError, ModelError, suggest
from jq.graph import Graph, Node
from jq.graph.edit import fresh, rename


def nhwc_inputs(graph: Graph, names: Iterable[str] | None = None) -> Graph:
    """Return the graph with inputs in channels-last order, of all images (4 dims) or of some names; outputs stay.

    A Transpose follows each of them; the values are the same.

    >>> import jq
    >>> [str(v) for v in nhwc_inputs(jq.load(jq.zoo.path("fashion_resnet"))).inputs]
    ['input: float32[N,28,28,1]']
    """
    inputs = {v.name: v for v in graph.inputs}
    chosen = [n for n, v in inputs.items() if v.shape is not None and len(v.shape) == 4] if names is None else [*names]
    if not chosen:
        shown = ", ".join(map(str, graph.inputs))
        raise ConfigError(f"channels-last order needs an input of 4 dims; the model has {shown}")
    taken, moved, transposes = set(graph.tensors), dict[str, str](), list[Node]()
    for name in chosen:
        if name not in inputs:
            raise ConfigError(f"no input {name!r}.{suggest(name, inputs)} Available: {', '.join(inputs)}")
        shape = inputs[name].shape
        if shape is None or len(shape) < 3:
            raise ConfigError(f"input {inputs[name]} has no channels to move: expected 3 dims or more")
        if name in graph.output_names:
            raise ModelError(f"{name!r} is both an input and an output; its order cannot change for only one of them")
        rank = len(shape)
        inputs[name] = dataclasses.replace(inputs[name], shape=(shape[0], *shape[2:], shape[1]))
        moved[name] = fresh(f"{name}_nchw", taken)
        order = {"perm": (0, rank - 1, *range(1, rank - 1))}
        transposes.append(Node("Transpose", (name,), (moved[name],), order, f"{name}_Transpose"))
    renamed = rename(graph, moved)
    return renamed.replace(nodes=(*transposes, *renamed.nodes), inputs=tuple(inputs.values()))
