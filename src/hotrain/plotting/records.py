"""The records of a demo or a comparison on disk, from which all figures are drawn.

Two files in one folder. ``summary.json`` is the public interface: ``{"rows": [...], ...}`` with the conditions of the
measurement beside the rows. ``records.json`` has the other data of the report.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotrain.files import parse_json, read_text, write_text

SUMMARY = "summary.json"
RECORDS = "records.json"
VERSION = 2
"""Of both files. Files of version 1 say none; they lack the default, the test images and what ran in the layers."""

ROW_FIELDS = ("model", "method", "seed", "accuracy", "saved_bytes", "bit_ops", "step_ms")
"""The fields of a row: accuracy in percent; bytes kept between forward and backward of one batch; bit
operations and median milliseconds of one training step. Where the run failed they are ``None``. A row may also
have ``layers``: what ran, read off the model after the run, one dict for the layers that did the same."""

Test = tuple[Callable[[Any], bool], str]  # of a value, and what it accepts


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _lists(test: Test) -> Test:
    return lambda value: isinstance(value, list) and all(map(test[0], value)), f"a list, each {test[1]}"


def _tables(test: Test) -> Test:
    return lambda value: isinstance(value, dict) and all(map(test[0], value.values())), f"an object, each {test[1]}"


def _or_none(test: Test) -> Test:
    return lambda value: value is None or test[0](value), f"{test[1]} or null"


TEXT: Test = (lambda value: isinstance(value, str), "text")
NUMBER: Test = (_is_number, "a finite number")
WHOLE: Test = (lambda value: type(value) is int and abs(value) < 2**63, "a whole number")
MEASURED = _or_none(NUMBER)
PLAIN: Test = (lambda value: not isinstance(value, (dict, float)) or _is_number(value), "no object")

FIELDS: dict[str, dict[str, Test]] = {
    "rows": {"model": TEXT, "method": TEXT, "seed": WHOLE, **dict.fromkeys(ROW_FIELDS[3:], MEASURED)},
    "curves": {
        **{"model": TEXT, "method": TEXT, "seed": WHOLE, "epoch": _lists(NUMBER)},
        **dict.fromkeys(("accuracy", "loss"), _lists(MEASURED)),
    },
    "memory": {"model": TEXT, "method": TEXT, "total": NUMBER, "by_operator": _tables(NUMBER)},
    "spectrum": {"model": TEXT, "layer": TEXT, "tensor": TEXT, "energy": _lists(NUMBER)},
}
"""The fields that a record has to have."""

OPTIONAL: dict[str, Test] = {"layers": _or_none(_lists(_tables(PLAIN)))}
"""Of a row."""

META: dict[str, Test] = {
    **dict.fromkeys(("title", "default", "command", "device", "commit"), _or_none(TEXT)),
    "seconds": NUMBER,
    "test_images": _tables(WHOLE),
    "methods": _tables(TEXT),
    "models": _tables(_tables(PLAIN)),
    "notes": _lists(TEXT),
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
        return _distinct(row["model"] for row in self.rows)

    def methods(self) -> list[str]:
        """Method names in the order of the rows."""
        return _distinct(row["method"] for row in self.rows)

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

    Args:
        folder: with both files.

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


def _check(where: str, values: Mapping[str, Any], tests: Mapping[str, Test]) -> None:
    for name, (accepts, accepted) in tests.items():
        if name in values and not accepts(values[name]):
            raise ValueError(f"{where}: {name} is {str(values[name])[:80]!r}, accepted is {accepted}")


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


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
