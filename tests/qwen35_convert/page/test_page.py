"""The page: parsed as a browser would, asks for nothing, shows the figures that JSON has."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from xml.etree import ElementTree as Xml

import pytest

from qwen35_convert.comparison.result import Entry
from qwen35_convert.page.page import STYLE, page_html
from qwen35_convert.page.scale import figure
from qwen35_convert.sizes import size_text
from qwen35_convert.verification.verify import Report
from tests.qwen35_convert.comparison.entries import compared, entry, failed, several

VOID = {"meta", "link"}
SVG = re.compile(r"<svg.*?</svg>", re.DOTALL)
HOSTILE = '<script>alert("1")</script>&amp;\x00\ud800\u202e\'"><img src=x onerror=y>'


class Parsed(HTMLParser):
    """Elements with their attributes, texts by the element that they stand in."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, "elements are nested"

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def page():
    return page_html(several())


@pytest.fixture(scope="module")
def parsed(page):
    return Parsed(page)


def test_every_element_is_closed_and_landmarks_are_there(page, parsed):
    assert page.startswith('<!doctype html>\n<html lang="en">')
    assert parsed.open == []
    for landmark in ("header", "main", "footer", "h1", "title"):
        assert len(parsed.all(landmark)) >= 1, landmark
    sections = [one["id"] for one in parsed.all("section")]
    assert sections == ["frontier", "table", "layers", "roles", "worst"]
    headings = {one.get("id") for one in parsed.all("h2")}
    assert {one["aria-labelledby"] for one in parsed.all("section")} <= headings


def test_ids_are_unique(parsed):
    ids = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_nothing_is_asked_for_and_nothing_runs(page, parsed):
    assert "http:" not in page
    assert "https:" not in page
    assert "url(" not in page
    assert "@import" not in page
    assert not {"script", "iframe", "img", "object"} & {tag for tag, _ in parsed.elements}
    for _, attributes in parsed.elements:
        assert not [key for key in attributes if key.startswith("on")]
        assert attributes.get("href") in (None, "data:,")
        assert "src" not in attributes
        assert "style" not in attributes
    (policy,) = (one for one in parsed.all("meta") if "http-equiv" in one)
    assert policy["content"].startswith("default-src 'none'")


def test_every_picture_is_xml_and_says_in_words_what_it_shows(page):
    pictures = [Xml.fromstring(found) for found in SVG.findall(page)]
    assert len(pictures) > 8
    for picture in pictures:
        assert picture.get("viewBox")
        if picture.get("aria-hidden") != "true":
            assert picture.get("role") == "img"
            assert picture.findtext("title")
        for node in picture.iter():
            for value in node.attrib.values():
                assert "nan" not in value
                assert "inf" not in value


def test_marks_lie_inside_their_picture(page):
    for found in SVG.findall(page):
        picture = Xml.fromstring(found)
        width, height = map(float, picture.get("viewBox").split()[2:])
        for node in picture.iter():
            for key, end in (("x", width), ("cx", width), ("y", height), ("cy", height)):
                if key in node.attrib:
                    assert -0.01 <= float(node.get(key)) <= end + 0.01


def test_figures_are_those_of_the_json(page):
    told = several().as_dict()["artifacts"]
    table = re.search(r'<section id="table".*?</section>', page, re.DOTALL)[0]
    cells = re.findall(r'<td data-key="(\w+)">(.*?)</td>', table)
    form = {
        "model_bytes": size_text,
        "bits_per_weight": "{:.2f}".format,
        "top1": lambda share: f"{100 * share:.2f} %",
        "ppl_ratio": "{:.4f}".format,
    }
    expected = [
        (key, form.get(key, figure)(artifact[key]))
        for artifact in told
        for key in dict.fromkeys(key for key, _ in cells)
    ]
    assert cells == expected
    assert len(cells) == 8 * len(told)
    points = re.findall(r"<title>(\S+): [^<]*, KL ([^<,]*)", page)
    assert dict(points) == {one["name"]: figure(one["kl_mean"]) for one in told}


def test_each_cell_of_the_heat_map_is_an_error_of_the_json(page):
    maps = re.search(r'<div class="maps">.*?</section>', page, re.DOTALL)[0]
    told = several().as_dict()["artifacts"]
    shown = re.findall(r"<title>layer (\d+), (\w+): ([^<]+) %</title>", maps)
    expected = [
        (str(one["layer"]), one["role"], figure(100 * one["relative_rms"]))
        for artifact in told
        for one in artifact["by_role"]
        if one["layer"] is not None
    ]
    assert sorted(shown) == sorted(expected)


