"""The command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import jq.cli
import jq.zoo
from jq.cli import main, printable
from jq.cli.application import GROUPS
from jq.cli.show import answer, coloured, marked, table
from jq.config_file import read_config
from jq.evidence.inspection import inspect
from jq.graph.read import load
from jq.recovery.adaround import AdaRound
from jq.util.progress import log

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
    name = "[red]" + "long " * 30 + "[/nope]\x1b]0;owned\x07\nerror: two"
    code, out, err = run(capfd, "inspect", str(tmp_path / name))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and "\x1b" not in err
    assert "[red]" + "long " * 30 + "[/nope]" in err


def test_printable() -> None:
    assert printable("a\tb\x00\x1b\u2028é日\ud800") == "a\\tb\\x00\\x1b\\u2028é日\\ud800"


def test_keyboard_interrupt(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(jq, "load", interrupted)
    assert run(capfd, "inspect", MODEL) == (130, "", "interrupted\n")


@pytest.mark.parametrize(("number", "word"), [("SIGINT", "interrupted"), ("SIGTERM", "terminated")])
@pytest.mark.parametrize("module", ["jq", "jaxlib._jax", "jq.cli.application"])
def test_a_signal_while_it_is_imported(module: str, number: str, word: str) -> None:
    program = f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
class Finder:
    def find_spec(name, *rest):
        name != {module!r} or os.kill(os.getpid(), signal.{number})
sys.meta_path.insert(0, Finder)
from jq_quant import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    code = 128 + getattr(signal, number)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"{word}\n")


def test_termination_leaves_no_draft(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jq", "calibrate", MODEL, "-o", str(tmp_path / "s.safetensors"), "--verbose"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    process.stderr.readline()  # it runs
    process.terminate()
    assert process.wait(60) == 143 and "terminated" in process.stderr.read()
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device")
def test_a_full_standard_output_is_said(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "jq", "inspect", MODEL], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (2, "error: cannot write to standard output: No space left on device\n")


@pytest.mark.parametrize("argv", [(), ("--nope",), ("nope",), ("inspect",), ("inspect", MODEL, MODEL)])
def test_usage_errors(argv: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capfd, *argv)
    assert code == 2
    assert "Usage" in err


def test_version(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capfd, "--version")
    assert (code, out) == (0, f"jq-quant {jq.__version__}\n")


@pytest.mark.parametrize("argv", [("-q", "inspect", MODEL), ("inspect", MODEL, "--quiet")])
def test_quiet(argv: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(capfd, *argv) == (0, "", "")
    assert json.loads(run(capfd, *argv, "--json")[1])["total_macs"]
    assert run(capfd, "inspect", MODEL)[1], "the next command is as loud as ever"


def test_quiet_is_of_warnings_and_not_of_errors(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    warnings.simplefilter("always")  # twice in one process
    random = ("infer", MODEL, "-o", str(tmp_path / "out"))  # without data
    assert run(capfd, *random, "-q") == (0, "", "")
    assert "warning: no data given" in run(capfd, "infer", MODEL, "-o", str(tmp_path / "other"))[2]
    code, out, err = run(capfd, "inspect", "nope.onnx", "-q")
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize("argv", [("-v", "quantize"), ("quantize", "--verbose")])
def test_verbose_steps_are_on_stderr(
    argv: tuple[str, ...], capfd: pytest.CaptureFixture[str], tmp_path: Path, calibration: str
) -> None:
    code, out, err = run(capfd, *argv, MODEL, "--data", calibration, "-o", str(tmp_path / "q.onnx"), "--json")
    assert code == 0 and json.loads(out)
    for step in ("prepared: 38 of 53 nodes", "calibrate: 16 in", "planned: Plan(26 activations"):
        assert step in err


def test_verbose_errors_have_a_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capfd, "inspect", "nope.onnx", "-v")
    assert (code, out) == (2, "") and err.startswith("Traceback")
    assert err.splitlines()[-1].startswith("error: cannot read the model nope.onnx")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("qu",), ["quantize"]),
        (("quantize", "--cross"), []),  # the tutorials' options are not advertised
        (("quantize", "--time"), ["--time-budget"]),
        (("calibrate", "m.onnx", "--config", "XINT8_ADA"), ["XINT8_ADAROUND", "XINT8_ADAQUANT"]),
        (("simulate", "m.onnx", "--target", "aie2"), ["aie2_x1", "aie2_even"]),
        (("quantize", "mod"), []),  # so that bash completes files
        (("quantize", MODEL, "--exclude", "stage2.0.s"), ["stage2.0.shortcut", "stage2.0.shortcut.bn"]),
        (("quantize", MODEL, "--override", "Max"), ["MaxPool"]),
        (("quantize", "none.onnx", "--input-node", "stem"), []),
        (("quantize", "--set", "weight_m"), ["weight_method="]),
        (("evaluate", "--metric", "bo"), ["boxes"]),
    ],
)
def test_shells_complete(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: tuple[str, ...], expected: list[str]
) -> None:
    line = {"COMP_WORDS": " ".join(("jq-quant", *words)), "COMP_CWORD": str(len(words))}
    for name, value in (line | {"_JQ_QUANT_COMPLETE": "complete_bash"}).items():
        monkeypatch.setenv(name, value)
    code, out, err = run(capfd)
    assert (code, out.split(), err) == (0, expected, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_of_completion(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], shell: str) -> None:
    monkeypatch.setenv("_JQ_QUANT_COMPLETE", f"source_{shell}")
    code, out, _ = run(capfd)
    assert code == 0 and "jq-quant" in out and f"complete_{shell}" in out
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=out, text=True, check=False).returncode == 0  # noqa: S607


def test_help_imports_no_more_than_the_package() -> None:
    script = (
        "import pkgutil, sys, jq, jq.ops; from jq.cli import main\n"
        "modules = {f'jq.ops.{module.name}' for module in pkgutil.iter_modules(jq.ops.__path__)}\n"
        "light = ('integer', 'kinds', 'linear', 'masks', 'padding', 'resizing', 'saturating', 'table')\n"
        "families = modules - {'jq.ops.' + n for n in light}\n"
        "try: main(['--help'])\n"
        "finally: print(*{'onnxruntime', 'rich', *families} & set(sys.modules), file=sys.stderr)\n"
    )
    done = subprocess_run("-c", script)
    assert done.returncode == 0
    assert all(f"  {command}" in done.stdout for names in GROUPS.values() for command in names)
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
    code, out, err = run(capfd, "demo", "-o", str(tmp_path / "out"), "--json")
    figures = json.loads(out)["models"]["fashion_resnet"]
    assert (code, err) == (0, "") and figures["same_class"] == 1.0
    assert f"{figures['xint8_top1']:.2%}" == rows["XINT8 top-1"]


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
    recovery = ("--cross_layer_equalization", "--fast_finetune", "--set", "cle=false", "--show-config", "--json")
    _, out, _ = run(capfd, "quantize", *tutorial, *recovery)
    assert [json.loads(out)[name] for name in ("cle", "finetune")] == [True, "adaround"]
    _, out, _ = run(
        capfd, "quantize", *tutorial, "--config", "XINT8_ADAQUANT", "--fast_finetune", "--show-config", "--json"
    )
    assert json.loads(out)["finetune"] == "adaquant"
    flags = ("--calib_data", calibration, "--adaround", "--num_iters", "2000", "--learning_rate", "0.05", "--cle",
             "--exclude_nodes", "stem; fc", "--exclude_subgraphs", "[a, b], [c]")  # fmt: skip
    _, out, _ = run(capfd, "quantize", "--input_model_path", MODEL, *flags, "--show-config", "--json")
    options, own = json.loads(out), AdaRound()
    assert (options["finetune"], options["finetune_steps"]) == ("adaround", 2 * own.steps)
    assert options["finetune_rate"] == pytest.approx(own.learning_rate / 2)
    assert (options["exclude"], options["exclude_subgraphs"]) == (["stem", "fc"], [[["a", "b"], ["c"]]])
    for both in (("--adaround", "--adaquant"), ("--num_iters", "10")):
        assert run(capfd, "quantize", *tutorial, *both)[0] == 2
    for models in ((), (MODEL, "--model_input", MODEL)):
        code, out, err = run(capfd, "quantize", *models)
        assert (code, out) == (2, "")
        assert "needs one float ONNX file" in err


def test_quantize_prints_json(capfd: pytest.CaptureFixture[str], tmp_path: Path, calibration: str) -> None:
    output = str(tmp_path / "model.onnx")
    code, out, err = run(capfd, "quantize", MODEL, "--data", calibration, "-o", output, "--json")
    assert (code, err) == (0, "")
    keys = {"title", "verdict", "outputs", "facts", "attribution", "advice", "tensors", "guard", "moves", "findings",
            "unmatched", "layers", "changed", "beside"}  # fmt: skip
    assert keys == json.loads(out).keys()


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


@pytest.mark.parametrize("form", [(), ("--json",)])
@pytest.mark.parametrize("preset", ["A8W8", "VINT8", "XINT8_ADAROUND"])
def test_a_config_goes_through_a_file(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, preset: str, form: tuple[str, ...]
) -> None:
    changes = (
        "--set",
        "percentile=99.5",
        "--set",
        'overrides={"a \\"b\\" [0]": {"weight": "int4"}, "Gemm": {"symmetric": true}}',
    )
    code, out, _ = run(capfd, "quantize", MODEL, "--config", preset, *changes, "--show-config", *form)
    assert code == 0
    path = tmp_path / ("mine.json" if form else "mine.toml")
    path.write_text(out)
    code, again, _ = run(capfd, "quantize", MODEL, "--config", str(path), "--show-config", *form)
    assert (code, again) == (0, out)
    found = (json.loads if form else tomllib.loads)(out)
    assert found["percentile"] == 99.5 and found["overrides"]['a "b" [0]'] == {"weight": "int4"}


def test_a_toml_config_quantizes(capfd: pytest.CaptureFixture[str], tmp_path: Path, calibration: str) -> None:
    config, ours, theirs = (str(tmp_path / name) for name in ("mine.toml", "ours.onnx", "theirs.onnx"))
    Path(config).write_text('preset = "A8W8"\nmethod = "percentile"\npercentile = 99.9\n')
    assert run(capfd, "quantize", MODEL, "--data", calibration, "--config", config, "-o", ours)[0] == 0
    same = ("--config", "A8W8", "--set", "method=percentile", "--set", "percentile=99.9")
    assert run(capfd, "quantize", MODEL, "--data", calibration, *same, "-o", theirs)[0] == 0
    assert Path(ours).read_bytes() == Path(theirs).read_bytes()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "method = ", "is not TOML"),
        ("a.toml", "methd = 'minmse'", "no option 'methd'. Did you mean 'method'?"),
        ("a.toml", "preset = 'XINT9'", "no preset 'XINT9'"),
        ("a.toml", "preset = ['XINT8']", "no preset"),
        ("a.toml", "batch = 'eight'", "at most 1048576; got 'eight'"),
        ("a.json", "[1]", "needs options by name; got a list"),
        ("a.json", "method = 'minmix'", "is not JSON"),
        ("a.toml", '{"method": "minmix"}', "is not TOML"),
        ("a.toml", "\0", "is not TOML"),
        ("a.json", "{", "is not JSON"),
        ("a.toml", None, "cannot read"),
    ],
)
def test_config_files_that_cannot_be(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    code, out, err = run(capfd, "lint", MODEL, "--config", str(path))
    assert (code, out) == (2, "") and message in err and str(path) in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--config", "XINT9"), "no preset 'XINT9'. Did you mean 'XINT8'?"),
        (("--set", "clee=true"), "no option 'clee'. Did you mean 'cle'?"),
        (("--set", "cle"), "needs the form NAME=VALUE"),
        (("--set", "weight=int9"), "got 'int9'"),
        (("--report", "x.pdf"), "ends in .html or .json"),
        (("--format", "qdd"), "got 'qdd'"),
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


def test_npu(capfd: pytest.CaptureFixture[str], tmp_path: Path, calibration: str) -> None:
    model, page, options = (str(tmp_path / name) for name in ("q.onnx", "places.html", "vitisai_config.json"))
    run(capfd, "quantize", MODEL, "--data", calibration, "--output", model)
    code, out, err = run(capfd, "npu", model, "--html", page, "--provider-config", options)
    assert (code, err) == (0, "") and "subgraphs" in out and "on Strix (stx), backend X2" in out
    assert "<svg" in Path(page).read_text() and json.loads(Path(options).read_text()) == {"target": "X2"}
    code, out, _ = run(capfd, "npu", model, "--chip", "phx", "--json")
    told = json.loads(out)
    assert code == 0 and told["backend"] == "X1" and sum(told["counts"].values()) == len(told["nodes"])
    nodes = [{"output": [p["output"]], "opType": p["op"], "device": "NPU"} for p in told["nodes"].values()]
    report = {"deviceStat": [{"name": "NPU", "nodeNum": len(nodes)}], "nodeStat": nodes}
    Path(tmp_path / "r.json").write_text(json.dumps(report))
    code, out, _ = run(capfd, "npu", model, "--report", str(tmp_path / "r.json"))
    assert code == 0 and "wrong: a quantizer runs with the node that reads or writes its tensor" in out
    code, out, err = run(capfd, "npu", model, "--report", calibration)
    assert (code, out) == (2, "") and err.startswith("error: ") and "vitisai_ep_report.json" in err


def test_lint_ends_with_1_where_something_cannot_be(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capfd, "lint", unknown_op("magic", tmp_path))
    assert code == 1 and "unsupported-op" in out and err == ""


def test_lint_ends_with_1_on_a_float16_model_that_quantize_refuses(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "half.onnx"
    jq.convert(MODEL, path, to="fp16", form="native", keep_io=False)
    code, out, _ = run(capfd, "lint", str(path))
    assert code == 1 and "float-type" in out
    code, out, err = run(capfd, "quantize", str(path), "-o", str(tmp_path / "out.onnx"))
    assert code == 2 and out == "" and "float16" in err


def test_pixels_are_prepared_as_the_options_say(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    images, labels = jq.zoo.evaluation_set()
    pixels = ((images[:200] * 0.353 + 0.286) * 255).round().astype(np.uint8).transpose(0, 2, 3, 1)
    np.savez(tmp_path / "data.npz", images=pixels, labels=labels[:200])
    data, quantized = str(tmp_path / "data.npz"), str(tmp_path / "model.onnx")
    (tmp_path / "mine.toml").write_text('preset = "unit"\nmean = 0.286\n')
    prep = ("--prep", str(tmp_path / "mine.toml"), "--std", "0.353")
    code, _, err = run(capfd, "quantize", MODEL, "--data", data, *prep, "-o", quantized)
    assert code == 0 and err.count("bytes are taken as pixels and fed as RGB / 255, minus 0.286, divided by 0.353") == 1
    evaluating = ("evaluate", "--data", data, "--labels", data, "--json")
    code, out, err = run(capfd, *evaluating, "--model", MODEL, "--model", quantized)
    assert code == 0 and "top-1" not in err and "fed as RGB / 255, minus 0.286" in err
    top1 = [m["top1"] for m in json.loads(out)["classification"]["models"].values()]
    direct = jq.evaluate.model_scores(MODEL, images[:200]).values.argmax(1)
    assert top1[0] == np.mean(direct == labels[:200]) and top1[1] > top1[0] - 0.03
    code, out, err = run(capfd, *evaluating, "--model", quantized, "--prep", "raw")
    assert code == 0 and "but the model was quantized on images fed as RGB / 255, minus 0.286" in err
    assert "top-1 of the float model is" in err and "with --prep tf it would be" in err
    for option, text in (("mean", "a"), ("scale", "1/0"), ("crop", "x"), ("prep", "imagnet"), ("order", "RBG")):
        code, out, err = run(capfd, "quantize", MODEL, "--data", data, f"--{option}", text, "-o", f"{tmp_path}/no.onnx")
        assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1
    code, _, err = run(capfd, "quantize", MODEL, "--mean", "1", "-o", str(tmp_path / "no.onnx"))
    assert code == 2 and "--mean needs --data" in err


def test_labels_that_count_another_class_are_noticed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    images, labels = jq.zoo.evaluation_set()
    np.savez(tmp_path / "data.npz", input=images[:100], labels=np.minimum(labels[:100] + 1, 9))
    data = str(tmp_path / "data.npz")
    code, _, err = run(capfd, "evaluate", "--model", MODEL, "--data", data, "--labels", data)
    assert code == 0 and "with --label-offset -1 it would be" in err


def test_data_come_from_a_function_of_the_users(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loader = tmp_path / "loader.py"
    loader.write_text(
        "import numpy as np\n"
        "def stacked():\n    return np.zeros((4, 1, 28, 28), np.float32)\n"
        "def samples():\n    for i in range(4):\n        yield {'input': np.full((1, 1, 28, 28), i, np.float32)}\n"
        "def nothing():\n    pass\n"
    )
    for name in ("stacked", "samples"):
        code, out, _ = run(capfd, "calibrate", MODEL, "--data", f"{loader}:{name}", "--json")
        assert code == 0 and json.loads(out)["samples"] == 4
    for name, words in (("sample", "Did you mean 'samples'"), ("nothing", "returned None")):
        code, _, err = run(capfd, "calibrate", MODEL, "--data", f"{loader}:{name}")
        assert code == 2 and words in err
    assert "FUNCTION" in run(capfd, "calibrate", MODEL, "--data", str(loader))[2]
    assert "not a Python file" in run(capfd, "calibrate", MODEL, "--data", f"{tmp_path}/none.py:f")[2]


def test_presets_have_a_sentence_a_chip_and_a_cost(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capfd, "presets", "--json")
    rows = json.loads(out)
    assert code == 0 and [r["preset"] for r in rows] == list(jq.presets)
    assert all(r["what"] and r["chip"] and r["cost"] for r in rows)


def test_nodes_are_chosen_by_options_of_their_own(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capfd, "quantize", "--show-config", "--json", "--exclude", "head*", "--exclude", "Gemm", "--input-node", "a",
        "--output-node", "b", "--override", "conv*", "weight_method=minmax", "--override", "x", "symmetric=yes",
        "--set", "finetune=none", "--set", "op_types=Conv,Gemm",
    )  # fmt: skip
    config = json.loads(out)
    assert code == 0 and config["exclude"] == ["head*", "Gemm"] and config["op_types"] == ["Conv", "Gemm"]
    assert (config["input_nodes"], config["output_nodes"], config["finetune"]) == (["a"], ["b"], None)
    assert config["overrides"] == {"conv*": {"weight_method": "minmax"}, "x": {"symmetric": True}}
    for words in (("conv",), ("conv", "weight")):
        code, _, err = run(capfd, "quantize", "--show-config", "--override", *words)
        assert code == 2 and "--override" in err


@pytest.mark.parametrize("name", ["XINT8", "A8W8", "BF16", "UINT8_DYNAMIC_QUANT", "XINT8_ACCURATE"])
def test_a_shown_config_names_every_option_and_is_read_back(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capfd, "quantize", "--config", name, "--show-config")
    path = tmp_path / "mine.toml"
    path.write_text(out)
    assert code == 0 and read_config(path) == jq.presets[name]
    for option in jq.presets[name].to_dict():
        assert option == "overrides" or f"\n{option} = " in out or f"\n# {option} is not set" in out


def test_a_folder_that_is_not_there_is_no_typo(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "models").mkdir()
    output = tmp_path / "model" / "a.onnx"
    code, out, err = run(capfd, "preprocess", MODEL, "-o", str(output))
    assert (
        (code, out) == (2, "") and "add --make-dirs" in err and "Did you mean 'models'" in err and not output.exists()
    )
    code, _, err = run(capfd, "preprocess", MODEL, "-o", str(output), "--make-dirs")
    assert code == 0 and output.exists()


def test_models_in_the_wrong_order_are_noticed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    quantized = str(tmp_path / "q.onnx")
    jq.quantize(MODEL, jq.zoo.calibration_set()[0][:8], output=quantized)
    code, _, err = run(capfd, "compare", quantized, MODEL)
    assert code == 2 and "give the float model first" in err


def test_tables_abbreviate_numbers_and_do_not_break_them(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    answer(False, None, table(("a name of words", "count", "share"), [("some words", "12,345,678", "0.123456789")]))
    out = capfd.readouterr().out
    assert "12.3M" in out and "0.123" in out
    monkeypatch.setenv("COLUMNS", "120")
    answer(False, None, table(("a name of words", "count", "share"), [("some words", "12,345,678", "0.123456789")]))
    assert "12,345,678" in capfd.readouterr().out


def test_long_work_is_told_by_the_minute(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("jq.util.progress._MINUTE", 0.0)
    code, _, err = run(capfd, "calibrate", MODEL)
    assert code == 0 and "calibrate: 16 of 16 samples after" in err


def test_a_calibration_is_taken_from_its_file(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, calibration: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats, one, other = (str(tmp_path / name) for name in ("s.safetensors", "one.onnx", "other.onnx"))
    assert run(capfd, "calibrate", MODEL, "--data", calibration, "-o", stats)[0] == 0
    assert run(capfd, "quantize", MODEL, "--data", calibration, "-o", one)[0] == 0

    def fails(*given: object, **options: object) -> None:
        raise AssertionError("calibrated again")

    monkeypatch.setattr("jq.pipeline.calibrate", fails)
    code, _, err = run(capfd, "quantize", MODEL, "--data", calibration, "-o", other, "--stats", stats)
    assert (code, err) == (0, "") and Path(one).read_bytes() == Path(other).read_bytes()
    code, out, _ = run(
        capfd, "sensitivity", MODEL, "--data", calibration, "--stats", stats, "--by", "layer", "--limit", "4"
    )
    assert code == 0 and "each layer quantized alone" in out
    code, _, err = run(
        capfd, "quantize", MODEL, "--data", calibration, "-o", other, "--stats", stats, "--config", "A8W8"
    )
    assert code == 2 and "belong to a config with another" in err and "jq-quant calibrate" in err
    network = str(jq.zoo.path("fashion_mobilenet"))
    code, _, err = run(capfd, "quantize", network, "--data", calibration, "-o", other, "--stats", stats)
    assert code == 2 and "another model" in err


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert marked("error", "x") == "error: x"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert marked("warning", "x") == "\x1b[33mwarning:\x1b[0m x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert marked("warning", "x") == "warning: x"
    assert [str(span.style) for span in coloured("1.0 dB, 15.0 dB, 25.0 dB").spans] == ["red", "yellow", "green"]


def test_a_warning_of_the_log_is_shown_once(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def said_twice(*_: object) -> object:
        for _ in range(2):
            log.warning("said %d times", 2)
        return inspect(load(MODEL))

    monkeypatch.setattr("jq.inspect", said_twice)
    _, _, err = run(capfd, "inspect", MODEL)
    assert err.count("said 2 times") == 1


def test_a_config_in_the_json_of_amds_examples(capfd, tmp_path):
    spec = {"spec": "XInt8Spec"}
    document = {
        "global_config": {"input_tensors": spec, "weight": spec, "bias": None},
        "exclude": {"node_names": ["stem"]},
        "extra_options": {
            "IgnoreWarnings": False,
            "UseRandomData": False,
            "MatMulToGemm": True,
            "DedicatedQDQPair": True,
        },
    }
    path = tmp_path / "amd.json"
    path.write_text(json.dumps(document))
    code, out, err = run(capfd, "quantize", MODEL, "--config", str(path), "--show-config", "--json")
    made = json.loads(out)
    assert code == 0 and "MatMulToGemm=True" in err
    assert (made["exclude"], made["pairs"], made["scale"]) == (["stem"], "each", "power_of_two")
    code, out, _ = run(capfd, "npu", MODEL, "--config", str(path), "--json")
    assert code == 0 and json.loads(out)["format"] == "XINT8"
    code, _, err = run(capfd, "quantize", "--config", str(path), "--show-config")
    assert code == 2 and "can only be read for a model" in err
    path.write_text(json.dumps(document | {"use_external_data_format": True}))
    code, _, err = run(capfd, "quantize", MODEL, "--config", str(path), "--show-config")
    assert code == 2 and "ModelQuantizer" in err
    path.write_text(json.dumps(document | {"global_config": {"weight": {"spec": "XInt9Spec"}}}))
    code, _, err = run(capfd, "quantize", MODEL, "--config", str(path), "--show-config")
    assert code == 2 and "amd.json: " in err
