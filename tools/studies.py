"""The studies as Markdown: what their records say of published claims, and tables with every cell, also if not run.

The records are ``benchmarks/results/studies/NAME.jsonl``, which `hotrain study NAME --records` appends to.
"""

from __future__ import annotations

from pathlib import Path

import hotrain_study.tables
from hotrain_study.cells import Study, beside, read_rows
from hotrain_study.studies import studies
from records import COMMANDS, RESULTS, _markdown, folded

from hotrain.presets import DEFAULT

RECORDS = RESULTS / "studies"


def head(folder: Path = RECORDS) -> str:
    """What the records say, in at most ten lines."""
    rows = read_rows(sorted(folder.glob("*.jsonl")))
    return "\n".join(f"* {line}" for line in hotrain_study.tables.head(studies(), rows, DEFAULT))


def study(name: str, folder: Path = RECORDS) -> str:
    """The tables of one study."""
    return tables(studies()[name], folder)


def tables(chosen: Study, folder: Path) -> str:
    """The tables of a study, with what they were measured on below; of one that was not run at all, the cells."""
    rows = read_rows(beside(folder / f"{chosen.name}.jsonl"))
    parts = []
    for table in hotrain_study.tables.tables(chosen, rows):
        if {cell for _, *cells in table.rows for cell in cells if cell} == {hotrain_study.tables.NOT_RUN}:
            methods = ", ".join(method for method, *_ in table.rows)
            parts.append(f"**{table.title}** ({'; '.join(table.headers[1:])}): not run yet, with {methods}.")
            continue
        parts.append(f"**{table.title}**\n\n{_markdown(table.headers, table.rows)}")
        parts += [table.note] if table.note else []
    where = [f"* {line}" for line in hotrain_study.tables.ran_on(chosen, rows)] or [f"* 0 of {len(chosen.cells)} cells"]
    commands = dict.fromkeys(row["command"] for row in chosen.last(rows).values() if "command" in row)
    where += [f"* `{command}`" for command in commands]
    return "\n\n".join([*parts, folded(COMMANDS, where) if commands else "\n".join(where)])
