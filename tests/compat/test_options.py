"""Every option of Quark's: what it becomes, or why it is not supported. Nothing is quantized here."""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import jq
from jq.arithmetic import formats
from jq.compat import quark
from jq.compat.quark import (
    DEFAULT_ADAQUANT_PARAMS,
    DEFAULT_ADAROUND_PARAMS,
    AdaQuantConfig,
    AdaRoundConfig,
    BFP16Spec,
    BiasCorrectionConfig,
    CalibMethod,
    CalibrationMethod,
    CLEConfig,
    Config,
    ExtendedQuantFormat,
    ExtendedQuantType,
    Int8Spec,
    Int16Spec,
    Int32Spec,
    LayerWiseMethod,
    PowerOfTwoMethod,
    QConfig,
    QLayerConfig,
    QuantFormat,
    QuantGranularity,
    QuantizationConfig,
    QuantType,
    ScaleType,
    SmoothQuantConfig,
    VitisQuantFormat,
    XInt8Spec,
    get_default_config,
    get_default_config_mapping,
)
from jq.compat.quark.options import AS_FIELDS, EXTRA_OPTIONS, FAST_FINETUNE, FIELDS
from jq.compat.quark.translate import Translation, translate
from jq.config import CONSTRAINTS, QuantConfig
from jq.errors import ConfigError
from jq.recovery.adaquant import AdaQuant
from jq.recovery.adaround import AdaRound

REFUSED = [name for name in get_default_config_mapping() if "_MIXED_" in name or name == "MATMUL_NBITS"]


def of(graph: jq.Graph, base: str = "XINT8", /, **fields: Any) -> Translation:
    """A named config with other fields, and with more of the extra options, translated."""
    config = get_default_config(base)
    config.extra_options |= fields.pop("extra_options", {})
    for name, value in fields.items():
        setattr(config, name, value)
    return translate(Config(config), graph)


def extra(graph: jq.Graph, base: str = "XINT8", /, **options: Any) -> QuantConfig:
    return of(graph, base, extra_options=options).config


@pytest.mark.parametrize("name", [n for n in get_default_config_mapping() if n in jq.presets])
def test_named_configs_mean_what_our_presets_do(graph: jq.Graph, name: str) -> None:
    found, expected = of(graph, name).config.to_dict(), jq.presets[name].to_dict()
    found["rewrites"], expected["rewrites"] = set(found["rewrites"]), set(expected["rewrites"])
    assert found == expected


def test_other_named_configs(graph: jq.Graph) -> None:
    assert REFUSED
    for name in REFUSED:
        with pytest.raises(ConfigError, match="is not supported"):
            of(graph, name)
    found = of(graph, "BF16_BFP16").config
    assert (found.activation, found.weight) == (formats.BFLOAT16, formats.BFP16)
    found = of(graph, "INT8_TRANSFORMER_DEFAULT").config
    assert found.op_types == ("Gemm", "MatMul")
    assert found.moving_average == 0.01


def test_a_config_is_a_copy() -> None:
    get_default_config("XINT8").extra_options["Percentile"] = 1.0
    get_default_config("XINT8_ADAROUND").extra_options["FastFinetune"]["NumIterations"] = 1
    quark.XINT8_QCONFIG.extra_options["Percentile"] = 1.0
    assert "Percentile" not in get_default_config("XINT8_CONFIG").extra_options
    assert "Percentile" not in quark.XINT8_QCONFIG.extra_options
    assert get_default_config("XINT8_ADAROUND").extra_options["FastFinetune"] == DEFAULT_ADAROUND_PARAMS
    assert DEFAULT_ADAROUND_PARAMS["NumIterations"] == 1000
    with pytest.raises(ConfigError, match="Did you mean 'XINT8_ADAROUND'"):
        get_default_config("XINT8_ADARUND")


METHODS = {
    CalibrationMethod.MinMax: "minmax",
    CalibrationMethod.Entropy: "entropy",
    CalibrationMethod.Percentile: "percentile",
    LayerWiseMethod.LayerWisePercentile: "layerwise_percentile",
}


