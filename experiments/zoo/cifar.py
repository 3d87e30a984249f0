"""Train a residual network on CIFAR-10 for the tables of low bits, and write it as ONNX with its data.

    python experiments/zoo/cifar.py --data DIR --out DIR [--blocks 1] [--epochs 12] [--seed 0]

DIR holds `cifar10_train.npz` and `cifar10_test.npz`: `images`, bytes [N,32,32,3], and `labels`. `--blocks` 1, 2 and 3 are
ResNet-8, 14 and 20 with stages of 16, 32 and 64 channels. Writes `cifar_resnet.onnx`, `cifar_calib.npz` (512 of the training
images that were not trained on) and `cifar_eval.npz` (all test images), prepared as the network reads them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx

from experiments.zoo.train import Recipe, balanced, predict, residual, to_onnx, train

MEAN, STD = np.float32([0.4914, 0.4822, 0.4465]), np.float32([0.2470, 0.2435, 0.2616])  # of the training images
CALIBRATION = 512


def pixels(images: np.ndarray) -> np.ndarray:
    return (images.astype(np.float32) / 255 - MEAN) / STD


def augment(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Each image flipped with probability 1/2 and moved by up to four pixels."""
    n = len(images)
    padded = np.pad(images, ((0, 0), (4, 4), (4, 4), (0, 0)))
    row = rng.integers(0, 9, (n, 1)) + np.arange(32)
    column = rng.integers(0, 9, (n, 1)) + np.arange(32)
    column = np.where(rng.random((n, 1)) < 0.5, column, column[:, ::-1])
    return padded[np.arange(n)[:, None, None], row[:, :, None], column[:, None, :]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder of the arrays")
    parser.add_argument("--out", type=Path, required=True, help="the folder that is written to")
    parser.add_argument("--blocks", type=int, default=1, help="of a stage")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    (images, labels), test = (
        [np.load(args.data / f"cifar10_{split}.npz")[key] for key in ("images", "labels")]
        for split in ("train", "test")
    )
    apart = balanced(labels, CALIBRATION, np.random.default_rng(args.seed))
    rest = np.setdiff1d(np.arange(len(labels)), apart)
    net = residual((16, 32, 64), args.blocks, pooled=False)
    recipe = Recipe(args.epochs, 3e-3, augment, pixels)
    params, stats = train(
        "cifar_resnet", net, (images[rest], labels[rest]), (images[apart], labels[apart]), args.seed, recipe
    )
    args.out.mkdir(parents=True, exist_ok=True)
    onnx.save(to_onnx("cifar_resnet", net, params, stats, (3, 32, 32)), args.out / "cifar_resnet.onnx")
    for name, (given, known) in {"calib": (images[apart], labels[apart]), "eval": test}.items():
        np.savez_compressed(args.out / f"cifar_{name}.npz", images=pixels(given).transpose(0, 3, 1, 2), labels=known)
    right = np.mean(predict(net, params, stats, test[0], pixels) == test[1])
    print(f"cifar_resnet: {right:.2%} of the {len(test[1])} test images")


if __name__ == "__main__":
    main()
