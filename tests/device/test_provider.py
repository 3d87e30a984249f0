"""The provider's options and vitisai_config.json, against the forms of the vendor's documents."""

from __future__ import annotations

import json

import numpy as np
import pytest

import jq
from tests.npu import structures

DATA = np.ones((2, 3, 8, 8), np.float32)
PASSES = [
    {"name": "init", "plugin": "vaip-pass_init"},
    {"name": "vaiml_partition", "plugin": "vaip-pass_vaiml_partition"},
]
TARGETS = [{"name": "VAIML", "pass": ["init", "vaiml_partition"]}]


def vaiml(**options):
    return {"passes": [PASSES[0], {**PASSES[1], "vaiml_config": options}], "target": "VAIML", "targets": TARGETS}


def test_the_documented_forms():
    bf16 = jq.npu.provider_config(flow="BF16")
    assert bf16.config == vaiml(optimize_level=1, preferred_data_storage="auto")
    assert bf16.options == {"config_file": "vitisai_config.json"}
    mixed = vaiml(
        keep_outputs=True,
        optimize_level=2,
        enable_f32_to_bf16_conversion=True,
        device="ve2",
        group_args="mixed_precision",
    )
    assert jq.npu.provider_config(flow="mixed", device="ve2").config == mixed
    assert jq.npu.provider_config(flow="mixed").config["passes"][1]["vaiml_config"]["device"] == "stx"
    named = jq.npu.provider_config(flow="mixed", device="ve2-xc2ve3858", threshold_gops_percent=20).config
    assert named["passes"][1]["vaiml_config"]["device"] == "ve2-xc2ve3858"
    assert jq.npu.provider_config().config == {"target": "X2"}
    assert jq.npu.provider_config(backend="X1").config == {"target": "X1"}
    phoenix = jq.npu.provider_config(chip="phx", xclbin="4x4.xclbin", cache_dir="c", cache_key="k")
    assert phoenix.config == {"target": "X1", "xclbin": "4x4.xclbin", "cache_dir": "c", "cache_key": "k"}
    assert jq.npu.provider_config(chip="hpt").notes  # where the file lies
    for made in (bf16, phoenix, jq.npu.provider_config(flow="mixed")):
        jq.npu.check_config(made.config)


def test_the_flow_is_what_was_made_of_the_model(tmp_path):
    model = structures.residual(2)
    whole = jq.quantize(model, DATA, "XINT8").model
    config = jq.presets["XINT8"].replace(exclude=("conv2",))
    islands = jq.quantize(model, DATA, config).model
    assert [jq.npu.provider_config(m).flow for m in (model, whole, islands)] == ["BF16", "X2", "mixed"]
    made = jq.npu.provider_config(whole, "phx")
    made.write(tmp_path / "vitisai_config.json")
    assert json.loads((tmp_path / "vitisai_config.json").read_text()) == made.config
    with pytest.raises(jq.ConfigError, match="has no BF16: quantize it to XINT8"):
        jq.npu.provider_config(model, "phx")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flow": "X3"}, "flow needs one of X1, X2, BF16, mixed"),
        ({"chip": "phx", "flow": "mixed"}, "chip 'phx' has no BF16"),
        ({"chip": "phx", "flow": "X2"}, "chip 'phx' needs backend X1; got 'X2'"),
        ({"flow": "X2", "xclbin": "4x4.xclbin"}, "xclbin must not be set on chip 'stx'"),
        ({"flow": "X2", "device": "ve2"}, "device is an option of flow"),
        ({"flow": "X2", "opt_levle": 3}, "no option 'opt_levle' is documented. Did you mean 'opt_level'"),
        ({"flow": "X2", "opt_level": 5}, "opt_level needs 0, 1, 2, 3, 65536; got 5"),
        ({"flow": "X2", "ai_analyzer_profiling": 1}, "ai_analyzer_profiling needs bool; got 1"),
        ({"flow": "X2", "opt_level": True}, "opt_level needs"),
        ({"flow": "BF16", "optimize_level": 4}, "optimize_level needs 1, 2, 3; got 4"),
        ({"flow": "BF16", "preferred_data_storage": "rows"}, "preferred_data_storage needs auto"),
        ({"flow": "mixed", "device": "ve3"}, "device needs stx, ve2, ve2-xc2ve3858; got 've3'"),
        ({"flow": "mixed", "target": "X2"}, "leave out target"),
    ],
)
def test_what_is_not_documented_is_refused(options, message):
    with pytest.raises(jq.ConfigError, match=message):
        jq.npu.provider_config(**options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pases": []}, "no option 'pases' is documented"),
        ({"targets": []}, "targets need"),
        ({"passes": [PASSES[0]]}, "targets need"),
        (
            {"passes": [PASSES[0], {**PASSES[1], "vaiml_config": {"optimise_level": 1}}]},
            "Did you mean 'optimize_level'",
        ),
    ],
)
def test_files_that_do_not_match_the_documents(change, message):
    with pytest.raises(jq.ConfigError, match=message):
        jq.npu.check_config({**vaiml(optimize_level=1), **change})
