"""Calibration and evaluation data: any accepted form becomes samples.

A sample is one dict of arrays with which the model runs once. `open_source` takes every accepted form of
data to a `Source` of samples, checked against the inputs that the model declares.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
import operator
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from jq.data import arrays, images
from jq.data.arrays import Sample
from jq.data.fitting import Fitting, fitting, is_moved
from jq.data.preprocessing import UNIT, Pixels, Preprocessing, stored_preprocessing
from jq.errors import ConfigError, DataError, suggest
from jq.graph import Dim, Value
from jq.util.digest import digest

Item = TypeVar("Item")

RANDOM_SAMPLES = 16
_READERS = min(4, os.cpu_count() or 1)  # threads that read the files of a folder
_JUDGED = 8  # samples on which the guard judges tensors


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """Samples of one model, in a fixed order."""

    length: int | None  # number of samples, if known
    again: bool  # whether reading twice gives the same samples
    first: int  # samples in the first thing that the user handed over: 8 for a reader's batches of 8
    head: Sample  # the first sample, which can be looked at without reading
    samples: Callable[..., Iterator[Sample]]  # samples(skip=0): in order, without the first `skip`
    stack: Sample | None = None  # [length, *sample shape], where all samples lie in one array per input
    names: tuple[str, ...] | None = None  # of samples that are files: paths in the folder, without the ending
    preprocessing: Preprocessing | None = None  # of the pixels, where samples are made of them

    def limited(self, limit: int | None) -> Source:
        """The first samples of these, at most `limit`; all, if that is None.

        >>> source = open_source(np.zeros((8, 3), np.float32), [Value("x", np.dtype("float32"), ("N", 3))])
        >>> source.limited(5).length, len(list(source.limited(5).samples(skip=3)))
        (5, 2)
        """
        if limit is None:
            return self
        try:
            count = min(operator.index(limit), sys.maxsize)
        except TypeError:
            count = 0
        if count < 1:
            raise ConfigError(f"limit={limit!r}: expected a whole number of at least one sample")
        length = None if self.length is None else min(count, self.length)
        return dataclasses.replace(
            self, length=length, samples=lambda skip=0: itertools.islice(self.samples(skip), max(0, count - skip))
        )


def open_source(data: Any, inputs: Sequence[Value], *, seed: int = 0) -> Source:
    """Return the samples that `data` hold for a model with these inputs.

    `data` is an onnxruntime `CalibrationDataReader`; an iterable of `{input name: array}`; a dict of
    stacked arrays; a path to `.npz`, `.npy`, or a folder of images or arrays, one sample per file; a
    `jq.data.images.ImageFolder`; or None for random data. A model with one input takes bare arrays too. `Pixels` is any of
    them with the preprocessing of its images or bytes; without it they are fed as RGB / 255, with a warning. Arrays with
    their channels on the other side, and float64, are taken too.

    Batches are split into samples of batch 1, unless the model declares a batch: stacked arrays are cut into
    samples of that batch, and a reader or an iterable must yield such samples. An input without a batch axis (a
    scalar, a fixed shape) may stand in stacked data once, for all samples.

    >>> source = open_source(np.zeros((8, 3), np.float32), [Value("x", np.dtype("float32"), ("N", 3))])
    >>> source.length, source.head["x"].shape
    (8, (1, 3))
    """
    for value in inputs:
        if value.containers or value.dtype == np.dtype(object):
            raise DataError(f"input {value} is not a tensor of numbers; data for it cannot be read")
    if not inputs:
        raise DataError("the model has no inputs, so it cannot be run on data")
    if data is None:
        text = f"{RANDOM_SAMPLES} random samples of seed {seed} are used; pass real data for meaningful ranges"
        warnings.warn(f"no data given: {text}", UserWarning, stacklevel=3)
        return _from_random(inputs, seed)
    if isinstance(data, images.ImageFolder):
        return _from_images(data, inputs)
    data, pixels = (data.data, data.preprocessing) if isinstance(data, Pixels) else (data, None)
    if isinstance(data, (str, os.PathLike)):
        return _from_path(Path(data), inputs, pixels)
    if callable(getattr(data, "get_next", None)):
        return _from_items(lambda: _read_all(data), inputs, callable(getattr(data, "rewind", None)), None, pixels)
    if isinstance(data, Mapping) or hasattr(data, "__array__"):
        return _from_arrays(data, inputs, "data", pixels)
    try:
        again = iter(data) is not data
    except TypeError:
        known = "a reader with get_next(), an iterable of {input name: array}, arrays, a path or None"
        raise DataError(f"data of type {type(data).__name__!r} are not supported; expected {known}") from None
    if not isinstance(data, (list, tuple)):
        return _from_items(lambda: iter(data), inputs, again, None, pixels)
    length = sum(len(_split(item, inputs, f"item {i}", pixels)) for i, item in enumerate(data))
    return _from_items(lambda: iter(data), inputs, True, length, pixels)


def as_trained(data: Any, metadata: Mapping[str, str]) -> Any:
    """Return data whose pixels become what a model's metadata say, unless the data say it themselves.

    A preprocessing of the data's own that is another one is a warning.

    >>> as_trained("photos", Preprocessing(mean=0.5).to_metadata()).preprocessing.mean
    (0.5,)
    """
    stored = stored_preprocessing(metadata)
    if stored is None or data is None:
        return data
    own = preprocessing_of(data)
    if own is None:
        return Pixels(data, stored)
    if own != stored:
        warnings.warn(
            f"images are fed as {own}, but the model was quantized on images fed as {stored}; leave out --prep and the "
            "options of pixels to use the model's own",
            UserWarning,
            stacklevel=3,
        )
    return data


def preprocessing_of(data: Any, inputs: Sequence[Value] = ()) -> Preprocessing | None:
    """Return the preprocessing that the data declare or, for a model's inputs, that files, folders and arrays get."""
    if isinstance(data, images.ImageFolder):
        return data.alone
    if isinstance(data, Pixels):
        return data.preprocessing
    stored = isinstance(data, (str, os.PathLike, Mapping)) or hasattr(data, "__array__")
    return open_source(data, inputs).preprocessing if inputs and stored else None


