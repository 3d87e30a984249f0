"""Worked cases of a chip's arithmetic, run through the interpreter's own rules.

    python tests/integer/run_cases.py FILE.json

Each case becomes a model of one operator between quantizers, which `jq.integer.load` runs for the case's targets;
cases of a rounding, a requantizer or a block format call the function that the rules call. Prints each mismatch and
exits with 1 if there is one, with 2 if a case cannot be run.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from onnx import TensorProto, helper, numpy_helper

import jq
from jq.arithmetic import blocks, numerics
from jq.arithmetic.formats import BFLOAT16, BFP16, MXINT8
from jq.npu.facts import pool_multiplier
from jq.ops import vision
from jq.ops.integer import fixed, products, rounding
from jq.readings.integer import TARGETS

Case = Mapping[str, Any]
_INT8 = (-128, 127)


# ---------------------------------------------------------------------------------------------
# One operator between quantizers
# ---------------------------------------------------------------------------------------------


class _Model:
    """Collects the nodes of a quantized model of a few operators; tensors of integers are int8 with zero point 0."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.arrays: list[Any] = []
        self.inputs: list[Any] = []
        self.feeds: dict[str, np.ndarray] = {}
        self.opset = 17

    def constant(self, array: np.ndarray) -> str:
        name = f"c{len(self.arrays)}"
        self.arrays.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def parameters(self, position: int) -> list[str]:
        return [self.constant(np.float32(2.0**-position)), self.constant(np.int8(0))]

    def add(self, op_type: str, inputs: list[str], **attrs: Any) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], **attrs))
        return name

    def integers(self, values: Any, position: int) -> str:
        """A tensor of integers that comes in, dequantized."""
        name, array = f"x{len(self.inputs)}", np.asarray(values)
        wide = array.min(initial=0) < _INT8[0] or array.max(initial=0) > _INT8[1]  # of sums that int8 does not have
        self.opset = 21 if wide else self.opset
        self.feeds[name] = array.astype(np.int16 if wide else np.int8)
        kind = helper.np_dtype_to_tensor_dtype(self.feeds[name].dtype)
        self.inputs.append(helper.make_tensor_value_info(name, kind, array.shape))
        parameters = self.constant(np.float32(2.0**-position)), self.constant(np.zeros((), self.feeds[name].dtype))
        return self.add("DequantizeLinear", [name, *parameters])

    def weight(self, values: Any, position: int) -> str:
        return self.add("DequantizeLinear", [self.constant(np.asarray(values, np.int8)), *self.parameters(position)])

    def quantized(self, tensor: str, position: int) -> str:
        return self.add("QuantizeLinear", [tensor, *self.parameters(position)])

    def again(self, tensor: str, position: int) -> str:
        """A tensor rounded and read again."""
        return self.add("DequantizeLinear", [self.quantized(tensor, position), *self.parameters(position)])

    def run(self, output: str, target: Any) -> np.ndarray:
        graph = helper.make_graph(
            self.nodes,
            "case",
            self.inputs,
            [helper.make_tensor_value_info(output, TensorProto.INT8, None)],
            self.arrays,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=9)
        chip = jq.integer.load(model, target)

        def run(params, feeds):
            computed = chip.reading.run(params, feeds)
            return computed.outputs[output], computed.learned

        # Every case is another program, and runs once.
        compiled = jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})
        result, learned = compiled(chip.params, self.feeds)
        if learned.floats:
            raise AssertionError(f"computed in float32: {learned.floats}")
        return np.asarray(result)


def _activated(model: _Model, tensor: str, act: str | None) -> str:
    match act:
        case None:
            return tensor
        case "relu":
            return model.add("Relu", [tensor])
        case "relu6":
            ends = [model.constant(np.float32(end)) for end in (0, 6)]
            return model.add("Clip", [tensor, *ends])
        case "leaky":
            return model.add("LeakyRelu", [tensor], alpha=26 / 256)
    raise ValueError(f"no activation {act!r}")


def conv_dot(params: Case, inputs: Case, target: Any) -> Any:
    model, depth = _Model(), len(inputs["x"])
    operands = [
        model.integers(np.reshape(inputs["x"], (1, depth, 1, 1)), params["px"]),
        model.weight(np.reshape(inputs["w"], (1, depth, 1, 1)), params["pw"]),
    ]
    if inputs.get("b") is not None and params.get("pb") is not None:
        operands.append(model.weight([inputs["b"]], params["pb"]))
    y = _activated(model, model.add("Conv", operands), params.get("act"))
    return model.run(model.quantized(y, params["po"]), target).item()


