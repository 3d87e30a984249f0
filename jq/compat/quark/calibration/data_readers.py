"""Quark's readers of calibration data, over jq's sources."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto
from onnxruntime.quantization import CalibrationDataReader

from jq.arithmetic.layout import channels_last
from jq.compat.quark.inputs import Inputs, ranges_of, shapes_of
from jq.data.sources import open_source
from jq.errors import DataError
from jq.graph.read import load

_RANDOM_SAMPLES = 1  # what Quark's reader of random data holds


class _SampleReader(CalibrationDataReader):  # type: ignore[misc]
    """Samples in memory, read any number of times."""

    def __init__(self, samples: Iterable[Mapping[str, np.ndarray]]) -> None:
        self._samples = list(samples)
        self.reset_iter()

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        return self._samples[index]

    def get_next(self) -> Mapping[str, np.ndarray] | None:
        """Return the next sample, or None behind the last one."""
        return next(self._rest, None)

    def rewind(self) -> None:
        """Start again at the first sample."""
        self.reset_iter()

    def reset_iter(self) -> None:
        """Start again at the first sample: Quark's name of `rewind`."""
        self._rest = iter(self._samples)


class CachedDataReader(_SampleReader):
    """The first `data_size` samples of another reader, kept in memory.

    >>> reader = CachedDataReader(_SampleReader([{"x": np.zeros(1)}, {"x": np.ones(1)}]), data_size=1)
    >>> len(reader), reader.get_next(), reader.get_next()
    (1, {'x': array([0.])}, None)
    """

    def __init__(
        self,
        dr: CalibrationDataReader,
        data_size: int | None = None,
        convert_nchw_to_nhwc: bool = False,
        quantize_fp16: bool = False,
    ) -> None:
        samples: list[Mapping[str, np.ndarray]] = list(itertools.islice(iter(dr.get_next, None), data_size))
        if not samples:
            raise DataError("the calibration data reader has no data")
        if quantize_fp16:
            samples = [{k: v.astype(np.float16) if v.dtype == np.float32 else v for k, v in s.items()} for s in samples]
        if convert_nchw_to_nhwc:
            samples = [{k: channels_last(v) if v.ndim == 4 else v for k, v in s.items()} for s in samples]
        super().__init__(samples)


class RandomDataReader(_SampleReader):
    """One random sample for a model, to try a config without data.

    >>> import jq
    >>> RandomDataReader(jq.zoo.path("fashion_resnet")).get_next()["input"].shape
    (1, 1, 28, 28)
    """

    def __init__(
        self,
        model_input: str | os.PathLike[str] | ModelProto,
        input_shape: Mapping[str, Sequence[int]] | None = None,
        input_data_range: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        values = load(model_input).inputs
        shapes = shapes_of("input_shape", input_shape, values) if input_shape else {}
        ranges = ranges_of("input_data_range", input_data_range) if input_data_range else {}
        made = Inputs(values, samples=_RANDOM_SAMPLES, random=True, shapes=shapes, ranges=ranges).sampled(None, 0)
        super().__init__(made)


class PathDataReader(_SampleReader):
    """The samples in a folder of arrays or images, or in a file of arrays, as `jq.quantize` takes them."""

    def __init__(
        self,
        model_input: str | os.PathLike[str] | ModelProto,
        data_path: str | os.PathLike[str],
        input_shape: Any = (),
    ) -> None:
        super().__init__(open_source(data_path, load(model_input).inputs).samples())
