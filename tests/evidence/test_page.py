"""The page of a report as text: what is in it, what may never be, and the pictures' geometry."""

from __future__ import annotations

import dataclasses
import html.parser
import re

import jax
import numpy as np
import pytest

import jq
from jq.evidence.compare import side_by_side
from jq.evidence.page import asset, page
from jq.evidence.plots import depth_plot, front_plot, histogram, ranges
from jq.evidence.report import Distribution, Report, Section, TensorRow
from jq.util import markup

HOSTILE = """</script></title></svg><script>alert("x")</script>' onload='alert(1)&amp;\x00\u202e"""


def row(name="conv", **changes):
    given = {
        "kind": "weight", "node": name, "format": "int8", "scale": 0.5, "exponent": -1, "zero_point": 0, "low": -70.0,
        "high": 1.0, "sqnr": 30.0, "moves": (name,), "reason": "range", "depth": 3, "bounds": (-64.0, 63.5),
        "values": Distribution(-70.0, 10.0, (5, 0, 0, 100)), "channels": ((-70.0, 1.0), (-1.0, 1.0)), "note": name,
    }  # fmt: skip
    return TensorRow(tensor=name, **{**given, **changes})


class Tags(html.parser.HTMLParser):
    def __init__(self, source):
        super().__init__()
        self.found, self.open = [], []
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag  # well-formed: nothing in the text closed a tag


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    rows = (row(HOSTILE), row(HOSTILE, depth=7, sqnr=40.0))
    Report(HOSTILE, {HOSTILE: HOSTILE}, rows, (), (), {HOSTILE: (HOSTILE,)}).to_html(path)
    return path.read_text()


def test_names_from_a_model_are_text(hostile):
    found = Tags(hostile)
    assert not found.open
    tags = [tag for tag, _ in found.found]
    assert tags.count("script") == tags.count("style") == 1 and tags.count("svg") > 3
    assert not any(key.startswith("on") for _, attrs in found.found for key in attrs)