def _elementwise(op_type: str, params: Case, inputs: Case, target: Any) -> Any:
    model = _Model()
    operands = [model.integers([v], p) for v, p in zip(inputs["v"], params["p"], strict=True)]
    if op_type == "Mul":
        y = functools.reduce(lambda a, b: model.add("Mul", [a, b]), operands)
    else:
        y = model.add("Sum" if op_type == "Add" and len(operands) > 2 else op_type, operands)
    y = model.add("Relu", [y]) if params.get("relu") else y
    return model.run(model.quantized(y, params["po"]), target).item()


def _spread(total: int, count: int) -> np.ndarray:
    """Integers of 8 bits that add up to a sum, if there are any; else wider ones."""
    base, more = divmod(total, count)
    return np.array([base + 1] * more + [base] * (count - more))


def avgpool(params: Case, inputs: Case, target: Any) -> Any:
    model, kernel = _Model(), params["kernel"]
    x = model.integers(_spread(inputs["sum"], math.prod(kernel)).reshape(1, 1, *kernel), params["pi"])
    return model.run(model.quantized(model.add("AveragePool", [x], kernel_shape=kernel), params["po"]), target).item()


def reduce_mean(params: Case, inputs: Case, target: Any) -> Any:
    model, dims = _Model(), params["dims"]
    x = model.integers(_spread(inputs["sum"], math.prod(dims)).reshape(1, *dims), params["pi"])
    y = model.add("ReduceMean", [x], axes=list(range(1, len(dims) + 1)), keepdims=0)
    return model.run(model.quantized(y, params["po"]), target).item()


def maxpool(params: Case, inputs: Case, target: Any) -> Any:
    model, window = _Model(), inputs["window"]
    x = model.integers(np.reshape(window, (1, 1, 1, len(window))), params["pi"])
    y = model.add("MaxPool", [x], kernel_shape=[1, len(window)])
    return model.run(model.quantized(y, params["po"]), target).item()


def requant_pos(params: Case, inputs: Case, target: Any) -> Any:
    model = _Model()
    y = model.add("Concat", [model.integers(inputs["v"], params["pi"])], axis=0)
    return model.run(model.quantized(y, params["po"]), target).tolist()


def _of_one_operand(op_type: str, params: Case, inputs: Case, target: Any, **attrs: float) -> Any:
    model = _Model()
    y = model.add(op_type, [model.integers(inputs["x"], params["pi"])], **attrs)
    return model.run(model.quantized(y, params["po"]), target).tolist()


def hard_sigmoid(params: Case, inputs: Case, target: Any) -> Any:
    return _of_one_operand("HardSigmoid", params, inputs, target, alpha=1 / 6, beta=0.5)


def leaky_relu(params: Case, inputs: Case, target: Any) -> Any:
    alpha, shift = params.get("num", 26) / 2 ** params.get("shift", 8), params.get("shift", 8)
    if target.slope is None and target.slope_shift is not None:
        target = dataclasses.replace(target, slope_shift=max(shift, target.slope_shift))
    return _of_one_operand("LeakyRelu", params, inputs, target, alpha=alpha)


def hard_swish(params: Case, inputs: Case, target: Any) -> Any:
    model = _Model()
    x = model.integers(inputs["x"], params["pi"])
    gate = model.again(model.add("HardSigmoid", [x], alpha=1 / 6, beta=0.5), params["ph"])
    return model.run(model.quantized(model.add("Mul", [x, gate]), params["po"]), target).tolist()


# ---------------------------------------------------------------------------------------------
# What the rules call
# ---------------------------------------------------------------------------------------------


def _saturated(v: Any, bits: int) -> Any:
    return np.clip(np.asarray(v, np.int64), -(1 << bits - 1), (1 << bits - 1) - 1).tolist()


def round_shift(params: Case, inputs: Case, target: Any) -> Any:
    v = np.array(inputs["v"], np.int64)
    if np.any(v != v.astype(np.int32)):
        raise ValueError("an accumulator of more than 32 bits")
    most = np.iinfo(np.int32).max if params["bits"] > 30 else numerics.WIDEST
    found = numerics.round_shift(jnp.asarray(v, jnp.int32), params["shift"], params["mode"], most)
    return _saturated(found, params["bits"])


def round_shift_fp32(params: Case, inputs: Case, target: Any) -> Any:
    v, factor = jnp.asarray(inputs["v"], jnp.int32), np.float32(2.0 ** -params["shift"])
    return _saturated(rounding.float32_requantize(v, factor, 0), params["bits"])


def avgpool_factor(params: Case, inputs: Case, target: Any) -> Any:
    return [list(pool_multiplier(kernel)) for kernel in inputs["kernels"]]


