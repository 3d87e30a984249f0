"""From `git clone` to the first report on a model of your own: a terminal session that is recorded for the docs.

    python experiments/tutorial/first_report.py MODEL.onnx IMAGES [--prep keras-caffe] [--repository .] [--page PAGE.md]

The session runs in an empty folder, which holds links to MODEL.onnx and the folder IMAGES, with empty caches of pip and of
compilations; `git clone` reads the repository that is given. Every command is run in one terminal, 100 columns wide, and
what it shows is written to docs/first_report.cast, which `asciinema play` plays, and into the page, between its headings
"The session" and the next. Exits with 1 if a command fails or all of it takes longer than --seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
URL = "https://github.com/jq-quant/jq"
WIDTH, HEIGHT = 100, 40
COMMANDS = (
    f"git clone -q {URL} && cd jq",
    "python3 -m venv .venv && . .venv/bin/activate && pip install -q '.[images]'",
    "jq-quant lint ../{model}",
    "jq-quant quantize ../{model} --data ../photos --prep {prep} -o ../{stem}_xint8.onnx",
    "jq-quant compare ../{model} ../{stem}_xint8.onnx --data ../photos --limit 32 --report ../report.html",
)
_PROMPT = "\x1b]done %s\x07"  # an escape sequence that terminals do not show


def recorded(commands: list[str], folder: Path, repository: Path) -> tuple[list[tuple[float, str]], dict[str, float]]:
    """What the terminal showed, by seconds since the start, and the seconds of each command."""
    settings = {
        "HOME": str(folder / "home"), "XDG_CACHE_HOME": str(folder / "home/cache"), "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.{repository}.insteadOf", "GIT_CONFIG_VALUE_0": URL,
        "TERM": "xterm-256color", "COLUMNS": str(WIDTH), "LINES": str(HEIGHT), "PS1": "", "PIP_NO_CACHE_DIR": "1",
    }  # fmt: skip
    outside = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "JQ_CACHE")}
    own, theirs = pty.openpty()
    shell = subprocess.Popen(
        ["bash", "--noprofile", "--norc"], stdin=subprocess.PIPE, stdout=theirs, stderr=theirs, cwd=folder,  # noqa: S607
        env=outside | settings, text=True, bufsize=1,
    )  # fmt: skip
    os.close(theirs)
    assert shell.stdin is not None
    start, shown, seconds = time.perf_counter(), list[tuple[float, str]](), dict[str, float]()
    for command in commands:
        began = time.perf_counter() - start
        shown.append((began, f"\x1b[1m$ {command}\x1b[0m\r\n"))
        shell.stdin.write(f"{command}\nprintf '\\033]done %s\\007' $?\n")
        pending, end = "", None
        while end is None:
            pending += os.read(own, 65536).decode(errors="replace")
            end = re.search(_PROMPT % r"(\d+)", pending)
            ready = pending.find("\x1b]") if "\x1b]" in pending else len(pending)  # the prompt may come in two parts
            shown.append((time.perf_counter() - start, pending[:ready]))
            pending = pending[ready:]
        seconds[command] = time.perf_counter() - start - began
        if end[1] != "0":
            raise SystemExit(f"{command} ended with {end[1]}:\n" + "".join(text for _, text in shown))
    shell.stdin.close()
    shell.wait()
    return shown, seconds


def thinned(shown: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """The recording without the states of a progress bar that another follows within a second."""
    redraws, kept = "\r\x1b[2K", list[tuple[float, str]]()
    for at, text in shown:
        before = kept[-1] if kept else (0.0, "")
        redrawn = text.startswith(redraws) and before[1].startswith(redraws) and "\n" not in before[1]
        if redrawn and at - before[0] < 1:
            kept[-1] = before[0], text
        elif text:
            kept.append((at, text))
    return kept


def plain(shown: str) -> str:
    """What stays on a terminal: without colours, and of a line that was written again the last state."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r\n", "\n")
    return "\n".join(line.rpartition("\r")[2].rstrip() for line in text.split("\n"))


def write_page(page: Path, shown: list[tuple[float, str]], commands: list[str], seconds: dict[str, float]) -> None:
    """Put the session into a page, each command with the time at which it began."""
    began = 0.0
    text = plain("".join(text for _, text in shown))
    for command in commands:
        minutes, rest = divmod(began, 60)
        text = text.replace(f"$ {command}", f"# {int(minutes)}:{rest:02.0f}\n$ {command}", 1)
        began += seconds[command]
    minutes, rest = divmod(began, 60)
    parts = [*text.strip().splitlines(), f"# {int(minutes)}:{rest:02.0f}"]
    block = "\n".join(f"    {line}".rstrip() for line in parts)
    session = re.compile(r"(## The session\n+)(?: {4}.*\n|\n(?= {4}))+")
    page.write_text(session.sub(lambda m: f"{m[1]}{block}\n", page.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("--prep", default="keras-caffe")
    parser.add_argument("--repository", type=Path, default=ROOT)
    parser.add_argument("--page", type=Path, default=ROOT / "docs/guides/first_report.md")
    parser.add_argument("--cast", type=Path, default=ROOT / "docs/first_report.cast")
    parser.add_argument("--seconds", type=float, default=180.0)
    args = parser.parse_args()
    words = {"model": args.model.name, "stem": args.model.stem, "prep": args.prep}
    commands = [command.format(**words) for command in COMMANDS]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / args.model.name).symlink_to(args.model.resolve())
        (folder / "photos").symlink_to(args.images.resolve())
        shown, seconds = recorded(commands, folder, args.repository.resolve())
        size = (folder / "report.html").stat().st_size
    header = {
        "version": 2,
        "width": WIDTH,
        "height": HEIGHT,
        "title": f"From git clone to a report on {args.model.name}",
    }
    events = ([round(at, 3), "o", text] for at, text in thinned(shown))
    lines = [json.dumps(line, ensure_ascii=False) for line in (header, *events)]
    args.cast.write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_page(args.page, shown, commands, seconds)
    for command, spent in seconds.items():
        print(f"{spent:6.1f} s  {command}")
    total = sum(seconds.values())
    print(f"{total:6.1f} s  in all; the report has {size / 1e6:.2f} MB")
    raise SystemExit(total > args.seconds)


if __name__ == "__main__":
    main()
