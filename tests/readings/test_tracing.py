"""What `trace` promises beyond the op rules: known values, taps, transforms, types, errors."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import jq
from jq.arithmetic.layout import Packed
from tests.conftest import one_node, onnxruntime_outputs

OPTIMIZED = True  # the compiled program is looked at


@pytest.fixture(scope="module")
def resnet() -> jq.Graph:
    return jq.load(jq.zoo.path("fashion_resnet"))


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return jq.zoo.evaluation_set()[0][:4]


def model(nodes, inputs, outputs, initializers=(), opset=21):
    graph = helper.make_graph(
        nodes, "g", inputs, outputs, [numpy_helper.from_array(v, k) for k, v in dict(initializers).items()]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def tensor(name, shape, elem=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, elem, shape)


@pytest.mark.parametrize("name", jq.zoo.models())
def test_bundled_models_equal_onnxruntime(name, images):
    import onnxruntime as ort

    graph = jq.load(jq.zoo.path(name))
    ours = np.asarray(jq.trace(graph)(jq.pack(graph), {"input": images})["logits"])
    (theirs,) = ort.InferenceSession(jq.zoo.path(name)).run(None, {"input": images})
    assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()


def test_shape_arithmetic_never_reaches_xla():
    """A flatten as exporters write it: Shape, Gather, Unsqueeze, Concat, Reshape."""
    built = model(
        [
            helper.make_node("Shape", ["x"], ["s"]),
            helper.make_node("Gather", ["s", "zero"], ["n"]),
            helper.make_node("Mul", ["n", "two"], ["n2"]),
            helper.make_node("Unsqueeze", ["n2", "axes"], ["n1"]),
            helper.make_node("Concat", ["n1", "rest"], ["shape"], axis=0),
            helper.make_node("Reshape", ["x", "shape"], ["y"]),
        ],
        [tensor("x", ["N", 4, 6])],
        [tensor("y", None)],
        {"zero": np.int64(0), "two": np.int64(2), "axes": np.array([0]), "rest": np.array([-1])},
    )
    graph = jq.load(built)
    program = jax.make_jaxpr(jq.trace(graph))(graph.params, {"x": jnp.zeros((3, 4, 6))})
    assert {str(e.primitive) for e in program.eqns} == {"reshape"}
    assert program.out_avals[0].shape == (6, 12)


def test_a_shape_given_as_input_is_known_outside_jit_and_refused_inside():
    x, shape = np.arange(6, dtype=np.float32), np.array([2, 3])
    graph = jq.load(one_node("Reshape", {"x": x, "shape": shape}))
    fn = jq.trace(graph)
    assert fn.static_inputs == {"shape"}
    np.testing.assert_array_equal(fn(graph.params, {"x": x, "shape": shape})["y"], x.reshape(2, 3))
    np.testing.assert_array_equal(fn(graph.params, {"x": x, "shape": shape[::-1].copy()})["y"], x.reshape(3, 2))
    with pytest.raises(jq.UnsupportedOp, match=r"node 'node' \(Reshape.*must be known while tracing"):
        jax.jit(fn)(graph.params, {"x": x, "shape": shape})


def test_taps_return_intermediate_tensors_in_onnx_order(resnet, images):
    name = next(n.outputs[0] for n in resnet.nodes if n.op_type == "Conv")
    outputs, tapped = jq.trace(resnet, taps=[name])(resnet.params, {"input": images})
    assert outputs.keys() == {"logits"}
    (direct,) = jq.trace(resnet, outputs=[name])(resnet.params, {"input": images}).values()
    assert tapped[name].shape[:2] == (4, resnet.params[resnet.nodes[0].inputs[1]].shape[0])
    np.testing.assert_allclose(tapped[name], direct, rtol=1e-5, atol=1e-5)


def test_a_reducing_tap_keeps_no_tensor(resnet, images):
    """Peak memory with every tensor's maximum tapped is far below that with every tensor kept."""
    names = [o for n in resnet.nodes for o in n.outputs]

    def kept(taps):
        compiled = (
            jax.jit(jq.trace(resnet, taps=taps))
            .lower(resnet.params, {"input": np.tile(images, (16, 1, 1, 1))})
            .compile()
        )
        memory = compiled.memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes

    assert kept(dict.fromkeys(names, jnp.max)) * 2 < kept(names)


