"""How tensors and layers are quantized, in the words of Quark's newer configs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any

from jq.compat.quark.calibration import CalibrationMethod, ExtendedCalibrationMethod, LayerWiseMethod, PowerOfTwoMethod
from jq.compat.quark.quantization.config.data_type import DataType
from jq.compat.quark.quantization.config.fields import Fields
from jq.errors import ConfigError, suggest


class CalibMethod(Enum):
    """How a tensor's range is found."""

    MinMax = 0
    MinMSE = 1
    Percentile = 2
    Entropy = 3
    LayerwisePercentile = 4
    Distribution = 5


class ScaleType(Enum):
    """Which scales there may be."""

    Float32 = 0
    PowerOf2 = 1
    Int16 = 2


class QuantGranularity(Enum):
    """The parts of a tensor that have their own scale."""

    Tensor = 0
    Channel = 1
    Group = 2


_CHOICES: Mapping[str, type[Enum]] = {
    kind.__name__: kind
    for kind in (
        CalibMethod, ScaleType, QuantGranularity,
        CalibrationMethod, ExtendedCalibrationMethod, LayerWiseMethod, PowerOfTwoMethod,
    )
}  # fmt: skip


def choice_of(value: Any) -> Any:
    """Return the member of an enumeration that `Kind.Name` means; any other value unchanged.

    >>> choice_of("ScaleType.PowerOf2"), choice_of("model.onnx")
    (<ScaleType.PowerOf2: 1>, 'model.onnx')
    """
    kind, dot, name = value.partition(".") if isinstance(value, str) else ("", "", "")
    if not dot or kind not in _CHOICES:
        return value
    known = _CHOICES[kind].__members__
    if name not in known:
        raise ConfigError(f"unknown value {value!r}.{suggest(name, known)} Available: {', '.join(known)}")
    return known[name]


@dataclasses.dataclass(eq=False)
class QTensorConfig(Fields):
    """How a tensor is quantized.

    >>> spec = XInt8Spec()
    >>> spec.set_symmetric(False)
    >>> spec.symmetric, spec.scale_type.name, Int16Spec().data_type.name
    (False, 'PowerOf2', 'Int16')
    """

    symmetric: bool
    scale_type: ScaleType
    calibration_method: CalibMethod
    quant_granularity: QuantGranularity
    data_type: DataType

    @staticmethod
    def from_dict(options: Mapping[str, Any]) -> QTensorConfig:
        """Return what `to_dict` described, or AMD's examples in JSON: `{"spec": "XInt8Spec"}`."""
        if "spec" in options:
            specs = {k: v for k, v in globals().items() if k.endswith("Spec") and not k.startswith("_")}
            if options["spec"] not in specs or len(options) > 1:
                near = suggest(str(options["spec"]), specs)
                raise ConfigError(f"spec needs exactly one of {', '.join(specs)}; got {dict(options)}.{near}")
            return specs[options["spec"]]()
        name = str(options.get("data_type"))
        if name not in DataType.__members__:
            known = DataType.__members__
            raise ConfigError(f"no data_type {name!r}.{suggest(str(name), known)} Available: {', '.join(known)}")
        fields = {k: choice_of(v) for k, v in options.items()} | {"data_type": DataType[name]}
        try:
            return QTensorConfig(**fields)
        except TypeError as error:  # of fields that are not there
            raise ConfigError(f"spec {', '.join(options)}: {error}") from error

    def set_symmetric(self, symmetric: bool) -> None:
        """Set whether zero is in the middle of the codes."""
        self.symmetric = symmetric

    def set_scale_type(self, scale_type: ScaleType) -> None:
        """Set which scales there may be."""
        self.scale_type = scale_type

    def set_calibration_method(self, calibration_method: CalibMethod) -> None:
        """Set how the range is found."""
        self.calibration_method = calibration_method

    def set_quant_granularity(self, quant_granularity: QuantGranularity) -> None:
        """Set the parts of a tensor that have their own scale."""
        self.quant_granularity = quant_granularity

    def set_data_type(self, data_type: DataType) -> None:
        """Set the number format."""
        self.data_type = data_type


@dataclasses.dataclass(eq=False)
class _IntegerSpec(QTensorConfig):
    """Integers, symmetric, with float scales and a percentile's range."""

    symmetric: bool = True
    scale_type: ScaleType = ScaleType.Float32
    calibration_method: CalibMethod = CalibMethod.Percentile
    quant_granularity: QuantGranularity = QuantGranularity.Tensor
    data_type: DataType = DataType.Int8


