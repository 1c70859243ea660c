"""The page: one file that asks for nothing, with every section its records allow."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from sample_records import METHODS, MODELS, sample_records

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


def test_every_section_is_there_in_the_order_of_a_reader(outline: Outline) -> None:
    assert outline.headings == [
        "Memory and accuracy on real digits",
        "Bytes kept and accuracy",
        "What this means",
        "Where the bytes are",
        "Learning curves",
        "The methods",
        "What ran in each layer",
        "Energy by sequency",
        "How it was measured",
    ]


def test_nothing_is_requested_from_elsewhere(page: str, outline: Outline) -> None:
    inside = ("#", "data:")
    assert all(reference.startswith(inside) for reference in outline.references)
    assert not re.search(r"https?:|//cdn|@import|<script|<link", page)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))


def test_figures_are_svg(page: str) -> None:
    figures = svgs(page)
    # per model: trade-off, accuracy, loss, bytes, spectrum
    assert len(figures) == 5 * len(MODELS)
    for figure in figures:
        ElementTree.fromstring(figure)


def test_colours_are_the_page_s_variables_in_both_modes(page: str) -> None:
    for figure in svgs(page):
        text = re.sub(r"base64,[^\"]*", "", figure)
        left = set(re.findall(r"#[0-9a-f]{6}\b", text)) - {"#ffffff", "#000000"}
        assert not left, f"colours that do not follow the mode: {left}"
    light, dark = page.split("prefers-color-scheme:dark", 1)
    for name, look in LOOKS.items():
        assert f"--m-{name}:{look.light}" in light
        assert f"--m-{name}:{look.dark}" in dark


def test_every_method_is_a_row_of_every_model_and_only_the_default_is_marked(page: str) -> None:
    for method in METHODS:
        mark = r' <span class="mark">default</span>' if method == "hq8" else ""
        rows = re.findall(rf'scope="row">.*?</svg>{re.escape(method)}{mark}</th>', page)
        in_layers = 2 * len(MODELS) if method == "hq8" else 0
        assert len(rows) == len(MODELS) + in_layers, method
    bars = [figure for figure in svgs(page) if "bytes kept by operator" in figure]
    for figure in bars:
        assert all(f">{method}<" in figure for method in METHODS if method != "hq8")
        assert ">hq8 (default)<" in figure


def only(*methods: str, **meta: object) -> Records:
    """The sample records with these methods alone."""
    full = sample_records(seeds=(0,))

    def kept(kind: list[dict]) -> list[dict]:
        return [record for record in kind if record["method"] in methods]

    return Records({**full.meta, **meta}, kept(full.rows), kept(full.curves), kept(full.memory))


def test_a_page_speaks_of_the_methods_that_were_run_only() -> None:
    page = render(only("exact", "hq8"))
    body = page.split("<body>")[1]
    assert not re.search(r"\bhot\b|hot-unbiased|low-pass|Q8\(", body)
    assert "hq8 (default): less in linear layers, activation functions." in body
    assert "formulas of exact and HOT" in render(only("exact", "hot"))


def test_older_records_mark_no_default() -> None:
    full = sample_records(seeds=(0,))
    old = {key: value for key, value in full.meta.items() if key not in ("default", "test_images", "methods")}
    page = render(Records(old, full.rows, full.curves, full.memory))
    assert "default" not in page.split("<body>")[1]
    assert "Noise is" not in page


def rows(**accuracy: float) -> list[dict]:
    kept = {"exact": 100, "hq8": 25, "int4": 20}
    return [
        dict(sample_records(seeds=(0,)).rows[0], method=method, accuracy=value, saved_bytes=kept[method])
        for method, value in accuracy.items()
    ]


META = {"default": "hq8", "test_images": {"vit": 360}}


def lead(records: Records) -> list[str]:
    return re.findall('<p class="lead">(.*?)</p>', render(records))


def test_the_headline_does_not_claim_three_images() -> None:
    """Three of 360 images are 0.83 points; at 97.5 % the noise of one seed is 1.65."""
    (sentence,) = lead(Records(META, rows(exact=97.5, hq8=97.5 + 300 / 360)))
    assert sentence == (
        "vit: hq8 (default) keeps 0.25 × the bytes of exact. Its accuracy of 98.33 % is within noise of "
        "exact&#39;s 97.50 %."
    )
    (sentence,) = lead(Records(META, rows(exact=97.5, hq8=94.5)))
    assert "94.50 % is 3.00 points below exact&#39;s (noise ±1.65)" in sentence
    (sentence,) = lead(Records({}, rows(exact=97.5, hq8=98.0)))
    assert "0.50 points above exact&#39;s (the noise is not known)" in sentence


def test_the_headline_is_of_the_default_else_of_what_keeps_least() -> None:
    assert "hq8 (default) keeps" in lead(Records(META, rows(exact=97.0, int4=97.0, hq8=97.0)))[0]
    assert "int4 keeps" in lead(Records({}, rows(exact=97.0, hq8=97.0, int4=97.0)))[0]
    assert lead(Records(META, rows(hq8=97.0))) == [], "nothing to compare with"


def test_who_ends_beyond_the_noise_is_named() -> None:
    said = render(Records(META, rows(exact=97.5, hq8=97.0, int4=90.0)))
    assert "Further from exact&#39;s accuracy than the noise – vit: int4. The others are not ranked." in said
    assert "These runs do not rank them" in render(Records(META, rows(exact=97.5, hq8=97.0)))


def test_a_method_far_below_does_not_flatten_the_others() -> None:
    page = render(Records(META, rows(exact=97.5, hq8=97.0, int4=11.0)))
    (figure,) = svgs(page)
    assert ">int4, 11.0 %<" in figure
    ticks = [float(text) for text in re.findall(r">([0-9.]+)</text>", figure)]
    assert min(tick for tick in ticks if tick > 30) > 80


def test_one_epoch_draws_no_curve() -> None:
    full = sample_records(seeds=(0,), epochs=1)
    page = render(Records(full.meta, full.rows, full.curves))
    assert "Learning curves" not in page
    assert len(svgs(page)) == len(MODELS)


def test_text_of_records_is_escaped(page: str) -> None:
    assert "A note with &lt;angle brackets&gt; &amp; an ampersand." in page


def test_sections_without_records_are_left_out() -> None:
    full = sample_records()
    page = render(Records(full.meta, full.rows))
    assert "Learning curves" not in page
    assert "Energy by sequency" not in page
    assert len(svgs(page)) == len(MODELS), "bytes against accuracy need the rows alone"


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


ROW = (
    '{"model": "vit", "method": "hot", "seed": 0, "accuracy": 91.0, "saved_bytes": 1, "bit_ops": 1.5, "step_ms": null}'
)
BAD = {
    "no folder": (None, "is missing"),
    "not JSON": ("{", "is not JSON"),
    "a list": ("[]", "holds a list"),
    "no rows": ('{"device": "cpu"}', "no list under 'rows'"),
    "a later version": ('{"version": 3, "rows": []}', "records of version 3, accepted are 1 to 2; update hotrain"),
    "no version": ('{"version": "two", "rows": []}', "records of version 'two'"),
    "nested too deeply": ("[" * 100_000, "is not JSON"),
    "a row that is a number": ('{"rows": [3]}', r"rows\[0\]: got a int, accepted is an object"),
    "an accuracy of text": (
        f'{{"rows": [{ROW.replace("91.0", chr(34) + "x" + chr(34))}]}}',
        "accuracy is 'x', .* number",
    ),
    "an accuracy of NaN": (
        f'{{"rows": [{ROW.replace("91.0", "NaN")}]}}',
        "accuracy is 'nan', accepted is a finite number",
    ),
    "layers that are a number": (f'{{"rows": [{ROW[:-1]}, "layers": 3}}]}}', r"rows\[0\]: layers is '3'"),
    "a title that is a list": (f'{{"rows": [{ROW}], "title": []}}', "the conditions: title is"),
    "a row without fields": ('{"rows": [{"model": "vit"}]}', r"rows\[0\] lacks method, seed"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_records_are_refused(case: str, tmp_path) -> None:
    text, message = BAD[case]
    if text is not None:
        (tmp_path / "summary.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_records(tmp_path)


def test_records_without_a_version_are_read(tmp_path) -> None:
    """As hotrain wrote them before there was one."""
    records = only("exact", "hot")
    records.save(tmp_path)
    for name in ("summary.json", "records.json"):
        value = json.loads((tmp_path / name).read_text())
        assert value.pop("version") == 2
        (tmp_path / name).write_text(json.dumps(value))
    assert load_records(tmp_path) == records