def test_nothing_comes_from_elsewhere(hostile):
    assert not re.search(
        r"https?:|//[a-z]|url\(|@import|<link|<iframe", re.sub(r"'sha256-[^']*'|<!doctype html>", "", hostile)
    )
    policy = next(a["content"] for t, a in Tags(hostile).found if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-") and "unsafe" not in policy


def test_heads_are_buttons_that_say_how_it_is_sorted(hostile):
    found = Tags(hostile).found
    heads = [i for i, (tag, attrs) in enumerate(found) if tag == "th" and attrs.get("scope") == "col"]
    assert len(heads) > 5 and all(found[i][1]["aria-sort"] == "none" and found[i + 1][0] == "button" for i in heads)
    ids = {attrs["id"] for _, attrs in found if "id" in attrs}
    assert {attrs["aria-controls"] for _, attrs in found if "aria-controls" in attrs} <= ids
    assert all("aria-label" in attrs for tag, attrs in found if tag == "svg" and attrs.get("aria-hidden") != "true")


def test_columns_without_values_are_left_out():
    plain = Report("t", {}, (row(),), (), ())
    assert '<button type="button">cosine' not in page(plain) and '<button type="button">SQNR' in page(plain)
    assert "Along the network" not in page(Report("t", {}, (), (), ()))  # and no rows are no failure


def numbers(pattern, source):
    return [tuple(map(float, found.groups())) for found in re.finditer(pattern, source)]


def test_a_histogram_and_its_grid_share_an_axis():
    picture = histogram(row())
    bars = numbers(r"M([\d.]+) [\d.]+v-([\d.]+)h([\d.]+)V", picture)
    bounds = [x for (x,) in numbers(r"M([\d.]+) 20V150", picture)]
    unit = bars[0][2] / 20  # a bin is 20 wide
    assert [b[0] for b in bars] == pytest.approx([bars[0][0], bars[0][0] + 60 * unit], abs=0.2)
    assert bounds == pytest.approx([bars[0][0] + 6 * unit, bars[0][0] + 133.5 * unit], abs=0.2)
    assert bars[1][1] / bars[0][1] == pytest.approx(np.log(101) / np.log(6), rel=0.01)
    assert picture.count('class="beyond"') == 1  # below the least code, and nothing above the largest
    assert "step 2^-1, a line for every 8 codes" in picture


def test_pictures_of_odd_tensors():
    assert histogram(row(values=None)) == "" and ranges(row(channels=None)) == ""
    flat = row(values=Distribution(0.0, 0.0, (7,)), bounds=(0.0, 0.0), scale=1e-30, channels=((0.0, 0.0),) * 3)
    assert "nan" not in histogram(flat) + ranges(flat)
    many = row(channels=((-1.0, 1.0),) * 4096)
    assert len(ranges(many)) < 8_000 and "4096 output channels, 32 to a column" in ranges(many)


def test_the_plot_along_the_depth():
    rows = [
        ("t0", row("a", depth=0, sqnr=10.0)),
        ("t1", row("b", depth=10, sqnr=40.0)),
        ("t2", row("c", depth=5, sqnr=np.inf)),
    ]
    picture = depth_plot([*rows, ("t3", row("d", reason="changed")), ("t4", row("e", sqnr=None))])
    assert re.findall(r'<a href="#(t\d)"', picture) == ["t0", "t1", "t2"] and "c: exact, range" in picture
    at = dict(zip("abc", numbers(r"<path d=\"M([\d.]+) ([\d.]+)l4", picture), strict=True))
    assert at["c"][0] == pytest.approx((at["a"][0] + at["b"][0]) / 2, abs=0.2)
    assert at["a"][1] > at["b"][1] == at["c"][1]


@pytest.mark.parametrize("make", [
    lambda: jq.load(jq.zoo.path("fashion_resnet")),
    lambda: jq.presets["XINT8"],
    lambda: jq.make_plan(jq.prepare(jq.load(jq.zoo.path("fashion_resnet")), "BF16"), None, "BF16"),
    lambda: Report(HOSTILE, {}, tuple(row(HOSTILE) for _ in range(30)), (), ()),
])  # fmt: skip
def test_notebooks_show_the_first_rows(make):
    shown = make()._repr_html_()
    found = Tags(shown)
    assert not found.open and "script" not in [tag for tag, _ in found.found]
    assert len(shown) < 10_000 and 2 <= shown.count("<tr>") <= 11 and re.search(r"and [\d,]+ more</p>", shown)


def test_a_preview_of_little_says_no_more():
    assert "more" not in markup.preview("t", ("a",), [(1,)])


def test_values_on_a_device_are_text_too():
    assert markup.text(jax.numpy.float32(2)) == "2.0"


# --- Accessibility, as WCAG has it ---


def contrast(one: str, other: str) -> float:
    def light(colour: str) -> float:
        short = colour.lstrip("#")
        parts = [
            int((short if len(short) == 6 else "".join(c * 2 for c in short))[i : i + 2], 16) / 255 for i in (0, 2, 4)
        ]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted(map(light, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_text_stands_out_in_light_and_dark():
    style = asset("report.css")
    light, dark = (dict(re.findall(r"--(\w+): (#\w+)", block)) for block in style.split("@media", 2)[:2])
    for colours in (light, light | dark):
        for name in ("text", "soft", "accent", "constraint", "range", "weights"):
            assert min(contrast(colours[name], colours[back]) for back in ("back", "panel")) >= 4.5, name
        for step in range(6):
            assert contrast(colours[f"on{step}"], colours[f"loss{step}"]) >= 4.5, step
        assert min(contrast(colours["on"], colours[place]) for place in ("npu", "cpu", "ep")) >= 4.5


def test_controls_have_names_and_headings_skip_no_level(whole):
    tags = Tags(whole).found
    levels = [int(tag[1]) for tag, _ in tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1 and levels.count(1) == 1 and set(levels) == {1, 2}
    assert [tag for tag, _ in tags].count("main") == 1 and ("html", {"lang": "en"}) in tags
    labels = re.findall(r"<label>(.*?)</label>", whole, re.DOTALL)
    fields = [attrs["id"] for tag, attrs in tags if tag in ("input", "select")]
    assert all(any(f'id="{field}"' in label for label in labels) for field in fields)
    assert all(attrs.get("alt") for tag, attrs in tags if tag == "img")
    assert all(
        attrs.get("tabindex") == "0" and attrs.get("aria-label") for _, attrs in tags if attrs.get("class") == "wide"
    )
    names = [attrs["aria-label"] for _, attrs in tags if attrs.get("role") in ("region", "search")]
    assert len(names) == len(set(names))  # landmarks that a reader can tell apart
    ids = [attrs["id"] for _, attrs in tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert '<th scope="col"></th>' not in whole


def test_pictures_of_sections_take_the_style_of_the_page():
    picture = front_plot("t", "bits", "loss", [(1, 2), (2, 1)], [])
    assert (
        "<style>" in picture
        and page(Report("t", {}, (), (), (), sections=(Section("s", (), (), picture),))).count("<style>") == 1
    )


def test_what_is_in_a_whole_page(whole):
    for words in (
        "The network", "Side by side", "Blocks by their share", "Samples that changed class", "Before and after finetuning",
        "Along the network", "Layers and their tensors", "values, logarithmic", "SQNR, dB",
    ):  # fmt: skip
        assert words in whole, words
    assert whole.count('<img alt="') == whole.count("data:image/png;base64,") > 0
    assert len(whole) < 3_000_000
    heads = re.findall(r'<th scope="col"[^>]*><button type="button">([^<]*)', whole)
    assert heads[:2] == ["name", "SQNR dB"]  # which a narrow screen shows


@pytest.fixture(scope="module")
def whole():
    images, labels = jq.zoo.calibration_set()
    path = jq.zoo.path("fashion_mobilenet")
    results = [
        jq.quantize(path, images[:16], preset) for preset in ("W4A8", "XINT8_ADAROUND")
    ]  # of which one changes classes
    reports = [jq.compare(path, r.model, images[:96], labels=labels[:96]) for r in results]
    made = dataclasses.replace(reports[0], sections=results[1].report.sections)
    return page(side_by_side([made, reports[1]]))