def test_methods_and_files(graph: jq.Graph) -> None:
    for method, name in METHODS.items():
        assert of(graph, "INT8_CNN_DEFAULT", calibrate_method=method).config.method == name
    found = of(graph, calibrate_method=PowerOfTwoMethod.NonOverflow).config
    assert (found.method, found.scale, found.weight_method) == ("nonoverflow", "power_of_two", "minmax")
    plain = of(graph, enable_npu_cnn=False).config
    assert (plain.scale, plain.constraints, plain.forms, plain.bias) == ("power_of_two", (), (), "int32")
    files = {
        QuantFormat.QDQ: "qdq", QuantFormat.QOperator: "qoperator", ExtendedQuantFormat.QDQ: "qdq",
        VitisQuantFormat.QDQ: "vitis_qdq", VitisQuantFormat.FixNeuron: "fix_neuron",
    }  # fmt: skip
    assert {f: of(graph, quant_format=f).format for f in files} == files
    for wrong in (
        {"calibrate_method": CalibrationMethod.Distribution},
        {"calibrate_method": "MinMSE"},
        {"calibrate_method": CalibrationMethod.MinMax},  # with the NPU's scales
        {"quant_format": VitisQuantFormat.BFPFixNeuron},
        {"activation_type": ExtendedQuantType.QInt32},
        {"weight_type": QuantType.QFLOAT8E4M3FN},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            of(graph, **wrong)


def test_fields_of_nodes(graph: jq.Graph) -> None:
    convolutions = [n.label for n in graph.nodes if n.op_type == "Conv"]
    first, last = convolutions[0], convolutions[-1]
    found = of(graph, op_types_to_quantize=["Conv"], extra_op_types_to_quantize=["Gemm"]).config
    assert found.op_types == ("Conv", "Gemm")
    found = of(graph, input_nodes=[first], output_nodes=[last], subgraphs_to_exclude=[([first], [last])]).config
    assert (found.input_nodes, found.output_nodes) == ((first,), (last,))
    assert found.exclude_subgraphs == (((first,), (last,)),)
    assert of(graph, nodes_to_exclude=[last]).config.exclude == (last,)
    blocks = of(graph, nodes_to_exclude=[f"^{last[:3]}.*"]).config.exclude
    assert set(blocks) == {n.label for n in graph.nodes if n.label.startswith(last[:3])}
    only = of(graph, nodes_to_quantize=[first, last]).config
    left = {n.label for n in graph.nodes if not any(fnmatch.fnmatchcase(n.label, p) for p in only.exclude)}
    assert left == {first, last}
    for field in ("nodes_to_quantize", "nodes_to_exclude"):
        with pytest.raises(ConfigError, match="matches no node"):
            of(graph, **{field: ["^nowhere.*"]})
        with pytest.raises(ConfigError, match="not a regular expression"):
            of(graph, **{field: ["^(.*"]})
    with pytest.raises(ConfigError, match="Did you mean"):
        of(graph, nodes_to_quantize=[first + "x"])
    with pytest.raises(ConfigError, match="pairs"):
        of(graph, subgraphs_to_exclude=[first])


def test_other_fields(graph: jq.Graph) -> None:
    assert of(graph, "INT8_CNN_DEFAULT", per_channel=True).config.per_channel
    assert not of(graph, include_cle=False).config.cle
    assert not of(graph, print_summary=False).summary
    found = of(graph, "UINT8_DYNAMIC_QUANT", weight_type=QuantType.QInt8).config
    assert (found.dynamic, found.weight, found.weight_symmetric) == (True, formats.INT8, True)
    with pytest.raises(ConfigError, match="per_channel"):
        of(graph, per_channel=True)
    with pytest.raises(ConfigError, match="the NPU does not support"):
        of(graph, use_dynamic_quant=True)
    with pytest.raises(ConfigError, match="include_cle is 'yes'; expected True or False"):
        of(graph, include_cle="yes")


def test_every_field_counts(graph: jq.Graph) -> None:
    """A field either changes the translation, or has a row that says why not."""
    other = {
        "calibrate_method": PowerOfTwoMethod.NonOverflow, "quant_format": QuantFormat.QOperator,
        "activation_type": QuantType.QInt8, "weight_type": QuantType.QUInt8, "include_fast_ft": True,
        "input_nodes": [graph.nodes[0].label], "output_nodes": [graph.nodes[0].label],
        "op_types_to_quantize": ["Conv"], "extra_op_types_to_quantize": ["Elu"],
        "nodes_to_quantize": [graph.nodes[0].label], "nodes_to_exclude": [graph.nodes[0].label],
        "subgraphs_to_exclude": [([graph.nodes[0].label], [graph.nodes[1].label])], "include_cle": False,
        "enable_npu_cnn": False, "print_summary": False, "optimize_model": False, "enable_npu_transformer": True,
        "use_dynamic_quant": True, "per_channel": True, "extra_options": {"Percentile": 90.0},
    }  # fmt: skip
    usual = of(graph)
    for field in dataclasses.fields(QuantizationConfig):
        if field.name in FIELDS:
            assert FIELDS[field.name].effect
            continue
        try:
            assert of(graph, **{field.name: other[field.name]}) != usual, field.name
        except ConfigError as error:
            assert field.name in str(error)  # noqa: PT017  either is right


# An option, its value, and what of the config it changes; on XINT8, or on the config that is named.
CHANGES: list[tuple[str, Any, dict[str, Any]]] = [
    ("NumBins", 512, {"bins": 512, "method": "minmse_hist"}),
    ("NumBins", 0, {"method": "minmse"}),
    ("U8S8_AAWS.NumBins", 512, {"bins": 512, "method": "percentile"}),
    ("U8S8_AAWS.Percentile", 99, {"percentile": 99}),
    ("INT8_CNN_DEFAULT.ActivationSymmetric", True, {"symmetric": True}),
    ("INT8_CNN_DEFAULT.WeightSymmetric", False, {"weight_symmetric": False}),
    ("INT8_CNN_DEFAULT.CalibTensorRangeSymmetric", False, {"symmetric": False}),
    ("INT8_CNN_DEFAULT.CalibMovingAverage", True, {"moving_average": 0.01}),
    ("INT8_TRANSFORMER_DEFAULT.CalibMovingAverageConstant", 0.25, {"moving_average": 0.25}),
    ("INT8_CNN_DEFAULT.WeightCalibrateMethod", quark.ExtendedCalibrationMethod.MinMSE, {"weight_method": "mse"}),
    ("PercentileCandidates", [99.0, 99.9], {"percentiles": (99.0, 99.9)}),
    ("LWPMetric", "mse", {"percentile_metric": "mse"}),
    ("Int32Bias", True, {"bias": "int32"}),
    ("A8W8.Int32Bias", False, {"bias": "weight"}),
    ("QuantizeBias", False, {"bias": "float"}),
    ("WeightsOnly", True, {"weights_only": True}),
    ("QuantizeAllOpTypes", True, {"op_types": None}),
    ("OpTypesToQuantize", ["Conv"], {"op_types": ("Conv",)}),
    ("SimulateDPU", False, {"forms": ()}),
    ("NPULimitationCheck", False, {"constraints": ()}),
    ("AlignPool", False, {"constraints": tuple(c for c in CONSTRAINTS if c != "align_pool")}),
    ("AdjustShiftCut", False, {"constraints": tuple(c for c in CONSTRAINTS if c != "shift_cut")}),
    ("VINT8.AlignConcat", True, {"constraints": ("align_concat",)}),
    ("VINT8.ConvertSigmoidToHardSigmoid", True, {"forms": ("sigmoid_to_hard_sigmoid",), "form_loss": None}),
    ("INT8_CNN_DEFAULT.ConvertSplitToSlice", True, {"rewrites": ("split_to_slice", "hard_swish_to_product")}),
    ("BiasCorrection", False, {"bias_correction": False}),
]


@pytest.mark.parametrize(("option", "value", "changed"), CHANGES)
def test_an_option_does_what_it_says(graph: jq.Graph, option: str, value: Any, changed: dict[str, Any]) -> None:
    base, _, name = option.rpartition(".")
    before = of(graph, base or "XINT8").config
    assert extra(graph, base or "XINT8", **{name: value}) == before.replace(**changed)


def test_fused_activations(graph: jq.Graph) -> None:
    keys = [f"RemoveQDQConv{kind}" for kind in ("Clip", "Relu", "LeakyRelu", "PRelu")]
    assert not extra(graph, **dict.fromkeys(keys, False)).fuse_activations
    with pytest.raises(ConfigError, match="must be equal"):
        extra(graph, RemoveQDQConvRelu=False)


def test_run_options(graph: jq.Graph) -> None:
    found = of(graph, extra_options={"ConvertOpsetVersion": 19, "CalibDataSize": 7, "UseRandomData": True})
    assert (found.opset, found.inputs.samples, found.inputs.random) == (19, 7, True)
    with pytest.raises(ConfigError, match="CalibDataSize=0"):
        extra(graph, CalibDataSize=0)


def test_constants_of_sums_are_like_activations() -> None:
    shift = numpy_helper.from_array(np.ones(3, np.float32), "shift")
    value = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [1, 3]) for n in "xy"]
    node = helper.make_node("Add", ["x", "shift"], ["y"], name="sum")
    model = helper.make_model(helper.make_graph([node], "g", value[:1], value[1:], [shift]))
    found = of(jq.load(model), "A16W8").config
    assert dict(found.overrides)["Add"] == (("weight", formats.INT16), ("weight_symmetric", True))


