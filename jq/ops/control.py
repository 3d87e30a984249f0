"""Control flow: If, Loop, Scan.

Where conditions and trip counts are known while tracing, branches are picked and loops unrolled, so
known values stay known inside. Otherwise they become `lax.cond`, `lax.scan` and `lax.while_loop`, which
need values of fixed shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jq.errors import UnsupportedOp
from jq.graph import Graph
from jq.ops.table import Array, Context, demanded, op

_UNROLL = 4  # loops of at most this many rounds are unrolled, so that XLA fuses across rounds
_ENDLESS = 1 << 30  # a trip count from here on is no bound, as exporters write for a while loop
_TRUE = np.asarray(True)


def _known(value: Array) -> bool:
    return not isinstance(value, jax.core.Tracer)


def _true(value: Array) -> bool:
    return _known(value) and bool(np.all(value))


def _array(value: Any) -> Any:
    """A value as JAX's control flow carries it; sequences are lists and absent optionals None."""
    return jax.tree.map(jnp.asarray, value)


def _types(values: Sequence[Any]) -> str:
    return ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(values))


@op("If", steering=("cond",), host=True)
def if_(cond: Array, *, then_branch: Graph, else_branch: Graph, ctx: Context) -> tuple[Any, ...]:
    if _known(cond):
        return tuple(ctx.run(then_branch if _true(cond) else else_branch, []))
    branches = [lambda graph=graph: tuple(map(_array, ctx.run(graph, []))) for graph in (then_branch, else_branch)]
    types = [jax.eval_shape(branch) for branch in branches]
    if jax.tree.map(_type, types[0]) != jax.tree.map(_type, types[1]):
        raise UnsupportedOp(
            "its condition depends on the data, so both branches must give the same types, but they give "
            f"({_types(types[0])}) and ({_types(types[1])}); make the condition a constant, or the types equal"
        )
    return lax.cond(cond.reshape(()), *branches)


def _type(value: Any) -> tuple[Any, ...]:
    return value.shape, value.dtype


@op("Loop", steering=("M", "cond"), host=True)
def loop(
    M: Array | None = None, cond: Array | None = None, *v_initial: Any, body: Graph, ctx: Context
) -> tuple[Any, ...]:
    """Scan outputs have as many rows as the loop has rounds, so that number must be known while tracing."""
    cond = _TRUE if cond is None else cond
    if _known(cond) and not _true(cond):
        M = np.asarray(0)
    carried, scanned = list(v_initial), len(body.outputs) - 1 - len(v_initial)
    fixed, steady = _probe(body, carried, ctx)
    count = _ENDLESS if M is None else max(0, int(np.reshape(M, ()))) if _known(M) else None
    if count is not None and _known(cond) and (count <= _UNROLL or not fixed):
        done = _unrolled(count, carried, scanned, body, ctx)
        if done is not None:
            return done
    if not fixed:
        raise UnsupportedOp(
            "its iterations change the types of loop-carried values, or need their values or number, so the trip count "
            "and condition must be known while tracing, but they depend on the data"
        )
    if count is not None and count < _ENDLESS and steady and _known(cond):
        return _scanned(count, carried, body, ctx)
    if scanned:
        raise UnsupportedOp(
            "it has scan outputs, so the number of its iterations decides shapes and must be known while tracing, but trip "
            "count or condition depend on the data"
        )
    return _while(M, cond, carried, body, ctx)


def _probe(body: Graph, carried: Sequence[Any], ctx: Context) -> tuple[bool, bool]:
    """Whether rounds can run as one traced body, and whether that body goes on whatever the data are.

    They can where no value is needed known and none changes its type from round to round.
    """
    needed = demanded(body)
    if any(v is None or isinstance(v, list) for v in carried):
        return False, False
    if not needed.isdisjoint([body.inputs[0].name, *(v.name for v in body.inputs[2:])]):
        return False, False
    steady = False

    def after(index: Array, *values: Array) -> tuple[Array, ...]:
        nonlocal steady
        more, *results = ctx.run(body, [index, _TRUE, *values])
        steady = _true(more)
        return tuple(map(_array, results[: len(carried)]))

    try:
        types = jax.eval_shape(after, jnp.asarray(0, _index()), *map(_array, carried))
    except UnsupportedOp:  # a shape inside depends on a carried value
        return False, False
    return [_type(t) for t in types] == [_type(_array(v)) for v in carried], steady


def _index() -> Any:
    return jax.dtypes.canonicalize_dtype(np.int64)


