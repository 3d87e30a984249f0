"""The report in a real browser, headless: it is drawn, it sorts, and its policy lets nothing else run."""

from __future__ import annotations

import base64
import dataclasses
import os
import re
import shutil
import subprocess

import numpy as np
import pytest

from jq.evidence.layers import NetworkLayer
from jq.evidence.pictures import ChangedSample, png
from jq.evidence.report import Deviation, Distribution, Report, TensorRow
from jq.evidence.verdict import OutputLoss, OutputsVerdict

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome on PATH")
HOSTILE = """</title></script><script>document.title="owned"</script><img src=x onerror='document.title="owned"'>"""


def row(index: int, name: str) -> TensorRow:
    error = Deviation(0.99, 0.5, 40.0, 0.25, 0.01, 35.0, 0.9, 0.1, 0.0, None)
    counts = tuple(int(1000 * np.exp(-(((i - 32) / 9) ** 2))) for i in range(64))
    return TensorRow(
        tensor=name,
        kind=("activation", "weight")[index % 2],
        node=name,
        format="int8",
        scale=0.0625,
        exponent=-4,
        zero_point=0,
        low=-9.0,
        high=9.0,
        sqnr=[30.5, float("inf"), 9.25, 100.0][index],
        moves=(),
        error=error,
        reason=["rounding", "", "range", "upstream"][index],
        depth=index,
        bounds=(-8.0, 7.9375),
        values=Distribution(-9.0, 9.0, counts),
        channels=((-1.0, 1.0), (-7.0, 9.0)),
    )


@pytest.fixture
def network(tmp_path):
    """A page with layers: a convolution with two tensors, and a sum that reads it and the input."""
    layers = (
        NetworkLayer("x", "input", ()),
        NetworkLayer("conv", "Conv", ("conv",), (0,), "conv .. add", "npu", "listed"),
        NetworkLayer("add", "Add", ("add",), (0, 1), "conv .. add", "cpu", "not listed"),
    )
    rows = (row(0, "conv"), dataclasses.replace(row(1, "weight"), node="conv"), row(2, "add"))
    sample = ChangedSample(7, "cat", 3, 4, 3, base64.b64encode(png(np.full((8, 8, 3), 99, np.uint8))).decode())
    verdict = OutputsVerdict((OutputLoss("y", 20.0, 0.9, 0.01, (0.8, 0.7)),), "10 samples", ("One layer makes it.",))
    path = tmp_path / "network.html"
    Report("t", {}, rows, (), (), layers=layers, changed=(sample,), verdict=verdict).to_html(path)
    return path


@pytest.fixture
def page(tmp_path):
    rows = tuple(row(i, name) for i, name in enumerate(["conv", HOSTILE, "relu", "add"]))
    path = tmp_path / "report.html"
    Report(HOSTILE, {HOSTILE: HOSTILE}, rows, (), (), {"float": (HOSTILE,)}).to_html(path)
    return path