@pytest.mark.parametrize(
    "name", [n for n, o in {**EXTRA_OPTIONS, **FAST_FINETUNE}.items() if o.effect[:7] == "refused"]
)
def test_what_cannot_be_had_is_refused_by_name(graph: jq.Graph, name: str) -> None:
    inside = {"FastFinetune": {**DEFAULT_ADAROUND_PARAMS, name: True}}
    with pytest.raises(ConfigError, match=f"{name}=True is not supported: "):
        of(graph, "XINT8_ADAROUND", extra_options={name: True} if name in EXTRA_OPTIONS else inside)
    for off in (False, None, [], {}):
        extra(graph, **({name: off} if name in EXTRA_OPTIONS else {}))


@pytest.mark.parametrize("name", [n for n, o in FIELDS.items() if o.effect[:7] == "refused"])
def test_fields_that_cannot_be_had(graph: jq.Graph, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=True is not supported: "):
        of(graph, **{name: True})


@pytest.mark.parametrize("name", [n for n, o in EXTRA_OPTIONS.items() if o.effect[:4] == "only"])
def test_only_the_default(graph: jq.Graph, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        extra(graph, **{name: "something else"})


def test_what_is_done_in_another_way_is_said(graph: jq.Graph) -> None:
    assert of(graph).notes == ()
    (note,) = of(graph, extra_options={"SimplifyModel": False}).notes
    assert note.startswith("SimplifyModel=False: ")
    assert of(graph, use_external_data_format=True).external
    (note,) = of(graph, extra_options={"FastFinetune": DEFAULT_ADAROUND_PARAMS}).notes
    assert "include_fast_ft" in note


@pytest.mark.parametrize("name", [*EXTRA_OPTIONS, *AS_FIELDS])
def test_values_of_a_wrong_kind(graph: jq.Graph, name: str) -> None:
    """Whatever is given, the answer is a config or a ConfigError."""
    for value in ("word", -1, 1.5, [3], {"x": 1}, object(), True, None):
        try:
            of(graph, "XINT8_ADAROUND", extra_options={name: value})
        except ConfigError as error:
            assert str(error)  # noqa: PT017


@pytest.mark.parametrize("name", FAST_FINETUNE)
def test_parameters_of_a_wrong_kind(graph: jq.Graph, name: str) -> None:
    for value in ("word", -1, 1.5, [3], {"x": 1}, object(), True, None):
        try:
            of(graph, "XINT8_ADAROUND", extra_options={"FastFinetune": {name: value}})
        except ConfigError as error:
            assert str(error)  # noqa: PT017


def test_unknown_names(graph: jq.Graph) -> None:
    with pytest.raises(ConfigError, match=r"extra_options has no option 'Percntile'\. Did you mean 'Percentile'"):
        extra(graph, Percntile=99.0)
    with pytest.raises(ConfigError, match="Did you mean 'NumIterations'"):
        of(graph, "XINT8_ADAROUND", extra_options={"FastFinetune": {"NumIteration": 5}})
    with pytest.raises(ConfigError, match="Did you mean 'include_cle'"):
        QuantizationConfig(includ_cle=True)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="Did you mean 'num_iterations'"):
        AdaRoundConfig().num_iteration = 3  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="extra_options is a list"):
        translate(Config(QuantizationConfig(extra_options=[1])), graph)  # type: ignore[arg-type]


