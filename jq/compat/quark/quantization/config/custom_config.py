"""Quark's named configs. Each is created on access, so that no user changes another's copy.

`from ... import XINT8_CONFIG` works for every name of `get_default_config_mapping`, with `_CONFIG` behind it, and for
the newer configs, with `_QCONFIG`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from jq.compat.quark.calibration import CalibrationMethod, PowerOfTwoMethod
from jq.compat.quark.quantization.config import spec
from jq.compat.quark.quantization.config.algorithm import AdaQuantConfig, AdaRoundConfig
from jq.compat.quark.quantization.config.config import QConfig, QuantizationConfig
from jq.compat.quark.quantization.quant_utils import ExtendedQuantFormat, ExtendedQuantType, QuantType
from jq.errors import ConfigError, suggest

DEFAULT_ADAROUND_PARAMS: dict[str, Any] = {
    "DataSize": 1000,
    "FixedSeed": 1705472343,
    "BatchSize": 2,
    "NumIterations": 1000,
    "LearningRate": 0.1,
    "OptimAlgorithm": "adaround",
    "OptimDevice": "cpu",
    "InferDevice": "cpu",
    "EarlyStop": True,
}
DEFAULT_ADAQUANT_PARAMS: dict[str, Any] = {
    **DEFAULT_ADAROUND_PARAMS,
    "LearningRate": 0.00001,
    "OptimAlgorithm": "adaquant",
}
DEFAULT_BFP_PARAMS: dict[str, Any] = {
    "bfp_method": "to_bfp", "axis": 1, "bit_width": 16, "block_size": 8, "rounding_mode": 2
}  # fmt: skip
DEFAULT_MICROEXPONENTS_PARAMS: dict[str, Any] = {
    "bfp_method": "to_bfp_prime", "axis": 1, "bit_width": 13, "block_size": 16, "sub_block_size": 2,
    "sub_block_shift_bits": 1, "rounding_mode": 2,
}  # fmt: skip
DEFAULT_MICROSCALING_PARAMS: dict[str, Any] = {
    "element_dtype": "int8", "axis": 1, "block_size": 32, "rounding_mode": 2
}  # fmt: skip

_U8, _S8, _U16, _S16 = QuantType.QUInt8, QuantType.QInt8, ExtendedQuantType.QUInt16, ExtendedQuantType.QInt16
_F16, _BF16 = ExtendedQuantType.QFloat16, ExtendedQuantType.QBFloat16
_BFP, _MX = ExtendedQuantType.QBFP, ExtendedQuantType.QMX
_FORCE = {"ForceQuantizeNoInputCheck": True}
_SYMMETRIC = {"ActivationSymmetric": True}
_ALIGNED = {"AlignSlice": False, "FoldRelu": True, "AlignConcat": True}
_TUNINGS = {"ADAROUND": DEFAULT_ADAROUND_PARAMS, "ADAQUANT": DEFAULT_ADAQUANT_PARAMS}
_VINT8 = {
    "UseRandomData": True,
    "ConvertBNToConv": True,
    "ConvertSigmoidToHardSigmoid": False,
    "ConvertClipToRelu": True,
    "ConvertSplitToSlice": True,
    "SplitLargeKernelPool": False,
    "ReplaceClip6Relu": True,
    "ConvertReduceMeanToGlobalAvgPool": False,
    "RemoveQDQConvClip": False,
    "RemoveQDQConvPRelu": False,
    "RemoveQDQConvRelu": False,
    "RemoveQDQConvLeakyRelu": False,
    "Int32Bias": False,
    "DedicatedQDQPair": True,
    "QuantizeAllOpTypes": True,
}


def _config(activation: Any, weight: Any, extra: Mapping[str, Any], **fields: Any) -> QuantizationConfig:
    """Return a config: 8-bit ones in onnxruntime's format, others in Quark's."""
    if not {activation, weight} <= {_U8, _S8}:
        fields.setdefault("quant_format", ExtendedQuantFormat.QDQ)
    return QuantizationConfig(activation_type=activation, weight_type=weight, extra_options=dict(extra), **fields)


def _tuned(config: QuantizationConfig, params: Mapping[str, Any]) -> QuantizationConfig:
    tuned = copy.deepcopy(config)
    tuned.include_fast_ft = True
    tuned.extra_options["FastFinetune"] = dict(params)
    return tuned


def _alike(kind: type[Any]) -> spec.QLayerConfig:
    return spec.QLayerConfig(kind(), weight=kind(), bias=kind())


def _older() -> dict[str, QuantizationConfig]:
    percentile: dict[str, Any] = {"calibrate_method": CalibrationMethod.Percentile}
    power: dict[str, Any] = {"calibrate_method": PowerOfTwoMethod.MinMSE}
    extended: dict[str, Any] = {"quant_format": ExtendedQuantFormat.QDQ}
    finer: dict[str, Any] = {"Percentile": 99.9999}
    configs: dict[str, QuantizationConfig] = {}

    def add(name: str, config: QuantizationConfig, *tunings: str) -> None:
        configs[name] = config
        configs.update({f"{name}_{tuning}": _tuned(config, _TUNINGS[tuning]) for tuning in tunings})

    both = ("ADAROUND", "ADAQUANT")
    add("UINT8_DYNAMIC_QUANT", QuantizationConfig(weight_type=_U8, use_dynamic_quant=True))
    add("XINT8", _config(_U8, _S8, {**_SYMMETRIC, **_FORCE}, enable_npu_cnn=True, **power), *both)
    weights_only = {**_SYMMETRIC, "WeightsOnly": True, "FastFinetune": dict(DEFAULT_ADAROUND_PARAMS)}
    only = _config(_U8, _S8, weights_only, enable_npu_cnn=True, include_fast_ft=True, **power)
    add("XINT8_WEIGHTSONLY_ADAROUND", only)
    add("VINT8", _config(_S8, _S8, {**_SYMMETRIC, **_VINT8}, optimize_model=False, **power))
    add("S8S8_AAWS", _config(_S8, _S8, {**finer, **_FORCE}, **percentile), *both)
    add("U8S8_AAWS", _config(_U8, _S8, _FORCE, **percentile), *both)
    asymmetric = {"ActivationSymmetric": False, "WeightSymmetric": False}
    add("U8U8_AAWA", _config(_U8, _U8, {**asymmetric, **_FORCE}, **percentile))
    add("S16S8_ASWS", _config(_S16, _S8, {**_SYMMETRIC, **_FORCE}, **percentile), *both)
    add("A8W8", _config(_S8, _S8, {**_SYMMETRIC, **_FORCE, **_ALIGNED}, **extended), *both)
    wide = {**_SYMMETRIC, **_FORCE, **_ALIGNED, "AlignEltwiseQuantType": True}
    add("A16W8", _config(_S16, _S8, wide), *both)
    add("U16S8_AAWS", _config(_U16, _S8, _FORCE, **percentile), *both)
    add("FP16", _config(_F16, _F16, _FORCE), "ADAQUANT")
    add("BF16", _config(_BF16, _BF16, {"QuantizeAllOpTypes": True, **_FORCE}), "ADAQUANT")
    bfp = {"BFPAttributes": dict(DEFAULT_BFP_PARAMS)}
    add("BFP16", _config(_BFP, _BFP, bfp), "ADAQUANT")
    microexponents = {
        name: {"BFPAttributes": {**DEFAULT_MICROEXPONENTS_PARAMS, "bit_width": width}}
        for name, width in (("MX4", 11), ("MX6", 13), ("MX9", 16))
    }
    for name, extra in microexponents.items():
        add(name, _config(_BFP, _BFP, extra), "ADAQUANT")
    for element in ("fp8_e5m2", "fp8_e4m3", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "int8"):
        extra = {"MXAttributes": {**DEFAULT_MICROSCALING_PARAMS, "element_dtype": element}}
        add("MX" + element.upper().replace("_", ""), _config(_MX, _MX, extra), "ADAQUANT")
    target: dict[str, Any] = {"TargetLayerConfig": _alike(spec.Int8Spec)}
    mixed = {**finer, "Int32Bias": False, "Int16Bias": False, "WeightSymmetric": True, "ActivationSymmetric": False}
    mixed |= {**_FORCE, "AutoMixprecision": target}
    add("S16S16_MIXED_S8S8", _config(_S16, _S16, mixed, include_auto_mp=True, **percentile))
    for name, kind in (("BFP16", spec.BFP16Spec), ("MXINT8", spec.MXInt8Spec)):
        target = {"TargetLayerConfig": _alike(kind), "DualQuantNodes": True}
        mixed = {**_SYMMETRIC, "QuantizeBias": False, "DedicateDQNode": True, "CalibDataSize": 1}
        mixed |= {"AutoMixprecision": target}
        add(f"BF16_MIXED_{name}", _config(_BF16, _BF16, mixed, include_auto_mp=True), "ADAQUANT")
    add("BF16_BFP16", _config(_BF16, _BFP, bfp))
    add("BF16_MXINT8", _config(_BF16, _MX, {"MXAttributes": dict(DEFAULT_MICROSCALING_PARAMS)}))
    add("MX9_INT8", _config(_BFP, _S8, microexponents["MX9"]))
    for bits, activation, weight in (("INT8", _U8, _S8), ("INT16", _U16, _S16)):
        add(f"{bits}_CNN_DEFAULT", _config(activation, weight, _FORCE))
        attention: dict[str, Any] = {"enable_npu_transformer": True}
        add(f"{bits}_TRANSFORMER_DEFAULT", _config(activation, weight, {"CalibMovingAverage": True}, **attention))
        accurate = _config(activation, weight, {**finer, **_FORCE}, **percentile)
        add(f"{bits}_CNN_ACCURATE", _tuned(accurate, DEFAULT_ADAROUND_PARAMS))
        accurate = _config(activation, weight, finer, **percentile, **attention)
        add(f"{bits}_TRANSFORMER_ACCURATE", _tuned(accurate, DEFAULT_ADAROUND_PARAMS))
    four_bits = {"GroupSize": 128, "Symmetric": True, "Bits": 4, "AccuracyLevel": 1}
    add("MATMUL_NBITS", QuantizationConfig(extra_options={"UseMatMulNBits": True, "MatMulNBitsParams": four_bits}))
    return configs


def _newer() -> dict[str, QConfig]:
    aligned = {**_FORCE, **_ALIGNED}
    bases: dict[str, tuple[type, type, dict[str, Any], bool]] = {
        "XINT8": (spec.XInt8Spec, spec.XInt8Spec, _FORCE, True),
        "VINT8": (spec.XInt8Spec, spec.XInt8Spec, {"OptimizeModel": False, "EnableNPUCnn": False, **_VINT8}, False),
        "A8W8": (spec.Int8Spec, spec.Int8Spec, aligned, True),
        "A16W8": (spec.Int16Spec, spec.Int8Spec, {**aligned, "AlignEltwiseQuantType": True}, True),
        "BF16": (spec.BFloat16Spec, spec.BFloat16Spec, _FORCE, False),
        "BFP16": (spec.BFP16Spec, spec.BFP16Spec, {}, False),
    }
    configs = {}
    for name, (activation, weight, extra, tunes) in bases.items():
        algorithms: dict[str, list[Any]] = {"": []}
        if tunes:
            algorithms |= {"_ADAROUND": [AdaRoundConfig()], "_ADAQUANT": [AdaQuantConfig()]}
        for suffix, algorithm in algorithms.items():
            layers = spec.QLayerConfig(input_tensors=activation(), weight=weight())
            configs[name + suffix] = QConfig(layers, algo_config=algorithm, extra_options=extra)
    return configs


_NO_NAMES = ("XINT8_WEIGHTSONLY_ADAROUND",)  # a constant that Quark's mapping lacks


def get_default_config_mapping() -> dict[str, QuantizationConfig]:
    """Return all of Quark's older configs by name.

    >>> len(get_default_config_mapping())
    65
    """
    return {name: config for name, config in _older().items() if name not in _NO_NAMES}


def get_default_config(config_name: str) -> QuantizationConfig:
    """Return the config of that name, with or without `_CONFIG`, each time a copy of its own.

    >>> get_default_config("XINT8_ADAROUND_CONFIG").extra_options["FastFinetune"]["NumIterations"]
    1000
    """
    known = get_default_config_mapping()
    name = str(config_name).removesuffix("_CONFIG")
    if name not in known:
        raise ConfigError(f"no config {config_name!r}.{suggest(name.upper(), known)} Available: {', '.join(known)}")
    return known[name]


def __getattr__(name: str) -> Any:
    """A constant such as XINT8_CONFIG or XINT8_QCONFIG, and the mapping of all names."""
    if name == "DefaultConfigMapping":
        return get_default_config_mapping()
    for suffix, configs in (("_QCONFIG", _newer), ("_CONFIG", _older)):
        if name.endswith(suffix) and name.removesuffix(suffix) in (known := configs()):
            return known[name.removesuffix(suffix)]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
