"""Train the bundled models of `jq.zoo` on Fashion-MNIST and write them as ONNX.

    python experiments/zoo/train.py --data DIR [--seed 0] [--out jq/zoo]

DIR holds the four files `{train,t10k}-images-idx3-ubyte[.gz]` and `...-labels-idx1-ubyte[.gz]` of
the Debian package `dataset-fashion-mnist`: `apt-get download dataset-fashion-mnist`, then
`dpkg-deb -x dataset-fashion-mnist_*.deb TMP`; DIR is `TMP/usr/share/datasets/fashion-mnist`.

A network is a list of `Node`, read by three interpreters: `init` (parameters), `apply` (JAX,
NHWC) and `to_onnx` (ONNX, NCHW, BatchNormalization unfolded). The last step is kept; the 512
held-out calibration images are the only accuracy shown while training. SPREAD was lowered (from 1.2)
after a short trial in which int8 fell to chance on the evaluation images; shift and epochs were set to
fit the time then.
"""

import argparse
import gzip
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime as ort
import optax
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

MEAN, STD = 0.2860, 0.3530  # of the training pixels / 255; jq.zoo normalises with the same two
EPS = 1e-5
CLASSES, CALIBRATION, EVALUATION = 10, 512, 3000
BATCH, WARMUP = 128, 200
# Log-normal sigma of the initial BatchNormalization scales of the MobileNet. ImageNet MobileNets
# reach such spreads by long training; a few epochs on a small set do not, so they start there.
SPREAD = 0.8


class Node(NamedTuple):
    kind: str  # conv, bn, relu, relu6, maxpool, add, pool, dense
    name: str  # also the name of the output tensor
    inputs: tuple[str, ...]
    channels: int  # of the output
    kernel: int = 1
    stride: int = 1
    depthwise: bool = False
    spread: str = ""  # bn: the initial scales are log-normal, one draw per distinct word


Net = list[Node]
Tree = dict[str, dict[str, jax.Array]]
Prepare = Callable[[np.ndarray], np.ndarray]  # bytes of images to what the network reads


def conv_bn(net: Net, x: str, name: str, c: int, k: int, act: str, s: int = 1, **more: str) -> str:
    """Append Conv, BatchNormalization and an activation; the name of the result."""
    net.append(Node("conv", name, (x,), c, k, s, name.endswith("depthwise")))
    net.append(Node("bn", f"{name}.bn", (name,), c, **more))
    if act:
        net.append(Node(act, f"{name}.{act}", (f"{name}.bn",), c))
    return net[-1].name


def residual(widths: Sequence[int], blocks: int, pooled: bool) -> Net:
    """A residual network with a stage for each width; behind the stem, `pooled` halves the image."""
    net: Net = []
    x, width = conv_bn(net, "input", "stem", widths[0], 3, "relu"), widths[0]
    if pooled:
        net.append(Node("maxpool", "stem.maxpool", (x,), width, 2, 2))
        x = "stem.maxpool"
    for stage, c in enumerate(widths, 1):
        for block in range(blocks):
            name, stride = f"stage{stage}.{block}", 1 + (c != width)
            y = conv_bn(net, x, f"{name}.conv1", c, 3, "relu", stride)
            y = conv_bn(net, y, f"{name}.conv2", c, 3, "")
            if stride > 1:
                x = conv_bn(net, x, f"{name}.shortcut", c, 1, "", stride)
            net.append(Node("add", f"{name}.add", (y, x), c))
            net.append(Node("relu", f"{name}.relu", (f"{name}.add",), c))
            x, width = f"{name}.relu", c
    return [*net, Node("pool", "pool", (x,), width), Node("dense", "logits", ("pool",), CLASSES)]


def resnet() -> Net:
    return residual((24, 48, 72), blocks=2, pooled=True)