def test_finetuning_counts_relative_to_the_vendors_defaults(graph: jq.Graph) -> None:
    def tuned(params: dict[str, Any]) -> QuantConfig:
        return of(graph, include_fast_ft=True, extra_options={"FastFinetune": params}).config

    assert tuned(DEFAULT_ADAROUND_PARAMS) == jq.presets["XINT8_ADAROUND"]
    assert tuned({}) == jq.presets["XINT8_ADAROUND"]
    assert tuned(DEFAULT_ADAQUANT_PARAMS) == jq.presets["XINT8_ADAQUANT"]
    found = tuned(
        {**DEFAULT_ADAROUND_PARAMS, "NumIterations": 5000, "LearningRate": 0.2, "BatchSize": 4, "FixedSeed": 7}
    )
    assert found.finetune_steps == 5 * AdaRound().steps  # of the vendor's 1000
    assert (found.finetune_rate, found.finetune_batch, found.seed) == (0.2, 4, 7)
    found = tuned({**DEFAULT_ADAQUANT_PARAMS, "LearningRate": 1e-4, "NumIterations": 500})
    assert found.finetune_steps == round(AdaQuant().steps / 2)
    assert found.finetune_rate == pytest.approx(10 * AdaQuant().learning_rate)
    with pytest.raises(ConfigError, match="Did you mean 'adaround'"):
        tuned({"OptimAlgorithm": "adarond"})
    with pytest.raises(ConfigError, match="NumIterations=0"):
        tuned({"NumIterations": 0})
    with pytest.raises(ConfigError, match="finetune_rate"):
        tuned({"LearningRate": float("nan")})
    with pytest.raises(ConfigError, match="DropRatio"):
        tuned({"DropRatio": 0.5})
    params = {"MemOptLevel": 2, "CacheDir": "cache", "OptimDevice": "cuda:0"}
    found_all = of(graph, include_fast_ft=True, extra_options={"FastFinetune": params})
    assert found_all.spill == "cache"
    assert [n.split(":")[0] for n in found_all.notes] == ["OptimDevice='cuda"]


