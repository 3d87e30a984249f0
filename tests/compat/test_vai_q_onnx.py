"""`quantize_static`, as scripts for vai_q_onnx call it: each kind of file, each method."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import jq
from jq.compat import vai_q_onnx
from jq.compat.vai_q_onnx import CalibrationMethod, PowerOfTwoMethod, QuantFormat, QuantType, VitisQuantFormat
from jq.errors import ConfigError, DataError
from tests.compat.conftest import IMAGES, MODEL, ListReader, agreement, logits


def quantized(**arguments: Any) -> onnx.ModelProto:
    given = {"model_output": None, "calibration_data_reader": ListReader(), "print_summary": False, **arguments}
    return vai_q_onnx.quantize_static(str(MODEL), **given)


def domains(model: onnx.ModelProto) -> set[str]:
    return {n.domain for n in model.graph.node}


def test_the_default_is_fix_neuron(tmp_path: Path) -> None:
    output = tmp_path / "quantized.onnx"
    vai_q_onnx.quantize_static(
        model_input=str(MODEL),
        model_output=str(output),
        calibration_data_reader=ListReader(),
        quant_format=VitisQuantFormat.FixNeuron,
        calibrate_method=PowerOfTwoMethod.MinMSE,
        input_nodes=[],
        output_nodes=[],
        extra_options=None,
    )
    model = onnx.load(output)
    fixed = [n for n in model.graph.node if n.op_type == "FixNeuron"]
    assert fixed
    assert model.graph == quantized().graph
    assert not {"QuantizeLinear", "DequantizeLinear"} & {n.op_type for n in model.graph.node}


def test_vitis_qdq() -> None:
    model = quantized(quant_format=VitisQuantFormat.QDQ)
    assert {n.op_type for n in model.graph.node if n.domain} == {"VitisQuantizeLinear", "VitisDequantizeLinear"}


@pytest.mark.parametrize("method", [*PowerOfTwoMethod, *(m for m in CalibrationMethod if m.name != "Distribution")])
def test_methods(method: Any) -> None:
    model = quantized(quant_format=QuantFormat.QDQ, calibrate_method=method)
    assert domains(model) == {""}
    assert agreement(model) > 0.95
    scales = [numpy_helper.to_array(i) for i in model.graph.initializer if i.name.endswith("_scale")]
    powers = all((np.log2(s) % 1 == 0).all() for s in scales)
    assert powers == isinstance(method, PowerOfTwoMethod) or powers is False


def test_qoperator() -> None:
    model = quantized(quant_format=QuantFormat.QOperator, calibrate_method=CalibrationMethod.MinMax)
    assert "QLinearConv" in {n.op_type for n in model.graph.node}
    assert agreement(model) > 0.95


def test_no_reader_means_random_data() -> None:
    with pytest.warns(UserWarning, match="random samples"):
        model = quantized(calibration_data_reader=None, quant_format=QuantFormat.QDQ)
    assert any(n.op_type == "QuantizeLinear" for n in model.graph.node)


def test_only_what_lies_between() -> None:
    convolutions = [n.name for n in onnx.load(MODEL).graph.node if n.op_type == "Conv"]
    model = quantized(quant_format=QuantFormat.QDQ, input_nodes=[convolutions[1]], output_nodes=[convolutions[2]])
    made = {o for n in model.graph.node if n.op_type == "DequantizeLinear" for o in n.output}
    inside = {n.name for n in model.graph.node if n.op_type == "Conv" and n.input[1] in made}
    assert inside == set(convolutions[1:3])


def test_the_npu_has_constraints() -> None:
    free, bound = (
        quantized(quant_format=QuantFormat.QDQ, activation_type=QuantType.QUInt8, enable_ipu_cnn=npu)
        for npu in (False, True)
    )
    types = [{i.name: i.data_type for i in model.graph.initializer} for model in (free, bound)]
    assert [t["stem.bias_quantized"] for t in types] == [onnx.TensorProto.INT32, onnx.TensorProto.INT8]


def test_what_cannot_be_had() -> None:
    for name in ("reduce_range", "include_sq"):
        with pytest.raises(ConfigError, match=f"{name}=True"):
            quantized(**{name: True})
    with pytest.raises(ConfigError, match="RandomDataReaderInputShape"):
        quantized(random_data_reader_input_shape={"imput": [1, 1, 28, 28]})
    with pytest.raises(ConfigError, match="extra_options is a list"):
        vai_q_onnx.quantize_static(str(MODEL), None, None, QuantFormat.QDQ, PowerOfTwoMethod.MinMSE, [], [], ["Conv"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a FixNeuron needs"):
        quantized(calibrate_method=CalibrationMethod.MinMax)
    with pytest.raises(ConfigError, match="Did you mean 'Percentile'"):
        quantized(extra_options={"Percntile": 99.0})


def test_channels_last_is_of_the_model_and_not_of_the_data() -> None:
    plain, model = (quantized(quant_format=QuantFormat.QDQ, convert_nchw_to_nhwc=last) for last in (False, True))
    assert [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim][1:] == [28, 28, 1]
    assert np.array_equal(logits(model, IMAGES.transpose(0, 2, 3, 1)), logits(plain))


def test_float16_models() -> None:
    half = jq.convert(MODEL, to="fp16", form="native", keep_io=False)
    given = {"quant_format": QuantFormat.QDQ, "print_summary": False, "convert_fp16_to_fp32": True}
    model = vai_q_onnx.quantize_static(half, None, ListReader(), **given)
    assert agreement(model) > 0.95
    with pytest.raises(DataError, match="expected input: float32"):  # data are of the converted model, as in Quark
        vai_q_onnx.quantize_static(half, None, ListReader(IMAGES.astype(np.float16)), **given)


def test_random_data_of_a_shape() -> None:
    with pytest.warns(UserWarning, match="random samples"):
        model = quantized(
            calibration_data_reader=None,
            quant_format=QuantFormat.QDQ,
            random_data_reader_input_shape=[2, 1, 28, 28],
            extra_options={"CalibDataSize": 2},
        )
    assert any(n.op_type == "QuantizeLinear" for n in model.graph.node)


def test_the_first_arguments_are_the_vendors() -> None:
    parameters = inspect.signature(vai_q_onnx.quantize_static).parameters
    assert list(parameters)[:8] == [
        "model_input", "model_output", "calibration_data_reader", "quant_format", "calibrate_method", "input_nodes",
        "output_nodes", "extra_options",
    ]  # fmt: skip
    positional = vai_q_onnx.quantize_static(
        str(MODEL), None, ListReader(), QuantFormat.QDQ, PowerOfTwoMethod.MinMSE, [], [], {"BiasCorrection": False}
    )
    assert positional.graph == quantized(quant_format=QuantFormat.QDQ, extra_options={"BiasCorrection": False}).graph
    assert parameters["quant_format"].default is VitisQuantFormat.FixNeuron
    assert parameters["calibrate_method"].default is PowerOfTwoMethod.MinMSE
