"""`ModelQuantizer`: Quark's entry point, run by jq."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

from onnx import ModelProto

from jq.compat.quark.external import store_outside
from jq.compat.quark.mixed import mixed
from jq.compat.quark.quantization.config.algorithm import AlgoConfig, AutoMixprecisionConfig
from jq.compat.quark.quantization.config.config import Config, QConfig
from jq.compat.quark.restored import Restored
from jq.compat.quark.translate import translate
from jq.errors import ConfigError
from jq.graph.read import load
from jq.pipeline import quantize
from jq.util import files


class ModelQuantizer:
    """Quantizer of models by a Quark config.

    >>> import jq
    >>> from jq.compat.quark import Config, get_default_config
    >>> images, _ = jq.zoo.calibration_set()
    >>> config = get_default_config("XINT8")
    >>> config.print_summary = False
    >>> model = ModelQuantizer(Config(config)).quantize_model(
    ...     jq.zoo.path("fashion_resnet"), calibration_data_reader=[{"input": images[:16]}])
    >>> sum(node.op_type == "QuantizeLinear" for node in model.graph.node)
    26
    """

    def __init__(self, config: Config | QConfig) -> None:
        if not isinstance(config, (Config, QConfig)):
            raise ConfigError(f"expected a Config or a QConfig; got {type(config).__name__!r}")
        self.config = config

    def quantize_model(
        self,
        model_input: str | os.PathLike[str] | ModelProto,
        model_output: str | os.PathLike[str] | None = None,
        calibration_data_reader: Any = None,
        calibration_data_path: str | os.PathLike[str] | None = None,
        algorithms: Sequence[AlgoConfig] | None = None,
    ) -> ModelProto:
        """Return the quantized model, and write it to `model_output`; without data, random ones are taken.

        The data are a reader, or a path, as `jq.quantize` takes them.
        """
        if calibration_data_reader is not None and calibration_data_path is not None:
            raise ConfigError(
                "calibration_data_reader and calibration_data_path are mutually exclusive; give one of them"
            )
        graph = load(model_input)
        given = self.config.algo_config if isinstance(self.config, QConfig) else algorithms or ()
        mixing = [a for a in given if isinstance(a, AutoMixprecisionConfig)]
        translation = translate(self.config, graph, algorithms or ())
        for note in translation.notes:
            warnings.warn(note, UserWarning, stacklevel=2)
        data = calibration_data_reader if calibration_data_path is None else calibration_data_path
        files.check_writable(model_output, model_input)
        if translation.config.calibrates or translation.config.cle or translation.config.finetune:
            data = translation.inputs.sampled(data, translation.config.seed)
        model = model_input if translation.graph is None else translation.graph
        if mixing:
            result = mixed(mixing[0], translation.config, load(model), data)
            if model_output is not None:
                files.write(model_output, result.model.SerializeToString())
        else:
            written = {"format": translation.format, "opset": translation.opset, "spill": translation.spill}
            kept = None if translation.ranges_file is None else Restored(translation.ranges_file)
            result = quantize(model, data, translation.config, output=model_output, measured=kept, **written)
        if model_output is not None and translation.external:
            store_outside(model_output)
        if translation.summary and not mixing:
            print(result.report.summary())
        return result.model