def test_only_what_is_asked_for_is_computed(resnet, images):
    first = resnet.nodes[0].outputs[0]
    short = jax.make_jaxpr(jq.trace(resnet, outputs=[first]))(resnet.params, {"input": images})
    whole = jax.make_jaxpr(jq.trace(resnet))(resnet.params, {"input": images})
    assert len(short.eqns) * 5 < len(whole.eqns)


def test_unknown_tap_names_the_nearest_tensor(resnet):
    with pytest.raises(jq.ConfigError, match="Did you mean 'logits'"):
        jq.trace(resnet, taps=["logit"])


def test_jit_vmap_and_grad(resnet, images):
    fn = jq.trace(resnet)
    plain = fn(resnet.params, {"input": images})["logits"]
    jitted = jax.jit(fn)(resnet.params, {"input": images})["logits"]
    np.testing.assert_allclose(jitted, plain, rtol=1e-5, atol=1e-5)
    mapped = jax.vmap(lambda x: fn(resnet.params, {"input": x[None]})["logits"][0])(images)
    np.testing.assert_allclose(mapped, plain, rtol=1e-4, atol=1e-4)
    stacked = jax.tree.map(lambda p: jnp.stack([p, p * 1.1]), dict(resnet.params))
    alternatives = jax.vmap(lambda p: fn(p, {"input": images})["logits"])(stacked)
    np.testing.assert_allclose(alternatives[0], plain, rtol=1e-4, atol=1e-4)
    grads = jax.jit(jax.grad(lambda p: fn(p, {"input": images})["logits"].sum()))(resnet.params)
    assert grads.keys() == resnet.params.keys()
    weight = resnet.nodes[0].inputs[1]
    assert np.isfinite(grads[weight]).all()
    assert np.abs(grads[weight]).max() > 0


def test_gradient_equals_a_finite_difference(resnet, images):
    fn, weight = jq.trace(resnet), resnet.nodes[0].inputs[1]
    direction = np.random.default_rng(0).standard_normal(resnet.params[weight].shape, np.float32)

    def loss(step):
        params = dict(resnet.params) | {weight: resnet.params[weight] + step * direction}
        return fn(params, {"input": images})["logits"].std()

    numeric = (loss(1e-4) - loss(-1e-4)) / 2e-4
    np.testing.assert_allclose(jax.grad(loss)(0.0), numeric, rtol=5e-2)


def test_packed_params_give_the_same_result(resnet, images):
    fn = jq.trace(resnet)
    packed, plain = (fn(params, {"input": images})["logits"] for params in (jq.pack(resnet), resnet.params))
    np.testing.assert_allclose(packed, plain, rtol=1e-5, atol=1e-5)  # jax 0.12 adds up in another order


def test_a_weight_that_another_operator_reads_stays_plain():
    w = np.ones((4, 4, 1, 1), np.float32)
    nodes = [helper.make_node("Conv", ["x", n], [f"c{n}"]) for n in ("own", "shared")]
    nodes += [helper.make_node("Add", ["cown", "cshared"], ["c"]), helper.make_node("Add", ["c", "shared"], ["y"])]
    built = model(nodes, [tensor("x", [4, 4, 2, 2])], [tensor("y", None)], {"own": w, "shared": 2 * w})
    graph = jq.load(built)
    params = jq.pack(graph)
    assert isinstance(params["own"], Packed)
    assert isinstance(params["shared"], jax.Array)
    x = np.random.default_rng(0).standard_normal((4, 4, 2, 2), np.float32)
    (want,) = onnxruntime_outputs(built, {"x": x})
    np.testing.assert_allclose(jq.trace(graph)(params, {"x": x})["y"], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [None, 1, 3, 8])