def newer(graph: jq.Graph, spec: Any, weight: Any = None, **fields: Any) -> Translation:
    layers = QLayerConfig(input_tensors=spec, weight=spec if weight is None else weight)
    return translate(QConfig(layers, **fields), graph)


def test_newer_configs(graph: jq.Graph) -> None:
    xint8 = jq.presets["XINT8"].replace(activation=formats.INT8, cle=False)
    assert newer(graph, XInt8Spec()).config == xint8
    found = newer(graph, XInt8Spec(), algo_config=[CLEConfig(), BiasCorrectionConfig(), AdaRoundConfig()]).config
    assert found == xint8.replace(cle=True, finetune="adaround")
    tuned = newer(graph, XInt8Spec(), algo_config=[AdaQuantConfig(num_iterations=6000, batch_size=4)]).config
    assert tuned == xint8.replace(finetune="adaquant", finetune_steps=2 * AdaQuant().steps, finetune_batch=4)
    found = newer(graph, Int8Spec()).config
    assert (found.method, found.percentile, found.symmetric, found.op_types) == (
        "percentile", 99.999, True, jq.presets["S8S8_AAWS"].op_types
    )  # fmt: skip
    channels = newer(graph, Int16Spec(), Int8Spec(quant_granularity=QuantGranularity.Channel)).config
    assert (channels.per_channel, channels.activation, channels.weight) == (True, formats.INT16, formats.INT8)
    assert newer(graph, BFP16Spec()).config.weight == formats.BFP16
    assert newer(graph, Int8Spec(calibration_method=CalibMethod.MinMSE)).config.weight_method == "mse"
    assert newer(graph, XInt8Spec(), EnableNPUCnn=False, OutputNodes=["x"]).config.output_nodes == ("x",)
    for name in ("XINT8", "XINT8_ADAROUND", "XINT8_ADAQUANT", "VINT8", "A8W8", "A16W8", "BF16", "BFP16"):
        translate(getattr(quark, f"{name}_QCONFIG"), graph)


