"""Providers of onnxruntime as readings: the CPU's and Azure's are real; vitisai's is played by a session of the CPU."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import jq
from jq.errors import ConfigError, DataError, ModelError
from jq.readings.runtime import onnxruntime_reading
from tests.conftest import onnxruntime_outputs

MODEL = jq.zoo.path("fashion_resnet")
OTHER = jq.zoo.path("fashion_mobilenet")
IMAGES = jq.zoo.evaluation_set()[0][:4]
VITISAI = "VitisAIExecutionProvider"


class Played:
    """onnxruntime with vitisai in it: compiled models and the options of each session, in the order of their opening."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, takes: bool = True, report: object = None) -> None:
        self.opened: list[tuple[object, dict[str, str], dict[str, str]]] = []
        real, played = onnxruntime.InferenceSession, self

        class Session:
            def __init__(self, source, options, providers, **_):
                (name, given), *_ = [p if isinstance(p, tuple) else (p, {}) for p in providers]
                keys = ("ep.context_enable", "ep.context_file_path", "ep.context_embed_mode")
                entries = {}
                for key in keys:
                    try:
                        entries[key] = options.get_session_config_entry(key)
                    except RuntimeError:
                        continue
                played.opened.append((source, given, entries))
                self.real = real(source, onnxruntime.SessionOptions(), providers=["CPUExecutionProvider"])
                self.names = [name, "CPUExecutionProvider"] if takes else ["CPUExecutionProvider"]
                if entries:  # as if compiled
                    content = source if isinstance(source, bytes) else Path(source).read_bytes()
                    Path(entries["ep.context_file_path"]).write_bytes(content)
                if report is not None and name == VITISAI:
                    folder = Path(given["cache_dir"], given["cache_key"])
                    folder.mkdir(parents=True)
                    (folder / "vitisai_ep_report.json").write_text(json.dumps(report))

            def get_providers(self):
                return self.names

            def __getattr__(self, name):
                if name == "get_provider_graph_assignment_info":
                    raise AttributeError(name)
                return getattr(self.real, name)

        monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [VITISAI, "CPUExecutionProvider"])


@pytest.mark.parametrize("reading", ["onnxruntime", "cpu", "CPUExecutionProvider", jq.Provider("cpu")])
def test_the_cpu_by_all_its_names(reading):
    run = jq.open_reading(MODEL, reading)
    (wanted,) = onnxruntime_outputs(jq.to_model(jq.load(MODEL)), {"input": IMAGES})
    np.testing.assert_allclose(run({"input": IMAGES})["logits"], wanted, rtol=1e-4, atol=1e-5)
    assert run.name == "cpu" and run.providers == ("cpu",)


def test_a_provider_that_is_not_there_says_which_are_and_what_to_install(tmp_path):
    for reading in ("vitisai", "VitisAIExecutionProvider", jq.Provider("vitisai", {"target": "X2"})):
        with pytest.raises(ConfigError, match=r"has no provider vitisai .*it has .*cpu; install Ryzen AI Software"):
            jq.infer(MODEL, IMAGES, tmp_path / "made", reading=reading)
    with pytest.raises(ConfigError, match=r"no provider 'vitisaj'.*Did you mean 'vitisai'"):
        jq.Provider("vitisaj")
    with pytest.raises(ConfigError, match="give context too"):
        jq.Provider("cpu", embed=True)
    assert not list(tmp_path.iterdir())


def test_a_provider_that_takes_nothing_is_a_warning():
    if "AzureExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has no provider but the CPU's, to take nothing")
    with pytest.warns(UserWarning, match=r"provider azure runs none of the model's \d+ nodes; cpu does"):
        run = onnxruntime_reading(MODEL, jq.Provider("azure"))
    assert run.providers == ("azure", "cpu") and set(run.taken) == {"cpu"}


def test_a_provider_that_is_not_in_the_session_is_a_warning(monkeypatch):
    Played(monkeypatch, takes=False)
    with pytest.warns(UserWarning, match="provider vitisai did not take the model: the session has cpu"):
        onnxruntime_reading(MODEL, jq.Provider("vitisai"))


