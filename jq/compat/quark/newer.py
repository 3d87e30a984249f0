"""Quark's newer config, `QConfig`, as its older one and overrides of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from jq.arithmetic.formats import Integer
from jq.compat.quark.calibration import CalibrationMethod, ExtendedCalibrationMethod, LayerWiseMethod, PowerOfTwoMethod
from jq.compat.quark.draft import Draft, matching, names
from jq.compat.quark.quantization.config.config import QConfig, QuantizationConfig
from jq.compat.quark.quantization.config.data_type import DataType
from jq.compat.quark.quantization.config.spec import (
    CalibMethod,
    QLayerConfig,
    QTensorConfig,
    QuantGranularity,
    ScaleType,
)
from jq.compat.quark.quantization.quant_utils import ExtendedQuantFormat, QuantFormat
from jq.errors import ConfigError
from jq.plan.placement import absorbed, rule_of
from jq.plan.selection import literal

_NEWER_METHODS: Mapping[tuple[ScaleType, CalibMethod], Enum] = {
    (ScaleType.Float32, CalibMethod.MinMax): CalibrationMethod.MinMax,
    (ScaleType.Float32, CalibMethod.MinMSE): ExtendedCalibrationMethod.MinMSE,
    (ScaleType.Float32, CalibMethod.Percentile): CalibrationMethod.Percentile,
    (ScaleType.Float32, CalibMethod.Entropy): CalibrationMethod.Entropy,
    (ScaleType.Float32, CalibMethod.LayerwisePercentile): LayerWiseMethod.LayerWisePercentile,
    (ScaleType.PowerOf2, CalibMethod.MinMax): PowerOfTwoMethod.NonOverflow,
    (ScaleType.PowerOf2, CalibMethod.MinMSE): PowerOfTwoMethod.MinMSE,
}


def older(config: QConfig) -> QuantizationConfig:
    """The older config that says the same of all layers."""
    activation, weight = inputs_of(config.global_config), config.global_config.weight
    if activation is None or weight is None:
        raise ConfigError("global_config needs input_tensors and weight")
    if activation.scale_type != weight.scale_type:
        raise ConfigError("input_tensors and weight need the same scale_type: jq uses one kind of scale in a model")
    method = _NEWER_METHODS.get((activation.scale_type, activation.calibration_method))
    if method is None:
        raise ConfigError(
            f"{activation.calibration_method} with {activation.scale_type} is not supported; expected "
            + " or ".join(f"{m} with {s}" for s, m in _NEWER_METHODS)
        )
    if activation.quant_granularity != QuantGranularity.Tensor or weight.quant_granularity == QuantGranularity.Group:
        raise ConfigError(
            "quant_granularity: activations have one scale per tensor, weights one per tensor or per channel"
        )
    eight = {DataType.Int8, DataType.UInt8}
    power = activation.scale_type == ScaleType.PowerOf2
    extra = config.extra_options | {"ActivationSymmetric": activation.symmetric, "WeightSymmetric": weight.symmetric}
    if weight.calibration_method == CalibMethod.MinMSE and not power:
        extra.setdefault("WeightCalibrateMethod", ExtendedCalibrationMethod.MinMSE)
    return QuantizationConfig(
        calibrate_method=method,
        quant_format=QuantFormat.QDQ if {activation.data_type, weight.data_type} <= eight else ExtendedQuantFormat.QDQ,
        activation_type=activation.data_type,
        weight_type=weight.data_type,
        per_channel=weight.quant_granularity == QuantGranularity.Channel,
        nodes_to_exclude=[e for e in config.exclude if isinstance(e, str)],
        subgraphs_to_exclude=[e for e in config.exclude if not isinstance(e, str)],
        use_external_data_format=config.use_external_data_format,
        include_cle=False,  # CLEConfig, among the algorithms, says otherwise
        enable_npu_cnn=power,
        extra_options=extra,
    )


def inputs_of(layer: QLayerConfig) -> QTensorConfig | None:
    """Return how the inputs of a layer are quantized, under either of the names that Quark has for it."""
    if layer.input_tensors is not None and layer.activation is not None:
        raise ConfigError("activation is the older name of input_tensors: give one of them")
    return layer.input_tensors or layer.activation


def add_layers(config: QConfig, draft: Draft) -> None:
    """Add the settings for some layers as overrides of nodes."""
    graph = draft.graph
    for layer, given in config.layer_type_config.items():
        types = names("layer_type_config", given)
        labels = [n.label for n in graph.nodes if n.op_type in types]
        if not labels:
            draft.notes.append(f"layer_type_config: the model has no {' or '.join(types)}")
        if layer is None:
            draft.exclude(labels)
        else:
            _override(layer, labels, config.global_config, draft)
    for layer, given in config.specific_layer_config.items():
        _override(layer, matching("specific_layer_config", given, graph), config.global_config, draft)


def _override(layer: QLayerConfig, nodes: Sequence[str], everywhere: QLayerConfig, draft: Draft) -> None:
    """A node's weights have its own options, and so has what it makes; what it reads has those of other nodes."""
    options: dict[str, Any] = {}
    if layer.weight is not None:
        _check_alike("weight", layer.weight, everywhere.weight, draft)
        channels = layer.weight.quant_granularity == QuantGranularity.Channel
        options = {"weight": layer.weight.data_type.value, "weight_symmetric": layer.weight.symmetric}
        options |= {"per_channel": channels}
    if layer.bias is not None:
        options["bias"] = _bias(layer)
    for name in nodes if options else ():
        draft.override(literal(name), **options)
    usual = inputs_of(everywhere)
    for role, spec in (("input_tensors", inputs_of(layer)), ("output_tensors", layer.output_tensors)):
        if spec is None or (role == "input_tensors" and _made(spec) == _made(usual)):
            continue
        _check_alike(role, spec, usual, draft)
        for name in nodes:
            for maker in _makers(name, role, draft):
                draft.override(literal(maker), **_made(spec))


