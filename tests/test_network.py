"""Nothing of a whole run reaches for the network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RUN = """
import socket, sys

def forbidden(*args, **kwargs):
    raise SystemExit(f"a socket was opened: {args}")

socket.socket.connect = socket.socket.connect_ex = socket.socket.bind = forbidden
socket.create_connection = socket.getaddrinfo = socket.gethostbyname = forbidden

import jq

images, labels = jq.zoo.calibration_set()
folder = sys.argv[1]
model = jq.zoo.path("fashion_resnet")
result = jq.quantize(model, images[:8], "XINT8", output=f"{folder}/q.onnx")
result.report.to_html(f"{folder}/q.html")
jq.compare(model, f"{folder}/q.onnx", images[:4])
jq.integer.load(f"{folder}/q.onnx")({"input": images[:2]})
jq.npu.forecast(f"{folder}/q.onnx")
print("no socket")
"""


def test_a_whole_run_opens_no_socket(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", RUN, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("no socket\n"), done.stderr
    page = (tmp_path / "q.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org/", "") and 'src="http' not in page
