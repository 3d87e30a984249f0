"""Help: an example for every command, groups and sections, and summaries that are not cut off."""

from __future__ import annotations

import pytest

import jq
from jq.cli import app, main
from jq.cli.application import GROUPS, SECTIONS, dashed
from jq.cli.pixels import PIXEL_OPTIONS

COMMANDS = tuple(dashed(command.callback.__name__) for command in app.registered_commands)


def helped(capfd: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert not caught.value.code
    return capfd.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_and_sections(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    out = helped(capfd, name, "--help")
    assert f"Example: jq-quant {name} " in " ".join(out.split())
    *_, pixels, general = [part for part in out.split("\n\n") if part.strip()]
    assert general.startswith("General options:") and all(f"--{o}" in general for o in ("json", "quiet", "verbose"))
    assert "--help" in out  # older ones of typer show it among the command's own
    assert pixels.startswith("Preprocessing of images:") == ("--data" in out)
    if "--data" in out:
        assert pixels.count("\n  --") == len(PIXEL_OPTIONS) and "--prep" not in out.split("Preprocessing of images")[0]
    assert sum(out.count(f"{title}:") for title in SECTIONS) == 1 + ("--data" in out)


def test_the_groups_hold_every_command_and_no_summary_is_cut_off(capfd: pytest.CaptureFixture[str]) -> None:
    out = helped(capfd, "-h")
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted(listed) == sorted(COMMANDS) and "More:" not in out
    assert all(f"{title}:" in out for title in GROUPS) and "..." not in out.split("Start here")[1]
    assert "Exit codes: 0: done; 1: done, but a check failed" in " ".join(out.split())


def test_the_version(capfd: pytest.CaptureFixture[str]) -> None:
    assert helped(capfd, "-V") == helped(capfd, "--version") == f"jq-quant {jq.__version__}\n"
