"""Second-order estimates for all tensors at once, from one forward pass and a few backward ones.

For scores z(x) the curvature of the loss at the float network is J'HJ, with H the loss's Hessian in z and J the Jacobian
of the scores: the generalized Gauss-Newton matrix, for kl the Fisher information. With a random v, E[vv'] = H, it is the
mean of squares of v'J, which one backward pass gives for every tensor: Martens, arXiv:1412.1193.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jq.arithmetic import layout
from jq.data.sources import Source, open_source
from jq.data.stream import Stream
from jq.errors import ConfigError, check_choice, suggest
from jq.graph import Graph
from jq.plan import Plan
from jq.plan.scales import channel_axes
from jq.readings.data_shapes import traceable
from jq.readings.hooks import Hook, kept_apart, needing_gradients, turned
from jq.readings.tracing import trace
from jq.research.losses import CURVED, Loss, losses, probe, scores
from jq.research.streaming import packed, streamed

Array = Any


def estimate(
    graph: Graph,
    params: Mapping[str, Any] | None,
    plan: Plan,
    groups: Sequence[frozenset[str]],
    source: Source,
    *,
    loss: Loss = "kl",
    probes: int = 1,
    seed: int = 0,
    mesh: Mesh | None = None,
) -> np.ndarray:
    """Return an estimate, for each sample and group, of the loss of quantizing that group alone: E[(v'J d)^2] / 2.

    d is what rounding changes in the float network. Each group has a dial, 0 for floats and 1 for codes, and v'Jd is the
    derivative with respect to it.
    """
    check_choice("loss", loss, CURVED)
    check_probes(probes)
    fn, read = trace(graph), scores(graph)
    of = {name: dials for name in plan if (dials := [i for i, group in enumerate(groups) if name in group])}

    def one(given: tuple[Any, Plan], sample: Mapping[str, Array], number: Array) -> Array:
        arrays, plan = given

        def outputs(dials: Array) -> dict[str, Array]:
            def dialled(name: str, value: Any) -> Any:
                value = jax.tree.map(jnp.asarray, value)
                dial = sum(dials[i] for i in of[name])
                still = lax.stop_gradient(value)
                rounded = plan.fake_quant(name, still)
                return jax.tree.map(lambda x, f, y: turned(x, kept_apart(y - f), dial), value, still, rounded)

            return read(fn.quantized(arrays, Hook(of, dialled), sample))

        z, pull = jax.vjp(outputs, jnp.zeros(len(groups)))
        return jnp.mean(jnp.square(lax.map(lambda v: pull(v)[0], _probes(loss, z, seed, number, probes))), 0) / 2

    stream = streamed(graph, source, 8, mesh)
    with needing_gradients("an estimate"):
        return stream.rows(stream.each(one), (packed(graph, params, stream), plan), title="estimate")


def fisher(
    graph: Graph,
    data: Any,
    *,
    tensors: Iterable[str] | None = None,
    params: Mapping[str, Any] | None = None,
    loss: Loss = "kl",
    probes: int = 1,
    seed: int = 0,
    mesh: Mesh | None = None,
) -> dict[str, np.ndarray]:
    """Return the diagonal of J'HJ for each tensor, activations and weights, added up within each of its channels.

    A mean over the samples. For kl that is the Fisher information of the classes, which needs no labels: the expected
    square of the gradient of their log-likelihood. Channels are the second axis of an activation, the output channels of
    a weight; a tensor that has none has one number. `tensors` are names, or a plan.

    >>> import jq
    >>> graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")))
    >>> images, _ = jq.zoo.calibration_set()
    >>> squares = fisher(graph, images[:4], tensors=["input", "stem.weight"])
    >>> {k: v.shape for k, v in squares.items()}
    {'input': (1,), 'stem.weight': (24,)}
    """
    check_choice("loss", loss, CURVED)
    check_probes(probes)
    graph = traceable(graph)
    stream = streamed(graph, open_source(data, graph.inputs, seed=seed), 8, mesh)
    fn, read = trace(graph), scores(graph)
    shapes = _shapes(graph, stream, tensors)
    axes = _channels(graph, shapes)
    counts = {k: shapes[k][axes[k]] if k in axes else 1 for k in shapes}

    def one(arrays: Any, sample: Mapping[str, Array], number: Array) -> dict[str, Array]:
        def outputs(sums: Mapping[str, Array]) -> dict[str, Array]:
            def watched(
                name: str, value: Any
            ) -> Any:  # the gradient with respect to `sums` is that of tensors, squared
                axis = axes.get(name, -1)
                axis = layout.axis_of(value, axis) if axis >= 0 else axis
                return layout.mapped(lambda x: _watch(jnp.asarray(x), sums[name], axis), value)

            return read(fn.quantized(arrays, Hook(sums, watched), sample))

        z, pull = jax.vjp(outputs, {k: jnp.zeros(n, jnp.float32) for k, n in counts.items()})
        pulled = lax.map(lambda v: pull(v)[0], _probes(loss, z, seed, number, probes))
        return jax.tree.map(lambda g: jnp.mean(g, 0), pulled)

    with needing_gradients("fisher"):
        squares = stream.rows(stream.each(one), packed(graph, params, stream), title="fisher")
    return {k: squares[k].mean(0, dtype=np.float64) for k in shapes}


def hessian_trace(
    graph: Graph,
    data: Any,
    *,
    tensors: Iterable[str] | None = None,
    params: Mapping[str, Any] | None = None,
    labels: Any = None,
    loss: Loss = "kl",
    probes: int = 1,
    seed: int = 0,
    mesh: Mesh | None = None,
) -> dict[str, float]:
    """Return for each tensor, activations and weights, the trace of the loss's Hessian with respect to it.

    A mean over the samples. Hutchinson's estimate: the expected r'Hr of random signs r, for all tensors in one pass. With
    `labels` the loss is the cross-entropy, as in Dong et al., HAWQ-V2 (arXiv:1911.03852). Without, it is the loss against
    the network's own outputs, of which all residuals vanish: then `fisher` gives the same with less noise.

    >>> import jq
    >>> graph = jq.prepare(jq.load(jq.zoo.path("fashion_resnet")))
    >>> images, labels = jq.zoo.calibration_set()
    >>> sorted(hessian_trace(graph, images[:4], tensors=["input", "stem.weight"], labels=labels[:4]))
    ['input', 'stem.weight']
    """
    check_choice("loss", loss, CURVED)
    check_probes(probes)
    graph = traceable(graph)
    source = open_source(data, graph.inputs, seed=seed)
    stream = streamed(graph, source, 4, mesh)
    fn, read = trace(graph), scores(graph)
    shapes = _shapes(graph, stream, tensors)
    classes = None if labels is None else jnp.asarray(np.asarray(labels, np.int32))
    if classes is not None and source.length is not None and len(classes) != source.length:
        raise ConfigError(f"there are {len(classes)} labels for {source.length} samples")

    def one(arrays: Any, sample: Mapping[str, Array], number: Array) -> dict[str, Array]:
        own = read(fn(arrays, sample))

        def value(shifts: Mapping[str, Array]) -> Array:
            def shifted(name: str, value: Any) -> Any:
                shift = layout.arranged(shifts[name], value)
                return layout.mapped(lambda x: jnp.asarray(x) + shift, value)

            z = read(fn.quantized(arrays, Hook(shifts, shifted), sample))
            if classes is not None:
                each = [jnp.mean(jax.nn.log_softmax(v, -1)[..., classes[number]]) for v in z.values()]
                return -jnp.mean(jnp.stack(each))
            return losses(lax.stop_gradient(own), z)[loss]

        def product(key: Array) -> dict[str, Array]:
            keys = {k: jax.random.fold_in(key, i) for i, k in enumerate(shapes)}
            r = {k: jax.random.rademacher(keys[k], s, jnp.float32) for k, s in shapes.items()}
            none = {k: jnp.zeros(s, jnp.float32) for k, s in shapes.items()}
            # Backwards twice: the convolutions' own gradients have no forward derivative.
            curved = jax.grad(lambda x: sum(jnp.vdot(r[k], g) for k, g in jax.grad(value)(x).items()))(none)
            return {k: jnp.vdot(r[k], curved[k]) for k in shapes}

        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), number), probes)
        return jax.tree.map(lambda x: jnp.mean(x, 0), lax.map(product, keys))

    with needing_gradients("hessian_trace"):
        traces = stream.rows(stream.each(one), packed(graph, params, stream), title="hessian")
    return {k: float(traces[k].mean(dtype=np.float64)) for k in shapes}


def check_probes(probes: int) -> None:
    """Raise a ConfigError unless there is at least one."""
    if not isinstance(probes, int) or probes < 1:
        raise ConfigError(f"probes is {probes!r}; expected a whole number, at least 1")


def _probes(loss: Loss, z: Mapping[str, Array], seed: int, number: Array, count: int) -> dict[str, Array]:
    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), number), count)
    return jax.vmap(functools.partial(probe, loss, z))(keys)


def _shapes(graph: Graph, stream: Stream, tensors: Iterable[str] | None) -> dict[str, tuple[int, ...]]:
    """The shapes of tensors of one sample, of all floats if none are named."""
    made = [*(v.name for v in graph.inputs), *(o for n in graph.nodes for o in n.outputs if o)]
    names = [*made, *graph.params] if tensors is None else list(tensors)
    fn = trace(graph, taps=names)  # says which are not there
    seen = stream.shapes(lambda params, sample: fn(params, sample)[1], dict(graph.params))
    floats = {k: tuple(seen[k].shape) for k in names if _is_float(seen.get(k))}
    if tensors is not None and (others := [k for k in names if k not in floats]):
        raise ConfigError(f"tensor {others[0]!r} is not a float tensor.{suggest(others[0], floats)}")
    return floats


def _channels(graph: Graph, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The axis of the channels of each tensor that has some."""
    own = channel_axes(graph)
    second = {k: 1 for k, shape in shapes.items() if k not in graph.params and len(shape) > 1}
    return second | {k: own[k] for k in shapes if k in own}


def _is_float(value: Any) -> bool:
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _watch(x: Array, sums: Array, axis: int) -> Array:
    return x


def _watch_forward(x: Array, sums: Array, axis: int) -> tuple[Array, None]:
    return x, None


def _watch_backward(axis: int, _: None, g: Array) -> tuple[Array, Array]:
    square = jnp.square(g)
    rest = tuple(i for i in range(g.ndim) if i != axis)
    return g, jnp.sum(square, rest) if axis >= 0 else jnp.sum(square)[None]


_watch.defvjp(_watch_forward, _watch_backward)
