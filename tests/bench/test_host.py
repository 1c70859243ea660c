"""`benchmarks/host.py`: every variant runs what it names, and has a record."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "host.py"


def test_every_variant_has_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FILE.parent))
    spec = importlib.util.spec_from_file_location("host", FILE)
    assert spec is not None
    assert spec.loader is not None
    host = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(host)
    out, sizes = tmp_path / "records.jsonl", ["--tokens", "32", "--inputs", "16", "--outputs", "16", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["host.py", "--device", "cpu", *sizes, "--commit", "c", "--out", str(out)])
    converted = []
    plain = host.built
    monkeypatch.setattr(host, "built", lambda *args: converted.append(plain(*args)) or converted[-1])
    assert host.main() == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["variant"] for row in rows] == list(host.VARIANTS)
    assert all(row["median_ms"] > 0 and row["commit"] == "c" for row in rows)
    exact, *others = converted
    assert not hasattr(exact, "_hotrain")
    assert [layer._hotrain.ran.method.name for layer in others] == [
        name.partition(":")[0] for name in host.VARIANTS[1:]
    ]
