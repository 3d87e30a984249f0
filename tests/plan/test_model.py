import jax
import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from jq.arithmetic.formats import BFP16, FLOAT16, INT8, INT16, UINT8, Integer
from jq.plan import QParams, QTensor


def dequantized(codes: np.ndarray, qparams: QParams) -> np.ndarray:
    """What onnxruntime's DequantizeLinear makes of codes."""
    arrays = {"x": codes, "s": np.asarray(qparams.scale), "z": np.asarray(qparams.zero_point).astype(codes.dtype)}
    axis = {} if qparams.axis is None else {"axis": qparams.axis}
    node = helper.make_node("DequantizeLinear", list(arrays), ["y"], **axis)
    given = [
        helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for k, a in arrays.items()
    ]
    made = helper.make_graph([node], "g", given, [helper.make_tensor_value_info("y", TensorProto.FLOAT, codes.shape)])
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, arrays)[0]


@pytest.mark.parametrize("grid", [INT8, UINT8, INT16], ids=repr)
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_values_are_those_of_dequantize_linear(grid: Integer, axis):
    rng = np.random.default_rng(0)
    codes = rng.integers(grid.qmin, grid.qmax, (3, 4, 5), endpoint=True).astype(grid.dtype)
    shape = () if axis is None else (codes.shape[axis],)
    scale, zero_point = rng.uniform(1e-3, 1, shape).astype(np.float32), np.asarray(rng.integers(0, 99, shape), np.int32)
    tensor = QTensor(codes, QParams(scale, zero_point, grid, axis))
    np.testing.assert_array_equal(tensor.value(), dequantized(codes, tensor.qparams))
    np.testing.assert_array_equal(jax.jit(QTensor.value)(tensor), tensor.value())  # a pytree
    np.testing.assert_array_equal(tensor.qparams.stored(tensor.value()), codes)


@pytest.mark.parametrize("axis", [None, 1])
def test_rounding_on_the_host_is_that_of_the_compiled_program(axis):
    rng = np.random.default_rng(0)
    shape = () if axis is None else (4,)
    qparams = QParams(rng.uniform(1e-3, 1, shape).astype(np.float32), np.full(shape, 99, np.int32), UINT8, axis)
    x = (rng.normal(size=(3, 4, 500)) * 50).astype(np.float32)
    np.testing.assert_array_equal(qparams.on_host(x), np.asarray(qparams.fake_quant(x)))


def test_codes_of_another_type_are_refused():
    one = QParams(np.float32(1), np.int32(0), INT8)
    for codes, grid in (
        (np.int16([1]), INT8),
        (np.uint8([1]), INT8),
        (np.float32([1]), FLOAT16),
        (np.int8([1]), BFP16),
    ):
        with pytest.raises(ValueError, match="needs codes of that type"):
            QTensor(codes, QParams(one.scale, one.zero_point, grid))


def test_a_weight_of_no_dims_comes_back_in_numpy_and_in_64_bits():
    given = QParams(np.float32(0.5), np.int32(0), INT8).given_back(np.float32(1.2))
    assert isinstance(given, (np.ndarray, np.generic)) and given.dtype == np.float64 and given == 1
