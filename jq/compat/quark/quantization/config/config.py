"""The two configs that `ModelQuantizer` takes: Quark's older and its newer one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Self

from jq.compat.quark.calibration import CalibrationMethod
from jq.compat.quark.quantization.config.algorithm import AlgoConfig, from_dict
from jq.compat.quark.quantization.config.fields import Fields, plain
from jq.compat.quark.quantization.config.spec import QLayerConfig, choice_of
from jq.compat.quark.quantization.quant_utils import QuantFormat, QuantType
from jq.errors import ConfigError

__all__ = ["Config", "QConfig", "QuantizationConfig"]

_OF_LAYERS = ("specific_layer_config", "layer_type_config")


@dataclasses.dataclass
class QuantizationConfig(Fields):
    """How a model is quantized, in Quark's words; `jq.compat.quark.options` lists what jq does for each.

    >>> QuantizationConfig(include_cle=False, extra_options={"Percentile": 99.9}).weight_type.name
    'QInt8'
    """

    calibrate_method: Enum = CalibrationMethod.MinMax
    quant_format: Enum = QuantFormat.QDQ
    activation_type: Enum = QuantType.QInt8
    weight_type: Enum = QuantType.QInt8

    input_nodes: list[str] = dataclasses.field(default_factory=list)
    output_nodes: list[str] = dataclasses.field(default_factory=list)
    op_types_to_quantize: list[str] = dataclasses.field(default_factory=list)
    nodes_to_quantize: list[str] = dataclasses.field(default_factory=list)
    extra_op_types_to_quantize: list[str] = dataclasses.field(default_factory=list)
    nodes_to_exclude: list[str] = dataclasses.field(default_factory=list)
    subgraphs_to_exclude: list[tuple[list[str], list[str]]] = dataclasses.field(default_factory=list)

    specific_tensor_precision: bool = False
    execution_providers: list[str] = dataclasses.field(default_factory=lambda: ["CPUExecutionProvider"])

    per_channel: bool = False
    reduce_range: bool = False
    optimize_model: bool = True
    use_dynamic_quant: bool = False
    use_external_data_format: bool = False

    convert_fp16_to_fp32: bool = False
    convert_nchw_to_nhwc: bool = False

    include_sq: bool = False
    include_rotation: bool = False
    include_cle: bool = True
    include_auto_mp: bool = False
    include_fast_ft: bool = False

    enable_npu_cnn: bool = False
    enable_npu_transformer: bool = False

    debug_mode: bool = False
    crypto_mode: bool = False
    print_summary: bool = True
    ignore_warnings: bool = True
    log_severity_level: Any = None

    extra_options: dict[str, Any] = dataclasses.field(default_factory=dict)


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

    A keyword that is no field becomes one of the `extra_options`, as in Quark.

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

    def to_dict(self) -> dict[str, Any]:
        """Return the config for JSON and YAML; settings for some layers only are a list of pairs.

        >>> from jq.compat.quark import CLEConfig, XInt8Spec
        >>> config = QConfig(QLayerConfig(XInt8Spec(), weight=XInt8Spec()), layer_type_config={None: ["Gemm"]})
        >>> config.to_dict()["layer_type_config"], QConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
        ([[None, ['Gemm']]], True)
        """
        settings = {name: getattr(self, name).items() for name in _OF_LAYERS}
        return super().to_dict() | {
            k: [[plain(layer), plain(names)] for layer, names in v] for k, v in settings.items()
        }

    @staticmethod
    def from_dict(options: Mapping[str, Any]) -> QConfig:
        """Return the config that `to_dict` described, or one in the JSON of AMD's examples: specs and excludes by name."""
        if "global_config" not in options:
            raise ConfigError("a QConfig needs global_config")
        excluded = options.get("exclude", [])
        if isinstance(excluded, Mapping):
            if other := excluded.keys() - {"node_names"}:
                raise ConfigError(f"exclude takes node_names only; got also {', '.join(sorted(other))}")
            excluded = list(excluded.get("node_names", []))
        fields = dict(options) | {
            "exclude": excluded,
            "global_config": QLayerConfig.from_dict(options["global_config"]),
        }
        for name in _OF_LAYERS:
            pairs = options.get(name, [])
            fields[name] = {None if layer is None else QLayerConfig.from_dict(layer): names for layer, names in pairs}
        fields["algo_config"] = [from_dict(algorithm) for algorithm in options.get("algo_config", [])]
        fields["extra_options"] = {k: choice_of(v) for k, v in options.get("extra_options", {}).items()}
        return QConfig(**fields)

    @staticmethod
    def get_default_config(config_name: str) -> Config:
        """Return the older config of that name, a copy of its own.

        >>> QConfig.get_default_config("XINT8").global_quant_config.enable_npu_cnn
        True
        """
        from jq.compat.quark.quantization.config.custom_config import get_default_config

        return Config(get_default_config(config_name))
