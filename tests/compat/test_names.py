"""Names, fields and defaults are the vendor's: by lists that are written down here, and by Quark itself if it is there."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
from enum import Enum
from typing import Any

import pytest

import jq
from jq.compat import quark
from jq.compat.quark import (
    QConfig,
    QLayerConfig,
    QTensorConfig,
    QuantizationConfig,
    get_default_config,
    get_default_config_mapping,
)
from jq.compat.quark.options import AS_FIELDS, EXTRA_OPTIONS
from jq.compat.quark.quantization.config import custom_config
from jq.compat.quark.translate import translate
from jq.errors import ConfigError

PATHS = {
    "": (
        "ModelQuantizer", "QConfig", "QuantType", "QuantFormat", "PowerOfTwoMethod", "CalibrationMethod",
        "CachedDataReader", "RandomDataReader", "PathDataReader", "CalibraterBase", "MinMaxCalibrater", "QuantizationMode",
        "write_calibration_table", "AutoSearch", "AutoSearchPro", "SearchSpace", "generate_all_configs",
        "get_auto_search_config", "auto_search", "get_library_path", "ExtendedQuantFormat", "ExtendedQuantType",
        "LayerWiseMethod", "QuantizationConfig", "XINT8_QCONFIG", "A16W8_ADAQUANT_QCONFIG",
    ),
    ".auto_search": (
        "AutoSearch", "AutoSearchConfig", "SearchSpace", "split_config_levels", "l2_metric", "l1_metric", "cos_metric",
        "psnr_metric", "ssim_metric",
    ),
    ".operators.custom_ops": ("get_library_path",),
    ".quant_utils": (
        "PowerOfTwoMethod", "VitisQuantType", "VitisQuantFormat", "ExtendedQuantType", "ExtendedQuantFormat",
        "CachedDataReader", "QuantType", "QuantFormat",
    ),
    ".quantization": ("QConfig", "CLEConfig", "AdaRoundConfig"),
    ".quantization.api": ("ModelQuantizer",),
    ".quantization.auto_search": ("AutoSearch", "AutoSearchPro", "get_auto_search_config"),
    ".quantization.config": (
        "Config", "QuantizationConfig", "get_default_config", "QConfig", "DEFAULT_CONFIG_MAPPING"
    ),
    ".quantization.config.algorithm": (
        "AdaQuantConfig", "AdaRoundConfig", "CLEConfig", "AutoMixprecisionConfig", "BiasCorrectionConfig"
    ),
    ".quantization.config.config": ("Config", "QuantizationConfig", "QConfig"),
    ".quantization.config.custom_config": (
        "XINT8_CONFIG", "A8W8_ADAROUND_CONFIG", "XINT8_WEIGHTSONLY_ADAROUND_CONFIG", "XINT8_ADAROUND_QCONFIG",
        "DEFAULT_ADAROUND_PARAMS", "DefaultConfigMapping", "get_default_config",
    ),
    ".quantization.config.legacy": ("QuantizationConfig",),
    ".quantization.config.spec": (
        "QLayerConfig", "XInt8Spec", "Int8Spec", "Int16Spec", "BFloat16Spec", "BFP16Spec", "CalibMethod", "ScaleType"
    ),
    ".quantization.config.data_type": ("Int8", "BFP16", "DataType"),
    ".calibration": ("PowerOfTwoMethod", "LayerWiseMethod", "RandomDataReader"),
    ".calibration.methods": ("PowerOfTwoMethod",),
    ".quantization.quant_utils": ("ExtendedQuantFormat", "ExtendedQuantType", "VitisQuantFormat"),
}  # fmt: skip
DEFAULTS = {
    "include_cle": True, "include_fast_ft": False, "enable_npu_cnn": False, "optimize_model": True,
    "per_channel": False, "print_summary": True, "calibrate_method": quark.CalibrationMethod.MinMax,
    "activation_type": quark.QuantType.QInt8, "execution_providers": ["CPUExecutionProvider"],
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_where_names_are_imported_from(path: str) -> None:
    module = importlib.import_module(f"jq.compat.quark{path}")
    for name in PATHS[path]:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="NOTHING_CONFIG"):
        _ = custom_config.NOTHING_CONFIG


def test_names_that_are_not_there_say_what_to_take() -> None:
    with pytest.raises(ConfigError, match="UINT8_DYNAMIC_QUANT"):
        exec("from jq.compat.quark import quantize_dynamic", {})  # noqa: S102
    with pytest.raises(ImportError, match="Nothing"):
        exec("from jq.compat.quark import Nothing", {})  # noqa: S102


def test_defaults() -> None:
    config = QuantizationConfig()
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS
    assert len(get_default_config_mapping()) == 65
    assert QConfig.get_default_config("XINT8").global_quant_config == get_default_config("XINT8")
    assert quark.DEFAULT_ADAQUANT_PARAMS["LearningRate"] == 1e-5
    assert quark.DataType.Int8 is quark.Int8


def plain(value: Any) -> Any:
    """A value of either package without its classes."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, dict):
        return {plain(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, type):
        return value.__name__
    if dataclasses.is_dataclass(value) or type(value).__module__.startswith("quark"):
        return {k: plain(v) for k, v in vars(value).items() if k not in ("name", "log_severity_level")}
    return value


def test_quark_itself() -> None:
    """Configs, fields, defaults, enums and specs, held against the installed package."""
    theirs = pytest.importorskip("quark.onnx", reason="AMD Quark is not installed")
    constants = importlib.import_module("quark.onnx.quantization.config.custom_config")
    for name in dir(constants):
        if name.endswith("_CONFIG"):
            assert plain(getattr(custom_config, name)) == plain(getattr(constants, name)), name
        elif name.startswith("DEFAULT_") or name.endswith("_QCONFIG"):
            assert hasattr(custom_config, name)
    for name in quark.__all__:
        ours, other = getattr(quark, name), getattr(theirs, name, None)
        if other is None or not isinstance(other, type):
            continue
        if issubclass(other, Enum):
            assert {m.name: m.value for m in ours} == {m.name: m.value for m in other}, name
        elif name.endswith("Config") and name not in ("Config", "QConfig", "AlgoConfig"):
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(other).parameters), name
        if name.endswith(("Spec", "RoundConfig", "QuantConfig", "CLEConfig", "GPTQConfig", "QuarotConfig")):
            assert plain(ours()) == plain(other()), name
    known = importlib.import_module("quark.onnx.quantization.config.maps").QCONFIG_ALL_PARAMS
    unknown = known - EXTRA_OPTIONS.keys() - AS_FIELDS.keys() - {f.name for f in dataclasses.fields(QConfig)}
    assert not unknown
    assert issubclass(quark.XInt8Spec, QTensorConfig)


