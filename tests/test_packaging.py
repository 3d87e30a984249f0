"""The distribution: what is in the wheel, and what its metadata say."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import jq

ROOT = Path(jq.__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode and re.search(r"connection|resolve|No matching distribution", done.stderr, re.IGNORECASE):
        pytest.skip("the build backend cannot be fetched here")
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_types_and_data_are_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert {"jq/py.typed", "jq/zoo/fashion.npz", "jq/zoo/fashion_resnet.onnx"} <= names
    assert any(name.startswith("jq/evidence/assets/") for name in names)
    assert {name for name in names if not name.startswith(("jq/", "jq_quant-"))} == {"jq_quant.py"}  # the command


def test_metadata(wheel: zipfile.ZipFile) -> None:
    (name,) = (n for n in wheel.namelist() if n.endswith("/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["Version"] == jq.__version__ == PROJECT["version"]
    assert metadata["Author"]
    assert {url.split(",")[0] for url in metadata.get_all("Project-URL")} >= {"Documentation", "Source", "Issues"}
    pythons = [c.rpartition(" ")[2] for c in metadata.get_all("Classifier") if "Python :: 3." in c]
    assert pythons == ["3.11", "3.12", "3.13"]


def test_what_only_unix_has_is_not_needed() -> None:
    """Ryzen AI is used on Windows, where these modules and functions are missing."""
    script = (
        "import os, shutil, sys\n"
        "shutil._use_fd_functions = False\n"  # as on Windows: otherwise Python's own code needs O_NONBLOCK
        "for name in ('fcntl', 'grp', 'pty', 'pwd', 'resource', 'termios', 'tty'): sys.modules[name] = None\n"
        "for name in ('sched_getaffinity', 'O_NONBLOCK', 'getuid', 'fork', 'mkfifo'): delattr(os, name)\n"
        "import jq\n"
        "from jq.cli import main\n"
        "main(['quantize', str(jq.zoo.path('fashion_resnet')), '-o', sys.argv[1], '-q'])\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "made.onnx")
        done = subprocess.run([sys.executable, "-c", script, str(made)], capture_output=True, text=True, check=False)
        assert done.returncode == 0 and made.exists(), done.stderr


def test_one_version_everywhere() -> None:
    assert f"version: {jq.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_oldest_versions_are_exact() -> None:
    done = subprocess.run([sys.executable, ROOT / ".ci/oldest.py"], capture_output=True, text=True, check=True)
    oldest = done.stdout.split()
    assert len(oldest) == len(PROJECT["dependencies"]) + 1
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", requirement) for requirement in oldest), oldest
