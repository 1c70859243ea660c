"""The notebook's cells run in order; of one epoch here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples/hotrain_in_five_minutes.ipynb"


def test_the_cells_run_and_show_less_memory() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in cells), "commit it without outputs"
    names: dict[str, Any] = {}
    for cell in cells:
        source = "".join(cell["source"])
        exec(compile(source.replace("EPOCHS = 8", "EPOCHS = 1"), str(NOTEBOOK), "exec"), names)
    assert names["EPOCHS"] == 1
    assert names["after"] < 0.6 * names["before"]
    assert names["report"].converted
    assert names["report"].ran(), "the converted layers ran"