def test_names_are_text_whatever_stands_in_them():
    page = page_html(compared(entry(HOSTILE, 500, 0.1), failed(entry("b", 600, 0.1), HOSTILE),
                              source=HOSTILE))  # fmt: skip
    parsed = Parsed(page)
    assert not {"script", "img"} & {tag for tag, _ in parsed.elements}
    assert "<script>" not in page
    told = [text for _, text in parsed.texts if 'alert("1")' in text]
    assert len(told) > 5
    for found in SVG.findall(page):
        Xml.fromstring(found)
    page.encode()


def test_one_artifact_without_predictions_is_a_page():
    one = entry("alone", 500, None)
    page = page_html(compared(one))
    assert "Predictions were not measured" in page
    assert [found["id"] for found in Parsed(page).all("section")] == ["table", "roles", "worst"]
    bare = Entry("bare", Report("structure", {}, [], {}, [], None))
    assert [found["id"] for found in Parsed(page_html(compared(bare))).all("section")] == ["table"]


@pytest.mark.parametrize("kl", [0.0, float("nan"), float("inf"), 1e-12, 40.0])
def test_odd_figures_are_shown_or_named(kl):
    page = page_html(compared(entry("a", 500, kl), entry("b", 500, 0.01), entry("c", 500, 0.0)))
    for found in SVG.findall(page):
        assert "nan" not in found
        Xml.fromstring(found)
    assert ("not finite" in page) == (kl != kl or kl > 1e9)


def test_what_failed_comes_first_and_is_escaped():
    found = compared(entry("a", 500, 0.1), failed(entry("b", 600, 0.01), "is <b>wrong</b>"))
    page = page_html(found)
    assert Parsed(page).all("section")[0]["id"] == "failed"
    assert "is &lt;b&gt;wrong&lt;/b&gt;" in page
    assert "1 of 2 passed" in page


def test_a_page_without_a_frontier_has_its_points():
    page = page_html(compared(failed(entry("a", 500, 0.1)), failed(entry("b", 600, 0.01))))
    assert "0 of 2 artifacts are on the frontier" in page
    assert "a: 500 B" in page


def test_thirty_artifacts_and_sixty_four_layers_are_a_page_of_some_size():
    """Lines beyond the eighth are dashed; a page of 27B stays small enough to be sent."""
    many = [entry(f"artifact-{i}", 500 + 10 * i, 0.3 / (i + 1)) for i in range(30)]
    page = page_html(compared(*many))
    assert "c1 dash-2" in page
    assert len(page) < 30 * 30_000


def test_pages_do_not_depend_on_pages_before():
    assert page_html(several()) == page_html(several())


def test_where_less_was_computed_the_page_says_what_was_checked_instead():
    judged = entry("int4-gptq", 500, 0.1)
    judged = replace(judged, report=replace(judged.report, calibration={"proof": "bounds"}))
    page = page_html(compared(entry("bf16-split", 2000, 0.0), judged, entry("int4", 600, 0.2)))
    assert "bf16-split: 4 of 4 layers hold the source's own weights." in unescape(page)
    assert "int4-gptq: calibrated weights were judged by what any encoder" in page
    assert page.count("calibrated weights were judged") == 1


def test_the_calibrated_are_named_on_the_page():
    one = replace(entry("gptq", 500, 0.1), calibrated=True)
    assert "gptq was calibrated on this same text" in page_html(compared(one))


def luminance(colour):
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_and_marks_stand_out(scheme):
    """WCAG 2.2: 4.5 for text, 3 for marks; steps of the heat map grow away from the page."""
    blocks = re.findall(r":root \{(.*?)\}", STYLE.read_text(), re.DOTALL)
    colours = dict(re.findall(r"--([\w]+): (#[0-9a-f]{6})", blocks[scheme]))
    for text in ("ink", "soft", "good", "bad"):
        assert contrast(colours[text], colours["page"]) >= 4.5, text
    assert contrast(colours["soft"], colours["raised"]) >= 4.5
    assert contrast(colours["soft"], colours["band"]) >= 4.5
    for i in range(1, 9):
        assert contrast(colours[f"c{i}"], colours["page"]) >= 3, i
    steps = [contrast(colours[f"h{i}"], colours["page"]) for i in range(1, 10)]
    assert steps == sorted(steps)
    assert steps[-1] > 7
