"""The demo, four updates a run: its records have the promised form and do not depend on how many run at a time."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hotrain.cli.demo import METHODS as DEMO_METHODS
from hotrain.cli.demo import notes, pictured
from hotrain.cli.main import app
from hotrain.cli.options import split_names
from hotrain.cli.prepare import configure
from hotrain.plotting.records import ROW_FIELDS
from hotrain.presets import DEFAULT

METHODS = ["exact", "hq8", "hot-unbiased"]
MODELS = ["demo_vit", "demo_resnet"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo")
    result = CliRunner().invoke(app, ["demo", "--quick", "-m", ",".join(METHODS), "--out", str(out), "--jobs", "2"])
    assert result.exit_code == 0, f"{result.stderr}\n{result.exception!r}"
    assert "small ViT" in result.stdout
    assert re.search(r"^\d+:\d\d min in all · wrote ", result.stdout, re.MULTILINE)
    lines = result.stderr.splitlines()
    assert [line.partition("  ")[0] for line in lines] == [f"{number} of 6" for number in range(1, 7)]
    assert str(out / "report.html") in result.stdout
    assert list(out.rglob("*.pt")) == [], "a demo leaves no checkpoints"
    return out


@pytest.mark.slow
def test_summary_has_the_promised_form(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    rows = summary["rows"]
    assert [(row["model"], row["method"]) for row in rows] == [
        (model, method) for model in MODELS for method in METHODS
    ]
    for row in rows:
        assert set(row) - {"layers"} == set(ROW_FIELDS)
        assert row["seed"] == 0
        assert 0 <= row["accuracy"] <= 100
        assert min(row["saved_bytes"], row["bit_ops"], row["step_ms"]) > 0
    assert {"device", "versions", "commit", "command"} <= set(summary)
    assert summary["default"] == DEFAULT == "hq8"
    assert summary["test_images"] == dict.fromkeys(MODELS, 360)
    assert list(summary["methods"]) == METHODS


@pytest.mark.slow
def test_records_hold_all_that_the_report_shows(folder: Path) -> None:
    records = json.loads((folder / "records.json").read_text())
    assert {entry["model"] for entry in records["memory"]} == set(MODELS)
    for kind in ("curves", "spectrum"):
        assert {entry["model"] for entry in records[kind]} == set(MODELS), kind
    assert all(abs(sum(entry["energy"]) - 1) < 1e-6 for entry in records["spectrum"])
    totals = {(entry["model"], entry["method"]): entry["total"] for entry in records["memory"]}
    for row in json.loads((folder / "summary.json").read_text())["rows"]:
        assert totals[row["model"], row["method"]] == row["saved_bytes"], "the figure and the table disagree"


@pytest.mark.slow
def test_report_has_every_section_and_asks_for_nothing(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    titles = re.findall("<h2>(.*?)</h2>", page)
    assert {"Bytes kept and accuracy", "What this means", "Energy by sequency"} <= set(titles)
    assert "Learning curves" not in titles, "of one epoch there is none"
    assert page.count('<svg class="figure"') == 3 * len(MODELS)
    assert page.count('<tr class="default"><th scope="row">') == len(MODELS)
    assert not re.search(r"https?:|<script|<link", page)


@pytest.mark.slow
def test_rows_do_not_depend_on_the_number_of_jobs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for pictures in ("kept", "energy"):
        monkeypatch.setattr(f"hotrain.cli.demo.{pictures}", lambda *_: [])
    words = ["demo", "--quick", "-m", ",".join(METHODS), "--out", str(folder / "again"), "--jobs", "1", "--json"]
    answer = json.loads(CliRunner().invoke(app, words).stdout)
    assert answer["failures"] == []
    assert Path(answer["report"]).is_file()
    again = answer["rows"]
    before = json.loads((folder / "summary.json").read_text())["rows"]
    for row, other in zip(again, before, strict=True):
        assert {**row, "step_ms": None} == {key: other[key] for key in row} | {"step_ms": None}


def test_the_demo_trains_the_default() -> None:
    methods = split_names(DEMO_METHODS, "--methods")
    assert methods[:2] == ["exact", DEFAULT]


@pytest.mark.parametrize(
    ("methods", "found"),
    [
        (["exact", "hot", "hot-unbiased"], "hot"),
        (["exact", "hot:rank=16", "hot:rank=4"], "hot:rank=4"),
        (["exact", "hq8", "luq"], None),
    ],
)
def test_pictures_of_layers_are_of_a_method_that_was_run(methods: list[str], found: str | None) -> None:
    """Full rank has no low-pass to look at."""
    run = pictured(configure("demo_vit"), methods)
    assert (run and run.method_label) == found


def test_notes_name_no_method_that_was_not_run() -> None:
    runs = [configure("demo_vit"), configure("demo_resnet")]
    said = " ".join(notes(runs, ["exact", "hq8"], 2))
    assert not re.search(r"lbp-wht|sequency", said)
    assert "lbp-wht" in " ".join(notes(runs, ["exact", "lbp-wht"], 2))
