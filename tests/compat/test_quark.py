"""What users of Quark type, row by row of the vendor's guides."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper
from onnxruntime.quantization import CalibrationDataReader

import jq
from jq.compat import quark
from jq.compat.quark import (
    DEFAULT_ADAROUND_PARAMS,
    CalibrationMethod,
    CLEConfig,
    Int8Spec,
    Int16Spec,
    PowerOfTwoMethod,
    QLayerConfig,
    QuantType,
    XInt8Spec,
)
from jq.compat.quark.quantization.config import Config, QConfig, QuantizationConfig, get_default_config
from jq.errors import ConfigError, DataError, ModelError
from tests.compat.conftest import IMAGES, MODEL, ListReader, agreement, logits, quantized


def scales(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {i.name: numpy_helper.to_array(i) for i in model.graph.initializer if i.name.endswith("_scale")}


def weight_type(model: onnx.ModelProto, name: str = "stem.weight_quantized") -> np.dtype:
    return next(numpy_helper.to_array(i).dtype for i in model.graph.initializer if i.name == name)


def test_xint8_in_five_lines(tmp_path: Path) -> None:
    from jq.compat.quark import ModelQuantizer
    from jq.compat.quark.quantization.config import Config, get_default_config

    output = tmp_path / "quantized.onnx"
    config = Config(global_quant_config=get_default_config("XINT8"))
    ModelQuantizer(config).quantize_model(str(MODEL), str(output), ListReader())

    session = ort.InferenceSession(str(output), providers=["CPUExecutionProvider"])
    results = session.run(None, {"input": IMAGES})
    np.save(tmp_path / "results.npy", results[0])
    assert np.load(tmp_path / "results.npy").shape == (len(IMAGES), 10)
    assert agreement(onnx.load(output)) > 0.97


def test_it_is_what_jq_makes_of_the_same_preset(by_name: Any) -> None:
    expected = jq.quantize(MODEL, IMAGES, "XINT8").model
    assert by_name("XINT8").graph == expected.graph


class Rewinding(CalibrationDataReader):
    """An enumeration that is made in get_next, as most guides have it."""

    def __init__(self, batch: int = 1) -> None:
        self.enumerated, self.batch = None, batch

    def get_next(self) -> dict[str, np.ndarray] | None:
        if self.enumerated is None:
            parts = np.split(IMAGES, len(IMAGES) // self.batch)
            self.enumerated = iter([{"input": part} for part in parts])
        return next(self.enumerated, None)

    def rewind(self) -> None:
        self.enumerated = None

    def __len__(self) -> int:
        return len(IMAGES) // self.batch


class Stopping:
    """No subclass, and an iterator that ends by itself."""

    def __init__(self) -> None:
        self.images = iter(IMAGES)

    def get_next(self) -> dict[str, np.ndarray]:
        return {"input": next(self.images)[None]}


@pytest.mark.parametrize("reader", [Rewinding, Stopping, lambda: Rewinding(batch=4)])
def test_readers_of_all_kinds_give_the_same(reader: Any, by_name: Any) -> None:
    config = get_default_config("XINT8")
    config.print_summary = False
    model = quark.ModelQuantizer(Config(config)).quantize_model(Path(MODEL), None, reader())
    assert model.graph == by_name("XINT8").graph


@pytest.mark.parametrize("name", ["XINT8_ADAROUND_CONFIG", "XINT8_ADAQUANT"])
def test_tuned_configs(by_name: Any, name: str) -> None:
    tuned = by_name(name)
    assert agreement(tuned) > 0.97
    assert tuned.graph != by_name("XINT8").graph


def test_other_formats(by_name: Any) -> None:
    floats = [s for s in scales(by_name("A8W8")).values() if np.log2(s) % 1]
    assert floats, "A8W8 has float scales"
    assert not [s for s in scales(by_name("XINT8")).values() if np.log2(s) % 1]
    wide = {n.op_type: n.domain for n in by_name("A16W8").graph.node if n.op_type == "QuantizeLinear"}
    types = {i.name: i.data_type for i in by_name("A16W8").graph.initializer}
    assert wide
    assert types["input_zero_point"] == onnx.TensorProto.INT16
    assert weight_type(by_name("A16W8")) == np.int8
    casts = {a.i for n in by_name("BF16").graph.node if n.op_type == "Cast" for a in n.attribute if a.name == "to"}
    assert casts == {onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT}
    for name in ("A8W8", "A16W8", "BF16"):
        assert agreement(by_name(name)) > 0.99


def by_hand(**fields: Any) -> QuantizationConfig:
    return QuantizationConfig(
        calibrate_method=PowerOfTwoMethod.MinMSE,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        enable_npu_cnn=True,
        extra_options={"ActivationSymmetric": True},
        **fields,
    )


def test_a_config_by_hand_is_the_named_one(by_name: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert quantized(by_hand(include_cle=True)).graph == by_name("XINT8").graph
    print(Config(by_hand()))
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "calibrate_method = PowerOfTwoMethod.MinMSE" in lines
    assert "ActivationSymmetric: True" in lines
    assert "include_cle = True" in lines


def test_cle_is_an_option(by_name: Any) -> None:
    assert quantized(by_hand(include_cle=False)).graph != by_name("XINT8").graph


def test_accurate_cnn() -> None:
    config = QuantizationConfig(
        calibrate_method=CalibrationMethod.Percentile,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        include_fast_ft=True,
        output_nodes=[[n.name for n in onnx.load(MODEL).graph.node if n.op_type == "Conv"][2]],  # a few layers will do
        extra_options={"Percentile": 99.9999, "FastFinetune": {**DEFAULT_ADAROUND_PARAMS, "NumIterations": 50}},
    )
    assert agreement(quantized(config)) > 0.99


def test_newer_config(by_name: Any) -> None:
    config = QConfig(
        global_config=QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec()),
        algo_config=[CLEConfig()],
        exclude=[next(n.name for n in onnx.load(MODEL).graph.node if n.op_type == "Gemm")],
        extra_options={"PrintSummary": False},
    )
    model = quark.ModelQuantizer(config).quantize_model(MODEL, calibration_data_reader=ListReader())
    types = {i.name: i.data_type for i in model.graph.initializer}
    assert types["input_zero_point"] == onnx.TensorProto.INT8
    assert agreement(model) > 0.97
    (gemm,) = (n for n in model.graph.node if n.op_type == "Gemm")
    assert gemm.input[1] in types, "the weight of an excluded node is a float"


def test_layers_of_the_newer_config() -> None:
    """Formats of some layers, of what they read and of what they make."""
    convolutions = [n.name for n in onnx.load(MODEL).graph.node if n.op_type == "Conv"]
    wide = QLayerConfig(input_tensors=Int16Spec(), weight=Int16Spec())
    config = QConfig(
        global_config=QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec()),
        specific_layer_config={wide: [convolutions[1]], QLayerConfig(output_tensors=Int16Spec()): [convolutions[5]]},
        layer_type_config={None: ["Gemm"]},
        extra_options={"PrintSummary": False},
    )
    model = quark.ModelQuantizer(config).quantize_model(MODEL, calibration_data_reader=ListReader())
    maker = {o: n for n in model.graph.node if n.op_type == "DequantizeLinear" for o in n.output}
    types = {i.name: i.data_type for i in model.graph.initializer}
    readers = {name: n for n in model.graph.node for name in n.input}
    nodes = {n.name: n for n in model.graph.node if n.op_type in ("Conv", "Gemm")}

    def read(node: onnx.NodeProto) -> list[int | None]:
        return [types.get(maker[name].input[2]) if name in maker else None for name in node.input[:2]]

    def made(node: onnx.NodeProto) -> int:
        while node.op_type != "QuantizeLinear":
            node = readers[node.output[0]]
        return types[node.input[2]]

    int8, int16 = onnx.TensorProto.INT8, onnx.TensorProto.INT16
    assert read(nodes[convolutions[0]]) == [int8, int8]
    assert read(nodes[convolutions[1]]) == [int16, int16]
    assert [made(nodes[name]) for name in convolutions[4:7]] == [int8, int16, int8]
    (gemm,) = (n for n in nodes.values() if n.op_type == "Gemm")
    assert read(gemm)[1] is None


def test_data_from_a_path_and_a_number_of_samples(tmp_path: Path, by_name: Any) -> None:
    np.save(tmp_path / "images.npy", jq.zoo.calibration_set()[0][:40])
    config = get_default_config("XINT8")
    config.print_summary = False
    config.extra_options["CalibDataSize"] = len(IMAGES)
    quantizer = quark.ModelQuantizer(Config(config))
    model = quantizer.quantize_model(MODEL, calibration_data_path=str(tmp_path / "images.npy"))
    assert model.graph == by_name("XINT8").graph
    with pytest.raises(ConfigError, match="give one of them"):
        quantizer.quantize_model(MODEL, None, ListReader(), calibration_data_path=str(tmp_path))


def test_a_summary_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    config = Config(by_hand(include_cle=False))
    quark.ModelQuantizer(config).quantize_model(MODEL, calibration_data_reader=ListReader())
    assert Path(MODEL).name in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::UserWarning")  # what VINT8 does otherwise
def test_random_data_are_said() -> None:
    config = get_default_config("VINT8")  # calibrates on random data whatever there are
    config.print_summary = False
    with pytest.warns(UserWarning, match="random samples"):
        quark.ModelQuantizer(Config(config)).quantize_model(MODEL, calibration_data_reader=ListReader())


def test_what_does_not_fit_is_an_error_of_ours(tmp_path: Path) -> None:
    quantizer = quark.ModelQuantizer(Config(get_default_config("XINT8")))
    with pytest.raises(ModelError, match="missing"):
        quantizer.quantize_model(tmp_path / "missing.onnx", None, ListReader())
    with pytest.raises(DataError):
        quantizer.quantize_model(MODEL, None, ListReader(IMAGES[:0]))
    with pytest.raises(ConfigError, match="Config or a QConfig"):
        quark.ModelQuantizer("XINT8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the float model itself"):
        quantizer.quantize_model(MODEL, MODEL, ListReader())


def test_signature() -> None:
    names = list(inspect.signature(quark.ModelQuantizer.quantize_model).parameters)
    assert names[1:] == [
        "model_input", "model_output", "calibration_data_reader", "calibration_data_path", "algorithms"
    ]  # fmt: skip


def test_logits_are_those_of_the_reader(by_name: Any) -> None:
    assert logits(by_name("XINT8")).argmax(-1).tolist() == logits(onnx.load(MODEL)).argmax(-1).tolist()


def sixteen_bits(**options: Any) -> Any:
    """A newer config in 16 bits, with layers to be lowered to eight."""
    wide = quark.QLayerConfig(input_tensors=quark.Int16Spec(), weight=quark.Int16Spec())
    eight = quark.QLayerConfig(input_tensors=quark.Int8Spec(), weight=quark.Int8Spec())
    return QConfig(wide, algo_config=[quark.AutoMixprecisionConfig(target_layer_config=eight, **options)])


def kinds(model: onnx.ModelProto) -> dict[int, int]:
    """How many zero points there are of each type: a quantized tensor has one."""
    arrays = {t.name: t.data_type for t in model.graph.initializer}
    points = [arrays[n.input[2]] for n in model.graph.node if n.op_type == "QuantizeLinear"]
    return {kind: points.count(kind) for kind in points}


def test_automatic_mixed_precision_widens_until_the_metric_holds() -> None:
    def made(threshold: float) -> onnx.ModelProto:
        quantizer = quark.ModelQuantizer(sixteen_bits(metric_default="sqnr", metric_threshold=threshold))
        return quantizer.quantize_model(str(MODEL), calibration_data_reader=ListReader())

    low, high = kinds(made(5.0)), kinds(made(45.0))
    assert set(low) == {onnx.TensorProto.INT8}
    assert onnx.TensorProto.INT16 in high


@pytest.mark.parametrize("options", [{}, {"metric_default": "kl", "metric_threshold": None}])
def test_automatic_mixed_precision_without_a_goal(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="needs a metric_threshold"):
        quark.ModelQuantizer(sixteen_bits(**options)).quantize_model(str(MODEL), calibration_data_reader=ListReader())


def test_automatic_mixed_precision_of_other_formats() -> None:
    config = QConfig(quark.QLayerConfig(input_tensors=quark.XInt8Spec(), weight=quark.XInt8Spec()))
    config.algo_config = sixteen_bits(metric_threshold=1.0, metric_default="kl").algo_config
    with pytest.raises(ConfigError, match="16-bit activations"):
        quark.ModelQuantizer(config).quantize_model(str(MODEL), calibration_data_reader=ListReader())