def test_newer_configs_that_contradict(graph: jq.Graph) -> None:
    for error, config in {
        "are mutually exclusive": QConfig(
            QLayerConfig(XInt8Spec(), weight=XInt8Spec()), algo_config=[AdaRoundConfig(), AdaQuantConfig()]
        ),
        "give one of them": QConfig(QLayerConfig(XInt8Spec(), XInt8Spec(), XInt8Spec())),
        "needs input_tensors": QConfig(QLayerConfig(weight=XInt8Spec())),
        "same scale_type": QConfig(QLayerConfig(XInt8Spec(), weight=Int8Spec())),
        "one scale per tensor": QConfig(
            QLayerConfig(Int8Spec(quant_granularity=QuantGranularity.Channel), weight=Int8Spec())
        ),
        "ScaleType.Int16 is not supported": QConfig(
            QLayerConfig(Int8Spec(scale_type=ScaleType.Int16), weight=Int8Spec(scale_type=ScaleType.Int16))
        ),
        "SmoothQuantConfig is not supported": QConfig(
            QLayerConfig(XInt8Spec(), weight=XInt8Spec()), algo_config=[SmoothQuantConfig()]
        ),
        "CLESteps=3 is not supported": QConfig(
            QLayerConfig(XInt8Spec(), weight=XInt8Spec()), algo_config=[CLEConfig(cle_steps=3)]
        ),
        "no option 'Percntile'": QConfig(QLayerConfig(XInt8Spec(), weight=XInt8Spec()), Percntile=3),
    }.items():
        with pytest.raises(ConfigError, match=error):
            translate(config, graph)


def test_layers(graph: jq.Graph) -> None:
    convolutions = [n.label for n in graph.nodes if n.op_type == "Conv"]
    same = Int8Spec()
    found = newer(
        graph,
        same,
        specific_layer_config={QLayerConfig(weight=Int16Spec(), bias=Int32Spec()): [convolutions[2]]},
        layer_type_config={None: ["Gemm", "Absent"], QLayerConfig(output_tensors=Int16Spec()): ["Add"]},
        exclude=[convolutions[0], ([convolutions[3]], [convolutions[4]])],
    ).config
    assert dict(dict(found.overrides)[convolutions[2]])["weight"] == formats.INT16
    assert dict(dict(found.overrides)[convolutions[2]])["bias"] == "int32"
    gemm, add = (next(n for n in graph.nodes if n.op_type == t) for t in ("Gemm", "Add"))
    (relu,) = graph.consumers[add.outputs[0]]
    assert relu.op_type == "Relu", "which is fused with the sum, so that its output is what is rounded"
    assert dict(dict(found.overrides)[relu.label])["activation"] == formats.INT16
    assert add.label not in dict(found.overrides)
    assert found.exclude == (convolutions[0], gemm.label)
    assert found.exclude_subgraphs == (((convolutions[3],), (convolutions[4],)),)
    assert newer(graph, same, layer_type_config={QLayerConfig(weight=Int16Spec()): ["Absent"]}).notes == (
        "layer_type_config: the model has no Absent",
    )
    other = QLayerConfig(weight=Int16Spec(calibration_method=CalibMethod.MinMax))
    (note,) = newer(graph, same, specific_layer_config={other: [convolutions[1]]}).notes
    assert note.startswith("weight of some layers: calibration_method")
    with pytest.raises(ConfigError, match="computed from, an input of the model"):
        newer(graph, same, specific_layer_config={QLayerConfig(input_tensors=Int16Spec()): [convolutions[0]]})
    normalization = next(n.label for n in graph.nodes if n.op_type == "BatchNormalization")
    with pytest.raises(ConfigError, match="simplification removed this node"):
        newer(graph, same, specific_layer_config={QLayerConfig(input_tensors=Int16Spec()): [normalization]})
    with pytest.raises(ConfigError, match="is not supported; expected int32"):
        newer(graph, same, specific_layer_config={QLayerConfig(weight=same, bias=Int16Spec()): [convolutions[1]]})