def mobilenet() -> Net:
    net: Net = []
    x, width, number = conv_bn(net, "input", "stem", 24, 3, "relu6", 2, spread="stem"), 24, 0
    for stage, (expand, c, blocks, stride) in enumerate(((1, 16, 1, 1), (4, 24, 2, 1), (4, 40, 3, 2), (4, 64, 2, 1))):
        for block in range(blocks):
            name, y, wide, s = f"block{number}", x, width * expand, 1 if block else stride
            if expand > 1:
                y = conv_bn(net, y, f"{name}.expand", wide, 1, "relu6", spread=f"{name}.e")
            y = conv_bn(net, y, f"{name}.depthwise", wide, 3, "relu6", s, spread=f"{name}.d")
            # One draw per stage: what a residual Add sums must agree on its channel scales.
            y = conv_bn(net, y, f"{name}.project", c, 1, "", spread=f"stage{stage}")
            if block:
                net.append(Node("add", f"{name}.add", (y, x), c))
            x, width, number = net[-1].name, c, number + 1
    x = conv_bn(net, x, "head", 192, 1, "relu6", spread="head")
    return [*net, Node("pool", "pool", (x,), 192), Node("dense", "logits", ("pool",), CLASSES)]


NETWORKS = {"fashion_resnet": resnet, "fashion_mobilenet": mobilenet}


def init(net: Net, rng: np.random.Generator, channels: int = 1) -> tuple[Tree, Tree]:
    """Parameters and running statistics; a layer undoes the channel scales of its input."""
    params, stats, draws = {}, {}, {"": 0.0}
    scales = {"input": np.ones(channels)}  # per channel, of each tensor
    for node in net:
        scale, c = scales[node.inputs[0]], node.channels
        match node.kind:
            case "conv":
                inputs = 1 if node.depthwise else len(scale)
                w = rng.normal(size=(node.kernel, node.kernel, inputs, c))
                w *= np.sqrt(2 / w[..., 0].size)
                params[node.name] = {"w": w / (scale if node.depthwise else scale[:, None])}
                scale = np.ones(c)
            case "bn":
                if node.spread:
                    draws.setdefault(node.spread, SPREAD * rng.normal(size=c))
                log_scale = draws[node.spread] + np.zeros(c)
                params[node.name] = {"log_scale": log_scale, "shift": np.zeros(c)}
                stats[node.name] = {"mean": np.zeros(c), "var": np.ones(c)}
                scale = np.exp(log_scale)
            case "dense":
                w = rng.normal(size=(len(scale), c)) / np.sqrt(len(scale)) / scale[:, None]
                params[node.name] = {"w": w, "b": np.zeros(c)}
        scales[node.name] = scale
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (params, stats))


