"""`benchmarks/scaling.py`: one process and FSDP2 take the same steps, and a record says what was measured."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

FILE = Path(__file__).parents[2] / "benchmarks" / "scaling.py"


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script, where torchrun started one process."""
    settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    spec = importlib.util.spec_from_file_location("scaling", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo, of what FSDP2 gathered
def test_every_way_takes_the_same_steps(
    scaling: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ways differ in communication alone, so in one process their losses are the same numbers: eager code, the
    same weights, batches and draws."""
    out = tmp_path / "records.jsonl"
    words = [
        "--subjects",
        "vit_base_patch16_224/b128",
        "--tiny",
        "--steps",
        "1",
        "--rounds",
        "1",
        "--ways",
        "one,fsdp2",
    ]
    monkeypatch.setattr(
        sys, "argv", ["benchmarks/scaling.py", *words, "--backend", "eager", "--out", str(out), "--commit", "c"]
    )
    assert scaling.main() == 0, capsys.readouterr().out
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["way"], row["variant"]) for row in rows] == [
        (w, v) for w in ("one", "fsdp2") for v in scaling.VARIANTS
    ]
    for variant in scaling.VARIANTS:
        (losses,) = {(row["first_loss"], row["last_loss"]) for row in rows if row["variant"] == variant}
        assert losses[1] < losses[0], "trained"
    exact, converted = ([row for row in rows if row["variant"] == v] for v in scaling.VARIANTS)
    assert exact[0]["first_loss"] == converted[0]["first_loss"]
    assert exact[0]["last_loss"] != converted[0]["last_loss"], "backward was converted"
    for row in rows:
        assert row["median_ms"] > 0
        assert (row["processes"], row["error"], row["commit"]) == (1, None, "c")
    for one in (exact, converted):
        assert [row["scaling"] for row in one] == [round(one[0]["median_ms"] / r["median_ms"], 3) for r in one]
