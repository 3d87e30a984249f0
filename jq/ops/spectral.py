"""Fourier transforms, windows and spectrograms."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from onnx import helper

from jq.errors import ModelError
from jq.ops.table import Array, op


def _complex(x: Array) -> Array:
    """The complex tensor that ONNX holds as (..., 2), or as (..., 1) where it is real."""
    if x.shape[-1] not in (1, 2):
        raise ModelError(f"the last dim must be 1 (real) or 2 (complex), found {x.shape[-1]}")
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return x[..., 0] if x.shape[-1] == 1 else x[..., 0] + 1j * x[..., 1]


def _pairs(y: Array) -> Array:
    return jnp.stack([y.real, y.imag], axis=-1)


def _forward(x: Array, length: int, axis: int, onesided: int) -> Array:
    """The spectrum, or with `onesided` its first half; that of a real signal mirrors its first half exactly."""
    half = np.arange(length // 2 + 1)
    if jnp.iscomplexobj(x):
        y = jnp.fft.fft(x, length, axis)
        return jnp.take(y, half, axis=axis) if onesided else y
    y = jnp.fft.rfft(x, length, axis)
    mirrored = length - np.arange(len(half), length)
    return y if onesided else jnp.concatenate([y, jnp.take(y, mirrored, axis=axis).conj()], axis=axis)


@op("DFT", since=17, static=("dft_length", "axis"))
def dft(x: Array, dft_length: Array | None = None, axis: Array | None = None, *, inverse: int, onesided: int) -> Array:
    """Return the transform; `onesided` with `inverse` takes half a spectrum and gives the real signal."""
    along = int(-2 if axis is None else axis) % x.ndim
    default = 2 * (x.shape[along] - 1) if inverse and onesided else x.shape[along]
    length = default if dft_length is None else int(dft_length)
    if inverse and onesided:
        return jnp.fft.irfft(_complex(x), length, along)[..., None].astype(x.dtype)
    y = jnp.fft.ifft(_complex(x), length, along) if inverse else _forward(_complex(x), length, along, onesided)
    return _pairs(y).astype(x.dtype)


@op("STFT", since=17, static=("frame_step", "frame_length"))
def stft(
    x: Array, frame_step: Array, window: Array | None = None, frame_length: Array | None = None, *, onesided: int
) -> Array:
    step = int(frame_step)
    default = x.shape[1] if window is None else window.shape[0]
    length = default if frame_length is None else int(frame_length)
    places = np.arange(0, x.shape[1] - length + 1, step)[:, None] + np.arange(length)
    frames = _complex(x)[:, places]  # (N, frames, length)
    frames = frames if window is None else frames * window.astype(frames.real.dtype)
    return _pairs(_forward(frames, length, -1, onesided)).astype(x.dtype)


def _window(name: str, *weights: float) -> None:
    """Register the sum over i of weights[i] * cos(2 pi i n / N): `size` points of one period, or symmetric."""

    @op(name, since=17, static=("size",), host=True)
    def rule(size: Array, *, output_datatype: int, periodic: int) -> np.ndarray:
        period = int(size) if periodic else int(size) - 1
        angle = 2 * np.pi * np.arange(int(size)) / max(period, 1)
        window = np.sum([w * np.cos(i * angle) for i, w in enumerate(weights)], axis=0)
        return window.astype(helper.tensor_dtype_to_np_dtype(output_datatype))


_window("HannWindow", 0.5, -0.5)
_window("HammingWindow", 25 / 46, -21 / 46)
_window("BlackmanWindow", 0.42, -0.5, 0.08)

_MEL_ARGUMENTS = ("num_mel_bins", "dft_length", "sample_rate", "lower_edge_hertz", "upper_edge_hertz")


@op("MelWeightMatrix", since=17, static=_MEL_ARGUMENTS, host=True)
def mel_weight_matrix(
    num_mel_bins: Array, dft_length: Array, sample_rate: Array, lower_edge_hertz: Array, upper_edge_hertz: Array, *,
    output_datatype: int,
) -> np.ndarray:  # fmt: skip
    """Return (spectrum bins, mel bins): triangles of one width on the scale mel = 2595 log10(1 + hertz / 700)."""
    count, length = int(num_mel_bins), int(dft_length)
    low, high = (2595 * math.log10(1 + float(edge) / 700) for edge in (lower_edge_hertz, upper_edge_hertz))
    mel = low + np.arange(count + 2) * ((high - low) / (count + 2))
    corners = ((length + 1) * 700 * (10 ** (mel / 2595) - 1) // int(sample_rate)).astype(np.int64)
    left, center, right = corners[:-2], corners[1:-1], corners[2:]
    place = np.arange(length // 2 + 1)[:, None]
    rising = (place - left) / np.maximum(center - left, 1)
    falling = (right - place) / np.maximum(right - center, 1)
    matrix = np.where(place < center, np.maximum(rising, 0), np.where(place > center, np.maximum(falling, 0), 1))
    return matrix.astype(helper.tensor_dtype_to_np_dtype(output_datatype))
