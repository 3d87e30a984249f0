"""The command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import jq.cli
import jq.zoo
from jq.cli import main, printable
from jq.inspect import inspect
from jq.onnx_read import load

MODEL = str(jq.zoo.path("fashion_resnet"))


def run(capfd: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    out, err = capfd.readouterr()
    code = caught.value.code
    return (0 if code is None else int(code)), out, err


def unknown_op(name: str, folder: Path) -> str:
    graph = helper.make_graph(
        [helper.make_node("Magic", ["x"], ["y"], name=name, domain="com.acme")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [onnx.ValueInfoProto(name="y")],
    )
    path = folder / "model.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("com.acme", 1)]).SerializeToString())
    return str(path)


def subprocess_run(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *argv],
        capture_output=True,
        text=True,
        env=os.environ | env,
        timeout=120,
        encoding="utf-8",
        check=False,
    )


def test_inspect_prints_tables(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capfd, "inspect", MODEL)
    found = inspect(load(MODEL))
    assert (code, err) == (0, "")
    for expected in (
        "input",
        "[N,1,28,28]",
        "logits",
        "Conv",
        "ai.onnx",
        f"{found.parameters:,}",
        f"{found.total_macs:,}",
    ):
        assert expected in out
    assert "unsupported" not in out


def test_inspect_json_is_one_document(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capfd, "inspect", MODEL, "--json", "--shape", "input=4,1,28,28")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert document["shapes"] == {"input": [4, 1, 28, 28]}
    assert document["total_macs"] == 4 * inspect(load(MODEL)).total_macs


def test_inspect_shows_a_model_with_unsupported_ops_and_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capfd, "inspect", unknown_op("wand", tmp_path))
    assert code == 2
    assert err == "error: no rule for com.acme::Magic (opset 1): 1 node(s), first 'wand'\n"
    line = next(line for line in out.splitlines() if line.startswith("unsupported"))
    assert "com.acme::Magic" in line and "'wand'" in line


@pytest.mark.parametrize(
    "option", ["input", "=1,2", "input=1,x", "nope=1,1,28,28", "input=1,28,28", "input=-1,1,28,28"]
)
def test_wrong_shape_option(option: str, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capfd, "inspect", MODEL, "--shape", option)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1


def test_names_are_no_markup_and_no_terminal_codes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capfd, "inspect", unknown_op("[bold]x[/bold]\x1b[2J\r\n:smile:\u202e[/]", tmp_path))
    assert code == 2
    assert "[bold]x[/bold]" in out and ":smile:" in out and "[/]" in out
    assert not set("\x1b\r\u202e") & set(out)


def test_error_line_is_raw_and_whole(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    name = "[red]" + "long " * 100 + "[/nope]\x1b]0;owned\x07\nerror: two"
    code, out, err = run(capfd, "inspect", str(tmp_path / name))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and "\x1b" not in err
    assert "[red]" + "long " * 100 + "[/nope]" in err


def test_printable() -> None:
    assert printable("a\tb\x00\x1b\u2028é日\ud800") == "a\\tb\\x00\\x1b\\u2028é日\\ud800"


def test_keyboard_interrupt(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(jq, "load", interrupted)
    assert run(capfd, "inspect", MODEL) == (130, "", "")


@pytest.mark.parametrize("argv", [(), ("--nope",), ("nope",), ("inspect",), ("inspect", MODEL, MODEL)])
def test_usage_errors(argv: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capfd, *argv)
    assert code == 2
    assert "Usage" in err


def test_version(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capfd, "--version")
    assert (code, out) == (0, f"jq-quant {jq.__version__}\n")


def test_help_imports_no_more_than_the_package() -> None:
    script = (
        "import sys, jq; from jq.cli import main\n"
        "try: main(['--help'])\n"
        "finally: print(*{'onnxruntime', 'jq.ops', 'rich'} & set(sys.modules), file=sys.stderr)\n"
    )
    done = subprocess_run("-c", script)
    assert done.returncode == 0
    assert all(f"  {command.callback.__name__}" in done.stdout for command in jq.cli.app.registered_commands)
    assert done.stderr.strip() == ""


def test_module_entry_point() -> None:
    done = subprocess_run("-m", "jq", "inspect", "nope.onnx")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: cannot read the model nope.onnx: No such file or directory\n"


def test_output_survives_a_narrow_encoding(tmp_path: Path) -> None:
    done = subprocess_run("-m", "jq", "inspect", unknown_op("日本", tmp_path), PYTHONIOENCODING="ascii")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "\\u65e5\\u672c" in done.stdout


def test_demo(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    images, labels = jq.zoo.evaluation_set()
    monkeypatch.setattr(jq.zoo, "evaluation_set", lambda: (images[:300], labels[:300]))
    monkeypatch.setattr(jq.zoo, "models", lambda: ("fashion_resnet",))
    monkeypatch.setattr("jq.cli.demo._DEMO_BATCH", 100)
    code, out, err = run(capfd, "demo", "-o", str(tmp_path / "out"))
    assert (code, err) == (0, "")
    rows = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in out.splitlines() if line.count("│") == 3}
    for row in ("float top-1", "XINT8 top-1"):
        assert np.isclose(float(rows[row].strip("%")), 92.0, atol=4)
    assert "100.00%" in out and "Next:" in out  # the simulation and onnxruntime give the same classes
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"fashion_resnet_xint8.onnx", "fashion_resnet_xint8.html"}


@pytest.fixture
def calibration(tmp_path: Path) -> str:
    path = tmp_path / "calibration.npy"
    np.save(path, jq.zoo.calibration_set()[0][:16])
    return str(path)


def test_quantize(capfd: pytest.CaptureFixture[str], tmp_path: Path, calibration: str) -> None:
    output, report = tmp_path / "model.onnx", tmp_path / "report.html"
    code, out, err = run(
        capfd, "quantize", MODEL, "--data", calibration, "-o", str(output), "--report", str(report),
        "--set", "cle=false", "--set", 'overrides={"stem": {"weight": "int4"}}',
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert "  samples: 16\n" in out and "\\n" not in out and f"written: {output}" in out.replace("\n", "")
    found = {p.key: p.value for p in onnx.load(output).metadata_props}
    options = json.loads(found["jq.config"])
    assert options["cle"] is False and options["overrides"] == {"stem": {"weight": "int4"}}
    assert report.read_text().startswith("<!doctype html>")


def test_quantize_as_tutorials_spell_it(capfd: pytest.CaptureFixture[str], tmp_path: Path, calibration: str) -> None:
    ours, theirs = tmp_path / "ours.onnx", tmp_path / "theirs.onnx"
    tutorial = ("--model_input", MODEL, "--model_output", str(theirs), "--calibration_dataset_path", calibration)
    assert run(capfd, "quantize", MODEL, "--data", calibration, "-o", str(ours))[0] == 0
    assert run(capfd, "quantize", *tutorial)[0] == 0
    assert ours.read_bytes() == theirs.read_bytes()
    recovery = ("--cross_layer_equalization", "--fast_finetune", "--set", "cle=false", "--show-config")
    _, out, _ = run(capfd, "quantize", *tutorial, *recovery)
    assert [json.loads(out)[name] for name in ("cle", "finetune")] == [True, "adaround"]
    _, out, _ = run(capfd, "quantize", *tutorial, "--config", "XINT8_ADAQUANT", "--fast_finetune", "--show-config")
    assert json.loads(out)["finetune"] == "adaquant"
    for models in ((), (MODEL, "--model_input", MODEL)):
        code, out, err = run(capfd, "quantize", *models)
        assert (code, out) == (2, "")
        assert "expected one float ONNX file" in err


def test_quantize_prints_json(capfd: pytest.CaptureFixture[str], tmp_path: Path, calibration: str) -> None:
    output = str(tmp_path / "model.onnx")
    code, out, err = run(capfd, "quantize", MODEL, "--data", calibration, "-o", output, "--json")
    assert (code, err) == (0, "")
    assert {"title", "facts", "tensors", "moves", "findings", "unmatched"} == json.loads(out).keys()


@pytest.mark.parametrize("folder", [".", "/"])
def test_a_folder_is_no_model(capfd: pytest.CaptureFixture[str], folder: str) -> None:
    code, out, err = run(capfd, "quantize", folder)
    assert (code, out) == (2, "") and err == f"error: cannot read the model {folder}: Is a directory\n"


def test_calibrate_takes_a_config_from_a_file(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, calibration: str
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"method": "nonoverflow", "batch": 4}))
    code, out, err = run(capfd, "calibrate", MODEL, "--data", calibration, "--config", str(path), "--json")
    assert (code, err) == (0, "")
    config = json.loads(out)["config"]
    assert (config["method"], config["batch"]) == ("nonoverflow", 4)


def test_a_config_goes_through_a_file(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capfd, "quantize", MODEL, "--config", "A8W8", "--set", "method=percentile", "--show-config")
    assert code == 0
    path = tmp_path / "mine.json"
    path.write_text(out)
    code, again, _ = run(capfd, "quantize", MODEL, "--config", str(path), "--show-config")
    assert (code, again) == (0, out) and json.loads(out)["method"] == "percentile"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--config", "XINT9"), "no preset 'XINT9'. Did you mean 'XINT8'?"),
        (("--set", "clee=true"), "no option 'clee'. Did you mean 'cle'?"),
        (("--set", "cle"), "expected the form NAME=VALUE"),
        (("--set", "weight=int9"), "no format 'int9'"),
        (("--report", "x.pdf"), "ends with .html or .json"),
        (("--format", "qdd"), "no format 'qdd'"),
        (("--config", "absent.json"), "cannot read absent.json"),
    ],
)
def test_options_that_cannot_be(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, calibration: str, argv: tuple[str, ...], message: str
) -> None:
    output = tmp_path / "model.onnx"
    code, out, err = run(capfd, "quantize", MODEL, "--data", calibration, "-o", str(output), *argv)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1
    assert not output.exists()


def test_lint(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capfd, "lint", MODEL)
    assert (code, err) == (0, "") and "finding(s)" in out
    code, out, _ = run(capfd, "lint", MODEL, "--json")
    assert code == 0 and {"rule", "severity", "where", "message"} == json.loads(out)[0].keys()


def test_lint_ends_with_1_where_something_cannot_be(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capfd, "lint", unknown_op("magic", tmp_path))
    assert code == 1 and "unsupported-op" in out and err == ""
