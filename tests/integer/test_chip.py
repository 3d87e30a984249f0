"""The integer program against onnxruntime, element by element, and against its own promise: no floats."""

from __future__ import annotations

import dataclasses
import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import jq
from jq.ops.integer import fixed, rounding
from tests.conftest import SHARED

XINT8_NAMES = jq.zoo.models()
FORMATS = ("qdq", "qoperator")


@functools.cache
def images() -> np.ndarray:
    return np.asarray(jq.zoo.calibration_set()[0][:24])


@functools.cache
def quantized(name: str, config: str = "XINT8", format: str = "qdq") -> onnx.ModelProto:
    return jq.quantize(jq.zoo.path(name), images()[:16], config, format=format).model


def by_onnxruntime(model: onnx.ModelProto, feeds, names) -> dict[str, np.ndarray]:
    """Tensors of a model, without onnxruntime's optimizations."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    have = {o.name for o in copy.graph.output}
    copy.graph.output.extend(helper.make_empty_tensor_value_info(n) for n in names if n not in have)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(copy.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


def rounded_tensors(model: onnx.ModelProto) -> list[str]:
    """Every tensor of integers that the model computes."""
    makers = ("QuantizeLinear", "QLinear", "QGemm")
    return [n.output[0] for n in model.graph.node if n.op_type.startswith(makers)]


def differing(model: onnx.ModelProto, feeds, target="ort", *, shared=False) -> dict[str, int]:
    """How many integers of each tensor are not onnxruntime's; with `shared`, each node computes on onnxruntime's."""
    chip = jq.integer.load(model, target)
    tensors = rounded_tensors(model)
    wanted = by_onnxruntime(model, feeds, tensors)
    found = chip.codes(feeds, {t: wanted[t] for t in tensors} if shared else None)
    assert set(tensors) <= set(found)
    assert all(np.asarray(found[t]).dtype == wanted[t].dtype for t in tensors)
    return {t: n for t in tensors if (n := int((np.asarray(found[t]) != wanted[t]).sum()))}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", XINT8_NAMES)
def test_ort_is_onnxruntime_on_every_integer(name, format):
    assert differing(quantized(name, format=format), {"input": images()}) == {}


@pytest.mark.parametrize("name", XINT8_NAMES)
def test_rounding_half_to_even_leaves_no_difference(name):
    assert differing(quantized(name), {"input": images()}, "aie2_even") == {}


@pytest.mark.parametrize("format", ["vitis_qdq", "fix_neuron"])
def test_the_vendors_dialects_are_the_same_program(format):
    name = XINT8_NAMES[0]
    feeds = {"input": images()}
    wanted = jq.integer.load(quantized(name), "aie2_x1")(feeds)["logits"]
    np.testing.assert_array_equal(jq.integer.load(quantized(name, format=format), "aie2_x1")(feeds)["logits"], wanted)


@pytest.mark.parametrize("config", ["INT8_CNN_DEFAULT", "A8W8", "S8S8_AAWS"])
def test_float_scales_agree_but_where_float32_sums_meet_a_tie(config):
    """onnxruntime adds float32 products here, in an order of its own: next to a tie that decides, and it is flagged."""
    model, feeds = quantized(XINT8_NAMES[0], config), {"input": images()[:8]}
    left = differing(model, feeds, shared=True)
    chip = jq.integer.load(model, "ort")
    _, log = chip.explain(feeds)
    assert sum(left.values()) <= sum(row.inexact for row in log.rows)
    assert sum(left.values()) <= 20  # of 618,000
    assert log.unexplained == 0


@pytest.mark.parametrize(("config", "products"), [("A16W8", set()), ("INT16_CNN_DEFAULT", {"Conv", "Gemm"})])
def test_16_bit_activations(config, products):
    """By bytes where a chip has a form for it, which is the exact product rounded: 16 by 8 bits; else in float32."""
    model, feeds = quantized(XINT8_NAMES[0], config), {"input": images()[:8]}
    exactly, floating = jq.integer.load(model, "aie2_even"), jq.integer.load(model, "ort")
    assert max(differing(model, feeds, shared=True).values()) < 100  # of 150,000, as float32 adds in another order
    ours, theirs = (chip(feeds)["logits"] for chip in (exactly, floating))
    np.testing.assert_allclose(ours, theirs, atol=0.02)
    types = {node.label: node.op_type for node in exactly.reading.graph.nodes}
    assert {types[label] for label in exactly.floats(feeds)} & {"Conv", "Gemm"} == products
    assert {types[label] for label in floating.floats(feeds)} >= {"Conv", "Gemm"}


REFERENCES = (
    sorted(p for pattern in ("quark_reference/*.*INT8*.onnx", "quark_reference/*.A8W8.onnx", "ort_reference/*.onnx")
           for p in SHARED.glob(pattern)) if SHARED else []
)  # fmt: skip


def reference(path) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model of another tool with one sample, or with as many as it takes."""
    model = onnx.load(path)
    stacked = np.load(SHARED / "quark_reference" / f"{path.name.split('.')[0]}.calib.npz")
    feeds = {}
    for value in model.graph.input:
        dims = [d.dim_value for d in value.type.tensor_type.shape.dim]
        sample = stacked[value.name]
        feeds[value.name] = sample[:1].reshape(dims) if all(dims) else sample[0]
    return model, feeds


