"""plotting/steps.py: a file that stands by itself, every variant once, no label over another, the front that is so."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from hotrain.plans import undominated
from hotrain.plotting.steps import draw_steps

POINTS = {
    "exact": (11.9, 51.0),
    "exact+compile": (9.36, 37.5),
    "exact+graphs": (9.36, 36.8),
    "exact+compile+checkpoint": (2.97, 44.6),
    "exact+compile+offload": (2.1, 412.0),
    "torchao-float8-tensorwise": (6.97, 47.0),
    "hotrain": (7.3, 32.6),
    "hotrain-all": (7.29, 33.0),
    "hotrain-memory": (3.6, 35.9),
    "hotrain-memory+checkpoint": (2.3, 43.2),
}
SVG = "{http://www.w3.org/2000/svg}"


def test_the_front_is_what_none_beats_in_both() -> None:
    front = ["exact+compile+offload", "hotrain-memory+checkpoint", "hotrain-memory", "hotrain-all", "hotrain"]
    assert undominated(POINTS) == front
    assert undominated({"a": (1.0, 2.0), "b": (1.0, 2.0), "c": (1.0, 3.0)}) == ["a", "b"], "equals beat each other not"


def test_a_file_by_itself_in_light_and_dark() -> None:
    text = draw_steps(POINTS, "a model")
    assert text == draw_steps(POINTS, "a model"), "the same points, the same file: make docs --check compares them"
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    style, drawing = text.split("</style>", 1)
    light, dark = style.split("prefers-color-scheme:dark")
    used = set(re.findall(r"var\((--[\w-]+)\)", text))
    assert {name for name in used if f"{name}:" not in light or f"{name}:" not in dark} == set()
    assert not set(re.findall(r"#[0-9a-f]{6}\b", drawing)), "colours that do not follow the mode"
    assert not re.search(r"https?:", text.replace('xmlns="http://www.w3.org/2000/svg"', ""))


def test_every_variant_is_named_once_and_the_slow_one_has_its_time() -> None:
    root = ElementTree.fromstring(draw_steps(POINTS, "a model"))
    texts = ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]
    for name in POINTS:
        assert texts.count("exact+compile+offload, 412 ms" if name == "exact+compile+offload" else name) == 1
    numbers = [float(text) for text in texts if re.fullmatch(r"[0-9.]+", text)]
    assert max(numbers) <= 2 * 32.6 * 1.1, "one slow variant must not flatten the others"


def test_one_point_is_a_figure_and_none_is_refused() -> None:
    assert "hotrain-memory" in draw_steps({"hotrain-memory": (3.0, 30.0)}, "a model")
    with pytest.raises(ValueError, match="a model: no variant was measured"):
        draw_steps({}, "a model")
