"""Small trained networks and their data, bundled so that everything runs with no download.

Two classifiers of Fashion-MNIST stored as ONNX with BatchNormalization unfolded: a plain
residual CNN, which quantizes easily, and a MobileNetV2-like net with ReLU6, depthwise
convolutions and strongly uneven channel ranges, which does not. `README.md` beside this file
has their figures, the source and licence of the data, and the command that reproduces them.

>>> import jq.zoo
>>> jq.zoo.models()
('fashion_resnet', 'fashion_mobilenet')
>>> images, labels = jq.zoo.evaluation_set()
>>> images.shape, jq.zoo.CLASSES[9]
((3000, 1, 28, 28), 'Ankle boot')
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jq.errors import check_choice

__all__ = ["CLASSES", "calibration_set", "evaluation_set", "models", "path"]

CLASSES: tuple[str, ...] = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
"""Names of the classes, in the order of the labels and of the logits."""

_FOLDER = Path(__file__).parent
_MODELS = ("fashion_resnet", "fashion_mobilenet")
# Of the training pixels / 255; experiments/zoo/train.py trained the models with the same two.
_MEAN, _STD = 0.2860, 0.3530


def models() -> tuple[str, ...]:
    """Names of the bundled models, as `path` takes them.

    >>> models()
    ('fashion_resnet', 'fashion_mobilenet')
    """
    return _MODELS


def path(name: str) -> Path:
    """ONNX file of the bundled model `name`; `ConfigError` if there is no such model.

    Each takes `input`, float32 [N,1,28,28] as `evaluation_set` returns it, to `logits` [N,10].

    >>> path("fashion_resnet").name
    'fashion_resnet.onnx'
    """
    check_choice("jq.zoo.path", name, _MODELS)
    return _FOLDER / f"{name}.onnx"


def evaluation_set() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """3000 images of the test split, 300 per class, and their labels.

    Images are float32 [3000,1,28,28], normalised to what the models expect:
    (pixel / 255 - 0.2860) / 0.3530. No model was trained on them, and no
    checkpoint was chosen by them.

    >>> images, labels = evaluation_set()
    >>> images.shape, images.dtype, labels.shape
    ((3000, 1, 28, 28), dtype('float32'), (3000,))
    """
    return _load("eval")


def calibration_set() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """512 images held out of the training split, 51 or 52 per class, and their labels.

    Normalised as in `evaluation_set`. No image occurs in the evaluation set or was trained on.

    >>> images, labels = calibration_set()
    >>> images.shape, images.dtype, labels.shape
    ((512, 1, 28, 28), dtype('float32'), (512,))
    """
    return _load("calib")


def _load(prefix: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    with np.load(_FOLDER / "fashion.npz") as data:
        pixels, labels = data[f"{prefix}_images"], data[f"{prefix}_labels"]
    images = (pixels[:, None].astype(np.float32) / 255 - _MEAN) / _STD
    return images.astype(np.float32), labels.astype(np.int64)