def run(tmp_path, *arguments: str) -> str:
    """What the browser prints of a page, which is all that it may read."""
    own = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1300,1000"]
    assert BROWSER is not None
    found = subprocess.run(
        [BROWSER, *options, f"--user-data-dir={tmp_path / 'profile'}", *arguments],
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout


def with_script(page, script: str):
    """A copy of the page with a script at its end. The copy has no policy, which would refuse it."""
    source = page.read_text()
    policy = re.search(r'<meta http-equiv="Content-Security-Policy"[^>]*>', source).group()
    copy = page.with_name("clicked.html")
    copy.write_text(source.replace(policy, "").replace("</body>", f"<script>{script}</script></body>"))
    return copy


def clicking(page, *selectors: str):
    """A copy of the page with clicks at its end."""
    return with_script(page, "".join(f"document.querySelector({selector!r}).click();" for selector in selectors))


def order(dom: str) -> list[str]:
    return re.findall(r'<tbody id="(t\d)"', dom)


def column(title: str, page) -> str:
    titles = re.findall(r'<th scope="col"[^>]*><button type="button">([^<]*)', page.read_text())
    return f"thead th:nth-child({titles.index(title) + 1}) button"


def test_a_click_on_a_head_sorts(page, tmp_path):
    assert order(run(tmp_path, "--dump-dom", page.as_uri())) == ["t0", "t1", "t2", "t3"]
    head = column("SQNR dB", page)
    dom = run(tmp_path, "--dump-dom", clicking(page, head).as_uri())
    assert order(dom) == ["t2", "t0", "t3", "t1"] and 'aria-sort="ascending"' in dom  # by number, what is exact last
    dom = run(tmp_path, "--dump-dom", clicking(page, head, head).as_uri())
    assert order(dom) == ["t1", "t3", "t0", "t2"] and 'aria-sort="descending"' in dom


def test_a_row_opens(page, tmp_path):
    dom = run(tmp_path, "--dump-dom", clicking(page, "#t2 button").as_uri())
    assert re.search(r'<tr id="t2d" class="more">', dom) and re.search(r'<tr id="t0d" class="more" hidden', dom)
    assert dom.count('aria-expanded="true" aria-controls') == 1


def hidden(dom: str) -> set[str]:
    """The bodies of the table that are not shown."""
    return set(re.findall(r'<tbody id="(\w+)"[^>]* hidden', dom))


def test_tensors_are_folded_into_their_layers(network, tmp_path):
    dom = run(tmp_path, "--dump-dom", network.as_uri())
    assert re.findall(r'<tbody id="(\w+)"', dom) == ["l0", "l1", "t0", "t1", "l2", "t2"] and hidden(dom) == {
        "t0",
        "t1",
        "t2",
    }
    dom = run(tmp_path, "--dump-dom", clicking(network, "#l1 button").as_uri())
    assert hidden(dom) == {"t2"} and '<tr id="t0d" class="more" hidden' in dom


def test_a_click_on_a_box_opens_its_layer(network, tmp_path):
    box = "document.querySelector('#canvas a[href=\"#l1\"] rect')"  # which has no click() of its own
    clicked = with_script(network, f"{box}.dispatchEvent(new MouseEvent('click', {{bubbles: true}}))")
    assert hidden(run(tmp_path, "--dump-dom", clicked.as_uri())) == {"t2"}
    assert hidden(run(tmp_path, "--dump-dom", f"{network.as_uri()}#t2")) == {"t0", "t1"}


def test_boxes_are_coloured_and_come_closer(network, tmp_path):
    def picture(dom: str) -> str:
        return re.search(r'<svg class="graph"[^>]*>', dom).group()

    whole = picture(run(tmp_path, "--dump-dom", network.as_uri()))
    closer = picture(run(tmp_path, "--dump-dom", clicking(network, "#closer", "#closer").as_uri()))
    assert 'data-colour="loss"' in whole
    wide = [float(re.search(r' width="([\d.]+)"', p).group(1)) for p in (whole, closer)]
    assert wide[1] == pytest.approx(wide[0] * 1.5**2)
    assert picture(run(tmp_path, "--dump-dom", clicking(network, "#closer", "#whole").as_uri())) == whole


def test_the_tensors_view_and_the_filter(network, tmp_path):
    def set_to(selector: str, value: str, event: str) -> str:
        return (
            f"document.querySelector({selector!r}).value={value!r};"
            f"document.querySelector({selector!r}).dispatchEvent(new Event({event!r}));"
        )

    def dom_after(script: str) -> str:
        return run(tmp_path, "--dump-dom", with_script(network, script).as_uri())

    assert hidden(dom_after(set_to("#view", "tensors", "change"))) == {"l0", "l1", "l2"}
    only = dom_after(set_to("#filter", "weight", "input"))
    assert hidden(only) == {"l0", "l2", "t0", "t1", "t2"} and ">1 of 3 tensors<" in only


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_picture_is_not_blank(page, tmp_path, scheme):
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    picture = tmp_path / f"{scheme}.png"
    colours = f"--blink-settings=preferredColorScheme={['dark', 'light'].index(scheme)}"
    run(tmp_path, colours, f"--screenshot={picture}", clicking(page, "#t0 button").as_uri())
    with image.open(picture) as found:
        pixels = np.asarray(found.convert("RGB")).astype(int)
    assert pixels.shape == (1000, 1300, 3)
    assert (pixels[0, 0].sum() > 600) == (scheme == "light")
    different = np.abs(pixels - pixels[0, 0]).sum(-1) > 60
    assert 0.02 < different.mean() < 0.5 and different[:200].any() and different[700:].any()
    blue = (pixels[..., 2] > pixels[..., 0] + 40) & (pixels[..., 2] > pixels[..., 1] + 20)
    assert blue.mean() > 0.005  # the histogram's bars


def test_names_are_text_and_nothing_else_runs(page, tmp_path):
    dom = run(tmp_path, "--dump-dom", page.as_uri())
    assert 'document.title="owned"' in dom and "<title>owned" not in dom and "<img" not in dom
    # Were one name not escaped, the policy would still refuse it.
    source = page.read_text()
    injected = page.with_name("injected.html")
    injected.write_text(source.replace("</body>", '<script>document.title = "owned"</script></body>'))
    assert "<title>owned" not in run(tmp_path, "--dump-dom", injected.as_uri())