def test_chunks_give_the_same_result(resnet, size):
    """Seven images: a short last chunk is part of it."""
    images = jq.zoo.evaluation_set()[0][:7]
    fn = jq.trace(resnet)
    whole = fn(resnet.params, {"input": images})["logits"]
    np.testing.assert_allclose(
        jq.chunked(fn, size)(resnet.params, {"input": images})["logits"], whole, rtol=1e-4, atol=1e-4
    )


def test_a_second_batch_does_not_recompile(resnet, images):
    fn = jq.trace(resnet)
    fn(resnet.params, {"input": images})
    fn(resnet.params, {"input": images + 1})
    assert fn._compiled._cache_size() == 1
    fn(resnet.params, {"input": images[:1]})
    assert fn._compiled._cache_size() == 2


def test_64_bit_types_without_a_process_wide_switch():
    x = np.arange(6, dtype=np.float64).reshape(2, 3) + 1e-12
    built = one_node("Cast", {"x": x}, to=TensorProto.DOUBLE)
    graph = jq.load(built)
    y = jq.trace(graph)(graph.params, {"x": x})["y"]
    assert y.dtype == np.float64
    np.testing.assert_array_equal(y, x)
    assert jnp.asarray(x).dtype == np.float32  # the process is as it was


def test_inputs_are_checked(resnet, images):
    fn = jq.trace(resnet)
    with pytest.raises(jq.DataError, match=r"input 'input' is missing"):
        fn(resnet.params, {})
    with pytest.raises(jq.DataError, match=r"no input 'imput'.*Did you mean 'input'"):
        fn(resnet.params, {"imput": images})
    with pytest.raises(jq.DataError, match=r"expected input: float32\[N,1,28,28\], found float64"):
        fn(resnet.params, {"input": images.astype(np.float64)})
    with pytest.raises(jq.DataError, match=r"found float32\[4, 28, 28\]"):
        fn(resnet.params, {"input": images[:, 0]})


def test_symbolic_dims_must_agree():
    built = model(
        [helper.make_node("Add", ["a", "b"], ["y"])],
        [tensor("a", ["N", 2]), tensor("b", ["N", 2])],
        [tensor("y", None)],
    )
    graph = jq.load(built)
    with pytest.raises(jq.DataError, match="input 'b'"):
        jq.trace(graph)({}, {"a": np.zeros((3, 2), np.float32), "b": np.zeros((1, 2), np.float32)})


def test_an_error_in_a_rule_names_the_node():
    built = model(
        [helper.make_node("MatMul", ["a", "b"], ["y"], name="product")],
        [tensor("a", [2, 3]), tensor("b", [4, 5])],
        [tensor("y", None)],
    )
    graph = jq.load(built)
    with pytest.raises(
        jq.ModelError, match=r"node 'product' \(MatMul, opset 21\) on \(a: float32\[2, 3\], b: float32\[4, 5\]\)"
    ):
        jq.trace(graph)({}, {"a": np.zeros((2, 3), np.float32), "b": np.zeros((4, 5), np.float32)})


def test_unsupported_ops_are_reported_together():
    built = model(
        [
            helper.make_node("Frobnicate", ["x"], ["a"], name="one", domain="acme"),
            helper.make_node("Wibble", ["a"], ["y"], name="two", domain="acme"),
        ],
        [tensor("x", [2])],
        [tensor("y", None)],
    )
    built.opset_import.append(helper.make_opsetid("acme", 3))
    with pytest.raises(jq.UnsupportedOp, match=r"acme::Frobnicate \(opset 3\).*'one'.*acme::Wibble.*'two'"):
        jq.trace(jq.load(built))


def test_dims_out_of_all_proportion_are_refused_before_allocation():
    built = one_node(
        "Conv",
        {"x": np.zeros((1, 1, 4, 4), np.float32)},
        initializers={"w": np.zeros((1, 1, 1, 1), np.float32)},
        pads=[1 << 17] * 4,
    )
    graph = jq.load(built)
    with pytest.raises(jq.ModelError, match=r"node 'node' \(Conv.*out of all proportion"):
        jq.trace(graph)(graph.params, {"x": np.zeros((1, 1, 4, 4), np.float32)})


