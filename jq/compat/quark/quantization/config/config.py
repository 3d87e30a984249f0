"""The two configs that `ModelQuantizer` takes: Quark's older and its newer one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

from jq.compat.quark.quantization.config.algorithm import AlgoConfig
from jq.compat.quark.quantization.config.fields import Fields
from jq.compat.quark.quantization.config.legacy import QuantizationConfig
from jq.compat.quark.quantization.config.spec import QLayerConfig

__all__ = ["Config", "QConfig", "QuantizationConfig"]


@dataclasses.dataclass
class Config(Fields):
    """Quark's older config.

    >>> print(Config(QuantizationConfig(extra_options={"Percentile": 99.99})))  # doctest: +ELLIPSIS
    Config(
        global_quant_config = QuantizationConfig(
            calibrate_method = CalibrationMethod.MinMax
            ...
            extra_options = {
                Percentile: 99.99
            }
        )
    )
    """

    global_quant_config: QuantizationConfig


@dataclasses.dataclass(init=False)
class QConfig(Fields):
    """Quark's newer config: a spec for all layers, others for some, and algorithms.

    What is no field here counts as one of the `extra_options`, as in Quark.

    >>> from jq.compat.quark import CLEConfig, XInt8Spec
    >>> config = QConfig(QLayerConfig(XInt8Spec(), weight=XInt8Spec()), algo_config=[CLEConfig()], NumBins=1024)
    >>> config.extra_options
    {'NumBins': 1024}
    """

    global_config: QLayerConfig
    specific_layer_config: dict[QLayerConfig, list[str]]
    layer_type_config: dict[QLayerConfig | None, list[str]]
    exclude: list[Any]
    algo_config: list[AlgoConfig]
    use_external_data_format: bool
    extra_options: dict[str, Any]

    def __new__(cls, *args: Any, **given: Any) -> Self:  # noqa: D102  more names than those of fields may be given
        return object.__new__(cls)

    def __init__(
        self,
        global_config: QLayerConfig,
        specific_layer_config: Mapping[QLayerConfig, list[str]] | None = None,
        layer_type_config: Mapping[QLayerConfig | None, list[str]] | None = None,
        exclude: Sequence[Any] | None = None,
        algo_config: Sequence[AlgoConfig] | None = None,
        use_external_data_format: bool = False,
        extra_options: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        self.global_config = global_config
        self.specific_layer_config = dict(specific_layer_config or {})
        self.layer_type_config = dict(layer_type_config or {})
        self.exclude = list(exclude or [])
        self.algo_config = list(algo_config or [])
        self.use_external_data_format = use_external_data_format
        self.extra_options = {**more, **(extra_options or {})}

    @staticmethod
    def get_default_config(config_name: str) -> Config:
        """Return the older config of that name, a copy of its own.

        >>> QConfig.get_default_config("XINT8").global_quant_config.enable_npu_cnn
        True
        """
        from jq.compat.quark.quantization.config.custom_config import get_default_config

        return Config(get_default_config(config_name))