def in_memory(samples: Sequence[Sample]) -> Source:
    """The source of samples that were read already."""
    return Source(len(samples), True, 1, samples[0], lambda skip=0: iter(samples[skip:]))


def readable_again(data: Any, inputs: Sequence[Value], seed: int = 0) -> Any:
    """Return data that can be read more than once: what was given, or else a list of all that it holds."""
    source = open_source(data, inputs, seed=seed)
    return data if source.again else list(source.samples())


def drawn(data: Any, inputs: Sequence[Value], count: int, seed: int) -> list[Sample]:
    """Return this many samples of data, without replacement and in their order, as a generator with this seed draws them.

    >>> inputs = [Value("x", np.dtype("float32"), ("N",))]
    >>> [int(s["x"][0]) for s in drawn(np.arange(9, dtype=np.float32), inputs, 3, seed=0)]
    [2, 4, 5]
    """
    source = open_source(data, inputs)
    if source.length is None:
        source = in_memory(list(source.samples()))
    chosen = frozenset(np.random.default_rng(seed).permutation(source.length or 0)[:count].tolist())
    return [sample for i, sample in enumerate(source.samples()) if i in chosen]


def calibration_samples(data: Any, inputs: Sequence[Value], held_out: int | None, seed: int = 0) -> Any:
    """Return data that can be read more than once, without the samples that `decides` keeps from calibration.

    >>> inputs = [Value("x", np.dtype("float32"), ("N",))]
    >>> [int(s["x"][0]) for s in calibration_samples(np.float32([0, 1, 2, 3, 4]), inputs, 2)]
    [0, 2, 4]
    """
    if held_out is None:
        return readable_again(data, inputs, seed)
    samples = enumerate(open_source(data, inputs, seed=seed).samples())
    return [sample for i, sample in samples if not decides(i, held_out)]


