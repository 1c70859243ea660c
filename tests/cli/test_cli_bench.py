"""`hotrain bench`: records on disk as they come, exit codes, and errors that say what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hotrain_bench import layers, ops, side_by_side, step
from typer.testing import CliRunner, Result

import hotrain
from hotrain.cli.main import app

CPU = ["--device", "cpu", "--tiny"]


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["layers", "--models", "vit_b", "--methods", "hot,hla", "--repeats", "1"], "bf16 ÷ it"),
        (["ops", "--methods", "hot", "--repeats", "1"], "llama8b/down/t64/g_w"),
        (["step", "llama8b-4blocks/t8192", "--variants", "exact", "--steps", "1"], "ms/step"),
    ],
)
def test_a_verb_prints_a_table_and_writes_records(arguments: list[str], shown: str, tmp_path: Path) -> None:
    out = tmp_path / "records.jsonl"
    done = invoke(*arguments, *CPU, "--out", out, "--commit", "abc123")
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
    assert shown in done.stdout
    rows = written(out)
    assert {(row["bench"], row["tiny"], row["commit"]) for row in rows} == {(arguments[0], True, "abc123")}
    assert len({row["run_id"] for row in rows}) == 1


def test_help_names_the_verbs() -> None:
    assert "bench" in CliRunner().invoke(app, ["--help"]).stdout
    text = invoke("--help").stdout
    assert [verb for verb in ("layers", "step", "zoo", "ops") if verb not in text] == []


@pytest.mark.parametrize("verb", ["layers", "step", "zoo", "ops"])
def test_without_a_gpu_one_line_says_what_to_do(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = invoke(verb)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: bench: there is no CUDA device here; --device cpu --tiny")


@pytest.mark.parametrize(("verb", "module"), [("layers", layers), ("ops", ops)])
def test_a_wrong_gradient_is_exit_code_1_and_no_record(
    verb: str, module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: Any) -> Any:
        raise layers.Wrong("vit_b/qkv hot: g_x is off by 1.000, allowed is 0.500; no times")
        yield

    monkeypatch.setattr(module, "run", wrong)
    done = invoke(verb, *CPU, "--out", tmp_path / "r.jsonl")
    assert done.exit_code == 1
    assert done.stderr == "wrong: vit_b/qkv hot: g_x is off by 1.000, allowed is 0.500; no times\n"
    assert not (tmp_path / "r.jsonl").exists()


def test_a_failed_variant_is_recorded_and_is_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured before and after it is printed and kept."""
    error = dict.fromkeys(side_by_side.MEASURED)
    rows = [
        {**error, "subject": "s", "variant": "broken", "error": "ModuleNotFoundError: No module named 'torchao'"},
        {"subject": "s", "variant": "exact", "median_ms": 2.5, "spread_ms": 0.1, "peak_bytes": 1 << 30,
         "reserved_bytes": 3 << 29, "activation_bytes": None, "above_bytes": 1 << 29, "error": None},
    ]  # fmt: skip
    monkeypatch.setattr(step, "run", lambda *_, **__: iter(rows))
    done = invoke("step", *CPU, "--out", tmp_path / "r.jsonl")
    assert done.exit_code == 1
    assert "s broken: ModuleNotFoundError: No module named 'torchao'" in done.stderr
    assert ["s", "(tiny)", "exact", "2.50", "0.10", "1.00", "1.50", "–", "0.50"] in [
        line.split() for line in done.stdout.splitlines()
    ], "small models are named as such"
    assert "the times mean nothing" in done.stdout
    assert [row["variant"] for row in written(tmp_path / "r.jsonl")] == ["broken", "exact"]


@pytest.mark.parametrize(
    "words", [["bench", "layers", "--batch", "3"], ["study", "lora", "--last"], ["prepare", "cifar10", "--out", "d"]]
)
def test_a_package_without_the_tools_says_where_they_are(words: list[str], tmp_path: Path) -> None:
    shutil.copytree(Path(hotrain.__file__).parent, tmp_path / "hotrain")
    command = [sys.executable, "-m", "hotrain.cli", *words]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path})
    assert run.returncode == 2
    assert run.stderr == (
        f"error: hotrain {words[0]}: its tools are not in the package; clone the repository and pip install -e .\n"
    )