def shifted_sum(x: jax.Array, w: jax.Array, stride: int) -> jax.Array:
    h, v = (stride * (-(-size // stride) - 1) + 1 for size in x.shape[1:3])
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    taps = ((i, j) for i in range(3) for j in range(3))
    return sum(x[:, i : i + h : stride, j : j + v : stride] * w[i, j, 0] for i, j in taps)


Arrays = tuple[jax.Array, jax.Array]


def depthwise_backward(stride: int, saved: Arrays, g: jax.Array) -> Arrays:
    x, w = saved
    (dx,) = jax.vjp(lambda x: shifted_sum(x, w, stride), x)[1](g)
    n, h, v, c = g.shape
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))

    def add_position(k: jax.Array, total: jax.Array) -> jax.Array:
        i, j = k // v, k % v
        window = jax.lax.dynamic_slice(x, (0, i * stride, j * stride, 0), (n, 3, 3, c))
        return total + window * jax.lax.dynamic_slice(g, (0, i, j, 0), (n, 1, 1, c))

    dw = jax.lax.fori_loop(0, h * v, add_position, jnp.zeros((n, 3, 3, c))).sum(0)
    return dx, dw[:, :, None]


# XLA's grouped convolution and its gradients are tens of times slower than nine shifted slices,
# and of these the gradient for w alone took 39 ms (5 ms above) for [128,14,14,96] on two cores.
depthwise = jax.custom_vjp(shifted_sum, nondiff_argnums=(2,))
depthwise.defvjp(lambda x, w, stride: (shifted_sum(x, w, stride), (x, w)), depthwise_backward)


def convolve(x: jax.Array, w: jax.Array, node: Node) -> jax.Array:
    stride = node.stride
    if node.depthwise:
        return depthwise(x, w, stride)
    if node.kernel == 1:  # as a matrix product its gradients are several times faster
        return x[:, ::stride, ::stride] @ w[0, 0]
    return jax.lax.conv_general_dilated(
        x, w, (stride, stride), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


SIMPLE = {
    "relu": lambda x: jnp.maximum(x, 0),
    "relu6": lambda x: jnp.clip(x, 0, 6),
    "maxpool": lambda x: x.reshape(len(x), x.shape[1] // 2, 2, -1, 2, x.shape[3]).max((2, 4)),
    "add": jnp.add,
    "pool": lambda x: x.mean((1, 2)),
}


def apply(net: Net, params: Tree, stats: Tree, x: jax.Array, train: bool) -> tuple[jax.Array, Tree]:
    """Logits of images x [N,28,28,1], and the new running statistics."""
    values, stats = {"input": x}, dict(stats)
    for node in net:
        x, p = values[node.inputs[0]], params.get(node.name, {})
        match node.kind:
            case "conv":
                x = convolve(x, p["w"], node)
            case "bn":
                # Parameters are log(gamma) and beta / gamma: Adam's steps are then relative to the
                # channel's scale; its equal steps on gamma itself would level the channels.
                mean, var = (s := stats[node.name])["mean"], s["var"]
                if train:
                    mean = x.mean((0, 1, 2))
                    var = jnp.square(x - mean).mean((0, 1, 2))
                    new = {"mean": mean, "var": var}
                    stats[node.name] = jax.tree.map(lambda a, b: 0.98 * a + 0.02 * b, s, new)
                gamma = jnp.exp(p["log_scale"])
                a = gamma * jax.lax.rsqrt(var + EPS)
                x = x * a + (gamma * p["shift"] - mean * a)
            case "dense":
                x = x @ p["w"] + p["b"]
            case kind:
                x = SIMPLE[kind](*(values[name] for name in node.inputs))
        values[node.name] = x
    return x, stats


def augment(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Each image [28,28] flipped with probability 1/2 and moved by up to one pixel."""
    n = len(images)
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    row = rng.integers(0, 3, (n, 1)) + np.arange(28)
    column = rng.integers(0, 3, (n, 1)) + np.arange(28)
    column = np.where(rng.random((n, 1)) < 0.5, column, column[:, ::-1])
    return padded[np.arange(n)[:, None, None], row[:, :, None], column[:, None, :]]


def pixels(images: np.ndarray) -> np.ndarray:
    return ((images.astype(np.float32) / 255 - MEAN) / STD)[..., None]


def to_nchw(images: np.ndarray) -> np.ndarray:
    return pixels(images).transpose(0, 3, 1, 2)


def predict(net: Net, params: Tree, stats: Tree, images: np.ndarray, pixels: Prepare = pixels) -> np.ndarray:
    run = jax.jit(lambda x: apply(net, params, stats, x, False)[0].argmax(1))
    return np.concatenate([run(pixels(part)) for part in np.split(images, len(images) // 8)])


@dataclass(frozen=True)
class Recipe:
    """How a network is trained: AdamW with a cosine schedule."""

    epochs: int
    rate: float  # at its peak
    augment: Callable[[np.ndarray, np.random.Generator], np.ndarray] = augment
    pixels: Prepare = pixels


RECIPES = {"fashion_resnet": Recipe(7, 3e-3), "fashion_mobilenet": Recipe(8, 3e-3)}


def train(name: str, net: Net, data: tuple, held: tuple, seed: int, recipe: Recipe) -> tuple[Tree, Tree]:
    rng, (images, labels) = np.random.default_rng(seed), data
    params, stats = init(net, rng, recipe.pixels(images[:1]).shape[-1])
    steps = len(images) // BATCH
    schedule = optax.warmup_cosine_decay_schedule(0.0, recipe.rate, WARMUP, recipe.epochs * steps)
    decayed = jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "w", params)
    optimizer = optax.adamw(schedule, weight_decay=0.02, mask=decayed)

    def loss(params: Tree, stats: Tree, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Tree]:
        logits, stats = apply(net, params, stats, x, True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), stats

    @jax.jit  # a Python loop of steps: gradients of convolutions inside lax.scan are far slower
    def step(params: Tree, stats: Tree, state: optax.OptState, x: jax.Array, y: jax.Array) -> tuple:
        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params, stats, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), stats, state, value

    state, start = optimizer.init(params), time.time()
    for epoch in range(recipe.epochs):
        losses = []
        for batch in np.split(rng.permutation(len(images))[: steps * BATCH], steps):
            x = recipe.pixels(recipe.augment(images[batch], rng))
            params, stats, state, value = step(params, stats, state, x, labels[batch])
            losses.append(value)
        right = np.mean(predict(net, params, stats, held[0], recipe.pixels) == held[1])
        took = f"{time.time() - start:.0f} s"
        print(
            f"{name} {epoch + 1}/{recipe.epochs}: loss {np.mean(losses):.4f}, held-out {right:.2%}, {took}", flush=True
        )
    return params, stats


def to_onnx(name: str, net: Net, params: Tree, stats: Tree, shape: tuple[int, ...] = (1, 28, 28)) -> onnx.ModelProto:
    nodes, weights = [], []

    def constants(owner: str, **values: jax.Array | np.ndarray) -> list[str]:
        for key, value in values.items():
            array = np.ascontiguousarray(value, np.float32).reshape(np.shape(value))
            weights.append(numpy_helper.from_array(array, f"{owner}.{key}"))
        return [f"{owner}.{key}" for key in values]

    def emit(op: str, inputs: list[str], output: str, **attributes: object) -> None:
        nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))

    for node in net:
        inputs, p, label = list(node.inputs), params.get(node.name, {}), node.name
        window = {"kernel_shape": [node.kernel] * 2, "strides": [node.stride] * 2}
        match node.kind:
            case "conv":
                inputs += constants(label, weight=np.transpose(p["w"], (3, 2, 0, 1)))
                window |= {"pads": [node.kernel // 2] * 4, "dilations": [1, 1]}
                emit("Conv", inputs, label, **window, group=node.channels if node.depthwise else 1)
            case "bn":
                gamma = np.exp(p["log_scale"])
                inputs += constants(label, scale=gamma, bias=gamma * p["shift"], **stats[label])
                emit("BatchNormalization", inputs, label, epsilon=EPS)
            case "relu6":
                emit("Clip", [*inputs, "relu6.min", "relu6.max"], label)
            case "maxpool":
                emit("MaxPool", inputs, label, **window, pads=[0] * 4)
            case "relu" | "add":
                emit(node.kind.capitalize(), inputs, label)
            case "pool":
                emit("GlobalAveragePool", inputs, "pool.mean")
                emit("Flatten", ["pool.mean"], label, axis=1)
            case "dense":
                inputs += constants(label, weight=np.transpose(p["w"]), bias=p["b"])
                emit("Gemm", inputs, label, transB=1)
    if any(node.kind == "relu6" for node in net):
        constants("relu6", min=np.float32(0), max=np.float32(6))
    source = helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", *shape])
    target = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", CLASSES])
    graph = helper.make_graph(nodes, name, [source], [target], weights)
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=8, producer_name="jq.zoo")
    onnx.checker.check_model(model, full_check=True)
    return model


def accuracy(path: Path, images: np.ndarray, labels: np.ndarray) -> str:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    logits = session.run(None, {"input": to_nchw(images)})[0]
    return f"{np.mean(logits.argmax(1) == labels):.2%}"


def report(path: Path, evaluation: tuple, test: tuple, calibration: np.ndarray) -> str:
    """Accuracy by onnxruntime: float, and by two naive per-tensor int8 quantizations."""
    lines = [
        f"{path.stem}: {path.stat().st_size / 1e6:.2f} MB",
        f"float, 3000 evaluation images: {accuracy(path, *evaluation)}",
        f"float, all 10000 test images: {accuracy(path, *test)}",
    ]
    with tempfile.TemporaryDirectory() as name:
        folded, weights, both = (Path(name, f"{kind}.onnx") for kind in ("folded", "w8", "w8a8"))
        quant_pre_process(path, folded, skip_symbolic_shape=True)  # folds BatchNormalization
        model, ratios = onnx.load(folded), []
        tensors = {t.name: t for t in model.graph.initializer}
        for node in model.graph.node:
            if node.op_type in ("Conv", "Gemm"):
                w = numpy_helper.to_array(tensor := tensors[node.input[1]])
                if w.ndim == 4 and (w.shape[1] == 1 or "mobilenet" not in path.stem):
                    ratios.append((r := np.abs(w).max((1, 2, 3))).max() / np.median(r))
                scale = 2.0 ** np.ceil(np.log2(np.abs(w).max() / 127))
                w = (np.clip(np.rint(w / scale), -128, 127) * scale).astype(np.float32)
                tensor.CopyFrom(numpy_helper.from_array(w, tensor.name))
        onnx.save(model, weights)
        kinds = {"weight_type": QuantType.QInt8, "activation_type": QuantType.QUInt8}
        parts = ({"input": to_nchw(part)} for part in np.split(calibration, 8))
        reader = SimpleNamespace(get_next=lambda: next(parts, None))
        quantize_static(folded, both, reader, per_channel=False, **kinds)
        lines += [
            f"BatchNormalization folded: {accuracy(folded, *evaluation)}",
            f"int8 weights per tensor, power of two: {accuracy(weights, *evaluation)}",
            f"int8 weights and activations per tensor, MinMax: {accuracy(both, *evaluation)}",
            "max/median channel range of each Conv (mobilenet: depthwise and stem): "
            + ", ".join(f"{r:.1f}" for r in ratios),
        ]
    return "\n  ".join(lines)


def read_split(folder: Path, split: str) -> list[np.ndarray]:
    arrays = []
    for stem in (f"{split}-images-idx3-ubyte", f"{split}-labels-idx1-ubyte"):
        packed = folder / f"{stem}.gz"
        raw = gzip.decompress(packed.read_bytes()) if packed.exists() else (folder / stem).read_bytes()
        shape = np.frombuffer(raw, ">u4", raw[3], 4)
        arrays.append(np.frombuffer(raw, np.uint8, -1, 4 + 4 * raw[3]).reshape(shape))
    return arrays


def balanced(labels: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Sorted indices of `count` samples, the classes' counts differing by at most one."""
    order = rng.permutation(len(labels))
    by_class = [order[labels[order] == c] for c in range(CLASSES)]
    rounds = [members[k] for k in range(-(-count // CLASSES)) for members in by_class]
    return np.sort(rounds[:count])


def unlike(images: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Indices of the images that are none of the others: Fashion-MNIST repeats a few."""
    seen = {image.tobytes() for image in others}
    return np.flatnonzero([image.tobytes() not in seen for image in images])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "jq" / "zoo")
    parser.add_argument("--models", nargs="+", choices=[*NETWORKS], default=[*NETWORKS])
    args = parser.parse_args()
    (images, labels), test = read_split(args.data, "train"), read_split(args.data, "t10k")
    rng = np.random.default_rng(args.seed)
    chosen = balanced(test[1], EVALUATION, rng)
    fresh = unlike(images, test[0])
    calib = fresh[balanced(labels[fresh], CALIBRATION, rng)]
    fresh = unlike(images, np.concatenate([images[calib], test[0]]))
    evaluation = test[0][chosen], test[1][chosen]
    np.savez_compressed(
        args.out / "fashion.npz", eval_images=evaluation[0], eval_labels=evaluation[1],
        calib_images=images[calib], calib_labels=labels[calib],
    )  # fmt: skip
    print(f"{len(fresh)} training images, {len(calib)} calibration, {len(chosen)} evaluation")

    reports = []
    for name in args.models:
        net, path = NETWORKS[name](), args.out / f"{name}.onnx"
        held = images[calib], labels[calib]
        params, stats = train(name, net, (images[fresh], labels[fresh]), held, args.seed, RECIPES[name])
        onnx.save(to_onnx(name, net, params, stats), path)
        right = np.mean(predict(net, params, stats, evaluation[0]) == evaluation[1])
        if f"{right:.2%}" != accuracy(path, *evaluation):
            raise SystemExit(f"{name}: JAX {right:.2%}, ONNX {accuracy(path, *evaluation)}")
        reports.append(report(path, evaluation, test, images[calib]))
    print("\n".join(reports))


if __name__ == "__main__":
    main()
