"""Scripts in the style of AMD's tutorials, which differ from scripts for Quark by their import lines alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx
import pytest

import jq
from jq.compat.quark import AutoSearch, AutoSearchPro, Config, auto_search, get_auto_search_config, get_default_config
from tests.compat.conftest import IMAGES, MODEL, ListReader, agreement, quantized

READER = """
import argparse, copy, os, sys
import numpy as np, onnx
from onnxruntime.quantization.calibrate import CalibrationDataReader, CalibrationMethod
from onnxruntime.quantization.quant_utils import QuantFormat, QuantType

class ImageDataReader(CalibrationDataReader):
    def __init__(self, folder, name):
        self.enum_data, self.name = None, name
        self.data_list = [np.load(os.path.join(folder, f))[None] for f in sorted(os.listdir(folder))]
    def get_next(self):
        if self.enum_data is None:
            self.enum_data = iter([{self.name: data} for data in self.data_list])
        return next(self.enum_data, None)
    def __getitem__(self, idx):
        return self.data_list[idx]
    def rewind(self):
        self.enum_data = None
"""
# The script of the CNN tutorial: named configs, or a config by hand.
TUTORIAL = """
from jq.compat.quark import ModelQuantizer
from jq.compat.quark.quantization.config import Config, get_default_config
from jq.compat.quark.quantization.config.config import QuantizationConfig
from jq.compat.quark import ModelQuantizer, PowerOfTwoMethod, QuantType
from jq.compat.quark.quant_utils import PowerOfTwoMethod, VitisQuantType, VitisQuantFormat

def by_hand(**more):
    return QuantizationConfig(calibrate_method=PowerOfTwoMethod.MinMSE, activation_type=QuantType.QUInt8,
                              weight_type=QuantType.QInt8, enable_npu_cnn=True,
                              extra_options={'ActivationSymmetric': True}, **more)

parser = argparse.ArgumentParser()
parser.add_argument('--model_input')
parser.add_argument('--model_output')
parser.add_argument('--calib_data')
parser.add_argument('--config', default='XINT8')
for flag in ('--fast_finetune', '--cross_layer_equalization', '--adaround', '--adaquant'):
    parser.add_argument(flag, action='store_true')
args = parser.parse_args()
if args.adaround:
    quant_config = get_default_config('XINT8_ADAROUND')
elif args.adaquant:
    quant_config = get_default_config('XINT8_ADAQUANT')
elif args.fast_finetune:
    quant_config = by_hand(include_fast_ft=True)
elif args.cross_layer_equalization:
    quant_config = by_hand(include_cle=True)
else:
    quant_config = get_default_config(args.config)
    if args.config == 'BF16':
        quant_config.extra_options['BF16QDQToCast'] = True
    quant_config.enable_npu_cnn = True
config = Config(global_quant_config=quant_config)
print('The configuration is {}'.format(config))
quantizer = ModelQuantizer(config)
quantizer.quantize_model(model_input=args.model_input, model_output=args.model_output,
                         calibration_data_reader=ImageDataReader(args.calib_data, 'input'))
"""
# The script of the Ryzen AI examples: specs, algorithms and excluded nodes.
SPECS = """
from jq.compat.quark import ModelQuantizer
from jq.compat.quark.quantization.config.algorithm import AdaQuantConfig, AdaRoundConfig, CLEConfig
from jq.compat.quark.quantization.config.config import QConfig
from jq.compat.quark.quantization.config.spec import (
    BFloat16Spec, BFP16Spec, CalibMethod, Int8Spec, Int16Spec, QLayerConfig, XInt8Spec)

parser = argparse.ArgumentParser()
parser.add_argument('--input_model_path')
parser.add_argument('--output_model_path')
parser.add_argument('--calib_data_path')
parser.add_argument('--config', default='XINT8')
parser.add_argument('--num_iters', type=int, default=1000)
parser.add_argument('--learning_rate', type=float, default=0.1)
parser.add_argument('--exclude_nodes', default='')
for flag in ('--adaround', '--adaquant', '--save_as_external_data'):
    parser.add_argument(flag, action='store_true')
args = parser.parse_args()
specs = {'XINT8': (XInt8Spec, XInt8Spec), 'A8W8': (Int8Spec, Int8Spec), 'A16W8': (Int16Spec, Int8Spec),
         'BF16': (BFloat16Spec, BFloat16Spec), 'BFP16': (BFP16Spec, BFP16Spec)}