def resize_bilinear(params: Case, inputs: Case, target: Any) -> Any:
    corners = jnp.asarray([[inputs["tl"], inputs["tr"]], [inputs["bl"], inputs["br"]]], jnp.int8)
    scale = Fraction(2) ** -params["pi"]
    x = fixed.Fixed(corners, scale, 128, 0, fixed.Grid(scale, 0, jq.arithmetic.formats.INT8))
    lerps = [Fraction(*params[key]) for key in ("y_lerp", "x_lerp")]
    spans = [(np.array([[0, 1]]), np.array([[float(1 - lerp), float(lerp)]])) for lerp in lerps]
    y = vision.chips_bilinear(x, spans, (0, 1), target.lerp_bits, target.rounding)
    found = rounding.quantize(y, fixed.Grid(Fraction(2) ** -params["po"], 0, jq.arithmetic.formats.INT8), target)
    return np.asarray(found.array).item()


def quantize(params: Case, inputs: Case, target: Any) -> Any:
    grid = fixed.Grid(Fraction(2) ** -params["p"], 0, jq.arithmetic.formats.INT8)
    own = jq.integer.Target(name="case", rounding=params["mode"])
    return np.asarray(rounding.quantize_real(jnp.asarray(inputs["x"], jnp.float32), grid, own).array).tolist()


def conv_psum16(params: Case, inputs: Case, target: Any) -> Any:
    parts = [[jnp.int32(part) for part in inputs[key]] for key in ("parts0", "parts1")]
    total = products.cascade(*parts, jnp.int32(inputs["bias_aligned"]), params["shift_psum"])
    return _saturated(numerics.round_shift(total, params["shift_cut"], target.rounding), 8)


def requant_sig24(params: Case, inputs: Case, target: Any) -> Any:
    factor, zero, low = np.float32(params["scale_f32"]), params["zp_out"], -128 if params["signed"] else 0
    multiplier, shift = rounding.significand(factor)
    out = np.clip(
        np.asarray(rounding.by_significand(jnp.asarray(inputs["acc"], jnp.int32), factor, zero)), low, low + 255
    )
    return {"multiplier": int(multiplier), "shift": int(shift), "out": out.tolist()}


def a16w8_acc_shift(params: Case, inputs: Case, target: Any) -> Any:
    return [products.word_shift(depth) for depth in inputs["K"]]


def bf16_bits(params: Case, inputs: Case, target: Any) -> Any:
    values = np.array(inputs["f32_bits"], np.uint32).view(np.float32)
    return np.asarray(blocks.cast(jnp.asarray(values), BFLOAT16, 0)).astype(BFLOAT16.dtype).view(np.uint16).tolist()


def _block(format: Any, params: Case, inputs: Case) -> Any:
    format = dataclasses.replace(format, rounding=params["mode"], raises=params.get("compiler", format.raises))
    if params.get("compiler"):
        lowest = dataclasses.replace(format.element, lowest=-2.0)
        format = dataclasses.replace(format, element=lowest)
    return np.asarray(blocks.cast(jnp.asarray(inputs["x"], jnp.float32), format, 0)).tolist()


_RULES: dict[str, Callable[[Case, Case, Any], Any]] = {
    "eltwise_add": functools.partial(_elementwise, "Add"),
    "eltwise_sub": functools.partial(_elementwise, "Sub"),
    "eltwise_mul": functools.partial(_elementwise, "Mul"),
    "eltwise_max": functools.partial(_elementwise, "Max"),
    "eltwise_min": functools.partial(_elementwise, "Min"),
    "bfp16_block8": lambda params, inputs, target: _block(BFP16, params, inputs),
    "mxint8_block": lambda params, inputs, target: _block(MXINT8, params, inputs),
} | {
    rule.__name__: rule
    for rule in (
        conv_dot, avgpool, reduce_mean, maxpool, requant_pos, hard_sigmoid, leaky_relu, hard_swish, round_shift,
        round_shift_fp32, avgpool_factor, resize_bilinear, quantize, conv_psum16, requant_sig24, a16w8_acc_shift, bf16_bits,
    )
}  # fmt: skip
_ANY = TARGETS["aie2_x1"]  # where a case is of no target in particular


def mismatches(cases: list[Case]) -> Iterator[str]:
    """One line for each expectation that is not met."""
    for case in cases:
        expected = case["expected"]
        wanted = expected if case["target"] == "all" else {case["target"]: expected}
        for name, value in wanted.items():
            try:
                found = _RULES[case["op"]](case["params"], case["inputs"], TARGETS.get(name, _ANY))
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
            if found != value:
                yield f"{case['id']} ({case['op']}, {case['formula']}, {name}): expected {value}, found {found}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    cases = json.loads(parser.parse_args().file.read_text())["vectors"]
    if unknown := {case["op"] for case in cases} - _RULES.keys():
        print(f"no rule for {sorted(unknown)}")
        raise SystemExit(2)
    count = 0
    for line in mismatches(cases):
        count += 1
        print(line)
    checked = sum(len(c["expected"]) if c["target"] == "all" else 1 for c in cases)
    print(f"{len(cases)} cases, {checked} expectations, {count} mismatches")
    raise SystemExit(count > 0)


if __name__ == "__main__":
    main()
