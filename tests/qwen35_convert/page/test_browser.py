"""The page in a real browser: no error, no request, every part is there and is drawn."""

from __future__ import annotations

import json
from io import BytesIO

import matplotlib.image
import numpy as np
import pytest

from qwen35_convert.page.page import page_html
from tests.qwen35_convert.comparison.entries import compared, entry, several
from tests.qwen35_convert.page.browser import is_here, opened

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not is_here(), reason="needs chromium and chromedriver"),
]
SECTIONS = ("frontier", "table", "layers", "roles", "worst")
WINDOWS = [(1400, False), (1400, True), (400, False), (400, True)]
BOXES = """JSON.stringify([...document.querySelectorAll('section, header, footer')].map(one => {
    const box = one.getBoundingClientRect()
    return [one.id || one.localName, box.left, box.top + scrollY, box.right, box.bottom + scrollY]
}))"""
# Texts that stick out of their picture by more than a pixel, in user units of the picture.
OUTSIDE = """JSON.stringify([...document.querySelectorAll('svg text')].filter(one => {
    const box = one.getBBox(), whole = one.ownerSVGElement.viewBox.baseVal
    return box.width && (box.x < -1 || box.y < -1 || box.x + box.width > whole.width + 1
        || box.y + box.height > whole.height + 1)
}).map(one => one.textContent))"""
VISIBLE = """[...document.querySelectorAll('.wide, .narrow')].filter(one => one.offsetParent)
    .map(one => one.className).join()"""
COVERED = """JSON.stringify((() => {
    const names = [...document.querySelectorAll('.labels text')].map(one => [one,
        one.getBoundingClientRect()]).filter(([, box]) => box.width)
    return names.flatMap(([a, p], i) => names.slice(i + 1).filter(([b, q]) =>
        a.ownerSVGElement === b.ownerSVGElement && Math.min(p.right, q.right) -
        Math.max(p.left, q.left) > 4 && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 6
    ).map(([b]) => [a.textContent, b.textContent]))
})())"""


@pytest.fixture(scope="module")
def browser():
    with opened() as one:
        yield one


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page_html(several()))
    return path


@pytest.fixture(scope="module", params=WINDOWS, ids=lambda one: f"{one[0]}-{one[1]}")
def shown(request, browser, page):
    """A browser that shows the page, its width, whether it is dark."""
    browser.log("performance")
    browser.show(page, request.param[0], dark=request.param[1])
    return browser, *request.param


def pixels(png):
    return (matplotlib.image.imread(BytesIO(png))[..., :3] * 255).round().astype(int)


def test_there_are_no_errors_and_no_requests(shown, page):
    browser, *_ = shown
    assert browser.log("browser") == []
    events = [json.loads(line["message"])["message"] for line in browser.log("performance")]
    sent = [
        e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"
    ]
    assert {url for url in sent if not url.startswith("data:")} <= {page.as_uri()}


def test_the_page_fits_the_window_and_its_parts_are_there(shown):
    browser, width, _ = shown
    assert browser.ask("document.documentElement.scrollWidth") == width
    boxes = {name: box for name, *box in json.loads(browser.ask(BOXES))}
    assert {*boxes} == {"header", "footer", *SECTIONS}
    for name, (left, top, right, bottom) in boxes.items():
        assert 0 <= left < right <= width, name
        assert bottom - top > 60, name
    assert browser.ask(VISIBLE) == ("wide,wide" if width > 860 else "narrow,narrow")


def test_the_picture_is_no_blank_page(shown):
    """Every part has ink on it, in many colours, on the ground of the scheme."""
    browser, width, dark = shown
    boxes = json.loads(browser.ask(BOXES))
    image = pixels(browser.picture())
    height = browser.ask("document.documentElement.scrollHeight")
    assert image.shape[:2] == (height, width)
    assert 1500 < height < 9000
    ground = image[2, 2]
    assert ground.tolist() == ([16, 19, 24] if dark else [255, 255, 255])
    inked = (np.abs(image - ground) > 8).any(-1)
    for name, left, top, right, bottom in boxes:
        part = inked[int(top) : int(bottom), int(left) : int(right)]
        assert 0.005 < part.mean() < 0.7, name
    assert len(np.unique(image[::2, ::2].reshape(-1, 3), axis=0)) > 200


def test_texts_stay_in_their_pictures_and_names_apart(shown):
    browser, *_ = shown
    assert json.loads(browser.ask(OUTSIDE)) == []
    assert json.loads(browser.ask(COVERED)) == []


def test_tables_of_tensors_open(shown):
    browser, *_ = shown
    before = browser.ask("document.documentElement.scrollHeight")
    browser.ask("document.querySelectorAll('details').forEach(one => { one.open = true })")
    assert browser.ask("document.documentElement.scrollHeight") > before + 300
    assert browser.ask("document.documentElement.scrollWidth") == shown[1]
    browser.ask("document.querySelectorAll('details').forEach(one => { one.open = false })")


@pytest.mark.parametrize("width", [400, 1400])
def test_long_names_and_many_artifacts_fit_too(browser, tmp_path, width):
    """A crowd at one place, names of 40 letters, 20 artifacts."""
    many = [entry(f"artifact-{i}", 500 + i, 0.1 + 0.001 * i) for i in range(18)]
    long = entry("a-name-that-is-as-long-as-names-may-become-GGUF", 700, 0.01)
    path = tmp_path / "page.html"
    path.write_text(page_html(compared(*many, long, entry("end", 900, 0.0))))
    browser.show(path, width, dark=False)
    assert browser.ask("document.documentElement.scrollWidth") == width
    assert json.loads(browser.ask(OUTSIDE)) == []
