"""Random float networks of about twenty operators, as exporters write them: valid for onnxruntime, and not large."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Shape = tuple[int, ...]  # of one sample, with a leading axis of one that stands for the batch
COUNT = 4  # samples
LOWEST = np.float32(np.finfo(np.float32).min)
UNARY = (
    "Relu",
    "Sigmoid",
    "Tanh",
    "HardSigmoid",
    "LeakyRelu",
    "Elu",
    "Softplus",
    "Abs",
    "Neg",
    "Erf",
    "Identity",
    "Sin",
)
NEWER = {"HardSwish": 14, "Mish": 18, "Gelu": 20}
OPSETS = range(13, 26)


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """A model and stacked samples for its inputs."""

    model: onnx.ModelProto
    data: Mapping[str, np.ndarray]


def network(seed: int, size: int = 20) -> Network:
    """Return the network of a seed."""
    drawing = _Drawing(np.random.default_rng(seed))
    while len(drawing.nodes) < size:
        drawing.extend()
    return drawing.finish()


class _Drawing:
    """Adds operators one after the other; each reads a tensor that there is, mostly one of the latest."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.opset = int(rng.choice(OPSETS))
        self.batch: str | int = "N" if rng.random() < 0.6 else 1
        self.nodes: list[onnx.NodeProto] = []
        self.arrays: dict[str, np.ndarray] = {}
        self.inputs: dict[str, tuple[Shape, np.ndarray]] = {}
        self.shapes: dict[str, Shape] = {}
        self.ids: str | None = None
        shape = self.one_of((1, 4, 8, 8), (1, 3, 9, 7), (1, 6, 10), (1, 12), (1, 2, 4, 6, 6), (1, 5, 8))
        self.input("x", shape)
        if rng.random() < 0.3:
            self.input("z", self.one_of(shape, (1, *shape[1:2]), (1, 7)))
        if rng.random() < 0.3:
            self.integers()

    # --- Drawing ---

    def one_of(self, *options: Any) -> Any:
        return options[self.rng.integers(len(options))]

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def input(self, name: str, shape: Shape) -> None:
        scale = 10.0 ** self.rng.uniform(-1, 1)
        self.inputs[name] = shape, (self.rng.normal(0, scale, (COUNT, *shape[1:]))).astype(np.float32)
        self.shapes[name] = shape

    def integers(self) -> None:
        """Token ids with an embedding, and a mask of the same length."""
        length = int(self.rng.integers(3, 7))
        kind = self.one_of(np.int64, np.int32)
        self.inputs["ids"] = (1, length), self.rng.integers(0, 5, (COUNT, length)).astype(kind)
        self.inputs["mask"] = (
            (1, length),
            (np.arange(length) < self.rng.integers(1, length + 1, (COUNT, 1))).astype(kind),
        )
        self.add("Gather", [self.array(self.normal(5, 8)), "ids"], (1, length, 8))
        self.ids = "ids"

    def normal(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        return self.rng.normal(0, scale, shape).astype(np.float32)

    def array(self, values: Any) -> str:
        name = f"c{len(self.arrays)}"
        self.arrays[name] = np.asarray(values)
        return name

    def add(self, op: str, inputs: Sequence[str], shape: Shape | None, outputs: int = 1, **attrs: Any) -> str:
        """Add a node; without a shape what it makes is read by nobody else than who asks."""
        names = [f"t{len(self.nodes)}" + (f"_{i}" if outputs > 1 else "") for i in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), names, name=f"{op}_{len(self.nodes)}", **attrs))
        for name in names if shape is not None else ():
            self.shapes[name] = shape
        return names[0]

    def pick(self, least: int = 0, most: int = 9) -> str | None:
        """A tensor of some rank, mostly one of the latest."""
        names = [n for n, s in self.shapes.items() if least <= len(s) <= most]
        return names[-1 - int(self.rng.geometric(0.5) - 1) % len(names)] if names else None

    def extend(self) -> None:
        kinds: tuple[tuple[Callable[[str], Any], int, int], ...] = (
            (self.conv, 3, 5), (self.conv, 4, 4), (self.pool, 3, 4), (self.resize, 4, 4), (self.pad, 3, 4), (self.matmul, 2, 4),
            (self.gemm, 2, 2), (self.norm, 3, 4), (self.layer_norm, 2, 4), (self.unary, 0, 5), (self.unary, 0, 5),
            (self.constant, 0, 5), (self.constant, 0, 5), (self.binary, 0, 5), (self.softmax, 2, 4), (self.reduce, 2, 5),
            (self.move, 1, 5), (self.move, 1, 5), (self.slice, 2, 5), (self.concat, 2, 5), (self.split, 2, 5),
            (self.attention, 3, 3), (self.branch, 0, 4), (self.clip, 0, 5),
        )  # fmt: skip
        kind, least, most = self.one_of(*kinds)
        if (x := self.pick(least, most)) is not None:
            kind(x)

    # --- Operators ---

    def conv(self, x: str) -> None:
        shape = self.shapes[x]
        channels, spatial = shape[1], shape[2:]
        group = channels if self.chance(0.25) else 1
        kernel = [int(self.rng.integers(1, min(3, d) + 1)) for d in spatial]
        if self.chance(0.15) and len(spatial) == 2:
            outputs = 4
            w = self.array(self.normal(channels, outputs, *kernel, scale=0.4))
            made = tuple(2 * (d - 1) + k for d, k in zip(spatial, kernel, strict=True))
            self.add("ConvTranspose", [x, w], (1, outputs, *made), strides=[2, 2])
            return
        outputs = channels if group > 1 else int(self.rng.integers(1, 9))
        inputs = [x, self.array(self.normal(outputs, channels // group, *kernel, scale=0.5))]
        if self.chance(0.6):
            inputs.append(self.array(self.normal(outputs)))
        attrs: dict[str, Any] = {"group": group} if group > 1 else {}
        if self.chance(0.5):
            attrs["auto_pad"] = self.one_of("SAME_UPPER", "SAME_LOWER")
            made = spatial
        else:
            made = tuple(d - k + 1 for d, k in zip(spatial, kernel, strict=True))
        y = self.add("Conv", inputs, (1, outputs, *made), **attrs)
        if self.chance(0.3):
            parts = [self.array(v) for v in (self.normal(outputs), self.normal(outputs), self.normal(outputs))]
            variance = self.array(np.abs(self.normal(outputs)) + np.float32(0.5))
            self.add("BatchNormalization", [y, *parts, variance], (1, outputs, *made))

    def pool(self, x: str) -> None:
        shape = self.shapes[x]
        op = self.one_of("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "LpPool")
        if op.startswith("Global"):
            self.add(op, [x], (*shape[:2], *(1 for _ in shape[2:])))
            return
        kernel = [min(2, d) for d in shape[2:]]
        attrs: dict[str, Any] = {"kernel_shape": kernel, "strides": kernel}
        pads = self.chance(0.3) and op != "LpPool"
        if pads:
            attrs["pads"] = [k - 1 for k in kernel] + [0] * len(kernel)
        if op == "AveragePool" and self.opset >= 19 and self.chance(0.3):
            attrs["dilations"] = [1] * len(kernel)
        made = [(d + (k - 1) * pads - k) // k + 1 for d, k in zip(shape[2:], kernel, strict=True)]
        self.add(op, [x], (*shape[:2], *made), **attrs)

    def resize(self, x: str) -> None:
        shape = self.shapes[x]
        if max(shape) > 24:
            return
        mode = self.one_of("nearest", "linear")
        attrs = {"mode": mode, "coordinate_transformation_mode": self.one_of("asymmetric", "half_pixel")}
        if mode == "nearest":
            attrs["nearest_mode"] = self.one_of("floor", "round_prefer_floor")
        scales = self.array(np.float32([1, 1, 2, 2]))
        self.add("Resize", [x, "", scales], (*shape[:2], *(2 * d for d in shape[2:])), **attrs)

    def pad(self, x: str) -> None:
        shape = self.shapes[x]
        mode = self.one_of("constant", "constant", "edge", "reflect")
        if min(shape[2:]) < 2:
            return
        pads = [0, 0, *(1 for _ in shape[2:]), 0, 0, *(0 for _ in shape[2:])]
        inputs = [x, self.array(np.array(pads))]
        if mode == "constant" and self.chance(0.5):
            inputs.append(self.array(np.float32(self.one_of(0, 1.5, -2))))
        self.add("Pad", inputs, (*shape[:2], *(d + 1 for d in shape[2:])), mode=mode)

    def matmul(self, x: str) -> None:
        shape, outputs = self.shapes[x], int(self.rng.integers(1, 9))
        w = self.array(self.normal(shape[-1], outputs, scale=0.5))
        self.add("MatMul", [x, w], (*shape[:-1], outputs))

    def gemm(self, x: str) -> None:
        shape, outputs, turned = self.shapes[x], int(self.rng.integers(1, 9)), self.chance(0.5)
        w = self.normal(shape[1], outputs, scale=0.5)
        inputs = [x, self.array(w.T if turned else w)]
        if self.chance(0.6):
            inputs.append(self.array(self.normal(outputs)))
        self.add("Gemm", inputs, (1, outputs), transB=int(turned))

    def norm(self, x: str) -> None:
        shape = self.shapes[x]
        if np.prod(shape[2:]) < 2:
            return
        parts = [self.array(self.normal(shape[1])) for _ in range(2)]
        self.add("InstanceNormalization", [x, *parts], shape)

    def layer_norm(self, x: str) -> None:
        """The operator, or what torch made of it before."""
        shape = self.shapes[x]
        if shape[-1] < 2:
            return
        scale, shift = (self.array(self.normal(shape[-1])) for _ in range(2))
        if self.opset >= 17 and self.chance(0.5):
            self.add("LayerNormalization", [x, scale, shift], shape, axis=-1)
            return
        mean = self._reduced("ReduceMean", x, [-1], 1)
        centred = self.add("Sub", [x, mean], None)
        square = self.add("Pow", [centred, self.array(np.float32(2))], None)
        variance = self._reduced("ReduceMean", square, [-1], 1)
        rms = self.add("Sqrt", [self.add("Add", [variance, self.array(np.float32(1e-5))], None)], None)
        normal = self.add("Div", [centred, rms], None)
        self.add("Add", [self.add("Mul", [normal, scale], None), shift], shape)

    def unary(self, x: str) -> None:
        newer = [op for op, since in NEWER.items() if since <= self.opset]
        op = self.one_of(*UNARY, *newer)
        if op in ("Relu", "Sigmoid") and self.chance(0.3):  # a product with the tensor itself
            gate = self.add(self.one_of("Sigmoid", "HardSigmoid"), [x], None)
            self.add("Mul", [x, gate], self.shapes[x])
            return
        self.add(op, [x], self.shapes[x])

    def clip(self, x: str) -> None:
        bounds = self.one_of((0, 6), (-1, 1), (0, None), (None, 4))
        inputs = [x, *("" if b is None else self.array(np.float32(b)) for b in bounds)]
        self.add("Clip", inputs, self.shapes[x])

    def constant(self, x: str) -> None:
        shape = self.shapes[x]
        forms: list[Shape] = [(), (1,)]
        if shape:
            forms.append(shape[-1:])
        if len(shape) > 2:
            forms.append((shape[1], *(1 for _ in shape[2:])))
        values = self.normal(*self.one_of(*forms), scale=10.0 ** float(self.rng.integers(-5, 2)))
        op = self.one_of("Add", "Sub", "Mul", "Div", "Max", "Min")
        values = np.sign(values) * (np.abs(values) + np.float32(0.5)) if op in ("Div", "Mul") else values
        inputs = [x, self.array(np.float32(values))]
        self.add(op, inputs if self.chance(0.7) or op == "Div" else inputs[::-1], shape)

    def binary(self, x: str) -> None:
        shape = self.shapes[x]
        alike = [(n, s) for n, s in self.shapes.items() if len(s) == len(shape)]
        fits = [n for n, s in alike if all(d in (1, e) for d, e in zip(s, shape, strict=True))]
        self.add(self.one_of("Add", "Add", "Mul", "Sub", "Max"), [x, self.one_of(*fits)], shape)

    def softmax(self, x: str) -> None:
        self.add("Softmax", [x], self.shapes[x], axis=self.one_of(-1, 1))

    def _reduced(self, op: str, x: str, axes: list[int], keepdims: int, shape: Shape | None = None) -> str:
        if self.opset >= (13 if op == "ReduceSum" else 18):
            return self.add(op, [x, self.array(np.array(axes))], shape, keepdims=keepdims)
        return self.add(op, [x], shape, axes=axes, keepdims=keepdims)

    def reduce(self, x: str) -> None:
        shape, keepdims = self.shapes[x], int(self.chance(0.5))
        if self.chance(0.15) and self.batch == 1:  # of everything: rank 0 or 1
            axes = list(range(len(shape)))[int(self.chance(0.5)) :]
            axes, keepdims = (axes if self.chance(0.5) else [a for a in range(len(shape)) if a != 1]), 0
        else:
            axes = sorted({int(a) for a in self.rng.integers(1, len(shape), 2)})
        made = tuple(1 if i in axes else d for i, d in enumerate(shape) if keepdims or i not in axes)
        self._reduced(self.one_of("ReduceMean", "ReduceMax", "ReduceSum"), x, axes, keepdims, made)

    def move(self, x: str) -> None:
        shape = self.shapes[x]
        rank = len(shape)
        kind = self.one_of("Transpose", "Reshape", "Flatten", "Unsqueeze", "Squeeze", "Gather")
        match kind:
            case "Transpose" if rank > 2:
                order = [0, *(1 + self.rng.permutation(rank - 1))]
                self.add("Transpose", [x], tuple(shape[i] for i in order), perm=[int(i) for i in order])
            case "Reshape" if rank > 2 and shape[0] == 1:
                made = (1, shape[1], int(np.prod(shape[2:]))) if self.chance(0.5) else (1, int(np.prod(shape[1:])))
                self.add("Reshape", [x, self.array(np.array([0, *made[1:-1], -1]))], made)
            case "Flatten" if rank > 1:
                self.add("Flatten", [x], (shape[0], int(np.prod(shape[1:]))))
            case "Unsqueeze" if rank < 4:
                axis = int(self.rng.integers(1, rank + 1))
                self.add("Unsqueeze", [x, self.array(np.array([axis]))], (*shape[:axis], 1, *shape[axis:]))
            case "Squeeze":
                axes = [i for i, d in enumerate(shape) if d == 1 and i]
                if axes:
                    axis = self.one_of(*axes)
                    made = tuple(d for i, d in enumerate(shape) if i != axis)
                    self.add("Squeeze", [x, self.array(np.array([axis]))], made)
            case "Gather" if rank > 1:
                axis = int(self.rng.integers(1, rank))
                if self.chance(0.5):
                    index = np.array(self.rng.integers(shape[axis]))
                    self.add("Gather", [x, self.array(index)], (*shape[:axis], *shape[axis + 1 :]), axis=axis)
                else:
                    index = self.rng.integers(0, shape[axis], 3)
                    self.add("Gather", [x, self.array(index)], (*shape[:axis], 3, *shape[axis + 1 :]), axis=axis)

    def slice(self, x: str) -> None:
        shape = self.shapes[x]
        axis = int(self.rng.integers(1, len(shape)))
        start = int(self.rng.integers(0, shape[axis]))
        parts = (self.array(np.array([v])) for v in (start, np.iinfo(np.int64).max, axis))
        self.add("Slice", [x, *parts], tuple(d - start if i == axis else d for i, d in enumerate(shape)))

    def concat(self, x: str) -> None:
        shape, axis = self.shapes[x], int(self.rng.integers(1, len(self.shapes[x])))
        around = shape[:axis], shape[axis + 1 :]
        others = [n for n, s in self.shapes.items() if len(s) == len(shape) and (s[:axis], s[axis + 1 :]) == around]
        parts = [x, *(self.one_of(*others) for _ in range(int(self.rng.integers(0, 3))))]
        total = sum(self.shapes[p][axis] for p in parts)
        if total <= 64:
            self.add("Concat", parts, tuple(total if i == axis else d for i, d in enumerate(shape)), axis=axis)

    def split(self, x: str) -> None:
        shape = self.shapes[x]
        axes = [i for i, d in enumerate(shape) if i and d % 2 == 0]
        if axes:
            axis = self.one_of(*axes)
            made = tuple(d // 2 if i == axis else d for i, d in enumerate(shape))
            self.add("Split", [x, self.array(np.array([shape[axis] // 2] * 2))], made, 2, axis=axis)

    def attention(self, x: str) -> None:
        """Scores of a sequence with itself, with a mask as torch writes it where there is one of its length."""
        _, length, depth = self.shapes[x]
        turned = self.add("Transpose", [x], None, perm=[0, 2, 1])
        scores = self.add("MatMul", [x, turned], None)
        scores = self.add("Div", [scores, self.array(np.float32(depth**0.5))], None)
        if self.ids is not None and self.inputs["mask"][0][1] == length:
            spread = self.add("Unsqueeze", ["mask", self.array(np.array([1]))], None)
            if self.chance(0.5):
                floats = self.add("Cast", [spread], None, to=TensorProto.FLOAT)
                lost = self.add("Sub", [self.array(np.float32(1)), floats], None)
                far = self.array(self.one_of(LOWEST, np.float32(-10000), np.float32(-1e9)))
                scores = self.add("Add", [scores, self.add("Mul", [lost, far], None)], None)
            else:
                seen = self.add("Cast", [spread], None, to=TensorProto.BOOL)
                far = self.array(self.one_of(np.float32(-np.inf), LOWEST))
                scores = self.add("Where", [seen, scores, far], None)
        self.add("MatMul", [self.add("Softmax", [scores], None, axis=-1), x], self.shapes[x])

    def branch(self, x: str) -> None:
        """An If of one branch or the other, by the data, or a Loop of fixed length."""
        if self.batch != 1 or self.chance(0.6):
            return
        name = f"b{len(self.nodes)}"
        dtype = TensorProto.FLOAT
        if self.chance(0.5):
            axes = {"axes": list(range(len(self.shapes[x])))} if self.opset < 18 else {}
            mean = self.add("ReduceMean", [x], None, keepdims=0, **axes)
            yes = self.add("Greater", [mean, self.array(np.float32(0))], None)
            k = self.array(np.float32(0.5))
            bodies = {
                side: helper.make_graph(
                    [helper.make_node(op, [x, k], [f"{name}_{side}"])], side, [],
                    [helper.make_tensor_value_info(f"{name}_{side}", dtype, None)],
                )
                for side, op in (("then_branch", "Mul"), ("else_branch", "Add"))
            }  # fmt: skip
            self.add("If", [yes], self.shapes[x], **bodies)
            return
        body = helper.make_graph(
            [
                helper.make_node("Tanh", [f"{name}_in"], [f"{name}_out"]),
                helper.make_node("Identity", [f"{name}_go"], [f"{name}_on"]),
            ],
            "body",
            [
                helper.make_tensor_value_info(f"{name}_i", TensorProto.INT64, []),
                helper.make_tensor_value_info(f"{name}_go", TensorProto.BOOL, []),
                helper.make_tensor_value_info(f"{name}_in", dtype, None),
            ],
            [
                helper.make_tensor_value_info(f"{name}_on", TensorProto.BOOL, []),
                helper.make_tensor_value_info(f"{name}_out", dtype, None),
            ],
        )
        self.add("Loop", [self.array(np.array(2)), "", x], self.shapes[x], body=body)

    # --- The model ---

    def finish(self) -> Network:
        """The model, whose outputs are all tensors that nobody reads."""
        inner = (m for n in self.nodes for a in n.attribute if a.HasField("g") for m in a.g.node)
        read = {i for n in (*self.nodes, *inner) for i in n.input}
        ends = [o for n in self.nodes for o in n.output if o not in read]
        inputs = {k: v for k, v in self.inputs.items() if k in read}
        named = {k: (self.batch, *shape[1:]) for k, (shape, _) in inputs.items()}
        graph = helper.make_graph(
            self.nodes,
            "random",
            [
                helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(inputs[k][1].dtype), s)
                for k, s in named.items()
            ],
            [onnx.ValueInfoProto(name=o) for o in ends],
            [numpy_helper.from_array(np.asarray(v), k) for k, v in self.arrays.items() if k in read],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)
        return Network(model, {k: a for k, (_, a) in inputs.items()})