@dataclasses.dataclass(eq=False)
class _FloatSpec(_IntegerSpec):
    """Floats and blocks of them, whose exponents need no calibration."""

    calibration_method: CalibMethod = CalibMethod.MinMax
    data_type: DataType = DataType.Float16


def _spec(name: str, base: type[QTensorConfig], text: str, **defaults: Any) -> type[Any]:
    """Return a class of specs with other defaults than its base."""
    fields = [(k, type(v), v) for k, v in defaults.items()]
    namespace = {"__doc__": text, "__module__": __name__}
    return dataclasses.make_dataclass(name, fields, bases=(base,), namespace=namespace, eq=False)


Int8Spec = _spec("Int8Spec", _IntegerSpec, "int8.")
UInt8Spec = _spec("UInt8Spec", _IntegerSpec, "uint8, with a zero point.", symmetric=False, data_type=DataType.UInt8)
XInt8Spec = _spec(
    "XInt8Spec", Int8Spec, "int8 with scales that are powers of two.",
    scale_type=ScaleType.PowerOf2, calibration_method=CalibMethod.MinMSE,
)  # fmt: skip
Int16Spec = _spec("Int16Spec", _IntegerSpec, "int16.", data_type=DataType.Int16)
UInt16Spec = _spec("UInt16Spec", _IntegerSpec, "uint16, with a zero point.", symmetric=False, data_type=DataType.UInt16)
Int32Spec = _spec("Int32Spec", _IntegerSpec, "int32.", data_type=DataType.Int32)
UInt32Spec = _spec("UInt32Spec", _IntegerSpec, "uint32, with a zero point.", symmetric=False, data_type=DataType.UInt32)
Float16Spec = _spec("Float16Spec", _FloatSpec, "float16.")
BFloat16Spec = _spec("BFloat16Spec", _FloatSpec, "bfloat16.", data_type=DataType.BFloat16)
BFP16Spec = _spec("BFP16Spec", _FloatSpec, "Blocks of eight with one exponent, 9 bits each.", data_type=DataType.BFP16)
MX4Spec = _spec("MX4Spec", _FloatSpec, "Blocks of 16 with microexponents, 4 bits each.", data_type=DataType.MX4)
MX6Spec = _spec("MX6Spec", _FloatSpec, "Blocks of 16 with microexponents, 6 bits each.", data_type=DataType.MX6)
MX9Spec = _spec("MX9Spec", _FloatSpec, "Blocks of 16 with microexponents, 9 bits each.", data_type=DataType.MX9)
MXFP4E2M1Spec = _spec("MXFP4E2M1Spec", _FloatSpec, "Blocks of 32 floats of 4 bits.", data_type=DataType.MXFP4E2M1)
MXFP6E3M2Spec = _spec("MXFP6E3M2Spec", _FloatSpec, "Blocks of 32 floats of 6 bits.", data_type=DataType.MXFP6E3M2)
MXFP6E2M3Spec = _spec("MXFP6E2M3Spec", _FloatSpec, "Blocks of 32 floats of 6 bits.", data_type=DataType.MXFP6E2M3)
MXFP8E5M2Spec = _spec("MXFP8E5M2Spec", _FloatSpec, "Blocks of 32 floats of 8 bits.", data_type=DataType.MXFP8E5M2)
MXFP8E4M3Spec = _spec("MXFP8E4M3Spec", _FloatSpec, "Blocks of 32 floats of 8 bits.", data_type=DataType.MXFP8E4M3)
MXInt8Spec = _spec(
    "MXInt8Spec", _FloatSpec, "Blocks of 32 integers of 8 bits with one exponent.", data_type=DataType.MXInt8
)


@dataclasses.dataclass(eq=False)
class QLayerConfig(Fields):
    """How the tensors of layers are quantized; None is what holds elsewhere. `activation` is an older `input_tensors`.

    >>> QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec()).bias is None
    True
    """

    input_tensors: QTensorConfig | None = None
    activation: QTensorConfig | None = None
    weight: QTensorConfig | None = None
    bias: QTensorConfig | None = None
    output_tensors: QTensorConfig | None = None

    @staticmethod
    def from_dict(options: Mapping[str, Any]) -> QLayerConfig:
        """Return what `to_dict` described."""
        return QLayerConfig(**{k: v if v is None else QTensorConfig.from_dict(v) for k, v in options.items()})