def test_random_data_have_the_shapes_and_bounds_that_are_asked_for(graph: jq.Graph) -> None:
    options = {"RandomDataReaderInputShape": {"input": [3, 1, 28, 28]}, "CalibDataSize": 2}
    inputs = of(graph, extra_options=options).inputs
    with pytest.warns(UserWarning, match="random samples"):
        samples = inputs.sampled(None, seed=0)
    assert [sample["input"].shape for sample in samples] == [(3, 1, 28, 28)] * 2
    inputs = of(graph, extra_options={"RandomDataReaderInputDataRange": {"input": [2, 3]}}).inputs
    with pytest.warns(UserWarning, match="random samples"):
        (first, *_) = inputs.sampled(None, seed=0)
    assert 2 <= first["input"].min() < 2.1 < 2.9 < first["input"].max() <= 3
    for name, wrong in (("RandomDataReaderInputShape", {"imput": [1, 1, 28, 28]}), ("RandomDataReaderInputShape", "x"),
                        ("RandomDataReaderInputDataRange", {"input": [3, 2]}),
                        ("RandomDataReaderInputDataRange", {"imput": [2, 3]})):  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            of(graph, extra_options={name: wrong})


def test_shapes_are_fixed_by_name_or_in_the_vendors_words(graph: jq.Graph) -> None:
    for shapes in ({"input": [2, 1, 28, 28]}, "input:[2,1,28,28];logits:[2, 10]"):
        found = of(graph, extra_options={"FixShapes": shapes}).graph
        assert found is not None
        assert [str(v) for v in (*found.inputs, *found.outputs)] == [
            "input: float32[2,1,28,28]",
            "logits: float32[2,10]",
        ]
    for wrong in ("input:[2,1,28,28];logits:[3,10]", "imput:[1]", {"input": [2, 1]}, {"input": [0, 1, 28, 28]}, 3):
        with pytest.raises(ConfigError, match="FixShapes"):
            of(graph, extra_options={"FixShapes": wrong})


def test_layouts_and_types_of_inputs(graph: jq.Graph) -> None:
    found = of(graph, convert_nchw_to_nhwc=True)
    assert found.graph is not None and [str(v) for v in found.graph.inputs] == ["input: float32[N,28,28,1]"]
    image = np.arange(784, dtype=np.float32).reshape(1, 1, 28, 28)
    (sample,) = found.inputs.sampled([{"input": image}], seed=0)
    assert np.array_equal(sample["input"], image.transpose(0, 2, 3, 1))
    half = jq.load(jq.convert(graph, to="fp16", form="native", keep_io=False))
    found = of(half, convert_fp16_to_fp32=True)
    assert found.graph is not None and {a.dtype for a in found.graph.arrays.values()} <= {
        np.dtype("f4"),
        np.dtype("i8"),
    }
    assert of(graph).graph is None
