"""A stream over data: one compiled program over all samples, on one device or over a mesh.

A program is a pure function of arguments, the same for all samples (weights, a plan), of a batch's inputs and of the
samples' numbers. Its results lead with samples (`spread`, `each`) or add up (`folded`); then samples are taken one at a
time, so that the size of a batch has no effect, and the host merges the devices' shares in their order. The last batch is
filled up and masked, so that one program serves all batches, and a thread reads the next batch while XLA computes.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jq.data.arrays import Sample
from jq.data.sources import Source
from jq.errors import ConfigError, DataError
from jq.util.progress import progress_bar

Program = Callable[[Any, Any, Any], Any]
"""A function of arguments, of inputs that lead with samples, and of the samples' numbers; -1 fills up a batch."""

_AT_ONCE = 2  # batches in memory that are computed at the same time


class GraphFunction(Protocol):
    """A graph read as a function: a `Traced`."""

    @property
    def static_inputs(self) -> frozenset[str]: ...  # noqa: D102  inputs that decide shapes
    @property
    def wide(self) -> bool: ...  # noqa: D102  whether 64-bit types are data


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Samples stacked on a new leading axis."""

    inputs: Sample  # each [size, *sample shape]
    valid: np.ndarray  # bool [size]; False where a short batch is filled up with its last sample
    start: int  # index of the first sample

    @property
    def count(self) -> int:
        """The number of samples that are there."""
        return int(self.valid.sum())

    @property
    def numbers(self) -> np.ndarray:
        """The index of each sample, int32, and -1 for those that fill the batch up."""
        return np.where(self.valid, np.arange(self.start, self.start + self.valid.size), -1).astype(np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class Stream:
    """A source in batches of one size, split over the first axis of a mesh."""

    source: Source
    size: int  # samples in a batch, a multiple of the devices
    mesh: Mesh
    known: Mapping[str, np.ndarray]  # inputs that decide shapes, the same for all samples
    wide: bool  # whether 64-bit types are data

    @classmethod
    def of(cls, source: Source, size: int, *readings: GraphFunction, mesh: Mesh | None = None) -> Stream:
        """The stream for programs that call these readings, by default on one device."""
        mesh = local_mesh(1) if mesh is None else mesh
        devices, static = devices_of(mesh), frozenset[str]().union(*(r.static_inputs for r in readings))
        known = {k: v for k, v in source.head.items() if k in static}
        return cls(source, -(-size // devices) * devices, mesh, known, any(r.wide for r in readings))

    @property
    def types(self) -> contextlib.AbstractContextManager[Any]:
        """JAX with the types that the readings compute in."""
        return jax.enable_x64(True) if self.wide else contextlib.nullcontext()

    def traced(self, inputs: Sample) -> Sample:
        """The inputs that a program gets, in the types that JAX has now."""
        return {k: narrow(v) for k, v in inputs.items() if k not in self.known}

    def shapes(self, fn: Callable[[Any, Sample], Any], arguments: Any) -> Any:
        """The shapes of `fn(arguments, sample)`."""
        with self.types:
            head = self.traced(self.source.head)
            return jax.eval_shape(lambda given, inputs: fn(given, {**inputs, **self.known}), arguments, head)

    def like(self) -> tuple[dict[str, Any], Any]:
        """The shapes and types of what a program gets of a batch, where all samples are like the first."""
        head, split = self.traced(self.source.head), divided(self.mesh)

        def batch(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self.size, *shape), dtype, sharding=split)

        return {k: batch(v.shape, v.dtype) for k, v in head.items()}, batch((), np.int32)

    def batches(self, skip: int = 0) -> Generator[Batch, None, None]:
        """Yield the batches without the first `skip` samples; a DataError if no sample is there."""
        with contextlib.closing(batches(self.source, self.size, skip=skip)) as stream:
            none = not skip
            for batch in stream:
                for name, value in self.known.items():
                    if not (batch.inputs[name] == value).all():
                        shown = np.array2string(value, threshold=8, separator=", ").replace("\n", "")
                        raise DataError(
                            f"input {name!r} decides shapes, so all samples must have the value of the first, {shown}; "
                            "group the samples by it, or give one sample"
                        )
                yield batch
                none = False
            if none:
                raise DataError("a pass over the data needs samples; got none; give data that can be read again")

    def alike(self, purpose: str) -> list[Batch]:
        """All batches, in memory; a DataError if samples differ in shape."""
        shapes = {k: a.shape for k, a in self.source.head.items()}
        whole = list(self.batches())
        if any({k: a.shape[1:] for k, a in batch.inputs.items()} != shapes for batch in whole):
            raise DataError(f"{purpose} needs samples of one shape; got several; resize them")
        return whole

    def run(self, program: Program, arguments: Any, batch: Batch) -> Any:
        """Start a compiled program on a batch and return its results, which may still be under way."""
        with self.types:
            placed = jax.tree.map(
                lambda v: jax.make_array_from_callback(v.shape, divided(self.mesh), lambda part: v[part]),
                (self.traced(batch.inputs), batch.numbers),
            )
            return program(arguments, *placed)

    def results(
        self,
        program: Program,
        arguments: Any,
        given: Iterable[Batch] | None = None,
        *,
        concurrent: bool = False,
        title: str | None = None,
    ) -> Iterator[tuple[Batch, Any]]:
        """Yield each batch with its results as numpy while the next one is under way; by default all of one pass.

        With `concurrent`, a CPU computes several batches at the same time. A `title` shows a progress bar.
        """

        def start(batch: Batch) -> tuple[Batch, Any]:
            return batch, self.run(program, arguments, batch)

        bar = progress_bar(title, self.source.length) if title else contextlib.nullcontext(lambda _: None)
        with bar as advance, contextlib.closing(self.batches()) as own:
            wanted = own if given is None else given
            begun = concurrently(start, wanted) if concurrent else map(start, wanted)
            for (batch, made), _ in itertools.pairwise(itertools.chain(begun, [None])):
                yield batch, jax.tree.map(np.asarray, made)
                advance(batch.count)

    def rows(self, program: Program, arguments: Any, given: Iterable[Batch] | None = None, **options: Any) -> Any:
        """The results of all samples, one after the other; options are those of `results`."""
        results = self.results(program, arguments, given, **options)
        parts = [jax.tree.map(lambda v, batch=batch: v[batch.valid], made) for batch, made in results]
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)

    def total(self, program: Program, arguments: Any, merge: Callable[[Any, Any], Any], **options: Any) -> Any:
        """The results of a `folded` program on all batches, merged on the host in 64 bits."""
        made = (share for _, made in self.results(program, arguments, **options) for share in shares(made, self.mesh))
        return functools.reduce(merge, (jax.tree.map(lambda v: v.astype(np.float64), share) for share in made))

    def spread(self, program: Program, options: dict[str, Any] | None = None) -> Program:
        """The compiled program, of which each device takes a share of the batch; results lead with samples.

        `options` are for XLA.
        """
        return jax.jit(shared(program, self.mesh), compiler_options=options)

    def each(self, one: Callable[[Any, Sample, Any], Any], options: dict[str, Any] | None = None) -> Program:
        """The compiled program of `one(arguments, sample, number)`, a sample at a time; `options` are for XLA."""
        known = self.known  # a program outlives the stream and holds none of its data

        def program(arguments: Any, inputs: Sample, numbers: Any) -> Any:
            return lax.map(lambda item: one(arguments, {**item[0], **known}, item[1]), (inputs, numbers))

        return self.spread(program, options)

    def folded(
        self,
        one: Callable[[Any, Sample], Any],
        merge: Callable[[Any, Any], Any],
        *,
        init: Callable[[Any], Any] | None = None,
    ) -> Program:
        """The compiled program that merges `one(arguments, sample)` over the samples of a batch, in their order.

        Its results lead with the devices, each of which merges its share; `total` merges those.
        `init(arguments)` is the identity of `merge`, by default zeros.
        """

        def alone(arguments: Any, sample: Sample) -> tuple[Any, None]:
            return one(arguments, {**sample, **known}), None

        def fold(arguments: Any, inputs: Sample, numbers: Any) -> Any:
            return whole(arguments, inputs, numbers)[0]

        known, whole = self.known, folding(alone, merge, self.mesh, init=init)
        return jax.jit(fold)


def folding(
    one: Callable[[Any, Sample], tuple[Any, Any]],
    merge: Callable[[Any, Any], Any],
    mesh: Mesh,
    *,
    init: Callable[[Any], Any] | None = None,
) -> Program:
    """Return a program that merges the first of `one(arguments, sample)` over samples, and keeps the second of each.

    The first leads with the devices' shares (see `shares`), which the host merges: in a program, devices that wait for each
    other occupy the threads of XLA's CPU backend, and where a busy machine lets one of them take all, it ends the process.
    """
    local = len({device.process_index for device in mesh.devices.flat}) == 1

    def fold(arguments: Any, inputs: Sample, numbers: Any) -> tuple[Any, Any]:
        def take(total: Any, item: tuple[Sample, Any]) -> tuple[Any, Any]:
            value, on = one(arguments, item[0])
            merged = merge(total, value)
            return jax.tree.map(lambda new, old: jnp.where(item[1] >= 0, new, old), merged, total), on

        if init is None:
            shapes = jax.eval_shape(lambda sample: one(arguments, sample)[0], jax.tree.map(lambda v: v[0], inputs))
            none = jax.tree.map(lambda v: jnp.zeros(v.shape, v.dtype), shapes)
        else:
            none = init(arguments)
        total, on = lax.scan(take, none, (inputs, numbers))
        return jax.tree.map(lambda v: v[None], total) if local else lax.all_gather(total, mesh.axis_names[0]), on

    whole, split = replicated(mesh).spec, divided(mesh).spec
    results = split if local else whole, split  # of another process's devices the host has what is gathered alone
    return jax.shard_map(fold, mesh=mesh, in_specs=(whole, split, split), out_specs=results, check_vma=False)


def shares(made: Any, mesh: Mesh) -> list[Any]:
    """Return what each device of a mesh made, of results that lead with devices; on the host."""
    made = jax.tree.map(np.asarray, made)
    return [jax.tree.map(lambda v, i=i: v[i], made) for i in range(devices_of(mesh))]


def concurrently(step: Callable[..., Any], *items: Iterable[Any]) -> Iterator[Any]:
    """Yield a step of each item, in order, two at the same time: XLA's CPU backend leaves cores idle on one."""
    given = zip(*items, strict=True)
    yield from itertools.starmap(step, itertools.islice(given, 1))  # compiles
    if jax.default_backend() != "cpu":
        yield from itertools.starmap(step, given)
        return
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        waiting: collections.deque[Future[Any]] = collections.deque()
        for item in given:
            waiting.append(pool.submit(lambda item: jax.block_until_ready(step(*item)), item))
            if len(waiting) > _AT_ONCE:  # few results wait to be taken
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


