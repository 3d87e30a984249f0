"""Statistics on disk: the round trip, damaged files, and what merges."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from onnx import helper

import jq
from jq.calibration.observers import Moments, Range
from jq.config import QuantConfig

METHODS = {
    "minmse": QuantConfig(),
    "error parts": QuantConfig(error_parts=True),
    "minmse_hist": QuantConfig(method="minmse_hist"),
    "nonoverflow": QuantConfig(method="nonoverflow"),
    "moving": QuantConfig(method="nonoverflow", moving_average=0.1),
    "minmax": jq.presets["A8W8"],
    "percentile": jq.presets["A8W8"].replace(method="percentile"),
    "entropy": jq.presets["A8W8"].replace(method="entropy", symmetric=False),
    "mse": jq.presets["A8W8"].replace(method="mse", histogram_range="first"),
    "layerwise_percentile": jq.presets["A8W8"].replace(method="layerwise_percentile", bins=300),
}
DATA = np.random.default_rng(0).standard_normal((12, 8), np.float32)


@pytest.fixture(scope="module")
def graph():
    values = [helper.make_tensor_value_info(n, 1, ["N", 8]) for n in "xy"]
    built = helper.make_graph([helper.make_node("Tanh", ["x"], ["y"])], "g", values[:1], values[1:])
    return jq.load(helper.make_model(built, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))


@pytest.fixture(scope="module")
def stats_of(graph):
    found = {}

    def of(name):
        if name not in found:
            found[name] = jq.calibrate(graph, DATA, METHODS[name].replace(batch=4))
        return found[name]

    return of


@pytest.mark.parametrize("name", METHODS)
def test_round_trip(graph, stats_of, name, tmp_path):
    stats = stats_of(name)
    stats.save(tmp_path / "deep" / "a.safetensors")
    loaded = jq.Stats.load(tmp_path / "deep" / "a.safetensors")
    assert (loaded.config, loaded.tensors, loaded.samples) == (stats.config, stats.tensors, 12)
    assert loaded.observers == stats.observers and list(loaded.observers) == list(stats.observers)
    for ours, theirs in ((loaded.states, stats.states), (loaded.places, stats.places)):
        assert ours.keys() == theirs.keys()
        for observer, state in theirs.items():
            assert ours[observer].keys() == state.keys()
            for leaf, value in state.items():
                np.testing.assert_array_equal(ours[observer][leaf], value)
                assert ours[observer][leaf].dtype == value.dtype
    for tensor in stats.tensors:
        assert loaded.range(tensor) == stats.range(tensor)
    found, expected = (jq.activation_qparams(graph, s) for s in (loaded, stats))
    assert {k: (v.scale, v.zero_point) for k, v in found.items()} == {
        k: (v.scale, v.zero_point) for k, v in expected.items()
    }
    loaded.save(tmp_path / "b.safetensors")
    bytes_of = (tmp_path / "deep" / "a.safetensors").read_bytes()
    assert bytes_of == (tmp_path / "b.safetensors").read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {"deep", "b.safetensors"}  # no draft left
    merged = loaded.merge(stats)
    assert merged.samples == 24 and merged.range("x") == pytest.approx(stats.range("x"), rel=2)


def test_bytes_are_the_same_each_time(graph, stats_of, tmp_path):
    for i in range(3):
        again = jq.calibrate(graph, DATA, METHODS["minmse_hist"].replace(batch=4))
        again.save(tmp_path / f"{i}")
    assert len({(tmp_path / f"{i}").read_bytes() for i in range(3)}) == 1


def test_memory_does_not_depend_on_the_data(graph, stats_of, tmp_path):
    stats_of("minmse_hist").save(tmp_path / "few")
    jq.calibrate(graph, np.resize(DATA, (96, 8)), stats_of("minmse_hist").config).save(tmp_path / "many")
    assert (tmp_path / "few").stat().st_size == (tmp_path / "many").stat().st_size


def test_refuses_unknown_tensors_and_absent_observers(stats_of):
    with pytest.raises(jq.DataError, match=r"no statistics for tensor 'yy'.*Did you mean 'y'"):
        stats_of("minmse").errors("yy")
    with pytest.raises(jq.DataError, match="no statistics for tensor"):
        stats_of("minmse").range("other")
    with pytest.raises(jq.DataError, match="no histograms"):
        stats_of("minmse").histogram("x")
    with pytest.raises(jq.DataError, match="no table of errors"):
        stats_of("minmse_hist").errors("x")


def test_refuses_unknown_tensors_of_histograms(stats_of):
    with pytest.raises(jq.DataError, match=r"no statistics for tensor 'yy'.*Did you mean 'y'"):
        stats_of("minmse_hist").histogram("yy")


@pytest.mark.parametrize("wanted", ["percentile", "minmse", "mse"])
def test_refuses_a_method_that_the_statistics_do_not_hold(graph, stats_of, wanted):
    with pytest.raises(jq.DataError):
        jq.activation_qparams(graph, stats_of("minmax"), METHODS[wanted])


class TestMerge:
    def test_refuses_other_configs(self, stats_of):
        for other in METHODS:
            if other == "minmse":
                continue
            with pytest.raises(jq.DataError, match="cannot be merged"):
                stats_of("minmse").merge(stats_of(other))

    def test_refuses_other_models(self, stats_of):
        stats = stats_of("nonoverflow")
        renamed = dataclasses.replace(stats, tensors={"a" + k: v for k, v in stats.tensors.items()})
        with pytest.raises(jq.DataError, match="cannot be merged"):
            stats.merge(renamed)

    @pytest.mark.parametrize("name", ["minmse", "minmse_hist"])
    def test_refuses_other_places(self, graph, stats_of, name):
        other = jq.calibrate(graph, 20 * DATA, stats_of(name).config)
        with pytest.raises(jq.DataError, match="like="):
            stats_of(name).merge(other)

    @pytest.mark.parametrize("name", METHODS)
    def test_with_itself_doubles_the_counts_and_keeps_the_range(self, stats_of, name):
        stats = stats_of(name)
        merged = stats.merge(stats)
        for tensor in stats.tensors:
            if name != "moving":
                assert merged.range(tensor) == stats.range(tensor)
            if "histogram" in stats.observers:
                assert merged.histogram(tensor).counts.sum() == 2 * stats.histogram(tensor).counts.sum() == 2 * 96
            if "errors" in stats.observers:
                np.testing.assert_array_equal(merged.errors(tensor)["total"], 2 * stats.errors(tensor)["total"])


def rewritten(path, target, change):
    """The file with its header, a dict, and its arrays changed."""
    with safetensors.safe_open(path, "numpy") as file:
        header = json.loads(file.metadata()["jq"])
        arrays = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    change(header, arrays)
    safetensors.numpy.save_file(arrays, target, {"jq": json.dumps(header)})


def used(stats):
    """Whatever reads all of them."""
    for tensor in stats.tensors:
        stats.range(tensor)
        if "errors" in stats.observers:
            stats.errors(tensor)
            stats.best_exponent(tensor)
        if "histogram" in stats.observers:
            stats.histogram(tensor)


class TestDamage:
    @pytest.mark.parametrize("name", ["minmse", "minmse_hist"])
    def test_random_damage_is_an_error_of_ours_or_none(self, stats_of, name, tmp_path):
        """Bytes flipped, in the header more often; files cut, filled up, and with holes."""
        path = tmp_path / "stats"
        stats_of(name).save(path)
        good = path.read_bytes()
        header = 8 + int.from_bytes(good[:8], "little")
        rng = np.random.default_rng(0)
        refused = 0
        for i in range(300):
            data = bytearray(good)
            kind = i % 6
            if kind < 4:
                for _ in range(rng.integers(1, 4)):
                    data[rng.integers(0, header if kind else len(data))] = (
                        rng.integers(32, 127) if kind < 3 else rng.integers(256)
                    )
            elif kind == 4:
                del data[int(rng.integers(0, len(data))) :]
            else:
                start = int(rng.integers(0, len(data)))
                data[start : start + int(rng.integers(1, 99))] = bytes(int(rng.integers(0, 99)))
            path.write_bytes(data)
            try:
                jq.Stats.load(path)
            except jq.Error:
                refused += 1
        assert refused > 150

    @pytest.mark.parametrize("content", [b"", b"\0" * 8, b"\xff" * 100, b"PK\3\4", b"{}", b"\x80\x04K\x01."])
    def test_what_is_no_file_of_ours(self, content, tmp_path):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(jq.DataError, match="is not a statistics file"):
            jq.Stats.load(tmp_path / "x")

    def test_other_safetensors(self, tmp_path):
        safetensors.numpy.save_file({"w": np.ones(3)}, tmp_path / "x")
        with pytest.raises(jq.DataError, match="is not a statistics file"):
            jq.Stats.load(tmp_path / "x")

    def test_no_file_and_no_place_to_write(self, stats_of, tmp_path):
        for path in (tmp_path / "absent", tmp_path):
            with pytest.raises(jq.DataError, match=r"cannot read|is not a statistics file"):
                jq.Stats.load(path)
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(jq.DataError, match="cannot write"):
            stats_of("minmse").save(tmp_path / "file" / "below")
        with pytest.raises(jq.DataError, match="cannot write"):
            stats_of("minmse").save(tmp_path)

    @pytest.mark.parametrize("key", ["version", "config", "tensors", "observers", "feeds", "extra"])
    def test_headers_that_lack_something(self, stats_of, key, tmp_path):
        stats_of("minmse").save(tmp_path / "good")
        rewritten(tmp_path / "good", tmp_path / "bad", lambda header, _: header.pop(key))
        with pytest.raises(jq.DataError):
            jq.Stats.load(tmp_path / "bad")

    @pytest.mark.parametrize(
        "change",
        [
            {"version": 99},
            {"version": "1"},
            {"config": {"method": "minmsee"}},
            {"config": {"metod": "minmse"}},
            {"config": None},
            {"tensors": {"x": {}}},
            {"tensors": {"x": {"errors": 7}}},
            {"tensors": {"x": {"errors": "1"}}},
            {"tensors": []},
            {"observers": {"errors": {"kind": "Nothing"}}},
            {"observers": {"errors": {"kind": "Observer", "axis": None}}},
            {"observers": {"errors": {"kind": "Range", "axis": None, "absolute": False}}},
            {"observers": {}},
            {"feeds": "many"},
            {"feeds": None},
        ],
        ids=str,
    )
    def test_headers_that_say_something_else(self, stats_of, change, tmp_path):
        stats_of("minmse").save(tmp_path / "good")
        rewritten(tmp_path / "good", tmp_path / "bad", lambda header, _: header.update(change))
        with pytest.raises(jq.Error):
            jq.Stats.load(tmp_path / "bad")

    @pytest.mark.parametrize("name", ["minmse", "minmse_hist", "moving"])
    @pytest.mark.parametrize("how", ["absent", "longer", "another rank"])
    def test_states_that_do_not_fit(self, stats_of, name, how, tmp_path):
        stats_of(name).save(tmp_path / "good")
        for key in [f"state/{o}/{k}" for o, s in stats_of(name).states.items() for k in s]:
            rewritten(tmp_path / "good", tmp_path / "bad", lambda _, arrays, key=key: damage(arrays, key, how))
            with pytest.raises(jq.DataError):
                jq.Stats.load(tmp_path / "bad")

    @pytest.mark.parametrize("name", ["minmse", "minmse_hist"])
    @pytest.mark.parametrize("how", ["absent", "longer", "another rank"])
    def test_places_that_do_not_fit(self, stats_of, name, how, tmp_path):
        stats_of(name).save(tmp_path / "good")
        for key in [f"place/{o}/{k}" for o, s in stats_of(name).places.items() for k in s]:
            rewritten(tmp_path / "good", tmp_path / "bad", lambda _, arrays, key=key: damage(arrays, key, how))
            with pytest.raises(jq.DataError):
                used(jq.Stats.load(tmp_path / "bad"))

    @pytest.mark.parametrize("dtype", [np.int8, np.uint64, np.bool_])
    def test_arrays_of_another_type(self, stats_of, dtype, tmp_path):
        stats_of("minmse").save(tmp_path / "good")

        def change(_, arrays):
            arrays.update({k: v.astype(dtype) for k, v in arrays.items()})

        rewritten(tmp_path / "good", tmp_path / "bad", change)
        with pytest.raises(jq.DataError):
            jq.Stats.load(tmp_path / "bad")


def damage(arrays, key, how):
    array = arrays.pop(key)
    if how == "longer":
        arrays[key] = np.repeat(array, 2, axis=0)
    if how == "another rank":
        arrays[key] = np.ascontiguousarray(array[..., None])


def test_observers_of_ones_own_are_kept(graph, tmp_path):
    own = {"channels": Range(1), "moments": Moments(-1)}
    stats = jq.calibrate(graph, DATA, observers=own)
    stats.save(tmp_path / "x")
    loaded = jq.Stats.load(tmp_path / "x")
    assert loaded.observers["channels"] == Range(1) and loaded.tensors["x"]["channels"] == 8
    for stats_ in (stats, loaded):
        np.testing.assert_array_equal(stats_.rows("x", "channels")["low"], DATA.min(0))
        np.testing.assert_array_equal(stats_.rows("x", "moments")["count"], np.full(8, 12))
        np.testing.assert_allclose(stats_.rows("x", "moments")["total"], DATA.sum(0), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(stats_.rows("y", "channels")["high"], np.tanh(DATA).max(0), rtol=1e-5)