@pytest.mark.skipif(not REFERENCES, reason="the reference models are not part of this repository")
@pytest.mark.parametrize("path", REFERENCES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_models_of_other_tools(path):
    assert differing(*reference(path)) == {}


# ---------------------------------------------------------------------------------------------
# No floats
# ---------------------------------------------------------------------------------------------


def float_equations(jaxpr):
    """Equations on floats, those in functions of the float32 forms excepted."""
    for equation in jaxpr.eqns:
        inner = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "jaxpr"))
        closed = [v for v in inner if hasattr(v, "jaxpr") or hasattr(v, "eqns")]
        floats = any(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in (*equation.invars, *equation.outvars))
        if equation.params.get("name") in rounding.FLOAT32_FORMS:
            continue
        for sub in closed:
            yield from float_equations(getattr(sub, "jaxpr", sub))
        if floats and not closed and equation.primitive.name not in MOVES:
            yield equation


MOVES = {"transpose", "reshape", "broadcast_in_dim", "squeeze", "slice", "concatenate", "copy"}


@pytest.mark.parametrize("target", jq.integer.TARGETS)
@pytest.mark.parametrize("name", XINT8_NAMES)
def test_no_float_operation_between_the_first_integers_and_the_last(name, target):
    chip = jq.integer.load(quantized(name), target)
    run, params = chip.trace()
    program = jax.make_jaxpr(run)(params, {"input": images()[:2]})
    assert [str(e) for e in float_equations(program.jaxpr)] == []
    names = [e.params["name"] for e in program.eqns if "name" in e.params]
    # Float32 is where images come in and logits go out, and nowhere else.
    assert names.count("_quantize_real") == 1 and names.count("_dequantize") == 1
    assert not {"float32_requantize", "_softmax_bits"} & set(names)
    assert chip.floats({"input": images()[:2]}) == {}


def test_convolutions_reach_the_library():
    chip = jq.integer.load(quantized("fashion_resnet"), "aie2_x1")
    run, params = chip.trace()
    jax.config.update("jax_disable_most_optimizations", False)
    program = jax.jit(run).lower(params, {"input": images()[:8]}).compile().as_text()
    jax.config.update("jax_disable_most_optimizations", True)
    products = sum(n.op_type in ("Conv", "Gemm") for n in chip.graph.nodes)
    if jax.default_backend() == "cpu" and "__ynn_fusion" not in program:
        pytest.skip("this jaxlib has no YNNPACK")
    assert program.count("__ynn_fusion") >= products


# ---------------------------------------------------------------------------------------------
# Targets
# ---------------------------------------------------------------------------------------------


