"""The engine that takes a function over data: nothing depends on batches or devices, and nothing is left behind."""

from __future__ import annotations

import ast
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jq
from jq.data.sources import Source, in_memory, open_source
from jq.data.stream import Batch, Stream, batches, concurrently
from jq.errors import ConfigError, DataError
from jq.graph import Value

SAMPLES = np.random.default_rng(7).integers(-50, 50, (23, 4)).astype(np.float32)
X = [Value("x", np.dtype("float32"), ("N", 4))]
SHAPED = SimpleNamespace(static_inputs=frozenset({"shape"}), wide=False)


def stream(size: int, count: int = 23, *readings: Any) -> Stream:
    return Stream.of(open_source(SAMPLES[:count], X), size, *readings)


def weighted(weights: Any, sample: Any) -> dict[str, Any]:
    """Whole numbers, of which float32 sums are exact in any order."""
    x = sample["x"][0] * weights
    return {"sum": x, "most": jnp.max(x)}


def merge(a: Any, b: Any) -> dict[str, Any]:
    return {"sum": a["sum"] + b["sum"], "most": np.maximum(a["most"], b["most"])}


def merge_traced(a: Any, b: Any) -> dict[str, Any]:
    return {"sum": a["sum"] + b["sum"], "most": jnp.maximum(a["most"], b["most"])}


def lowest(_: Any) -> dict[str, Any]:
    return {"sum": jnp.zeros(4), "most": jnp.float32(-jnp.inf)}


@settings(max_examples=12, deadline=None)
@given(size=st.integers(1, 30), count=st.integers(1, 23))
def test_a_total_does_not_depend_on_the_batch(size: int, count: int) -> None:
    """Short batches are masked: what fills them up would count in the sum."""
    own = stream(size, count)
    total = own.total(own.folded(weighted, merge_traced, init=lowest), np.float32(-3), merge)
    np.testing.assert_array_equal(total["sum"], (-3.0 * SAMPLES[:count]).sum(0))
    assert total["most"] == (-3 * SAMPLES[:count]).max() and total["sum"].dtype == np.float64


@settings(max_examples=8, deadline=None)
@given(size=st.integers(1, 30), count=st.integers(1, 23), concurrent=st.booleans())
def test_rows_are_those_of_the_samples_in_order(size: int, count: int, concurrent: bool) -> None:
    own = stream(size, count)
    made = own.rows(own.each(lambda w, s, i: (s["x"][0] * w, i)), np.float32(2), concurrent=concurrent)
    np.testing.assert_array_equal(made[0], SAMPLES[:count] * 2)
    np.testing.assert_array_equal(made[1], np.arange(count))


def test_all_batches_run_one_program(caplog: pytest.LogCaptureFixture) -> None:
    own = stream(5)
    program = own.folded(weighted, merge_traced)
    with jax.log_compiles(), caplog.at_level(logging.DEBUG, "jax"):
        own.total(program, np.float32(1), merge)
        own.total(program, np.float32(2), merge)
    assert sum("Compiling" in r.getMessage() and "fold" in r.getMessage() for r in caplog.records) == 1


def test_known_inputs_are_the_same_for_all_samples() -> None:
    inputs = [*X, Value("shape", np.dtype("int64"), (2,))]
    samples = [{"x": x[None], "shape": np.array([2, 2])} for x in SAMPLES]
    for own in (Stream.of(open_source(samples, inputs), size, SHAPED) for size in (1, 6)):
        made = own.rows(own.each(lambda _, s, __: s["x"].reshape(s["shape"])), None)
        np.testing.assert_array_equal(made, SAMPLES.reshape(-1, 2, 2))
    samples[20]["shape"] = np.array([4, 1])
    own = Stream.of(open_source(samples, inputs), 6, SHAPED)
    with pytest.raises(DataError, match="input 'shape' decides shapes"):
        own.rows(own.each(lambda _, s, __: s["x"]), None)