def test_options_reach_the_provider_as_text(monkeypatch, tmp_path):
    played = Played(monkeypatch)
    config = tmp_path / "vitisai_config.json"
    with pytest.raises(ConfigError, match=r"config_file: there is no file .*vitisai_config.json"):
        onnxruntime_reading(MODEL, jq.Provider("vitisai", {"config_file": config}))
    config.write_text("{}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        onnxruntime_reading(MODEL, jq.Provider("vitisai", {"config_file": config, "ai_analyzer_profiling": True}))
    assert played.opened[-1][1:] == ({"config_file": str(config), "ai_analyzer_profiling": "1"}, {})
    with pytest.warns(UserWarning, match=r"vitisai does not document the option opt_levle. Did you mean 'opt_level'"):
        onnxruntime_reading(MODEL, jq.Provider("vitisai", {"opt_levle": 3}))


def test_a_compiled_model_is_saved_and_read_until_something_changes(monkeypatch, tmp_path):
    played, path = Played(monkeypatch), tmp_path / "compiled.onnx"
    asked = jq.Provider("vitisai", {"target": "X2"}, path)
    assert not onnxruntime_reading(MODEL, asked).reused
    entries = {"ep.context_enable": "1", "ep.context_file_path": str(path), "ep.context_embed_mode": "0"}
    assert played.opened[-1][2] == entries and path.exists()
    assert onnxruntime_reading(MODEL, asked).reused
    assert played.opened[-1] == (path, {"target": "X2"}, {})
    others = (
        (OTHER, asked),
        (OTHER, jq.Provider("vitisai", {"target": "X1"}, path)),
        (OTHER, jq.Provider("vitisai", {"target": "X1"}, path, embed=True)),
    )
    for model, provider in others:
        with pytest.warns(
            UserWarning, match="compiled from another model, or with other options; it is compiled again"
        ):
            assert not onnxruntime_reading(model, provider).reused
    assert played.opened[-1][2] == entries | {"ep.context_embed_mode": "1"}


def test_compiled_models_of_others(monkeypatch, tmp_path):
    Played(monkeypatch)
    path = tmp_path / "compiled.onnx"
    path.write_bytes(OTHER.read_bytes())  # of another tool, without our note
    assert onnxruntime_reading(OTHER, jq.Provider("vitisai", {}, path)).reused
    path.write_bytes(jq.to_model(jq.load(MODEL).replace(name="x")).SerializeToString())
    (tmp_path / "compiled.onnx.json").write_text("[1]")
    with pytest.raises(DataError, match="was not written by jq"):
        onnxruntime_reading(OTHER, jq.Provider("vitisai", {}, path))
    (tmp_path / "compiled.onnx.json").unlink()
    path.write_bytes(b"broken")
    with pytest.raises(
        ModelError, match=r"does not load .*compiled.onnx, compiled from this model with provider vitisai"
    ):
        onnxruntime_reading(OTHER, jq.Provider("vitisai", {}, path))


def test_the_cpu_compiles_nothing(tmp_path):
    with pytest.warns(UserWarning, match=r"provider cpu saved no compiled model"):
        onnxruntime_reading(MODEL, jq.Provider("cpu", {}, tmp_path / "compiled.onnx"))
    assert not list(tmp_path.iterdir())


def test_timing_is_of_the_runs_after_the_warm_up(monkeypatch):
    ticks = iter(np.repeat(np.cumsum([0, 9, 1, 1, 1, 2, 3, 4]), 2)[1:-1])  # seconds: 9, 1 and 1 to warm up; 1, 2, 3, 4
    monkeypatch.setattr("jq.readings.timing.time.perf_counter", lambda: next(ticks))
    timing = jq.benchmark(MODEL, IMAGES, lambda sample: {}, runs=4, warm_up=3, seconds=60)
    assert (timing.warm_up_runs, timing.first_ms, timing.warm_up_ms) == (3, 9e3, 1e3)
    assert (timing.runs, timing.mean_ms, timing.p50_ms, timing.batch) == (4, 2500, 2500, 1)
    np.testing.assert_allclose((timing.p90_ms, timing.p99_ms, timing.throughput), (3700, 3970, 0.4))


def test_timing_ends_and_counts_batches():
    timing = jq.benchmark(MODEL, IMAGES, "cpu", runs=1000, warm_up=1000, seconds=0.01)
    assert timing.runs < 1000 and timing.warm_up_runs < 1000 and timing.load_ms > 0
    with pytest.raises(ConfigError, match="of 1 or more; got 0 and 1"):
        jq.benchmark(MODEL, IMAGES, runs=0, warm_up=1)
    fixed = jq.convert(MODEL, shapes={"input": (2, 1, 28, 28)})
    assert jq.benchmark(fixed, IMAGES, runs=1, warm_up=1).batch == 2


def test_device_in_compare_and_simulate():
    model = jq.quantize(MODEL, IMAGES, "XINT8").model
    facts = jq.compare(MODEL, model, IMAGES, reading="aie2_even").facts
    assert "dB, same class for 100.00% of the samples, against the float model" in facts["logits by aie2_even"]
    asked = []

    def device(sample):
        asked.append(len(sample["input"]))
        return {"logits": np.zeros((1, 10), np.float32)}

    simulation = jq.integer.simulate(jq.integer.load(model), IMAGES, reading=device)
    assert asked == [1] * 4 and simulation.agreements[0].equal < 1 and simulation.reading == "own"
    with pytest.raises(ConfigError, match=r"compares with a provider of onnxruntime.*got 'jq'"):
        jq.integer.simulate(jq.integer.load(model), IMAGES, reading="jq")


def test_large_weights_are_inputs_of_the_session(rng, tmp_path, monkeypatch):
    """What it computes stays the same, and what it takes of the user too; the limits are lowered."""
    weights = {
        "a": rng.standard_normal((16, 16)).astype(np.float32),
        "b": rng.standard_normal((16, 16)).astype(np.float32),
    }
    nodes = [helper.make_node("MatMul", ["x", "a"], ["h"]), helper.make_node("MatMul", ["h", "b"], ["y"])]
    ends = [[helper.make_tensor_value_info(name, 1, ["N", 16])] for name in ("x", "y")]
    tensors = [numpy_helper.from_array(w, name) for name, w in weights.items()]
    graph = helper.make_graph(nodes, "g", *ends, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x = rng.standard_normal((3, 16)).astype(np.float32)
    (want,) = onnxruntime_outputs(model, {"x": x})
    monkeypatch.setattr("jq.graph.write._LEAST_BESIDE", 1)
    for limit in (1 << 29, 1):
        monkeypatch.setattr("jq.readings.runtime._LARGE", limit)
        reading = onnxruntime_reading(jq.load(model))
        assert set(reading.given) == (set(weights) if limit == 1 else set())
        np.testing.assert_array_equal(reading({"x": x})["y"], want)