# --- Devices ---


def local_mesh(count: int | None = None) -> Mesh:
    """The first `count` devices of this process, by default all, along one axis."""
    devices = jax.local_devices()[:count]
    return jax.make_mesh((len(devices),), ("batch",), devices=devices)


def devices_of(mesh: Mesh) -> int:
    """The number of shares of a batch: the length of the mesh's first axis."""
    return mesh.shape[mesh.axis_names[0]]


def replicated(mesh: Mesh) -> NamedSharding:
    """A sharding with a copy for each device."""
    return NamedSharding(mesh, PartitionSpec())


def divided(mesh: Mesh) -> NamedSharding:
    """A sharding with a share of the leading axis for each device."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))


def shared(program: Program, mesh: Mesh) -> Program:
    """Return the program with arguments replicated, and batches and results divided."""
    whole, split = replicated(mesh).spec, divided(mesh).spec
    return jax.shard_map(program, mesh=mesh, in_specs=(whole, split, split), out_specs=split, check_vma=False)


def narrow(array: np.ndarray) -> np.ndarray:
    """An array in the type that JAX computes in."""
    return np.asarray(array, jax.dtypes.canonicalize_dtype(np.asarray(array).dtype))


# --- Batches ---


def batches(source: Source, size: int, *, skip: int = 0, prefetch: int = 1) -> Generator[Batch, None, None]:
    """Return the samples in batches of `size`, without the first `skip`; a thread reads up to `prefetch` ahead.

    A batch that ends early, because the data end or the shapes change, is filled up with its last sample.
    With `prefetch=0` a user's reader or iterable is called in the caller's thread, if only that may touch it.

    >>> from jq.data.sources import open_source
    >>> from jq.graph import Value
    >>> source = open_source(np.zeros((5, 3), np.float32), [Value("x", np.dtype("float32"), ("N", 3))])
    >>> [(b.start, b.inputs["x"].shape, b.valid.tolist()) for b in batches(source, 3)]
    [(0, (3, 1, 3), [True, True, True]), (3, (3, 1, 3), [True, True, False])]
    """
    if size < 1 or skip < 0 or prefetch < 0:
        raise ConfigError(
            f"batches need size of 1 or more, skip and prefetch of 0 or more; got {size}, {skip} and {prefetch}"
        )
    made = _grouped(source, size, skip)
    return _ahead(made, prefetch) if prefetch else made


def _grouped(source: Source, size: int, skip: int) -> Generator[Batch, None, None]:
    start = skip
    for _, alike in itertools.groupby(source.samples(skip), lambda sample: [a.shape for a in sample.values()]):
        while group := list(itertools.islice(alike, size)):
            count = len(group)
            if source.stack and count == size:  # views, no copies
                block = {name: array[start : start + size] for name, array in source.stack.items()}
            else:
                group += group[-1:] * (size - count)
                block = {name: np.stack([sample[name] for sample in group]) for name in group[0]}
            yield Batch(block, np.arange(size) < count, start)
            start += count


def _ahead(made: Generator[Batch, None, None], count: int) -> Generator[Batch, None, None]:
    """Yield from a generator that runs in a thread, which ends with the consumer."""
    ready: queue.SimpleQueue[Batch | BaseException] = queue.SimpleQueue()
    slots, stopped = threading.Semaphore(count), threading.Event()

    def fill() -> None:
        try:
            with contextlib.closing(made):
                while slots.acquire() and not stopped.is_set():  # `acquire` waits
                    ready.put(next(made))
        except BaseException as error:  # StopIteration at the end
            ready.put(error)

    thread = threading.Thread(target=fill, name="jq-data", daemon=True)
    thread.start()
    try:
        while not isinstance(batch := ready.get(), StopIteration):
            if isinstance(batch, BaseException):
                raise batch
            slots.release()
            yield batch
    finally:
        stopped.set()
        slots.release()
        thread.join(timeout=1)  # a user's reader may block for ever; the thread ends when it returns