@pytest.mark.parametrize("wide", [True, False])
def test_64_bit_types_are_those_of_the_readings(wide: bool) -> None:
    """1/3 in 64 bits, or to the 24 bits of float32."""
    source = open_source(np.full((3, 1), 1 / 3), [Value("x", np.dtype("float64"), ("N", 1))])
    own = Stream.of(source, 2, SimpleNamespace(static_inputs=frozenset(), wide=wide))
    made = own.rows(own.each(lambda _, s, __: s["x"]), None)
    np.testing.assert_array_equal(made.ravel(), [1 / 3 if wide else np.float32(1 / 3)] * 3)


def test_samples_of_two_shapes() -> None:
    source = open_source([np.zeros((1, n), np.float32) for n in (3, 3, 4)], [Value("x", np.dtype("float32"), (1, "n"))])
    with pytest.raises(DataError, match="a search needs samples of one shape"):
        Stream.of(source, 2).alike("a search")
    own = Stream.of(source, 2)
    assert own.total(own.folded(lambda _, s: jnp.float32(s["x"].size), jnp.add), None, np.add) == 10


def test_samples_in_memory_are_a_source() -> None:
    whole = list(open_source(SAMPLES, X).samples())
    (batch, *_) = Stream.of(in_memory(whole[2:]), 4).batches(skip=3)
    np.testing.assert_array_equal(batch.inputs["x"][:, 0], SAMPLES[5:9])


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    end = time.monotonic() + 2
    while (left := [t for t in threading.enumerate() if t.name == "jq-data" and t not in before]) and (
        time.monotonic() < end
    ):
        time.sleep(0.01)
    assert not left


@pytest.mark.usefixtures("no_thread_left")
def test_the_sources_exception_is_raised_where_it_is_consumed() -> None:
    def items() -> Iterator[np.ndarray]:
        yield from SAMPLES[:7, None]
        raise KeyError("the user's own")

    own = Stream.of(open_source(items(), X), 3)
    with pytest.raises(KeyError, match="the user's own"):
        own.total(own.folded(weighted, merge_traced), np.float32(1), merge)


@pytest.mark.usefixtures("no_thread_left")
def test_a_consumer_that_stops_leaves_no_thread() -> None:
    own = stream(2)
    results = own.results(own.each(lambda _, s, __: s["x"]), None)
    assert next(results)[0].start == 0
    results.close()


def test_the_next_batch_is_read_while_one_is_computed() -> None:
    read = []

    def items() -> Iterator[np.ndarray]:
        for x in SAMPLES:
            read.append(len(read))
            yield x[None]

    made = Stream.of(open_source(items(), X), 4).batches()
    next(made)
    end = time.monotonic() + 5
    while len(read) < 8 and time.monotonic() < end:
        time.sleep(0.01)
    assert 8 <= len(read) <= 13  # `groupby` looks one ahead
    made.close()


def test_steps_run_two_at_the_same_time_and_stay_in_order() -> None:
    meeting = threading.Barrier(2, timeout=10)

    def step(i: int) -> int:
        if i:
            meeting.wait()  # raises if the other one does not come
        return i * i

    assert list(concurrently(step, range(7))) == [i * i for i in range(7)]
    assert list(concurrently(step, [])) == []


# Reading ahead


def broken(after: int) -> Source:
    def items() -> Iterator[np.ndarray]:
        yield from SAMPLES[:after, None]
        raise KeyError("the user's own")

    return open_source(items(), X)


@pytest.mark.usefixtures("no_thread_left")
@pytest.mark.parametrize("prefetch", [0, 1, 2, 100])
def test_an_exception_reaches_the_consumer_in_its_place(prefetch: int) -> None:
    found: list[Batch] = []
    with pytest.raises(KeyError, match="the user's own"):
        found.extend(batches(broken(7), 3, prefetch=prefetch))
    made = batches(broken(7), 3, prefetch=prefetch)
    assert [next(made).start, next(made).start] == [0, 3]
    with pytest.raises(KeyError):
        next(made)