def test_dynamic_batch_and_spatial_dims_bind_while_tracing():
    w = np.ones((2, 3, 3, 3), np.float32)
    built = model(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], auto_pad="SAME_UPPER"),
            helper.make_node("GlobalAveragePool", ["c"], ["y"]),
        ],
        [tensor("x", ["N", 3, "H", "W"])],
        [tensor("y", None)],
        {"w": w},
    )
    graph = jq.load(built)
    for shape in [(1, 3, 5, 8), (2, 3, 9, 4)]:
        x = np.random.default_rng(0).standard_normal(shape, np.float32)
        (want,) = onnxruntime_outputs(built, {"x": x})
        np.testing.assert_allclose(jq.trace(graph)(graph.params, {"x": x})["y"], want, rtol=1e-4, atol=1e-5)


def test_convolutions_in_a_row_hold_no_transpose(resnet, images):
    """One transpose of the input and none after it; the pooled (N, C, 1, 1) moves no data."""
    program = jax.make_jaxpr(jq.trace(resnet))(jq.pack(resnet), {"input": images})
    moved = [
        e.invars[0].aval.shape for e in program.eqns if str(e.primitive) == "transpose" and e.invars[0].aval.ndim == 4
    ]
    assert [s for s in moved if s[2:] != (1, 1)] == [(4, 1, 28, 28)] or moved == [(4, 1, 28, 28), (4, 1, 1, 72)]


def test_sharded_over_devices_equals_one_device():
    """Over two virtual CPU devices, in a process of its own: their number is fixed when JAX starts."""
    code = """
import jax
jax.config.update("jax_num_cpu_devices", 2)
import numpy as np, jq
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
graph = jq.load(jq.zoo.path("fashion_resnet"))
images = jq.zoo.evaluation_set()[0][:7]
fn = jq.trace(graph)
want = fn(graph.params, {"input": images})["logits"]
for kind in (AxisType.Auto, AxisType.Explicit):  # seven images on two devices: one is filled up
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    for params in (graph.params, jq.pack(graph, mesh=mesh)):
        got = jax.jit(jq.chunked(fn, 2, mesh))(params, {"input": images})["logits"]
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
split = jax.device_put(images[:6], NamedSharding(mesh, P("data")))
got = jax.jit(fn)(jax.device_put(dict(graph.params), NamedSharding(mesh, P())), {"input": split})["logits"]
assert len(got.sharding.device_set) == 2, got.sharding
np.testing.assert_allclose(got, want[:6], rtol=1e-4, atol=1e-4)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_gemm_reads_its_weight_in_the_order_that_it_lies_packed_in():
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Gemm", ["x", "across"], ["a"], transB=1),
        helper.make_node("Gemm", ["a", "along"], ["b"]),
        helper.make_node("Gemm", ["b", "both"], ["c"], transB=1),
        helper.make_node("Gemm", ["c", "both"], ["y"]),
    ]
    arrays = {
        k: rng.standard_normal(s, np.float32) for k, s in {"across": (5, 3), "along": (5, 4), "both": (4, 4)}.items()
    }
    x, y = (helper.make_tensor_value_info(k, TensorProto.FLOAT, [2, n]) for k, n in (("x", 3), ("y", 4)))
    initializers = [numpy_helper.from_array(v, k) for k, v in arrays.items()]
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y], initializers))
    graph, feed = jq.load(model), {"x": rng.standard_normal((2, 3), np.float32)}
    packed = jq.pack(graph)
    assert {k for k, v in packed.items() if isinstance(v, Packed)} == {"across"}
    want = feed["x"] @ arrays["across"].T @ arrays["along"] @ arrays["both"].T @ arrays["both"]
    np.testing.assert_allclose(jq.trace(graph)(packed, feed)["y"], want, rtol=1e-4, atol=1e-4)
