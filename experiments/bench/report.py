"""The comparison of a float with a quantized model: its seconds, the size of its page, and how soon a browser shows it.

    python experiments/bench/report.py [MODEL.onnx:PREP ...] [--images NPZ] [--count 20] [--config XINT8] [--keep FOLDER]

Each model is quantized and compared on the same images; without PREP it sees the bundled ones. Of the page:

* `bytes` of the file, and how many rows and pictures it has;
* `laid_out_ms`: from the navigation until all of the page is loaded, its script has run and its layout is computed, by
  the browser's own clock. A copy of the page says it, whose policy is taken out: it would refuse a foreign script;
* `process`: seconds from the start of the browser to its end, for the page itself and for an empty one.

All are the best of `--rounds` runs of a headless Chromium with a fresh profile; `--keep` leaves the pages in a folder.
Appends one JSON line to `--out`. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from experiments.common import RESULTS, bundled, read_images, versions

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
CLOCK = """<script>addEventListener("load", () => {
document.body.getBoundingClientRect();
document.documentElement.dataset.clock = performance.now();
});</script></body>"""


def opened(browser: str, page: Path) -> tuple[float, str]:
    """Seconds of a browser that shows a page, from start to end, and what the page has become."""
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--dump-dom"]
        own = {"HOME": profile, "XDG_CONFIG_HOME": profile, "XDG_CACHE_HOME": profile}
        start = time.perf_counter()
        found = subprocess.run(
            [browser, *options, page.as_uri()], env=os.environ | own, capture_output=True, text=True, timeout=60
        )
        seconds = time.perf_counter() - start
    if found.returncode:
        raise SystemExit(f"{browser} ends with {found.returncode}: {found.stderr[-500:]}")
    return seconds, found.stdout


def timed(browser: str, page: Path, rounds: int) -> dict[str, float]:
    source = page.read_text()
    policy = re.search(r'<meta http-equiv="Content-Security-Policy"[^>]*>', source)
    assert policy is not None
    clocked, empty = page.with_suffix(".clock.html"), page.with_suffix(".empty.html")
    clocked.write_text(source.replace(policy.group(), "").replace("</body>", CLOCK))
    empty.write_text("<!doctype html><title>empty</title>")
    clocks = [re.search(r'data-clock="([^"]*)"', opened(browser, clocked)[1]) for _ in range(rounds)]
    return {
        "laid_out_ms": round(min(float(found.group(1)) for found in clocks if found), 1),
        "process_seconds": round(min(opened(browser, page)[0] for _ in range(rounds)), 2),
        "empty_process_seconds": round(min(opened(browser, empty)[0] for _ in range(rounds)), 2),
    }


def measure(args: argparse.Namespace, browser: str, path: Path, prep: str, folder: Path) -> dict[str, Any]:
    import jq

    images = read_images(prep, args.images, args.count)
    quantized, page = folder / f"{path.stem}_quantized.onnx", folder / f"{path.stem}.html"
    jq.quantize(path, images, args.config, output=quantized)
    start = time.perf_counter()
    report = jq.compare(path, quantized, images)
    report.to_html(page)
    seconds = time.perf_counter() - start
    return {
        "model": path.stem,
        "config": args.config,
        "count": args.count,
        "compare_seconds": round(seconds, 1),
        "rows": len(report.rows),
        "pictures": page.read_text().count("<figure>"),
        "bytes": page.stat().st_size,
        **timed(browser, page, args.rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="MODEL.onnx:PREP; without PREP it sees the bundled images")
    parser.add_argument("--images", type=Path, help="npz with uint8 NHWC `images`")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--config", default="XINT8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--browser", default=next(filter(None, map(shutil.which, BROWSERS)), None))
    parser.add_argument("--keep", type=Path, help="a folder for the pages and the quantized models")
    parser.add_argument("--out", type=Path, default=RESULTS / "report.jsonl")
    args = parser.parse_args()
    if args.browser is None:
        parser.error(f"none of {', '.join(BROWSERS)} is there; give --browser")
    for model in args.models or bundled():
        path, _, prep = model.partition(":")
        with tempfile.TemporaryDirectory() as scratch:
            folder = args.keep or Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            row = measure(args, args.browser, Path(path), prep, folder.resolve())
        row["browser"] = subprocess.run([args.browser, "--version"], capture_output=True, text=True).stdout.strip()
        print(", ".join(f"{k} {v}" for k, v in row.items()), flush=True)
        with args.out.open("a") as file:
            file.write(json.dumps({**row, **versions()}) + "\n")


if __name__ == "__main__":
    main()