@pytest.mark.usefixtures("no_thread_left")
@pytest.mark.parametrize("prefetch", [0, 1, 2, 100])
def test_an_early_end_leaves_no_thread(prefetch: int) -> None:
    closed = []

    def items() -> Iterator[np.ndarray]:
        try:
            while True:
                yield SAMPLES[:1]
        finally:
            closed.append(True)

    made = batches(open_source(items(), X), 2, prefetch=prefetch)
    assert next(made).start == 0
    made.close()
    del made
    assert closed
    batches(open_source(SAMPLES, X), 2)  # never begun


@pytest.mark.usefixtures("no_thread_left")
def test_a_reader_that_hangs_does_not_hang_the_consumer() -> None:
    release = threading.Event()

    def items() -> Iterator[np.ndarray]:
        yield SAMPLES[:2]
        release.wait()

    made = batches(open_source(items(), X), 2)
    next(made)
    begun = time.monotonic()
    made.close()
    assert time.monotonic() - begun < 1.9
    release.set()


def test_no_more_is_read_ahead_than_asked_for() -> None:
    read: list[int] = []

    def items() -> Iterator[np.ndarray]:
        for i in range(100):
            read.append(i)
            yield SAMPLES[:1]

    made = batches(open_source(items(), X), 5, prefetch=2)
    next(made)
    time.sleep(0.05)
    assert 5 < len(read) <= 15
    made.close()


def test_numbers_of_batches() -> None:
    source = open_source(SAMPLES, X)
    for wrong in ({"size": 0}, {"size": 1, "skip": -1}, {"size": 1, "prefetch": -1}):
        with pytest.raises(ConfigError, match="of 1 or more"):
            batches(source, **wrong)


DEVICES = """
import sys, numpy as np, jax, jax.numpy as jnp
from jq.data.sources import open_source
from jq.data.stream import Stream, divided, local_mesh
from jq.graph import Value
assert len(jax.devices()) == 2
x = np.load(sys.argv[1])
source = open_source(x, [Value("x", np.dtype("float32"), ("N", 4))])
for size in (3, 8):
    rows, most = [], []
    for count in (1, 2):
        own = Stream.of(source, size, mesh=local_mesh(count))
        assert own.size % count == 0
        rows.append(own.rows(own.each(lambda w, s, i: jnp.sin(s["x"][0] * w) + i), np.float32(0.3)))
        program = own.folded(lambda w, s: jnp.sin(s["x"][0] * w), jnp.maximum, init=lambda _: jnp.full(4, -jnp.inf))
        most.append(own.total(program, np.float32(0.3), np.maximum))
        batch = next(own.batches())
        given, where = (own.traced(batch.inputs), batch.numbers), divided(own.mesh)
        like = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=where), given)
        text = program.lower(np.float32(0.3), *like).as_text()
        assert "all_gather" not in text  # devices of a CPU that wait for each other may take all of its threads
    assert rows[0].tobytes() == rows[1].tobytes() and most[0].tobytes() == most[1].tobytes()
    np.testing.assert_allclose(rows[0], np.sin(x * np.float32(0.3)) + np.arange(len(x))[:, None], atol=1e-5)
"""


def test_two_devices_equal_one(tmp_path: Path) -> None:
    """Bit by bit, as maxima and rows do not depend on an order."""
    np.save(tmp_path / "x.npy", SAMPLES)
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PATH": ""}
    environment["PYTHONPATH"] = str(Path(jq.__file__).parents[1])
    script = [sys.executable, "-c", DEVICES, str(tmp_path / "x.npy")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=100)
    assert not done.returncode, done.stderr


ENGINE = {"shard_map", "make_array_from_callback", "make_mesh", "NamedSharding", "batches"}


def test_it_is_the_only_engine() -> None:
    """No other module shards or opens batches."""
    root = Path(jq.__file__).parent
    for path in set(root.rglob("*.py")) - {root / "data/stream.py"}:
        tree = ast.parse(path.read_text())
        named = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "jax"}
        named |= {a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
        assert not named & ENGINE, path
