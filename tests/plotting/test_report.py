"""The page: one file that asks for nothing, with every section its records allow."""

from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from PIL import Image
from sample_records import LAYERS, METHODS, MODELS, sample_records

from hotrain.plotting import Records, load_records
from hotrain.plotting.report import render, write_report
from hotrain.plotting.style import LOOKS

VOID = {"meta", "br", "input", "img", "link", "hr"}


class Outline(HTMLParser):
    """Tag balance, headings, links and ids of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("href", "src", "action", "srcset"):
                self.references.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.headings.append(data.strip())


@pytest.fixture(scope="module")
def page() -> str:
    return render(sample_records())


@pytest.fixture(scope="module")
def outline(page: str) -> Outline:
    parser = Outline()
    parser.feed(page)
    parser.close()
    return parser


def svgs(page: str) -> list[str]:
    return re.findall(r'<svg class="figure".*?</svg>', page, flags=re.DOTALL)


def test_tags_balance_and_ids_are_distinct(outline: Outline) -> None:
    assert outline.open == []
    assert len(outline.ids) == len(set(outline.ids)), "two figures share an id: one would clip the other"


def test_every_section_is_there(outline: Outline) -> None:
    assert outline.headings == [
        "Seven backward passes on real digits",
        "What each method costs and reaches",
        "Learning curves",
        "Where the bytes are",
        "Energy by sequency",
        "Outliers, and the scale each layer gets",
        "Error ratio of every converted layer",
        "What is measured here, and what is not",
        "Conditions",
    ]


def test_nothing_is_requested_from_elsewhere(page: str, outline: Outline) -> None:
    inside = ("#", "data:")
    assert all(reference.startswith(inside) for reference in outline.references)
    assert not re.search(r"https?:|//cdn|@import|<script|<link", page)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))


def test_figures_are_svg_and_their_images_decode(page: str) -> None:
    figures = svgs(page)
    # per model: accuracy, loss, bytes, spectrum, choices; and two surfaces
    assert len(figures) == 5 * len(MODELS) + 2
    for figure in figures:
        ElementTree.fromstring(figure)
    pictures = [base64.b64decode(code) for code in re.findall(r"data:image/png;base64,\s*([A-Za-z0-9+/=\s]+)", page)]
    assert len(pictures) == 2, "one picture a surface"
    for picture in pictures:
        with Image.open(io.BytesIO(picture)) as image:
            low, high = image.convert("L").getextrema()
            assert high > low, "an empty surface"


def test_colours_are_the_page_s_variables_in_both_modes(page: str) -> None:
    for figure in svgs(page):
        text = re.sub(r"base64,[^\"]*", "", figure)
        left = set(re.findall(r"#[0-9a-f]{6}\b", text)) - {"#ffffff", "#000000"}
        assert not left, f"colours that do not follow the mode: {left}"
    light, dark = page.split("prefers-color-scheme:dark", 1)
    for name, look in LOOKS.items():
        assert f"--m-{name}:{look.light}" in light
        assert f"--m-{name}:{look.dark}" in dark


def test_every_method_is_a_row_of_every_model(page: str) -> None:
    for method in METHODS:
        assert len(re.findall(rf'scope="row">.*?</svg>{re.escape(method)}</th>', page)) == len(MODELS)


def test_text_of_records_is_escaped(page: str) -> None:
    assert "A note with &lt;angle brackets&gt; &amp; an ampersand." in page


def test_sections_without_records_are_left_out() -> None:
    full = sample_records()
    page = render(Records(full.meta, full.rows))
    assert "Learning curves" not in page
    assert "Energy by sequency" not in page
    assert svgs(page) == []


def test_a_failed_run_is_said_and_does_not_stop_the_page() -> None:
    full = sample_records(seeds=(0,))
    failed = dict.fromkeys(full.rows[0], None) | {"model": "vit", "method": "hla", "seed": 1}
    page = render(Records(full.meta, [*full.rows, failed]))
    assert "1 of 2 failed" in page


def test_saved_records_draw_the_same_page(tmp_path) -> None:
    records = sample_records(seeds=(0,), epochs=2)
    records.save(tmp_path)
    assert load_records(tmp_path) == records
    assert write_report(tmp_path).read_text() == render(records)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["records.json", "report.html", "summary.json"]


BAD = {
    "no folder": (None, "is missing"),
    "not JSON": ("{", "is not JSON"),
    "a list": ("[]", "holds a list"),
    "no rows": ('{"device": "cpu"}', "no list under 'rows'"),
    "a row without fields": ('{"rows": [{"model": "vit"}]}', r"rows\[0\] lacks method, seed"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_records_are_refused(case: str, tmp_path) -> None:
    text, message = BAD[case]
    if text is not None:
        (tmp_path / "summary.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_records(tmp_path)


def test_a_flat_surface_is_drawn_and_a_line_refused() -> None:
    """All-zero g_y is real (a dead layer): no division by its maximum."""
    full = sample_records(seeds=(0,), epochs=2)
    flat = {"model": "vit", "layer": LAYERS[0], "choice": "tensor", "ratio": 1.0, "values": [[0.0] * 4] * 4}
    assert len(svgs(render(Records(full.meta, full.rows, surfaces=[flat])))) == 1
    with pytest.raises(ValueError, match="at least 2 × 2"):
        render(Records(full.meta, full.rows, surfaces=[flat | {"values": [[0.0] * 4]}]))
