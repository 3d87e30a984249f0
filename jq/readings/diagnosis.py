"""The cause of a failure: the model, if its own nodes do not fit each other, or else this package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import jax

from jq.errors import Error, ModelError
from jq.graph import Graph
from jq.graph.read import ModelLike, load
from jq.graph.write import check_model, to_model
from jq.readings.tracing import trace

Model = TypeVar("Model", bound=ModelLike)
P = ParamSpec("P")
R = TypeVar("R")


def blames_model(function: Callable[Concatenate[Model, P], R]) -> Callable[Concatenate[Model, P], R]:
    """Make a function of a model say what is wrong with the model, where something is and the function fails for it.

    Passes and rules rely on nodes whose operands fit. To check that in front of all of them would take as long as a
    trace; so it is looked for when one of them has failed. A failure on a sound model stays what it is, a defect.
    """

    @functools.wraps(function)
    def run(model: Model, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(model, *args, **kwargs)
        except Error:
            raise
        except Exception as error:
            check_sound(model if isinstance(model, Graph) else load(model), error)
            raise

    return run


def check_sound(graph: Graph, failure: Exception | None = None) -> None:
    """Raise a ModelError that names a node whose operands do not fit, with free dims as 1; nothing is computed.

    >>> import jq
    >>> check_sound(jq.load(jq.zoo.path("fashion_resnet")))
    """
    fn = trace(graph)
    try:
        with jax.enable_x64(fn.wide):
            shapes = {v.name: tuple(d if isinstance(d, int) else 1 for d in v.shape or ()) for v in graph.inputs}
            inputs = {v.name: jax.ShapeDtypeStruct(shapes[v.name], v.dtype) for v in graph.inputs}
            jax.eval_shape(lambda params, inputs: fn(params, inputs) and None, dict(graph.params), inputs)
        check_model(to_model(graph, skeleton=True))
    except ModelError as error:
        raise error from failure
    except Exception:  # strings and sequences that come in, which cannot be traced, say nothing about the model
        return