activation_spec, weight_spec = [kind() for kind in specs[args.config]]
algo_confs = [CLEConfig()]
if args.config != 'XINT8':
    activation_spec.set_calibration_method(CalibMethod.MinMax)
    weight_spec.set_calibration_method(CalibMethod.MinMax)
common = {'data_size': 1000, 'batch_size': 2, 'num_iterations': args.num_iters, 'learning_rate': args.learning_rate,
          'early_stop': True}
if args.adaround:
    algo_confs.append(AdaRoundConfig(**common))
if args.adaquant:
    algo_confs.append(AdaQuantConfig(**common))
extra_info = {}
if args.config in ('A8W8', 'A16W8'):
    extra_info = {'EnableNPUCnn': False, 'AlignSlice': False, 'FoldRelu': True, 'AlignConcat': True}
if args.config == 'A16W8':
    extra_info['AlignEltwiseQuantType'] = True
if args.config == 'BF16':
    extra_info = {'EnableNPUCnn': False, 'QuantizeAllOpTypes': True, 'ForceQuantizeNoInputCheck': True}
quant_config = QConfig(
    global_config=QLayerConfig(activation=activation_spec, weight=weight_spec),
    algo_config=algo_confs,
    use_external_data_format=args.save_as_external_data,
    exclude=[name.strip() for name in args.exclude_nodes.split(';')] if args.exclude_nodes else [],
    **extra_info,
)
name = onnx.load(args.input_model_path).graph.input[0].name
ModelQuantizer(quant_config).quantize_model(
    args.input_model_path, args.output_model_path, ImageDataReader(args.calib_data_path, name))