NEWER = (
    "XINT8_ADAROUND_QCONFIG", "VINT8_QCONFIG", "A16W8_ADAQUANT_QCONFIG", "BF16_QCONFIG", "BFP16_QCONFIG", "A8W8_QCONFIG"
)  # fmt: skip


@pytest.mark.parametrize("name", NEWER)
def test_newer_configs_go_through_json(name: str, graph: jq.Graph) -> None:
    config = getattr(quark, name)
    text = json.dumps(config.to_dict())
    again = QConfig.from_dict(json.loads(text))
    assert json.dumps(again.to_dict()) == text
    assert translate(again, graph) == translate(config, graph)


def test_layers_and_choices_go_through_json(graph: jq.Graph) -> None:
    convolutions = [n.label for n in graph.nodes if n.op_type == "Conv"]
    wide = QLayerConfig(input_tensors=quark.Int16Spec(), weight=quark.Int16Spec())
    config = QConfig(
        QLayerConfig(quark.Int8Spec(), weight=quark.Int8Spec()),
        specific_layer_config={wide: convolutions[1:3]},
        layer_type_config={None: ["Gemm"]},
        exclude=[convolutions[4], ([convolutions[5]], [convolutions[6]])],
        algo_config=[quark.CLEConfig(), quark.AdaRoundConfig(num_iterations=500)],
        extra_options={"WeightCalibrateMethod": quark.ExtendedCalibrationMethod.MinMSE},
    )
    again = QConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert translate(again, graph) == translate(config, graph)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"global_config": {"weight": {"data_type": "Int9"}}}, "Did you mean 'Int8'"),
        ({"global_config": {"wight": {}}}, "no field 'wight'|no data_type"),
        ({"global_config": {"weight": {"data_type": "Int8"}}}, "symmetric"),
        ({"algo_config": [{"name": "adarond"}]}, "Did you mean 'adaround'"),
        ({"algo_config": [{"name": "cle", "steps": 1}]}, "no field 'steps'"),
        ({"extra_options": {"WeightCalibrateMethod": "CalibrationMethod.MinMix"}}, "Did you mean 'MinMax'"),
    ],
)
def test_dicts_of_no_config(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        QConfig.from_dict(quark.XINT8_QCONFIG.to_dict() | change)
    with pytest.raises(ConfigError, match="global_config"):
        QConfig.from_dict({})


def test_the_json_of_amds_examples():

    layers = {"input_tensors": {"spec": "XInt8Spec"}, "weight": {"spec": "XInt8Spec"}, "bias": None}
    extra = {"IgnoreWarnings": False, "UseRandomData": False, "MatMulToGemm": True, "DedicatedQDQPair": True}
    read = QConfig.from_dict({"global_config": layers, "exclude": {"node_names": ["/a", "/b"]}, "extra_options": extra})
    wanted = QConfig(
        QLayerConfig(quark.XInt8Spec(), weight=quark.XInt8Spec()), exclude=["/a", "/b"], extra_options=extra
    )
    assert read.to_dict() == wanted.to_dict()
    for wrong in (
        {"global_config": {"weight": {"spec": "XInt9Spec"}}},
        {"global_config": layers, "exclude": {"x": []}},
    ):
        with pytest.raises(ConfigError, match=r"spec needs exactly one of|exclude takes node_names"):
            QConfig.from_dict(wrong)
