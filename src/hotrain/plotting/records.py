"""The records of a demo or a comparison on disk, from which all figures are drawn.

Two files in one folder. ``summary.json`` is the public interface: ``{"rows": [...], ...}`` with the conditions of the
measurement beside the rows. ``records.json`` has the other data of the report.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotrain.files import is_a, kind_text, parse_json, read_text, write_text

SUMMARY = "summary.json"
RECORDS = "records.json"
VERSION = 2
"""Of both files. Files of version 1 say none; they lack the default, the test images and what ran in the layers."""

ROW_FIELDS = ("model", "method", "seed", "accuracy", "saved_bytes", "bit_ops", "step_ms")
"""The fields of a row: accuracy in percent; bytes kept between forward and backward of one batch; bit
operations and median milliseconds of one training step. Where the run failed they are ``None``. A row may also
have ``layers``: what ran, read off the model after the run, one dict for the layers that did the same."""

PLAIN = str | int | float | bool | list | None

FIELDS: dict[str, dict[str, Any]] = {
    "rows": {"model": str, "method": str, "seed": int, **dict.fromkeys(ROW_FIELDS[3:], float | None)},
    "curves": {
        **{"model": str, "method": str, "seed": int, "epoch": list[float]},
        **dict.fromkeys(("accuracy", "loss"), list[float | None]),
    },
    "memory": {"model": str, "method": str, "total": float, "by_operator": dict[str, float]},
    "spectrum": {"model": str, "layer": str, "tensor": str, "energy": list[float]},
}
"""The fields that a record has to have, with their types."""

OPTIONAL = {"layers": list[dict[str, PLAIN]] | None}
"""Of a row."""

META: dict[str, Any] = {
    **dict.fromkeys(("title", "default", "command", "device", "commit"), str | None),
    "seconds": float,
    "test_images": dict[str, int],
    "methods": dict[str, str],
    "models": dict[str, dict[str, PLAIN]],
    "notes": list[str],
}
"""The conditions that are more than printed."""


@dataclass(frozen=True)
class Records:
    """Everything one report shows.

    ``meta``: conditions (device, versions, commit, command, seeds, …); ``models``: name → label and description;
    ``test_images``: name → their number; ``default``: the method that `hotrain.convert` used when this was measured;
    ``methods``: name → what it is, in a sentence.
    ``rows``: one per model, method and seed (``ROW_FIELDS``).
    ``curves``: per run, lists over epochs: test accuracy in percent and mean training loss.
    ``memory``: bytes autograd keeps, per model and method: ``total`` and ``by_operator`` (name → bytes).
    ``spectrum``: per layer, 16 fractions: energy of ``tensor`` (``g_y`` or ``x``) by sequency.

    Raises ``ValueError`` when a record lacks a field, or has one of another type.
    """

    meta: Mapping[str, Any]
    rows: list[dict[str, Any]]
    curves: list[dict[str, Any]] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)
    spectrum: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for kind, fields in FIELDS.items():
            records = getattr(self, kind)
            if not isinstance(records, list):
                raise ValueError(f"{kind}: got a {type(records).__name__}, accepted is a list of records")
            for index, record in enumerate(records):
                where = f"{kind}[{index}]"
                if not isinstance(record, dict):
                    raise ValueError(f"{where}: got a {type(record).__name__}, accepted is an object")
                missing = [name for name in fields if name not in record]
                if missing:
                    raise ValueError(f"{where} lacks {', '.join(missing)}; a record has {', '.join(fields)}")
                _check(where, record, {**fields, **(OPTIONAL if kind == "rows" else {})})
        _check("the conditions", self.meta, META)

    def models(self) -> list[str]:
        """Model names in the order of the rows."""
        return list(dict.fromkeys(row["model"] for row in self.rows))

    def methods(self) -> list[str]:
        """Method names in the order of the rows."""
        return list(dict.fromkeys(row["method"] for row in self.rows))

    def default(self) -> str | None:
        """The library's default method when this was measured; None where the records do not say."""
        return self.meta.get("default")

    def method_label(self, method: str) -> str:
        """``method``, marked where it is the default."""
        return f"{method} (default)" if method == self.default() else method

    def label(self, model: str) -> str:
        """What a reader calls ``model``."""
        return str(self.meta.get("models", {}).get(model, {}).get("label", model))

    def save(self, folder: Path) -> None:
        """Write both files into ``folder``, each in one step: a reader never sees half of one."""
        folder.mkdir(parents=True, exist_ok=True)
        rest = {kind: getattr(self, kind) for kind in FIELDS if kind != "rows"}
        _write_json(folder / RECORDS, {"version": VERSION, **rest})
        _write_json(folder / SUMMARY, {"version": VERSION, "rows": self.rows, **self.meta})


def load_records(folder: Path | str) -> Records:
    """The records of ``folder``. ``records.json`` may be absent: the report then lacks its sections.

    Raises:
        ValueError: ``summary.json`` is missing, is not JSON or lacks fields, or a file was written by a later version
            of hotrain.
    """
    folder = Path(folder)
    summary = _read_json(folder / SUMMARY)
    if not isinstance(summary.get("rows"), list):
        raise ValueError(f"{folder / SUMMARY}: no list under 'rows'; write it with `hotrain compare` or `hotrain demo`")
    rest = _read_json(folder / RECORDS) if (folder / RECORDS).exists() else {}
    kinds = {kind: rest.get(kind, []) for kind in FIELDS if kind != "rows"}
    meta = {key: value for key, value in summary.items() if key not in ("version", "rows")}
    try:
        return Records(meta=meta, rows=summary["rows"], **kinds)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def curve(history: Sequence[Mapping[str, Any]], **run: Any) -> dict[str, Any]:
    """A record of ``curves``: what says which run it is, and lists over the rows of its history."""
    fields = {"epoch": "epoch", "accuracy": "accuracy", "loss": "train_loss"}
    return {**run, **{name: [row[field] for row in history] for name, field in fields.items()}}


def _check(where: str, values: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    for name, kind in kinds.items():
        if name in values and not is_a(values[name], kind):
            raise ValueError(f"{where}: {name} is {str(values[name])[:80]!r}, accepted is {kind_text(kind)}")


def _write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ValueError(f"{path} is missing; run `hotrain demo` or `hotrain compare` first, or name its folder")
    text = read_text(path)
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); delete it and measure again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}; an object with 'rows' is accepted")
    version = value.get("version", 1)
    if version not in range(1, VERSION + 1):
        raise ValueError(f"{path}: records of version {version!r}, accepted are 1 to {VERSION}; update hotrain")
    return value
