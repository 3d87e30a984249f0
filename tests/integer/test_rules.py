"""Rules one by one: against onnxruntime on small models, and where only the chip has them, by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
from onnx import helper

import jq
from tests.integer.test_chip import chain, differing

PARAMETERS = {"s": np.float32(0.25), "z": np.int8(0), "out": np.float32(0.5)}
EVERY = np.arange(-128, 128, dtype=np.int8).reshape(1, 4, 8, 8)


def model(*nodes, x=EVERY, **arrays) -> onnx.ModelProto:
    """`real` is what x stands for, `made` is rounded to y."""
    return chain(
        ("DequantizeLinear", "x s z", "real", {}),
        *nodes,
        ("QuantizeLinear", "made out z", "y", {}),
        arrays=PARAMETERS | arrays,
        shape=x.shape,
    )


def weight(name: str, integers, scale: str = "ws") -> tuple[tuple, dict[str, np.ndarray]]:
    return ("DequantizeLinear", f"{name} {scale} z", f"{name}_real", {}), {name: np.asarray(integers, np.int8)}


def same_as_onnxruntime(made: onnx.ModelProto, x=EVERY, *, floats=()) -> None:
    chip = jq.integer.load(made, "ort")
    assert differing(made, {"x": x}) == {}
    assert set(chip.floats({"x": x})) == set(floats)


@pytest.mark.parametrize(
    "nodes",
    [
        [("Neg", "real", "made", {})],
        [("Abs", "real", "made", {})],
        [("Relu", "real", "a", {}), ("Add", "a real", "made", {})],  # a cut that waits is made before the sum
        [("Relu", "real", "a", {}), ("Clip", "a low high", "made", {})],
        [("Clip", "real", "made", {})],
        [("Mul", "real minus", "made", {})],
        [("ReduceSum", "real axes", "made", {"keepdims": 0})],
        [("Sum", "real real real", "made", {})],
        [("MaxPool", "real", "made", {"kernel_shape": [2, 2], "pads": [1, 1, 0, 0]})],
        [("Pad", "real pads half", "made", {})],
        [("Resize", "real none scales", "made", {"mode": "linear"})],
        [("Resize", "real none scales", "made", {"mode": "nearest"})],
        [("Split", "real", "a made", {"axis": 1})],
        [("Concat", "real real", "made", {"axis": 2})],
        [("LeakyRelu", "real", "made", {"alpha": 0.0})],
        [("HardSwish", "real", "made", {})],
    ],
    ids=lambda nodes: "-".join(node[0] for node in nodes),
)  # fmt: skip
def test_operators(nodes):
    arrays = {
        "low": np.float32(-1), "high": np.float32(4), "minus": np.float32(-0.5), "axes": np.array([1, 3]),
        "pads": np.array([0, 0, 1, 0, 0, 0, 2, 1]), "half": np.float32(0.5), "none": np.zeros(0, np.float32),
        "scales": np.float32([1, 1, 2, 2]),
    }  # fmt: skip
    read = {i for node in nodes for i in node[1].split()}
    same_as_onnxruntime(model(*nodes, **{k: v for k, v in arrays.items() if k in read}))


def test_the_largest_of_a_function_that_falls_is_not_that_of_the_largest_integer():
    wave = ("Cos", "real", "b", {})
    same_as_onnxruntime(model(wave, ("MaxPool", "b", "made", {"kernel_shape": [2, 2]})), floats={"made"})
    same_as_onnxruntime(model(wave, ("Transpose", "b", "made", {"perm": [0, 2, 3, 1]})))


def test_interpolation_of_float_scales_is_float32s():
    resize = ("Resize", "real none scales", "made", {"mode": "linear"})
    arrays = {"none": np.zeros(0, np.float32), "scales": np.float32([1, 1, 2, 2])}
    made = model(resize, **arrays, s=np.float32(0.037), out=np.float32(0.041))
    same_as_onnxruntime(made, floats={"made"})


def test_known_integers_that_change_are_not_taken_for_what_they_were():
    six, arrays = weight("six", 6, "one")
    made = model(
        six, ("Neg", "six_real", "low", {}), ("Clip", "real low six_real", "made", {}), one=np.float32(1), **arrays
    )
    same_as_onnxruntime(made, floats={"made"})


@pytest.mark.parametrize("scale", [2.0**-7, 2.0**-17, 2.0**-25, 2.0**-99, 0.037])
@pytest.mark.parametrize("after", [None, "Relu", "Mul", "Pad", "Transpose"])
def test_biases_of_any_scale(scale, after):
    """Finer than the products, much finer, and of no related scale; and what may follow."""
    rng = np.random.default_rng(0)
    w, arrays = weight("w", rng.integers(-128, 128, (4, 4, 1, 1)))
    b, more = weight("b", rng.integers(-128, 128, 4), "bs")
    follow = {
        None: ("Identity", "sum", "made", {}), "Relu": ("Relu", "sum", "made", {}), "Mul": ("Mul", "sum minus", "made", {}),
        "Pad": ("Pad", "sum pads", "made", {}), "Transpose": ("Transpose", "sum", "made", {}),
    }[after]  # fmt: skip
    made = model(
        w, b, ("Conv", "real w_real b_real", "sum", {}), follow, ws=np.float32(0.03125), bs=np.float32(scale),
        minus=np.float32(-1), pads=np.array([0, 0, 1, 0, 0, 0, 0, 1]), **arrays, **more,
    )  # fmt: skip
    assert differing(made, {"x": EVERY}) == {}
    for target in jq.integer.TARGETS if scale != 0.037 else ():
        _, log = jq.integer.load(made, target).explain({"x": EVERY})
        assert log.unexplained == 0


def test_per_channel_weights_of_every_reader():
    rng = np.random.default_rng(0)
    scales = np.float32([0.1, 0.2, 0.4, 0.3])
    codes = rng.integers(-128, 128, (4, 4, 8, 8)).astype(np.int8)
    for op, axis in (("Add", 0), ("Mul", 1), ("Conv", 0)):
        wide = np.repeat(EVERY, 4, 0) if op != "Conv" else EVERY
        made = model(
            ("DequantizeLinear", "w scales zeros", "w_real", {"axis": axis}),
            (op, "real w_real", "made", {}),
            x=wide, w=codes, scales=scales, zeros=np.zeros(4, np.int8),
        )  # fmt: skip
        assert sum(differing(made, {"x": wide}).values()) <= (op == "Conv")  # whose float32 sums may meet a tie


@pytest.mark.parametrize(("target", "wanted"), [("dpu", 32), ("aie2_x1", 63), ("aie2_even", 63), ("ort", 64)])
def test_guard_bits_of_sums(target, wanted):
    """127 / 2**8 beside 0: below the coarsest grid a chip keeps its guard bits, and drops the rest."""
    made = chain(
        ("DequantizeLinear", "x fine z", "a", {}), ("DequantizeLinear", "zero one z", "b", {}),
        ("Add", "a b", "made", {}), ("QuantizeLinear", "made out z", "y", {}),
        arrays={"fine": np.float32(2**-8), "one": np.float32(1), "zero": np.zeros((1, 4), np.int8), "z": np.int8(0),
                "out": np.float32(2**-7)},
    )  # fmt: skip
    assert np.asarray(jq.integer.load(made, target)({"x": np.full((1, 4), 127, np.int8)})["y"])[0, 0] == wanted


def test_bilinear_as_the_chip():
    """5 and 6 at a third from the one: rows are equal, 5 1/3 of 2**22, and a half of one is added."""
    made = model(("Resize", "real none scales", "made", {"mode": "linear"}), x=np.zeros((1, 1, 2, 2), np.int8),
                 none=np.zeros(0, np.float32), scales=np.float32([1, 1, 2, 2]), out=PARAMETERS["s"])  # fmt: skip
    x = np.array([[[[5, 9], [6, 10]]]], np.int8)
    found = np.asarray(jq.integer.load(made, "aie2_x1")({"x": x})["y"])[0, 0]
    # weights are quarters: rows 5, 5.25, 5.75, 6 and four more in the next column, rounded half up at the end
    rows = np.array([5, 5.25, 5.75, 6])[:, None] + np.array([0, 1, 3, 4])
    np.testing.assert_array_equal(found, np.floor(rows + 0.5))


def test_softmax_as_the_chip():
    """Two equal operands of eight that count: e / (2 e + 6) in bfloat16, here 1 / 8 to one of 128ths."""
    made = model(("Softmax", "real", "made", {}), x=np.zeros((1, 8), np.int8), out=np.float32(2**-7))
    equal = np.asarray(jq.integer.load(made, "aie2_x1")({"x": np.zeros((1, 8), np.int8)})["y"])
    np.testing.assert_array_equal(equal, 16)
    # e = bf16(2.71828) = 2.71875; the sum is 9.71875, to bfloat16 9.75; its reciprocal 13.1 / 128 has 7 bits
    x = np.array([[4, 0, 0, 0, 0, 0, 0, 0]], np.int8)
    found = np.asarray(jq.integer.load(made, "aie2_x1")({"x": x})["y"])[0]
    wanted = np.exp([1.0, 0]) / (np.exp(1) + 7) * 128
    np.testing.assert_allclose(found[:2], wanted, atol=0.75)
    assert (found[1:] == found[1]).all()


def test_qlinear_softmax_of_an_older_opset():
    made = helper.make_model(
        helper.make_graph(
            [helper.make_node("QLinearSoftmax", ["x", "s", "z", "out", "low"], ["y"], domain="com.microsoft", axis=1, opset=12)],
            "softmax",
            [helper.make_tensor_value_info("x", onnx.TensorProto.INT8, (1, 3, 5))],
            [helper.make_empty_tensor_value_info("y")],
            [onnx.numpy_helper.from_array(np.asarray(v), k)
             for k, v in {"s": np.float32(0.0625), "z": np.int8(0), "out": np.float32(2**-8), "low": np.int8(-128)}.items()],
        ),
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)], ir_version=9,
    )  # fmt: skip
    x = np.random.default_rng(0).integers(-128, 128, (1, 3, 5)).astype(np.int8)
    assert differing(made, {"x": x}) == {}


# ---------------------------------------------------------------------------------------------
# What is refused
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"s": np.float32(0)}, "must be positive"),
        ({"s": np.float32(-1)}, "must be positive"),
        ({"s": np.float32(np.nan)}, "must be positive"),
        ({"s": np.int32(1)}, "expected a float"),
        ({"z": np.zeros(2, np.int8)}, "its zero point has 2"),
        ({"w": np.zeros((4, 4, 1, 1), np.int8), "scales": np.ones(3, np.float32)}, "3 values for 4 channels"),
        ({"w": np.zeros((4, 4, 1, 1), np.uint8)}, "its zero point is int8"),
    ],
)
@pytest.mark.parametrize("target", jq.integer.TARGETS)
def test_quantizers_without_a_meaning(target, arrays, text):
    whole = {"w": np.zeros((4, 4, 1, 1), np.int8), "scales": np.float32(1)} | arrays
    made = model(
        ("DequantizeLinear", "w scales z", "w_real", {"axis": 0}), ("Conv", "real w_real", "made", {}), **whole
    )
    with pytest.raises(jq.ModelError, match=text):
        jq.integer.load(made, target)


@pytest.mark.parametrize(
    "fields",
    [
        {"requantize": "shifts"}, {"bias_guard": -1}, {"add_guard": 40}, {"slope_shift": 40}, {"lerp_bits": 3},
        {"slope": 2}, {"hard_sigmoid": (5000, 14)},
    ],
    ids=str,
)  # fmt: skip
def test_targets_that_no_chip_is(fields):
    with pytest.raises(jq.ConfigError, match=r"target 'mine': .*"):
        dataclasses.replace(jq.integer.DPU, name="mine", **fields)


@pytest.mark.parametrize("sums", [(-1, 2), (4, 0)])
def test_partial_sums_that_no_chip_has(sums):
    with pytest.raises(jq.ConfigError, match="at least one chunk"):
        jq.integer.PartialSums(*sums)