def _check_alike(role: str, spec: QTensorConfig, usual: QTensorConfig | None, draft: Draft) -> None:
    """Check that layers with integers differ in format only: the calibration is that of the whole model, as in Quark."""
    if usual is None or not isinstance(spec.data_type.value, Integer):
        return
    for field in ("scale_type", "calibration_method"):
        if getattr(spec, field) != getattr(usual, field):
            draft.notes.append(f"{role} of some layers: {field} is taken from global_config, {getattr(usual, field)}")


def _made(spec: QTensorConfig | None) -> dict[str, Any]:
    return {} if spec is None else {"activation": spec.data_type.value, "symmetric": spec.symmetric}


def _bias(layer: QLayerConfig) -> str:
    assert layer.bias is not None
    if layer.bias.data_type == DataType.Int32:
        return "int32"
    if layer.weight is not None and layer.bias.data_type == layer.weight.data_type:
        return "weight"
    raise ConfigError(
        f"a bias in {layer.bias.data_type} is not supported; expected int32, or the format of the layer's weight"
    )


def _makers(name: str, role: str, draft: Draft) -> list[str]:
    """Return the nodes whose overrides apply to a node's inputs, or outputs."""
    graph, labels = draft.cleaned, []
    node = next((n for n in graph.nodes if n.label == name), None)
    if node is None:
        raise ConfigError(f"{role} of node {name!r}: simplification removed this node")
    fused = absorbed(graph) if draft["fuse_activations"] else {}
    for tensor in node.outputs if role == "output_tensors" else node.inputs:
        if not tensor or tensor in graph.arrays:
            continue
        while tensor in fused:  # the activation behind it is rounded instead
            tensor = fused[tensor].outputs[0]
        maker = graph.producer.get(tensor)
        while maker is not None and (rule := rule_of(graph, maker)) is not None and rule.shares:
            maker = graph.producer.get(maker.inputs[0])  # values that only move have the scale where they come from
        if maker is None or {v.name for v in graph.inputs} & {*maker.inputs}:
            raise ConfigError(
                f"{role} of node {name!r}: {tensor!r} is, or is computed from, an input of the model, which has the "
                "format of global_config"
            )
        labels.append(maker.label)
    return labels
