"""What XLA makes of the passes over the data: few loops and kernels, compiled once, and ahead of their turn."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jq
from jq.calibration.calibrate import calibrate, compile_ahead
from jq.config import resolve
from jq.data.sources import open_source
from jq.data.stream import Stream
from jq.readings.chain import Chain
from jq.recovery.equalization import equalized
from jq.util import programs

CONFIG = resolve("XINT8")
# Loops and kernels of a pass, at most. A kernel costs some 20 ms to compile, a loop a kernel for each of its steps.
MOST = {
    ("fashion_resnet", "equalize"): (1, 210),
    ("fashion_resnet", "calibrate"): (9, 215),
    ("fashion_mobilenet", "equalize"): (1, 335),
    ("fashion_mobilenet", "calibrate"): (21, 300),
}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JQ_CACHE", raising=False)


def prepared(name: str) -> tuple[jq.Graph, np.ndarray]:
    return jq.prepare(jq.load(jq.zoo.path(name)), "XINT8"), jq.zoo.calibration_set()[0][:16]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other backends fuse in other ways")
@pytest.mark.parametrize(("name", "walk"), MOST)
def test_a_pass_is_few_loops_and_kernels(name: str, walk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chains = list[Chain]()
    of = Chain.of
    monkeypatch.setattr(Chain, "of", lambda *given: chains.append(of(*given)) or chains[-1])
    graph, images = prepared(name)
    equalized(graph, CONFIG, images) if walk == "equalize" else calibrate(graph, images, CONFIG)
    (chain,) = chains
    text = "".join(program.text for found in chain.programs.values() for program in dict.fromkeys(found))
    counts = text.count(" while("), text.count(" fusion(")
    assert all(count <= most for count, most in zip(counts, MOST[name, walk], strict=True)), counts


def test_equalization_changes_weights_alone_so_calibrations_program_is_compiled_meanwhile() -> None:
    graph, images = prepared("fashion_resnet")
    with programs.meanwhile(lambda: compile_ahead(graph, open_source(images, graph.inputs), CONFIG)) as wait:
        made = equalized(graph, CONFIG, images)
        wait()
        assert made.graph is not graph and programs._shelves[-1]
        ahead = calibrate(made.graph, images, CONFIG, reaches=made.reaches)
        assert not programs._shelves[-1]
    later = calibrate(made.graph, images, CONFIG)
    assert {t: ahead.best_exponent(t) for t in ahead.tensors} == {t: later.best_exponent(t) for t in later.tensors}


@pytest.mark.parametrize("name", jq.zoo.models())
def test_equalization_knows_the_reaches_that_calibration_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the data are read once: without them, the first samples are computed twice."""
    graph, images = prepared(name)
    made, ran = equalized(graph, CONFIG, images), list[int]()
    run = Stream.run
    monkeypatch.setattr(
        Stream, "run", lambda self, program, given, batch: ran.append(0) or run(self, program, given, batch)
    )
    stats = calibrate(made.graph, images, CONFIG, reaches=made.reaches)
    assert len(ran) == len(images) // CONFIG.batch
    for tensor in stats.tensors:
        assert made.reaches[tensor] == pytest.approx(max(map(abs, stats.range(tensor))), rel=0.1)
    looked = calibrate(made.graph, images, CONFIG)
    assert {t: stats.best_exponent(t) for t in stats.tensors} == {t: looked.best_exponent(t) for t in stats.tensors}


def test_wrong_reaches_cost_a_pass_and_change_nothing() -> None:
    graph, images = prepared("fashion_resnet")
    right = calibrate(graph, images, CONFIG)
    wrong = calibrate(graph, images, CONFIG, reaches=dict.fromkeys(right.tensors, 2.0**-20))
    assert {t: wrong.best_exponent(t) for t in wrong.tensors} == {t: right.best_exponent(t) for t in right.tensors}


def test_what_fails_ahead_fails_for_who_asks() -> None:
    def compiling() -> None:
        raise ValueError("no such program")

    with programs.meanwhile(compiling) as wait:
        wait()


def test_a_program_that_was_compiled_ahead_is_traced_once() -> None:
    x, traced = np.arange(6, dtype=np.float32), list[str]()

    def function(given: Any) -> Any:
        traced.append(threading.current_thread().name)
        return given * 2

    def ran() -> Any:
        with ThreadPoolExecutor(1) as pool:
            return programs.compiled("a", function, (x,), pool, None)[0](x)

    with programs.meanwhile(lambda: ran()) as wait:
        wait()
        np.testing.assert_array_equal(ran(), 2 * x)
    assert traced == ["jq-ahead"]