def _unrolled(count: int, carried: list[Any], scanned: int, body: Graph, ctx: Context) -> tuple[Any, ...] | None:
    """Round by round while tracing; None where the condition turns out to depend on the data."""
    rows: list[list[Any]] = [[] for _ in range(scanned)]
    start = len(carried)
    for index in range(count):
        more, *values = ctx.run(body, [np.asarray(index, np.int64), _TRUE, *carried])
        carried = values[:start]
        for row, value in zip(rows, values[start:], strict=True):
            row.append(value)
        if not _known(more):
            return None
        if not _true(more):
            break
    if scanned and not rows[0]:
        return None
    return (*carried, *(np.stack(r) if all(isinstance(v, np.ndarray) for v in r) else jnp.stack(r) for r in rows))


def _scanned(count: int, carried: Sequence[Any], body: Graph, ctx: Context) -> tuple[Any, ...]:
    def step(before: tuple[Array, ...], index: Array) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        _, *values = ctx.run(body, [index, _TRUE, *before])
        values = list(map(_array, values))
        return tuple(values[: len(before)]), tuple(values[len(before) :])

    final, rows = lax.scan(step, tuple(map(_array, carried)), jnp.arange(count, dtype=_index()))
    return (*final, *rows)


def _while(M: Array | None, cond: Array, carried: Sequence[Any], body: Graph, ctx: Context) -> tuple[Any, ...]:
    largest = np.iinfo(_index()).max
    limit = largest if M is None else min(int(np.reshape(M, ())), largest) if _known(M) else jnp.reshape(M, ())

    def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
        index, _, *values = state
        more, *after = ctx.run(body, [index, _TRUE, *values])
        return (index + 1, jnp.reshape(more, ()), *map(_array, after))

    start = (jnp.asarray(0, _index()), jnp.reshape(cond, ()), *map(_array, carried))
    return tuple(lax.while_loop(lambda state: state[1] & (state[0] < limit), step, start)[2:])


@op("Scan", since=9)
def scan(
    *initial_state_and_scan_inputs: Array, body: Graph, num_scan_inputs: int, scan_input_axes: Any = None,
    scan_input_directions: Any = None, scan_output_axes: Any = None, scan_output_directions: Any = None, ctx: Context,
) -> tuple[Array, ...]:  # fmt: skip
    states = len(initial_state_and_scan_inputs) - num_scan_inputs
    initial, inputs = initial_state_and_scan_inputs[:states], initial_state_and_scan_inputs[states:]
    outputs = len(body.outputs) - states
    axes, backward = scan_input_axes or (0,) * num_scan_inputs, scan_input_directions or (0,) * num_scan_inputs
    rows = [_flipped(jnp.moveaxis(x, axis, 0), back) for x, axis, back in zip(inputs, axes, backward, strict=True)]

    def step(before: tuple[Array, ...], row: list[Array]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        values = tuple(map(_array, ctx.run(body, [*before, *row])))
        return values[:states], values[states:]

    final, results = lax.scan(step, tuple(initial), rows)
    axes, backward = scan_output_axes or (0,) * outputs, scan_output_directions or (0,) * outputs
    turned = (jnp.moveaxis(_flipped(y, back), 0, a) for y, a, back in zip(results, axes, backward, strict=True))
    return *final, *turned


def _flipped(x: Array, backward: int) -> Array:
    return jnp.flip(x, 0) if backward else x


@op("Scan", since=8)
def scan_8(
    sequence_lens: Array | None, *initial_state_and_scan_inputs: Array, body: Graph, directions: Any = None,
    num_scan_inputs: int, ctx: Context,
) -> tuple[Array, ...]:  # fmt: skip
    """Axis 0 is the batch and axis 1 the sequence; rows behind an entry's own length are zeros."""
    states = len(initial_state_and_scan_inputs) - num_scan_inputs
    backward = directions or (0,) * num_scan_inputs
    batch, length = initial_state_and_scan_inputs[states].shape[:2]
    lengths = jnp.full(batch, length) if sequence_lens is None else sequence_lens

    def entry(size: Array, *values: Array) -> tuple[Array, ...]:
        places = jnp.arange(length)
        turned = jnp.clip(size - 1 - places, 0)
        inputs = tuple(x[turned] if back else x for x, back in zip(values[states:], backward, strict=True))

        def step(before: tuple[Array, ...], row: tuple[Array, ...]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
            place, *rest = row
            after = tuple(map(_array, ctx.run(body, [*before, *rest])))
            kept = tuple(jnp.where(place < size, new, old) for new, old in zip(after, before, strict=False))
            return kept, tuple(jnp.where(place < size, y, jnp.zeros_like(y)) for y in after[states:])

        final, rows = lax.scan(step, values[:states], (places, *inputs))
        return (*final, *rows)

    return jax.vmap(entry)(lengths, *initial_state_and_scan_inputs)
