"""tools/records.py: measured results are printed from records, ratios within one run only."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOLS = str(Path(__file__).resolve().parents[1] / "tools")


@pytest.fixture(scope="module")
def records() -> Iterator[ModuleType]:
    sys.path.insert(0, TOOLS)
    try:
        yield importlib.import_module("records")
    finally:
        sys.path.remove(TOOLS)


def measurement(variant: str, run_id: str, median_ms: float, activation_bytes: int) -> dict[str, Any]:
    return {
        "subject": "vit/fc1",
        "variant": variant,
        "run_id": run_id,
        "median_ms": median_ms,
        "spread_ms": 0.5,
        "peak_bytes": None,
        "activation_bytes": activation_bytes,
        "device": "a device",
        "torch": "2.13.0",
        "commit": "0123456789abcdef",
        "command": "make bench",
    }


def write(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_without_records_the_command_that_makes_them_is_named(records: ModuleType, tmp_path: Path) -> None:
    assert "`make bench`" in records.layers(folder=tmp_path)
    assert "`make demo`" in records.accuracy(tmp_path)


def test_ratios_are_formed_within_one_run(records: ModuleType, tmp_path: Path) -> None:
    write(
        tmp_path / "a.jsonl",
        measurement("exact", "one", 10.0, 1000),
        measurement("hot", "one", 8.0, 250),
        measurement("hot", "two", 5.0, 250),  # another run: no exact beside it, so no ratio
    )
    text = records.layers(folder=tmp_path)
    assert "| vit/fc1 | hot | 8 ± 0.5 | 0.80 | – |  | 250 | 0.25 |" in text
    assert "| vit/fc1 | hot | 5 ± 0.5 |  | – |  | 250 |  |" in text
    assert text.count("a device, PyTorch 2.13.0, commit 0123456789: `make bench`") == 2


def test_a_part_of_the_subjects(records: ModuleType, tmp_path: Path) -> None:
    sums = {**measurement("exact", "one", 40.0, 4000), "subject": "vit/all", "forward_ms": 20.0}
    write(tmp_path / "a.jsonl", measurement("exact", "one", 10.0, 1000), sums)
    text = records.layers("all", folder=tmp_path)
    assert "| vit/all | exact | 40 ± 0.5 |  | 20 |  | 4,000 |  |" in text
    assert "fc1" not in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"a\.jsonl:1 is not JSON"),  # a run that was cut off
        ('{"subject": "fc1"}', r"a\.jsonl:1 lacks variant, run_id"),  # a ratio could not be traced
    ],
)
def test_bad_records_are_refused(records: ModuleType, tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        records.layers(folder=tmp_path)


def test_gaps_are_paired_by_seed(records: ModuleType, tmp_path: Path) -> None:
    def row(method: str, seed: int, accuracy: float | None) -> dict[str, Any]:
        return {"model": "vit", "method": method, "seed": seed, "accuracy": accuracy} | dict.fromkeys(
            ("saved_bytes", "bit_ops", "step_ms"), 2048
        )

    rows = [row("exact", 0, 80.0), row("exact", 1, 90.0), row("hot", 0, 79.0), row("hot", 1, 88.0)]
    rows.append(row("luq", 0, None))  # a failed cell has no accuracy and no line
    meta = {"device": "a device", "versions": {"torch": "2.13.0"}, "commit": "abc", "command": "hotrain compare"}
    (tmp_path / "vit.json").write_text(json.dumps({"rows": rows, **meta}), encoding="utf-8")
    text = records.accuracy(tmp_path)
    # mean of (79−80, 88−90) = −1.5, standard deviation of (−1, −2) = 0.71
    assert "| vit | hot | 83.50 ± 6.36 | -1.50 ± 0.71 | 2 | 2,048 | 2.05e+03 | 2048.0 ± 0.0 |" in text
    assert "luq" not in text
    assert "PyTorch 2.13.0, commit abc: `hotrain compare`" in text
