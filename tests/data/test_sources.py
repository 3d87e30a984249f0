"""Every form of data gives the same samples; what does not fit is one clear error."""

from __future__ import annotations

import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jq.data.sources import fingerprint, open_source
from jq.data.stream import batches
from jq.errors import DataError, Error
from jq.graph import Dim, Value


def value(*shape: Dim, name: str = "x", dtype: Any = np.float32) -> Value:
    return Value(name, np.dtype(dtype), shape)


X = [value("N", 2, 3)]
SAMPLES = np.arange(11 * 6, dtype=np.float32).reshape(11, 2, 3)


class Reader:
    """As onnxruntime's examples are written: an iterator that ends."""

    def __init__(self, items: list[Any]) -> None:
        self.items, self.begun = items, iter(items)

    def get_next(self) -> Any:
        return next(self.begun, None)

    def __len__(self) -> int:
        raise NotImplementedError


class Rewindable(Reader):
    def rewind(self) -> None:
        self.begun = iter(self.items)


class Loader:
    """Like torch's: iterable, no sequence."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def in_eights(array: np.ndarray = SAMPLES) -> list[dict[str, np.ndarray]]:
    return [{"x": array[:8]}, {"x": array[8:]}]


def npy(folder: Path, array: np.ndarray = SAMPLES) -> Path:
    np.save(folder / "x.npy", array)
    return folder / "x.npy"


def npz(folder: Path, **arrays: np.ndarray) -> Path:
    np.savez(folder / "x.npz", **(arrays or {"x": SAMPLES}))
    return folder / "x.npz"


def npz_compressed(folder: Path) -> Path:
    np.savez_compressed(folder / "x.npz", x=np.asfortranarray(SAMPLES))
    return folder / "x.npz"


def files(folder: Path) -> Path:
    """One sample per file: with and without the batch axis, .npy and .npz, in subfolders."""
    (folder / "b").mkdir()
    (folder / "b" / "loop").symlink_to(folder)
    (folder / ".hidden.npy").write_bytes(b"")
    (folder / "labels.txt").write_text("no data")
    for i, sample in enumerate(SAMPLES):
        name = folder / "b" / f"{i:02}" if i > 5 else folder / f"{i:02}"
        if i == 3:
            np.savez(name, x=sample[None], label=np.int64(3))
        else:
            np.save(name, sample if i % 2 else sample[None])
    for path in folder.glob("0*"):  # sorted by path: those before b/ are the first six
        assert path.stem < "b"
    return folder


FORMS: dict[str, tuple[Callable[[Path], Any], int | None, bool, int]] = {
    # data, length, again, first
    "reader": (lambda _: Reader(in_eights()), None, False, 8),
    "rewindable": (lambda _: Rewindable(in_eights()), None, True, 8),
    "list": (lambda _: in_eights(), 11, True, 8),
    "tuple of arrays": (lambda _: tuple(SAMPLES[:, None]), 11, True, 1),
    "loader": (lambda _: Loader(in_eights()), None, True, 8),
    "generator": (lambda _: (a for a in (SAMPLES[:8], SAMPLES[8:])), None, False, 8),
    "array": (lambda _: SAMPLES, 11, True, 1),
    "dict": (lambda _: {"x": SAMPLES}, 11, True, 1),
    "lists of floats": (lambda _: {"x": SAMPLES.tolist()}, 11, True, 1),
    "npy": (npy, 11, True, 1),
    "npy as text": (lambda folder: str(npy(folder)), 11, True, 1),
    "fortran": (lambda folder: npy(folder, np.asfortranarray(SAMPLES)), 11, True, 1),
    "npz": (npz, 11, True, 1),
    "npz compressed": (npz_compressed, 11, True, 1),
    "npz with labels": (lambda folder: npz(folder, x=SAMPLES, y=SAMPLES), 11, True, 1),
    "npz of other names": (lambda folder: npz(folder, images=SAMPLES, labels=np.arange(11)), 11, True, 1),
    "folder": (files, 11, True, 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_feeds(form: str, tmp_path: Path) -> None:
    make, length, again, first = FORMS[form]
    source = open_source(make(tmp_path), X)
    assert (source.length, source.again, source.first) == (length, again, first)
    np.testing.assert_array_equal(source.head["x"], SAMPLES[:1])
    samples = list(source.samples())
    assert all(f.keys() == {"x"} and f["x"].dtype == np.float32 for f in samples)
    np.testing.assert_array_equal([f["x"] for f in samples], SAMPLES[:, None])
    if again:
        np.testing.assert_array_equal([f["x"] for f in source.samples(skip=9)], SAMPLES[9:, None])
        assert [b.start for b in batches(source, 4, skip=6)] == [6, 10]
        assert not list(batches(source, 4, skip=11))
    else:
        with pytest.raises(DataError, match="only once"):
            list(source.samples())


@pytest.mark.parametrize("form", FORMS)
def test_batches_have_one_size_and_say_what_is_padding(form: str, tmp_path: Path) -> None:
    found = list(batches(open_source(FORMS[form][0](tmp_path), X), 4))
    assert [b.start for b in found] == [0, 4, 8]
    assert all(b.inputs["x"].shape == (4, 1, 2, 3) for b in found)
    assert [b.valid.tolist() for b in found] == [[True] * 4, [True] * 4, [True, True, True, False]]
    np.testing.assert_array_equal(np.concatenate([b.inputs["x"] for b in found])[:11, 0], SAMPLES)
    np.testing.assert_array_equal(found[-1].inputs["x"][-1, 0], SAMPLES[-1])


def test_batches_of_stacked_arrays_are_views(tmp_path: Path) -> None:
    first = next(batches(open_source(SAMPLES, X), 4, prefetch=0))
    assert np.shares_memory(first.inputs["x"], SAMPLES)
    mapped = next(batches(open_source(npy(tmp_path), X), 4, prefetch=0)).inputs["x"]
    while isinstance(mapped, np.ndarray) and not isinstance(mapped, np.memmap):
        mapped = mapped.base
    assert isinstance(mapped, np.memmap)


def test_a_new_shape_begins_a_new_batch() -> None:
    sizes = [4, 4, 4, 5, 4]
    source = open_source([np.full((1, n), n, np.float32) for n in sizes], [value(1, "T")])
    found = [(b.start, b.inputs["x"].shape, b.valid.tolist()) for b in batches(source, 2)]
    assert found == [
        (0, (2, 1, 4), [True, True]),
        (2, (2, 1, 4), [True, False]),
        (3, (2, 1, 5), [True, False]),
        (4, (2, 1, 4), [True, False]),
    ]


def test_a_fixed_batch_is_kept() -> None:
    fixed = [value(2, 2, 3)]
    found = list(open_source(SAMPLES[:10], fixed).samples())
    np.testing.assert_array_equal([f["x"] for f in found], SAMPLES[:10].reshape(5, 2, 2, 3))
    assert open_source(Reader([{"x": SAMPLES[:2]}]), fixed).first == 1
    with pytest.raises(DataError, match=r"11 samples are not a multiple of the batch 2 .*leave 1 out"):
        open_source(SAMPLES, fixed)
    with pytest.raises(DataError, match=r"expected x: float32\[2,2,3\], found float32\[8,2,3\]"):
        open_source(in_eights(), fixed)


def test_inputs_that_are_no_batch_are_repeated() -> None:
    inputs = [value("N", 4), value(2, "N", 3, name="state"), value(name="rate", dtype=np.int64)]
    arrays = {"x": np.ones((5, 4), np.float32), "state": np.ones((10, 1, 3), np.float32), "rate": 16000}
    source = open_source(arrays, inputs)
    batch = next(batches(source, 5))
    assert {k: a.shape for k, a in batch.inputs.items()} == {"x": (5, 1, 4), "state": (5, 2, 1, 3), "rate": (5,)}
    once = open_source({**arrays, "state": arrays["state"][:2]}, inputs)
    assert once.length == 5
    with pytest.raises(DataError, match=r"different numbers of samples.*'x': 5, 'state': 2"):
        open_source({**arrays, "state": arrays["state"][:4]}, inputs)
    with pytest.raises(DataError, match="different numbers of samples"):
        open_source({**arrays, "x": arrays["x"][:1]}, inputs)


def test_only_a_common_open_batch_is_split() -> None:
    def ones(*shape: int) -> np.ndarray:
        return np.ones(shape, np.float32)

    graph = [value("nodes", 8), value("nodes", "nodes", name="adjacency")]
    assert open_source([{"x": ones(8, 8), "adjacency": ones(8, 8)}], graph).first == 1
    with pytest.raises(DataError, match=r"expected adjacency: float32\[nodes,nodes\], found float32\[8,7\]"):
        open_source([{"x": ones(8, 8), "adjacency": ones(8, 7)}], graph)
    state = [value("N", 4), value(2, "N", name="state")]
    assert open_source([{"x": ones(2, 4), "state": ones(2, 2)}], state).first == 1
    two = [value("N", 4), value("M", name="y"), value(name="rate")]
    split = open_source([{"x": ones(3, 4), "y": ones(3), "rate": np.float32(7)}], two)
    assert split.first == 3
    assert {k: a.shape for k, a in split.head.items()} == {"x": (1, 4), "y": (1,), "rate": ()}
    assert open_source([{"x": ones(3, 4), "y": ones(2), "rate": np.float32(7)}], two).first == 1
    assert open_source([ones(3, 4)], [Value("x", np.dtype("float32"), None)]).first == 3


def test_an_exhausted_reader_that_rewinds_is_read() -> None:
    reader = Rewindable(in_eights())
    while reader.get_next():
        pass
    assert len(list(open_source(reader, X).samples())) == 11


REFUSED: dict[str, tuple[Any, str]] = {
    "unknown name": ([{"X1": SAMPLES, "x": SAMPLES}], r"no input 'X1'"),
    "near name": ({"xx": SAMPLES}, r"no input 'xx'. Did you mean 'x'\? It has: x"),
    "missing name": ([{}], r"item 0: input 'x' is missing; the model needs x: float32\[N,2,3\]"),
    "float16": (SAMPLES.astype(np.float16), r"found float16\[11,2,3\]; convert it first"),
    "float16 scalar items": ([{"x": np.float16(1)}], "convert it first"),
    "uint8": (SAMPLES.astype(np.uint8), "normalise pixels"),
    "big-endian": (SAMPLES.astype(">f4"), "convert it first"),
    "rank": (SAMPLES[0], r"found float32\[2,3\]; the leading batch axis is missing"),
    "dim": (SAMPLES[:, :, :2], r"expected x: .*found float32\[11,2,2\]"),
    "dim of an item": ([SAMPLES[:, :1]], r"item 0: .*expected x: float32\[N,2,3\], found float32\[11,1,3\]"),
    "object": (np.array([[1], None], object), "found object"),
    "ragged": ({"x": [[1.0], [1.0, 2.0]]}, "is not an array"),
    "images and labels": ([(SAMPLES, np.arange(11))], "pass only the images"),
    "text": ({"x": "abc"}, "expected x: float32"),
    "junk": (3, "type 'int' are not supported; expected a reader"),
    "junk of a reader": (Reader([3]), r"get_next\(\) returned 'int'"),
    "array of a reader": (Reader([SAMPLES]), r"get_next\(\) returned 'ndarray'"),
    "no items": ([], "empty"),
    "no samples": (SAMPLES[:0], "no samples"),
    "empty batch": ([SAMPLES[:0]], "the batch has no samples"),
    "empty reader": (Reader([]), "empty"),
    "empty generator": ((x for x in ()), "empty"),
    "nothing there": ("/nowhere/x.npy", r"cannot read /nowhere/x.npy: No such file"),
    "null byte": ("a\0b", "cannot read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    data, match = REFUSED[case]
    with pytest.raises(DataError, match=match):
        open_source(data, X)


def test_refused_by_the_model() -> None:
    with pytest.raises(DataError, match=r"expected \{input name: array\} for the inputs x, y"):
        open_source(SAMPLES, [*X, value("N", name="y")])
    with pytest.raises(DataError, match=r"sequence float32.*not a tensor"):
        open_source(SAMPLES, [Value("x", np.dtype("float32"), None, ("sequence",))])
    with pytest.raises(DataError, match="no inputs"):
        open_source(None, [])
    with pytest.raises(DataError, match=r"input 'y': expected y: float32\[T\], found float32\[4\]"):
        ones = np.ones((1, 3), np.float32)
        open_source([{"x": ones, "y": np.ones(4, np.float32)}], [value("N", "T"), value("T", name="y")])


@pytest.mark.parametrize(
    ("dtype", "given", "fits"),
    [
        (np.float32, [1, 2], True),
        (np.float16, [1.0, 2.5], True),
        (ml_dtypes.bfloat16, [1.0, 2.5], True),
        (np.uint8, [1, 255], True),
        (np.uint8, [1, 256], False),
        (np.int64, [1.0, 2.5], False),
        (np.bool_, [True, False], True),
        (np.float32, [1.0, "2"], False),
    ],
)
def test_numbers_of_python_become_the_declared_type(dtype: Any, given: list[Any], fits: bool) -> None:
    if fits:
        found = open_source({"x": given}, [value("N", dtype=dtype)]).stack
        assert found is not None and found["x"].dtype == dtype
        assert found["x"][:, 0].tolist() == given
    else:
        with pytest.raises(DataError):
            open_source({"x": given}, [value("N", dtype=dtype)])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("form", [np.array, in_eights, lambda a: Reader(in_eights(a)), lambda a: iter(a[:, None])])
def test_nan_is_named(form: Callable[[np.ndarray], Any], dtype: Any) -> None:
    array = SAMPLES.astype(dtype)
    array[9, 0, 2] = np.inf
    array[9, 1, 1] = np.nan
    match = r"sample 9: input 'x' has 2 NaN or Inf among 6 values, the first inf at \[0, 0, 2\]"
    with pytest.raises(DataError, match=match):
        list(batches(open_source(form(array), [value("N", 2, 3, dtype=dtype)]), 4))


def test_the_fingerprint_tells_data_apart() -> None:
    same = {fingerprint(open_source(data, X)) for data in (SAMPLES, {"x": SAMPLES}, in_eights())}
    assert len(same) == 1
    changed = [SAMPLES + 1, SAMPLES[:10], SAMPLES[::-1]]
    assert len(same | {fingerprint(open_source(a, X)) for a in changed}) == 4
    once = open_source(Reader(in_eights()), X)
    assert fingerprint(once) == fingerprint(open_source(Rewindable(in_eights()), X))
    assert len(list(once.samples())) == 11


# Random data


def test_random_data_are_seeded_and_warned_of() -> None:
    inputs = [value("N", 64), value(2, "N", name="h"), value(3, name="i", dtype=np.int64), value(name="b", dtype=bool)]
    with pytest.warns(UserWarning, match=r"16 random samples of seed 5") as caught:
        one = open_source(None, inputs, seed=5)
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="seed 6"):
        other = open_source(None, inputs, seed=6)
    samples = list(one.samples())
    assert one.length == len(samples) == 16
    assert {k: (a.dtype, a.shape) for k, a in samples[0].items()} == {
        "x": (np.float32, (1, 64)),
        "h": (np.float32, (2, 1)),
        "i": (np.int64, (3,)),
        "b": (np.bool_, ()),
    }
    everything = np.concatenate([f["x"].ravel() for f in samples])
    assert abs(everything.mean()) < 0.15 and abs(everything.std() - 1) < 0.1
    assert set(np.concatenate([f["i"] for f in samples]).tolist()) == {0, 1}
    np.testing.assert_array_equal(next(one.samples(skip=7))["x"], samples[7]["x"])
    assert fingerprint(one) != fingerprint(other)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "given",
    [
        value("N", "T"),
        value("N", None),
        Value("x", np.dtype("float32")),
        Value("x"),
        value("N", 1 << 44),
        value("N", 1 << 28),
    ],
)
def test_random_data_do_not_guess(given: Value) -> None:
    with pytest.raises(DataError, match="random data"):
        open_source(None, [given])


# Files


class Hostile:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("unpickled",))


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".pkl"])
def test_pickles_are_refused(suffix: str, tmp_path: Path) -> None:
    import pickle

    path, array = tmp_path / f"x{suffix}", np.array([Hostile()], object)
    if suffix == ".npy":
        np.save(path, array, allow_pickle=True)
    elif suffix == ".npz":
        np.savez(path, x=array)
    else:
        path.write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(DataError, match=r"pickled objects are refused"):
        open_source(path, X)


def header(shape: tuple[int, ...], descr: str = "<f4") -> bytes:
    text = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode()
    text += b" " * (64 - (len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize("shape", [(1 << 40, 2, 3), (1 << 62, 2, 3), (1 << 70, 2, 3), (-1, 2, 3), (-3, -2, 3)])
@pytest.mark.parametrize("suffix", [".npy", ".npz"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_header_that_claims_more_than_the_file(shape: tuple[int, ...], suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x{suffix}"
    if suffix == ".npy":
        path.write_bytes(header(shape) + bytes(1000))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", header(shape) + bytes(1000))
    with pytest.raises(DataError, match="more than the file holds" if suffix == ".npz" else "cannot read"):
        open_source(path, X)


def test_an_npz_says_what_it_holds(tmp_path: Path) -> None:
    path = npz(tmp_path, a=SAMPLES, b=SAMPLES, labels=np.arange(11))
    match = (
        r"holds a: float32\[11,2,3\], b: float32\[11,2,3\], labels: int64\[11\]; the model needs x: float32\[N,2,3\]"
    )
    with pytest.raises(DataError, match=match):
        open_source(path, X)
    with pytest.raises(DataError, match=r"the model needs x: .*, y: "):
        open_source(npz(tmp_path, x=SAMPLES), [*X, value("N", name="y")])


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="neither arrays nor images"):
        open_source(tmp_path, X)
    np.save(tmp_path / "a.npy", SAMPLES)
    with pytest.raises(DataError, match=r"a.npy holds 11 samples; in a folder of arrays, each file is one"):
        open_source(tmp_path, X)
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(DataError, match="1 arrays and 1 images"):
        open_source(tmp_path, X)


def _bytes(save: Callable[[Path], Path]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return save(Path(folder)).read_bytes()


WHOLE = {".npy": _bytes(npy), ".npz": _bytes(npz_compressed)}


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([".npy", ".npz"]), st.floats(0, 1), st.floats(0, 1), st.binary(max_size=4), st.booleans())
def test_damaged_files_are_errors_or_data(suffix: str, cut: float, at: float, bytes_: bytes, truncate: bool) -> None:
    data = bytearray(WHOLE[suffix])
    if truncate:
        data = data[: int(cut * (len(data) - 1))]
    place = int(at * len(data))
    data[place : place + len(bytes_)] = bytes_
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder, f"x{suffix}")
        path.write_bytes(data)
        try:
            assert list(open_source(path, X).samples())
            assert not truncate or bytes_
        except Error:
            pass


def test_an_input_without_a_batch_is_stacked_beside_others():
    """As a detector's thresholds beside its boxes, or a state whose batch is its second axis."""
    inputs = [value(1, 2, 3), value(3, name="limits"), value("T", "N", name="state")]
    given = {"x": SAMPLES, "limits": np.ones((11, 3), np.float32), "state": np.ones((11, 5, 2), np.float32)}
    source = open_source(given, inputs)
    shapes = [{k: a.shape for k, a in sample.items()} for sample in source.samples(0)]
    assert shapes == [{"x": (1, 2, 3), "limits": (3,), "state": (5, 2)}] * 11
