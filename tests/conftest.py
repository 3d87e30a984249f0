"""Shared fixtures: one-node models, and onnxruntime as the oracle."""

from __future__ import annotations

import fnmatch
import gc
import mmap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import jq
from tests.sampling import mark_most

ort.set_default_logger_severity(4)

# Reference results of other tools, too large for this repository; None where they are not in a folder around it.
SHARED = next((p / "shared/spec" for p in Path(__file__).resolve().parents if (p / "shared/spec").is_dir()), None)


# Tests that need a newer onnxruntime than the oldest that pyproject.toml claims: version, beginning of the id, reason.
NEWER_RUNTIME = [line.split("\t") for line in Path(__file__).with_name("newer_runtime.tsv").read_text().splitlines()]


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Skip the tests of what the installed onnxruntime lacks, and leave most cases of long lists to `-m slow`."""
    mark_most(items)
    here = [int(part) for part in ort.__version__.split(".")[:2]]
    # An asterisk stands for anything.
    lacking = {test: reason for needs, test, reason in NEWER_RUNTIME if here < [int(part) for part in needs.split(".")]}
    for item in items:
        for test, reason in lacking.items():
            if fnmatch.fnmatchcase(item.nodeid, test.replace("[", "[[]") + "*"):
                item.add_marker(pytest.mark.skip(reason=reason))


def one_node(
    op_type: str,
    inputs: Mapping[str, np.ndarray],
    outputs: Sequence[str] = ("y",),
    *,
    opset: int = 21,
    domain: str = "",
    initializers: Mapping[str, np.ndarray] | None = None,
    order: Sequence[str] | None = None,
    **attrs: Any,
) -> onnx.ModelProto:
    """A model of one node. `order` gives the node's inputs where they are not inputs + initializers."""
    initializers = initializers or {}
    node = helper.make_node(
        op_type, order or [*inputs, *initializers], list(outputs), name="node", domain=domain, **attrs
    )
    graph = helper.make_graph(
        [node],
        "one_node",
        [
            helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for k, v in inputs.items()
        ],
        [onnx.ValueInfoProto(name=o) for o in outputs if o],
        [numpy_helper.from_array(v, k) for k, v in initializers.items()],
    )
    opsets = [helper.make_opsetid("", opset)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def onnxruntime_outputs(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """What onnxruntime computes, without its graph optimizations."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, dict(inputs))


def outputs(model: onnx.ModelProto, inputs: Mapping[str, Any]) -> list[np.ndarray]:
    """What jq computes, in the order of the outputs."""
    graph = jq.load(model)
    fn = jq.trace(graph)
    results = fn(graph.params, inputs)
    return [np.asarray(results[name]) for name in fn.outputs]


def assert_like_onnxruntime(model: onnx.ModelProto, inputs: Mapping[str, Any], **tolerance: float) -> None:
    """Equal to onnxruntime's; where a model does not declare its outputs, 64-bit types may be narrow."""
    expected = onnxruntime_outputs(model, inputs)
    for have, want in zip(outputs(model, inputs), expected, strict=True):
        assert have.dtype in (want.dtype, jax.dtypes.canonicalize_dtype(want.dtype))
        np.testing.assert_allclose(have, want, **({"rtol": 1e-4, "atol": 1e-5} | tolerance))


_GROWTH = 512 << 20  # bytes of compiled programs within a file, before they are freed
_LEFT = pytest.StashKey[int]()  # bytes after they were freed the last time


def resident() -> int:
    """Bytes of memory that this process occupies; 0 where the system does not say."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * mmap.PAGESIZE if pages.exists() else 0


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Free the compiled programs of a file after its last test: JAX keeps them, gigabytes by the end of a run.

    What the next file needs again it loads from the cache on disk.
    """
    if nextitem is None or nextitem.path != item.path or resident() > item.config.stash.get(_LEFT, 0) + _GROWTH:
        jax.clear_caches()
        gc.collect()
        item.config.stash[_LEFT] = resident()


@pytest.fixture(scope="module", autouse=True)
def quick_compilation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have XLA optimize little, since compiling takes the time; files of tests about its programs say OPTIMIZED."""
    jax.config.update("jax_disable_most_optimizations", not getattr(request.module, "OPTIMIZED", False))
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def rng() -> np.random.Generator:
    """Seeded, so that a failure comes back."""
    return np.random.default_rng(0)
