"""A pass as a chain of programs: the same states as of the whole network, and a block that repeats is one program."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import jq
from jq.data.sources import open_source
from jq.data.stream import Stream
from jq.readings.chain import Chain, pieces
from jq.readings.packing import pack
from jq.readings.tracing import AnyOrder, trace
from tests.networks import network

TRACED = Counter[str]()  # how often a state was traced


@dataclasses.dataclass(frozen=True)
class Extremes:
    """The least of tensors times their own factors, the largest, and the number of samples: exact in any order."""

    tensors: tuple[str, ...]
    lasting: bool = True

    def within(self, names: Mapping[str, str]) -> Extremes:
        return Extremes(tuple(names[t] for t in names if t in self.tensors), self.lasting)

    def tap(self, tensor: str, argument: Any) -> AnyOrder:
        return AnyOrder(lambda v: self._of(jnp.asarray(getattr(v, "array", v)), argument))

    def _of(self, x: jax.Array, factor: Any) -> dict[str, jax.Array]:
        return {"least": (x * factor).min(), "most": x.max(), "count": jnp.int32(1)}

    def state(self, seen: Mapping[str, Any]) -> Any:
        TRACED["state"] += 1
        return {k: jnp.stack([s[k] for s in seen.values()]) for k in ("least", "most", "count")} if seen else {}

    def none(self) -> Any:
        size, far = len(self.tensors), np.float32(np.inf)
        none = {"least": np.full(size, far), "most": np.full(size, -far), "count": np.zeros(size, np.int32)}
        return none if size else {}

    def merged(self, a: Any, b: Any) -> Any:
        host = any(isinstance(v, np.ndarray) for v in (*a.values(), *b.values()))
        least, most = (np.minimum, np.maximum) if host else (jnp.minimum, jnp.maximum)
        rule = {"least": least, "most": most, "count": lambda x, y: x + y}
        return {k: rule[k](a[k], b[k]) for k in a}


def extremes(graph: jq.Graph, data: Any, batch: int, watched: tuple[str, ...]) -> dict[str, tuple[float, float, int]]:
    """What a chain finds of the watched tensors, the least of them times their place in the list."""
    stream = Stream.of(open_source(data, graph.inputs), batch, trace(graph))
    chain = Chain.of(graph, Extremes(watched), stream)
    factors = {name: np.float32(i + 1) for i, name in enumerate(watched)}

    def merge(a: list[Any], b: list[Any]) -> list[Any]:
        return [piece.watcher.merged(x, y) for piece, x, y in zip(chain.pieces, a, b, strict=True)]

    found = stream.total(chain, (pack(graph), factors), merge)
    names = [name for piece in chain.pieces for name in piece.watched]
    assert sorted(names) == sorted(watched)
    states = {k: np.concatenate([s[k] for s in found if s]) for k in ("least", "most", "count")}
    return {n: tuple(float(states[k][i]) for k in ("least", "most", "count")) for i, n in enumerate(names)}


def of_whole(graph: jq.Graph, data: np.ndarray, watched: tuple[str, ...]) -> dict[str, tuple[float, float, int]]:
    """The same by the reading of the whole network."""
    fn, name = trace(graph, taps=watched), graph.inputs[0].name
    seen = [jax.tree.map(np.asarray, fn(graph.params, {name: x[None]})[1]) for x in data]
    return {
        t: (min(float((s[t] * np.float32(i + 1)).min()) for s in seen), max(float(s[t].max()) for s in seen), len(data))
        for i, t in enumerate(watched)
    }


def blocks(count: int, *, seed: int = 0) -> onnx.ModelProto:
    """A convolution, residual blocks of one shape with a name each, and a mean."""
    rng, nodes, weights = np.random.default_rng(seed), [], {}

    def conv(x: str, y: str, shape: tuple[int, ...]) -> None:
        weights[f"{y}.w"] = (rng.standard_normal(shape) / np.prod(shape[1:]) ** 0.5).astype(np.float32)
        weights[f"{y}.b"] = rng.standard_normal(shape[0]).astype(np.float32)
        nodes.append(helper.make_node("Conv", [x, f"{y}.w", f"{y}.b"], [y], name=f"conv of {y}", pads=[1, 1, 1, 1]))

    conv("x", "stem", (6, 3, 3, 3))
    last = "stem"
    for i in range(count):
        conv(last, f"a{i}", (8, 6, 3, 3))
        nodes.append(helper.make_node("Relu", [f"a{i}"], [f"r{i}"]))
        conv(f"r{i}", f"b{i}", (6, 8, 3, 3))
        nodes.append(helper.make_node("Add", [last, f"b{i}"], [f"s{i}"]))
        nodes.append(helper.make_node("Relu", [f"s{i}"], [f"y{i}"]))
        last = f"y{i}"
    nodes.append(helper.make_node("GlobalAveragePool", [last], ["mean"]))
    graph = helper.make_graph(
        nodes,
        "blocks",
        [helper.make_tensor_value_info("x", 1, ["N", 3, 8, 8])],
        [helper.make_tensor_value_info("mean", 1, ["N", 6, 1, 1])],
        [numpy_helper.from_array(v, k) for k, v in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def tensors(graph: jq.Graph) -> tuple[str, ...]:
    return (*(v.name for v in graph.inputs), *(o for n in graph.nodes for o in n.outputs if o))


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JQ_CACHE", raising=False)


@pytest.mark.parametrize("batch", [1, 4])
def test_states_are_those_of_the_whole_network(batch: int, rng: np.random.Generator) -> None:
    graph = jq.load(blocks(6))
    data = rng.standard_normal((6, 3, 8, 8)).astype(np.float32)
    assert len(list(pieces(graph, Extremes(())))) > 3
    found = extremes(graph, data, batch, tensors(graph))
    for name, want in of_whole(graph, data, tensors(graph)).items():
        np.testing.assert_allclose(found[name], want, rtol=1e-5, err_msg=name)


def test_a_block_that_repeats_is_one_program_whatever_the_depth() -> None:
    shallow, deep = (jq.load(blocks(n)) for n in (8, 40))
    keys = [[p.pattern.key for p in pieces(graph, Extremes(()))] for graph in (shallow, deep)]
    assert len(keys[1]) > 30 and len(set(keys[1])) == len(set(keys[0])) <= 4


def test_what_does_not_repeat_is_not_cut() -> None:
    """Each program takes the compiler a while."""
    assert len(list(pieces(jq.load(blocks(2)), Extremes(())))) == 1


def test_other_weights_trace_nothing(rng: np.random.Generator) -> None:
    data = rng.standard_normal((2, 3, 8, 8)).astype(np.float32)
    one, other = (jq.load(blocks(6, seed=seed)) for seed in (0, 1))
    extremes(one, data, 2, ("x", "a1", "mean"))
    TRACED.clear()
    found = extremes(other, data, 2, ("x", "a1", "mean"))
    assert not TRACED
    np.testing.assert_allclose(found["a1"], of_whole(other, data, ("x", "a1", "mean"))["a1"], rtol=1e-5)


@pytest.mark.parametrize("seed", range(8))
def test_any_network_may_be_cut(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it can be: the values that go on are those of the whole."""
    monkeypatch.setattr("jq.readings.chain._OFTEN", 1)
    drawn = network(seed, 24)
    graph = jq.load(drawn.model)
    watched = tuple(t for t in tensors(graph) if t in graph.values and graph.values[t].dtype == np.float32)
    found = extremes(graph, dict(drawn.data), 2, watched)
    fn, count = trace(graph, taps=watched), len(next(iter(drawn.data.values())))
    seen = [fn(graph.params, {k: v[i : i + 1] for k, v in drawn.data.items()})[1] for i in range(count)]
    for i, name in enumerate(watched):
        arrays = [np.asarray(s[name]) for s in seen]
        want = min((a * np.float32(i + 1)).min() for a in arrays), max(a.max() for a in arrays), count
        np.testing.assert_allclose(found[name], want, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("seed", range(12))
def test_all_nodes_of_any_network_are_in_one_piece_and_all_that_is_read_goes_on(seed: int) -> None:
    graph = jq.load(network(seed, 40).model)
    found, there = list(pieces(graph, Extremes(tensors(graph)))), {v.name for v in graph.inputs}
    assert sum(len(p.pattern.graph.nodes) for p in found) == len(graph.nodes)
    for piece in found:
        assert there.issuperset(piece.inputs)
        there.update(piece.outputs)
    assert sorted(t for p in found for t in p.watched) == sorted(tensors(graph))


def test_errors_name_what_the_user_named() -> None:
    model = blocks(6)
    model.graph.node[8].attribute[0].ints[:] = [0, 0, 0, 0]  # so that the sum behind it does not fit
    graph = jq.load(model)
    data = np.zeros((1, 3, 8, 8), np.float32)
    with pytest.raises(jq.ModelError, match=r"s1.*Add"):
        extremes(graph, data, 1, ("x", "mean"))