"""


@pytest.fixture(scope="module")
def calib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calib")
    for i, image in enumerate(IMAGES):
        np.save(folder / f"{i}.npy", image)
    return folder


def run(script: str, monkeypatch: pytest.MonkeyPatch, *argv: object) -> None:
    monkeypatch.setattr("sys.argv", ["script.py", *map(str, argv)])
    exec(compile(READER + script, "script.py", "exec"), {"__name__": "__main__"})  # noqa: S102


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "flags",
    [(), ("--config", "A8W8"), ("--config", "BF16"), ("--adaround",), ("--adaquant",), ("--fast_finetune",),
     ("--cross_layer_equalization",)],
)  # fmt: skip
def test_the_tutorial(flags: tuple[str, ...], calib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "made.onnx"
    run(TUTORIAL, monkeypatch, "--model_input", MODEL, "--model_output", made, "--calib_data", calib, *flags)
    assert agreement(onnx.load(made)) > 0.98


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "flags",
    [(), ("--config", "A8W8"), ("--config", "A16W8"), ("--config", "BF16"), ("--config", "BFP16"), ("--adaround",),
     ("--adaquant", "--learning_rate", 1e-5, "--num_iters", 500), ("--adaquant",), ("--save_as_external_data",)],
)  # fmt: skip
def test_the_examples(flags: tuple[object, ...], calib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "made.onnx"
    argv = ("--input_model_path", MODEL, "--output_model_path", made, "--calib_data_path", calib, *flags)
    run(SPECS, monkeypatch, *argv)
    if "BFP16" not in flags:  # onnxruntime alone does not run blocks
        assert agreement(onnx.load(made)) > 0.98
    assert Path(f"{made}.data").exists() == ("--save_as_external_data" in flags)


class Space:
    """A search as the example has it: a class that leaves most settings to their defaults."""

    search_space: ClassVar = {
        "calibrate_method": [auto_search.AutoSearchConfig.search_space["calibrate_method"][i] for i in (2, 4)],
        "activation_type": [get_default_config("A8W8").activation_type],
        "weight_type": [get_default_config("A8W8").weight_type],
        "include_cle": [False],
        "include_fast_ft": [False],
        "extra_options": {"ActivationSymmetric": [True, False], "CalibMovingAverage": [False, True]},
    }
    search_metric = "L2"
    search_metric_tolerance = 1e9
    search_evaluator = None
    search_stop_condition: ClassVar = {"find_n_candidates": 3, "iteration_limit": 100, "time_limit": 1e6}


def each_logits(model: str | Path) -> np.ndarray:
    run = jq.open_reading(model)
    return np.concatenate([run({"input": image[None]})["logits"] for image in IMAGES])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_auto_search(tmp_path: Path) -> None:
    settings = Space()
    settings.search_output_dir = str(tmp_path)
    search = AutoSearch(
        config=Config(global_quant_config=get_default_config("S8S8_AAWS")),
        auto_search_config=settings,
        model_input=MODEL,
        calibration_data_reader=ListReader(),
    )
    search.all_configs = search.build_all_configs(settings.search_space)
    assert len(search.all_configs) == 8
    candidates = search.search_model()
    assert [c["config_index"] for c in candidates] == [0, 1, 2]
    floats = each_logits(MODEL)
    for candidate in candidates:
        logits = each_logits(candidate["model_path"])
        assert candidate["difference"] == pytest.approx(np.mean((logits - floats) ** 2), rel=1e-4)
    assert "3 of 3 configs meet the tolerance" in (tmp_path / "auto_search.log").read_text()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_auto_search_keeps_what_is_within_the_tolerance(tmp_path: Path) -> None:
    settings = Space()
    settings.search_output_dir, settings.search_metric, settings.search_metric_tolerance = str(tmp_path), "cos", 1.1
    search = AutoSearch(MODEL, Config(get_default_config("S8S8_AAWS")), settings, calibration_data_reader=ListReader())
    search.all_configs = [*search.all_configs[:1], {"include_sq": True}]
    assert search.search_model() == []
    assert not list(tmp_path.glob("*.onnx"))
    assert "include_sq" in (tmp_path / "auto_search.log").read_text()
    assert 0.98 < search.searched_space[0] < 1


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("algorithm", ["Grid", "TPE"])
def test_auto_search_pro(algorithm: str, tmp_path: Path) -> None:
    config = get_auto_search_config("XINT8_SEARCH") | {
        "model_input": MODEL, "calib_data_reader": ListReader(), "output_dir": str(tmp_path), "search_algo": algorithm,
        "n_trials": 2, "two_stage_search": algorithm == "TPE",
    }  # fmt: skip
    space = config["search_space"]
    space["cle_params"]["cle_steps"] = [1]
    space["adaround_params"]["num_iterations"], space["adaround_params"]["learning_rate"] = [100], [0.1]
    space["adaquant_params"]["num_iterations"], space["adaquant_params"]["learning_rate"] = [100], [1e-5]
    best = AutoSearchPro(config).run()
    assert best["activation"] == "XInt8Spec"
    assert json.loads((tmp_path / "best_params.json").read_text()) == best
    made = list(tmp_path.glob("*.onnx"))
    assert len(made) >= 2
    assert all(agreement(onnx.load(path)) > 0.98 for path in made)


def test_searches_that_cannot_be_had() -> None:
    config = get_auto_search_config("XINT8_SEARCH")
    with pytest.raises(jq.ConfigError, match="model_input"):
        AutoSearchPro(config)
    with pytest.raises(jq.ConfigError, match="Did you mean 'n_trials'"):
        AutoSearchPro(config | {"n_trails": 3})
    settings = type("Settings", (), {"advanced_fastft_search": True})
    with pytest.raises(jq.ConfigError, match="two_stage_search"):
        AutoSearch(MODEL, Config(get_default_config("XINT8")), settings)


@pytest.mark.parametrize("option", ["SaveAndRestore", "TensorsRangeFile"])
def test_calibration_is_kept_and_restored(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ranges.json"
    config = get_default_config("XINT8")
    config.extra_options[option] = str(file)
    first = quantized(config)
    ranges = json.loads(file.read_text())["tensors_range"]
    assert ranges["input"][0] == pytest.approx(IMAGES.min())
    assert ranges["input"][1] == pytest.approx(IMAGES.max())
    monkeypatch.setattr("jq.pipeline.calibrate", None)  # a second calibration would fail
    monkeypatch.setattr("jq.pipeline.equalized", None)
    second = quantized(config)
    drop = [[p for p in m.metadata_props if p.key != "jq.seconds"] for m in (first, second)]
    assert first.graph == second.graph
    assert drop[0] == drop[1]
    file.write_text(json.dumps({"tensors_range": ranges}))  # one of Quark's own
    with pytest.raises(jq.ConfigError, match="a new file"):
        quantized(config)