def chain(*nodes, arrays=None, shape=(1, 4), dtype=onnx.TensorProto.INT8, opset=17) -> onnx.ModelProto:
    """A model of int8 `x` to int8 `y`."""
    made = [helper.make_node(op, inputs.split(), outputs.split(), **attrs) for op, inputs, outputs, attrs in nodes]
    graph = helper.make_graph(
        made,
        "chain",
        [helper.make_tensor_value_info("x", dtype, shape)],
        [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in (arrays or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def requantized(scale_in: float, scale_out: float) -> onnx.ModelProto:
    return chain(
        ("DequantizeLinear", "x in zero", "real", {}),
        ("QuantizeLinear", "real out zero", "y", {}),
        arrays={"in": np.float32(scale_in), "out": np.float32(scale_out), "zero": np.int8(0)},
    )


def test_a_user_can_write_a_fifth_target():
    x = np.array([[-3, -1, 1, 3]], np.int8)
    found = {}
    for mode in ("half_up", "half_even", "half_away", "floor"):
        own = dataclasses.replace(jq.integer.AIE2_X1, name=mode, rounding=mode)
        found[mode] = np.asarray(jq.integer.load(requantized(1.0, 2.0), own)({"x": x})["y"]).tolist()
    assert found == {
        "half_up": [[-1, 0, 1, 2]], "half_even": [[-2, 0, 0, 2]], "half_away": [[-2, -1, 1, 2]],
        "floor": [[-2, -1, 0, 1]],
    }  # fmt: skip


def test_a_scale_that_is_no_power_of_two_is_refused_by_name():
    with pytest.raises(jq.ModelError, match=r"powers of two.*tensor 'real' is 0\.3"):
        jq.integer.load(requantized(0.5, 0.3), "dpu")
    assert (
        np.asarray(jq.integer.load(requantized(0.5, 0.3), "aie2_x1")({"x": np.full((1, 4), 3, np.int8)})["y"])[0, 0]
        == 5
    )


def test_unknown_targets_and_float_models_are_refused():
    with pytest.raises(jq.ConfigError, match=r"target needs one of .*got 'dpx'.*Did you mean 'dpu'"):
        jq.integer.load(requantized(1, 1), "dpx")
    with pytest.raises(jq.ModelError, match="not quantized"):
        jq.integer.load(jq.zoo.path("fashion_resnet"))
    with pytest.raises(jq.ConfigError, match="unknown rounding 'up'"):
        jq.integer.Target(name="mine", rounding="up")


def test_what_no_chip_has_is_computed_in_float_and_listed():
    parameters = {"s": np.float32(0.125), "z": np.int8(0)}
    model = chain(
        ("DequantizeLinear", "x s z", "real", {}),
        ("CumSum", "real axis", "sums", {}),
        ("QuantizeLinear", "sums s z", "y", {}),
        arrays={**parameters, "axis": np.int64(1)},
    )
    chip = jq.integer.load(model, "aie2_x1")
    feeds = {"x": np.array([[1, 2, 3, 4]], np.int8)}
    assert np.asarray(chip(feeds)["y"]).tolist() == [[1, 3, 6, 10]]
    assert list(chip.floats(feeds).values()) == ["no integer rule"]


def test_partial_sums_of_16_bits_lose_what_the_shift_drops():
    """Two halves of two chunks: 24 is held as 32 above a shift of 4, so that 24 / 64 becomes 1."""
    weight = np.zeros((1, 8, 1, 1), np.int8)
    weight[0, 0] = 1
    model = chain(
        ("QuantizeLinear", "image s z", "first", {}),
        ("DequantizeLinear", "first s z", "a", {}),
        ("DequantizeLinear", "eye s z", "same", {}),
        ("Conv", "a same", "b", {}),
        ("QuantizeLinear", "b s z", "second", {}),
        ("DequantizeLinear", "second s z", "c", {}),
        ("DequantizeLinear", "w s z", "weight", {}),
        ("Conv", "c weight", "d", {}),
        ("QuantizeLinear", "d out z", "y", {}),
        arrays={"w": weight, "s": np.float32(1), "out": np.float32(64), "z": np.int8(0),
                "eye": np.eye(8, dtype=np.int8)[..., None, None]},
    )  # fmt: skip
    model.graph.input[0].name = "image"
    model.graph.input[0].type.CopyFrom(helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, (1, 8, 1, 1)))
    image = np.zeros((1, 8, 1, 1), np.float32)
    image[0, 0] = 24
    psum = dataclasses.replace(jq.integer.AIE2_X1, name="psum", partial_sums=jq.integer.PartialSums(4, 2))
    results = [np.asarray(jq.integer.load(model, t)({"image": image})["y"]).item() for t in (psum, "aie2_x1")]
    assert results == [1, 0]


def test_the_program_is_pure_and_compiles_once_per_shape():
    chip = jq.integer.load(quantized("fashion_resnet"), "aie2_x1")
    run, params = chip.trace()
    compiled = jax.jit(run)
    for start in (0, 8):
        compiled(params, {"input": images()[start : start + 8]})
    assert compiled._cache_size() == 1
    stacked = jax.vmap(lambda x: run(params, {"input": x})["logits"])(images()[:8].reshape(4, 2, *images().shape[1:]))
    np.testing.assert_array_equal(stacked.reshape(8, -1), chip({"input": images()[:8]})["logits"])


def test_a_weight_quantized_in_the_graph_is_folded():
    parameters = {"s": np.float32(0.5), "z": np.int8(0), "w": np.float32([[1.0], [2.0], [-1.0], [0.6]])}
    model = chain(
        ("DequantizeLinear", "x s z", "real", {}),
        ("QuantizeLinear", "w s z", "codes", {}),
        ("DequantizeLinear", "codes s z", "weight", {}),
        ("MatMul", "real weight", "product", {}),
        ("QuantizeLinear", "product s z", "y", {}),
        arrays=parameters,
    )
    chip = jq.integer.load(model, "dpu")
    feeds = {"x": np.array([[2, 2, 2, 2]], np.int8)}
    assert np.asarray(chip(feeds)["y"]).tolist() == [[5]]
    assert chip.floats(feeds) == {}


def test_table_of_a_function_of_one_tensor():
    """A sigmoid of 256 codes, times its operand: the product is a table too."""
    parameters = {"s": np.float32(0.0625), "z": np.uint8(128)}
    model = chain(
        ("DequantizeLinear", "x s z", "real", {}),
        ("Sigmoid", "real", "gate", {}),
        ("Mul", "real gate", "swish", {}),
        ("QuantizeLinear", "swish s z", "y", {}),
        arrays=parameters,
        shape=(1, 256),
        dtype=onnx.TensorProto.UINT8,
    )
    x = np.arange(256, dtype=np.uint8)[None]
    real = (x.astype(np.float64) - 128) / 16
    wanted = np.clip(np.rint(real / (1 + np.exp(-real)) * 16) + 128, 0, 255)
    chip = jq.integer.load(model, "aie2_even")
    np.testing.assert_array_equal(chip({"x": x})["y"], wanted)
    assert chip.floats({"x": x}) == {}


def test_sigmoids_that_a_network_keeps():
    """Of SiLU and of a gate, in XINT8, where HardSigmoid would lose more than the config allows."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Sigmoid", ["a"], ["s"]),
        helper.make_node("Mul", ["a", "s"], ["b"]),
        helper.make_node("GlobalAveragePool", ["b"], ["m"]),
        helper.make_node("Sigmoid", ["m"], ["g"]),
        helper.make_node("Mul", ["b", "g"], ["c"]),
        helper.make_node("Conv", ["c", "v"], ["y"]),
    ]
    arrays = {"w": rng.standard_normal((6, 4, 3, 3)) / 6, "v": rng.standard_normal((5, 6, 1, 1))}
    graph = helper.make_graph(
        nodes,
        "gates",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 4, 8, 8])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["N", 5, 8, 8])],
        [numpy_helper.from_array(a.astype(np.float32), k) for k, a in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x = 2 * rng.standard_normal((16, 4, 8, 8)).astype(np.float32)
    made = jq.quantize(model, x, "XINT8").model
    assert [n.op_type for n in made.graph.node].count("Sigmoid") == 2
    assert differing(made, {"x": x}) == {}
    assert jq.integer.load(made, "ort").floats({"x": x}) == {}


def test_exact_scales():
    assert fixed.exact(np.float32(0.1)) == Fraction(13421773, 134217728)
    assert fixed.round_fraction(Fraction(5, 2), "half_even") == 2