def decides(index: int, held_out: int) -> bool:
    """Whether a sample is held out from calibration and finetuning, one in `held_out`, to decide between models.

    >>> [i for i in range(9) if decides(i, 4)]
    [3, 7]
    """
    return index % held_out == held_out - 1


def judged_samples(data: Any, inputs: Sequence[Value], seed: int = 0, *, models: int = 1) -> list[Sample]:
    """Return the first samples, on which a plan is judged: fewer where several models run on them."""
    source = open_source(data, inputs, seed=seed)
    return list(itertools.islice(source.samples(), _JUDGED // models))


def fingerprint(source: Source) -> str:
    """Return a hash of the first sample and the length, by which a resumed run notices other data.

    >>> inputs = [Value("x", np.dtype("float32"), ("N", 3))]
    >>> one, other = np.zeros((5, 3), np.float32), np.ones((5, 3), np.float32)
    >>> fingerprint(open_source(one, inputs)) == fingerprint(open_source(other, inputs))
    False
    """
    return digest(source.length, source.head)


def _from_arrays(data: Any, inputs: Sequence[Value], where: str, pixels: Preprocessing | None = None) -> Source:
    """Stacked arrays; those that need it are made fit for the model sample by sample."""
    given = _given(data, inputs, where)
    fits = {v.name: fit for v in inputs if (fit := _fitting(v, given[v.name], pixels, where)) is not None}
    stack = {k: fits[k].in_order(np.asarray(v)) if k in fits else v for k, v in given.items()}
    stored = [dataclasses.replace(v, dtype=stack[v.name].dtype) if v.name in fits else v for v in inputs]
    source = _stacked(stack, stored, where)
    if not fits:
        return source

    def converted(sample: Sample) -> Sample:
        return {k: fits[k].converted(v) if k in fits else v for k, v in sample.items()}

    used = next((fit.pixels for fit in fits.values() if fit.pixels is not None), None)
    made: dict[str, Any] = {"head": converted(source.head), "stack": None, "preprocessing": used}
    return dataclasses.replace(source, samples=lambda skip=0: map(converted, source.samples(skip)), **made)


def _stacked(data: Any, inputs: Sequence[Value], where: str) -> Source:
    """Stacked arrays of the inputs' types: each is seen as [samples, *sample shape], with no copy.

    They are stacked along their batch. An input beside others may have no batch: then along an axis of its own.
    """
    stack = {value.name: _array(value, data[value.name], where) for value in inputs}
    apart = {v.name for v in inputs if v.shape and len(inputs) > 1 and stack[v.name].ndim == len(v.shape) + 1}
    inner = {v.name: v.shape if v.name in apart else v.shape and v.shape[1:] for v in inputs}
    stack = _checked(
        stack, [dataclasses.replace(v, shape=v.shape and (None, *(inner[v.name] or ()))) for v in inputs], where
    )
    for value in inputs:
        array, size = stack[value.name], _fixed_batch(value) or 1
        if value.name in apart:
            continue
        total, left = (len(array), len(array) % size) if array.ndim else (1, 0)
        if left:
            raise DataError(
                f"{where}: {total} samples are not a multiple of the batch {size} of input {value}; leave {left} out"
            )
        stack[value.name] = array.reshape(total // size, size, *array.shape[1:]) if array.ndim else array[None]
    counts = {name: len(array) for name, array in stack.items()}
    if not all(counts.values()):
        raise DataError(f"{where}: there are no samples; the inputs hold {counts}")
    head = _checked({name: array[0] for name, array in stack.items()}, inputs, where)
    length = max(counts.values())
    for value in inputs:
        once = value.shape == () or _fixed_batch(value) is not None
        if counts[value.name] != length and not (once and counts[value.name] == 1):
            raise DataError(f"{where}: inputs hold different numbers of samples: {counts}")
    stack = {name: np.broadcast_to(array, (length, *array.shape[1:])) for name, array in stack.items()}

    def samples(skip: int = 0) -> Iterator[Sample]:
        return (_finite({name: array[i] for name, array in stack.items()}, f"sample {i}") for i in range(skip, length))

    return Source(length, True, 1, head, samples, stack)


def _from_items(
    items: Callable[[], Iterator],
    inputs: Sequence[Value],
    again: bool,
    length: int | None,
    pixels: Preprocessing | None = None,
) -> Source:
    """Return the source for a reader or an iterable, each item of which is one sample or a batch of them."""
    begun = items()
    item = next(begun, None)
    if item is None:
        raise DataError("the data are empty: the first item is missing (an exhausted reader or generator?)")
    first = _split(item, inputs, "sample 0", pixels)
    once = [itertools.chain([item], begun)]

    def samples(skip: int = 0) -> Iterator[Sample]:
        if not again and not once:
            raise DataError("the data can be read only once; pass a list, arrays, a file, or a reader with rewind()")
        index = 0
        for item in items() if again else once.pop():
            for sample in _split(item, inputs, f"sample {index}", pixels):
                if index >= skip:
                    yield _finite(sample, f"sample {index}")
                index += 1

    return Source(length, again, len(first), first[0], samples)


def _read_all(reader: Any) -> Iterator[Mapping[str, Any]]:
    """Yield everything from a `CalibrationDataReader`, rewound if it can be."""
    if callable(getattr(reader, "rewind", None)):
        reader.rewind()
    with contextlib.suppress(StopIteration):  # of an iterator inside; onnxruntime's own readers return None
        while (item := reader.get_next()) is not None:
            if not isinstance(item, Mapping):
                raise DataError(f"get_next() returned {type(item).__name__!r}; expected {{input name: array}} or None")
            yield item


def _from_each(items: Sequence[Item], read: Callable[[Item], Sample]) -> Source:
    """Samples that are made one by one, a few at a time."""

    def samples(skip: int = 0) -> Iterator[Sample]:
        with ThreadPoolExecutor(_READERS) as pool:
            pending: collections.deque[Future[Sample]] = collections.deque()
            for i in range(skip, len(items) + _READERS):
                if i < len(items):
                    pending.append(pool.submit(read, items[i]))
                if i >= skip + _READERS:
                    yield pending.popleft().result()

    return Source(len(items), True, 1, read(items[0]), samples)


_MOST_RANDOM = 1 << 24  # numbers of a sample: several are drawn at once, as float64


def _from_random(inputs: Sequence[Value], seed: int) -> Source:
    """Standard normal floats, zeros and ones of other types; the batch is 1."""
    batch = {v.shape[0] for v in inputs if v.shape and isinstance(v.shape[0], str)}
    shapes: list[tuple[int, ...]] = []
    for value in inputs:
        dims = [1 if d in batch or (d is None and i == 0) else d for i, d in enumerate(value.shape or ())]
        shapes.append(tuple(d for d in dims if isinstance(d, int)))
        if value.dtype is None or value.shape is None or len(shapes[-1]) < len(dims):
            raise DataError(
                f"no data given, and random data cannot be made for input {value}: its type or shape is not fully known; "
                "give data, or fix its dims"
            )
    if (size := sum(map(math.prod, shapes))) > _MOST_RANDOM:
        raise DataError(
            f"no data given, and random data of {size:,} numbers for each sample would be too large; give data"
        )

    def read(i: int) -> Sample:
        rng, sample = np.random.default_rng([seed, i]), {}
        for value, shape in zip(inputs, shapes, strict=True):
            try:
                made = rng.standard_normal(shape) if _is_float(value.dtype) else rng.integers(0, 2, shape)
                sample[value.name] = np.asarray(made).astype(value.dtype)
            except (MemoryError, ValueError) as error:  # of a damaged or hostile model
                raise DataError(f"not enough memory for random data for input {value}: {error}") from error
        return sample

    return _from_each(range(RANDOM_SAMPLES), read)


def _from_path(path: Path, inputs: Sequence[Value], pixels: Preprocessing | None = None) -> Source:
    if not path.is_dir():
        return _from_arrays(_load(path, inputs), inputs, str(path), pixels)
    files, pictures = images.files_of(path, (".npy", ".npz")), images.files_of(path, images.SUFFIXES)
    if bool(files) == bool(pictures):
        content = f"{len(files)} arrays and {len(pictures)} images" if files else "neither arrays nor images"
        endings = ", ".join(sorted(images.SUFFIXES))
        raise DataError(f"{path} holds {content}; expected either .npy and .npz files or {endings}")
    if pictures:
        if pixels is None:
            warnings.warn(f"{path}: {images.DEFAULTS}", UserWarning, stacklevel=4)
        return _from_images(images.ImageFolder(path, **vars((pixels or UNIT).alone)), inputs)

    def read(file: Path) -> Sample:
        sample = _arrays(_load(file, inputs), inputs, str(file), pixels)
        for value in inputs:  # a sample may lack its batch axis
            if value.shape and sample[value.name].ndim == len(value.shape) - 1:
                sample[value.name] = sample[value.name][None]
        samples = _split(sample, inputs, str(file))
        if len(samples) > 1:
            raise DataError(f"{file} holds {len(samples)} samples; in a folder of arrays, each file is one")
        return _finite(samples[0], str(file))

    return dataclasses.replace(_from_each(files, read), names=_names(path, files))


def _from_images(folder: images.ImageFolder, inputs: Sequence[Value]) -> Source:
    groups, read = images.reader(folder, inputs)
    names = _names(Path(folder.path), [group[0] for group in groups]) if len(groups[0]) == 1 else None
    return dataclasses.replace(_from_each(groups, read), names=names, preprocessing=folder.alone)


def _names(folder: Path, files: Sequence[Path]) -> tuple[str, ...]:
    return tuple(file.relative_to(folder).with_suffix("").as_posix() for file in files)


def _load(path: Path, inputs: Sequence[Value]) -> Any:
    """The mapped array of an .npy file; of an .npz the inputs by name, or the only array that fits the only input."""
    with arrays.opened(path) as content:
        if not isinstance(content, arrays.Archive):
            return content
        members = content.members
        if all(value.name in members for value in inputs):
            return {value.name: content.read(value.name) for value in inputs}
        if len(inputs) == 1:
            inner = inputs[0].shape and inputs[0].shape[1:]
            shapes = {name: member.shape or () for name, member in members.items()}
            alike = [n for n, s in shapes.items() if _fits(inner, s[1:], {}) or _fits(inner, s, {})]
            alike = alike or [n for n, s in shapes.items() if is_moved(inputs[0].shape, s)]
            if len(alike) == 1:
                return content.read(alike[0])
        held, expected = ", ".join(map(str, members.values())) or "no arrays", ", ".join(map(str, inputs))
        raise DataError(f"{path} holds {held}; the model needs {expected}; name the arrays after its inputs")


def _arrays(data: Any, inputs: Sequence[Value], where: str, pixels: Preprocessing | None = None) -> Sample:
    """The arrays by input name, with the right types and channels."""
    made, given = {}, _given(data, inputs, where)
    for value in inputs:
        array = given[value.name]
        if (fit := _fitting(value, array, pixels, "data")) is not None:
            array = fit.converted(fit.in_order(np.asarray(array)))
        made[value.name] = _array(value, array, where)
    return made


def _fitting(value: Value, given: Any, pixels: Preprocessing | None, where: str) -> Fitting | None:
    """The change that makes an array fit an input; None for anything that is not an array yet."""
    known = isinstance(getattr(given, "dtype", None), np.dtype)  # a tensor of torch's has another
    return fitting(value, np.asarray(given), pixels, where) if known else None


def _given(data: Any, inputs: Sequence[Value], where: str) -> dict[str, Any]:
    """The arrays of each input as they were given; a model with one input needs no name."""
    declared = {value.name: value for value in inputs}
    if not isinstance(data, Mapping):
        if len(inputs) > 1:
            raise DataError(f"{where}: expected {{input name: array}} for the inputs {', '.join(declared)}")
        data = {inputs[0].name: data}
    for name in [*data, *declared]:
        if name not in declared:
            near = suggest(str(name), declared)
            raise DataError(f"{where}: the model has no input {name!r}.{near} It has: {', '.join(declared)}")
        if name not in data:
            raise DataError(f"{where}: input {name!r} is missing; the model needs {declared[name]}")
    return {name: data[name] for name in declared}


def _array(value: Value, given: Any, where: str) -> np.ndarray:
    """As numpy. Python's numbers become the declared type; arrays must have it."""
    try:
        array = np.asarray(given)
        python = not hasattr(given, "dtype") and array.dtype in (np.bool_, np.int64, np.float64)
        if python and value.dtype and (array.dtype != np.float64 or _is_float(value.dtype)):
            array = np.asarray(given, value.dtype)
    except Exception as error:  # ragged lists, numbers out of range, tensors of another device
        hint = " (from a loader of (images, labels), pass only the images)" if isinstance(given, (list, tuple)) else ""
        raise DataError(f"{where}: input {value.name!r} is not an array: {str(error).splitlines()[0]}{hint}") from error
    if value.dtype is None and (array.dtype.kind in "biufc" or _is_float(array.dtype)):
        return array
    if array.dtype != value.dtype:
        hint = "convert it first"
        if array.dtype == np.uint8 and _is_float(value.dtype):
            hint = "normalise pixels as in training, for example ((pixels / 255 - mean) / std).astype('float32')"
        raise DataError(f"{where}: input {value.name!r}: expected {value}, found {_shown(array)}; {hint}")
    return array


def _split(data: Any, inputs: Sequence[Value], where: str, pixels: Preprocessing | None = None) -> list[Sample]:
    """A batch as samples of batch 1, if the model leaves the batch open; else the one sample that it is."""
    sample = _checked(_arrays(data, inputs, where, pixels), inputs, where)
    batched = [value for value in inputs if sample[value.name].ndim]
    inner = {d for value in batched for d in (value.shape or ())[1:] if isinstance(d, str)}
    # A dim that is also some inner dim (the nodes of a graph and its adjacency) counts no samples.
    is_batch = all(_fixed_batch(v) is None and (v.shape is None or v.shape[0] not in inner) for v in batched)
    lengths = {len(sample[value.name]) for value in batched}
    if not is_batch or len(lengths) != 1:
        return [sample]
    if lengths == {0}:
        raise DataError(
            f"{where}: the batch has no samples: {', '.join(f'{k}: {_shown(a)}' for k, a in sample.items())}"
        )
    return [{k: a[i : i + 1] if a.ndim else a for k, a in sample.items()} for i in range(lengths.pop())]


def _checked(sample: Sample, inputs: Sequence[Value], where: str) -> Sample:
    dims: dict[str, Dim] = {}
    for value in inputs:
        array = sample[value.name]
        if not _fits(value.shape, array.shape, dims):
            hint = "; the leading batch axis is missing" if array.ndim + 1 == len(value.shape or ()) else ""
            raise DataError(f"{where}: input {value.name!r}: expected {value}, found {_shown(array)}{hint}")
    return sample


def _fits(declared: Sequence[Dim] | None, shape: Sequence[Dim], dims: dict[str, Dim]) -> bool:
    """Whether rank and dims are as declared; symbolic ones agree with `dims`, which gets the new ones."""
    if declared is None:
        return True
    return len(declared) == len(shape) and all(
        want is None or have == (dims.setdefault(want, have) if isinstance(want, str) else want)
        for want, have in zip(declared, shape, strict=True)
    )


def _finite(sample: Sample, where: str) -> Sample:
    for name, array in sample.items():
        if _is_float(array.dtype) and not np.isfinite(array).all():
            bad = np.argwhere(~np.isfinite(array)).tolist()
            share = f"{len(bad)} NaN or Inf among {array.size} values"
            raise DataError(f"{where}: input {name!r} has {share}, the first {array[tuple(bad[0])]} at {bad[0]}")
    return sample


def _fixed_batch(value: Value) -> int | None:
    """The batch of a sample, where the model fixes it."""
    return value.shape[0] if value.shape and isinstance(value.shape[0], int) else None


def _is_float(dtype: np.dtype | None) -> bool:
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact))  # numpy does not know bfloat16 for one


def _shown(array: np.ndarray) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"
