"""tools/formats_table.py: the formats of every operator, printed from records, the latest run of each model."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hotrain.compress import formats

TOOLS = str(Path(__file__).resolve().parents[1] / "tools")


@pytest.fixture(scope="module")
def formats_table() -> Iterator[ModuleType]:
    sys.path.insert(0, TOOLS)
    try:
        yield importlib.import_module("formats_table")
    finally:
        sys.path.remove(TOOLS)


def measured(subject: str, variant: str, run_id: str = "one", error: float = 0.02, **fields: Any) -> dict[str, Any]:
    """A record with an error of `error`, where two batches differ by half of the gradient."""
    empty = dict.fromkeys(("median_ms", "spread_ms", "peak_bytes", "activation_bytes"))
    model = {"error": error, "persistent": 0.0, "worst_tensor": 0.1234, "noise": 0.5}
    where = {"device": "a CPU", "torch": "2.13.0", "commit": "0123456789abcdef", "command": f"python {run_id}"}
    return {**empty, "bench": "formats", "subject": subject, "variant": variant, "run_id": run_id, "model": model} | (
        where | fields
    )


def write(folder: Path, *rows: dict[str, Any]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "formats_cpu_2026-01-01.jsonl").write_text(text, encoding="utf-8")


def test_without_records_the_command_that_makes_them_is_named(formats_table: ModuleType, tmp_path: Path) -> None:
    for part in (formats_table.operators, formats_table.together):
        assert "`python benchmarks/formats.py" in part(tmp_path)


def test_an_operator_s_line_has_bytes_errors_and_the_share_of_a_batch_s_noise(
    formats_table: ModuleType, tmp_path: Path
) -> None:
    own = {"g_x": {"error": 0.0673, "persistent": 0.00254}, "g_w": {"error": 0.0, "persistent": None}}
    write(tmp_path, measured("small_vit/gelu", "slope 3 bits", bytes_entry=0.375, gradients=own))
    text = formats_table.operators(tmp_path)
    # (0.02 / 0.5)² = 0.16 % of the variance; a gradient without an error is not worth a word.
    line = "| gelu | small_vit | slope 3 bits | 0.38 | g_x 6.7 % (0.25 %) | 2 % | 0 % | 12 % | 0.16 % |"
    assert line in text
    assert "a CPU, PyTorch 2.13.0, commit 0123456789: `python one`" in text
    assert "small_vit" not in formats_table.together(tmp_path)


def test_the_policy_s_format_is_bold_and_no_other(formats_table: ModuleType, tmp_path: Path) -> None:
    entries = {operator: formats.FORMATS[entry] for operator, entry in formats_table.ENTRIES.items()}
    by_input = {"gelu": "gelu", "silu": "curve", "tanh": "saturating"}
    entries |= {operator: f"input {formats.FORMATS[entry]}" for operator, entry in by_input.items()}
    rows = [measured(f"m/{name}", form) for name, today in entries.items() for form in (today, "another")]
    write(tmp_path, *rows)
    text = formats_table.operators(tmp_path)
    assert all(f"| {name} | m | **{form}** |" in text for name, form in entries.items())
    assert "**another**" not in text


def test_every_entry_of_the_policy_is_an_operator_s(formats_table: ModuleType) -> None:
    assert set(formats.FORMATS) == set(formats_table.ENTRIES.values())


def test_an_operator_is_shown_of_the_first_model_that_has_it(formats_table: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, measured("vit/linear", "int8"), measured("llama/linear", "int8"), measured("llama/silu", "int8"))
    text = formats_table.operators(tmp_path)
    assert "| linear | vit |" in text
    assert "| silu | llama |" in text
    assert "| linear | llama |" not in text


def test_of_each_model_the_latest_run_counts(formats_table: ModuleType, tmp_path: Path) -> None:
    write(
        tmp_path,
        measured("vit/all", "policy", "old", error=0.3),
        measured("resnet/all", "policy", "old", error=0.25),
        measured("vit/methods", "hot", "new", error=0.01),
    )
    text = formats_table.together(tmp_path)
    assert "| vit | of the method | hot | 1 % |" in text
    assert "| resnet | exact | policy | 25 % |" in text  # measured once, and not with the others
    assert "30 %" not in text
    assert text.count("* a CPU") == 2  # the conditions of both runs


def test_a_set_that_changes_nothing_for_a_model_is_left_out(formats_table: ModuleType, tmp_path: Path) -> None:
    write(
        tmp_path,
        measured("resnet/all", "int8"),
        measured("resnet/all", "q, k int6"),  # there is no attention
        measured("resnet/all", "conv int4", error=0.1),
        measured("vit/all", "int8"),
    )
    text = formats_table.together(tmp_path)
    assert [line.split(" | ")[2] for line in text.splitlines() if "| exact |" in line] == ["int8", "conv int4", "int8"]


def test_errors_beyond_measure_are_said_to_be_so(formats_table: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, measured("m/gelu", "a", error=4e31), measured("m/gelu", "b", error=3e-6))
    text = formats_table.operators(tmp_path)
    assert "| gelu | m | a | – | – | > 1000 % | 0 % | 12 % | > 1000 % |" in text
    assert "| gelu | m | b | – | – | < 0.001 % | 0 % | 12 % | < 0.001 % |" in text
