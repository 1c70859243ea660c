"""Tables are as wide as they need to be, and on a terminal as wide as it is, with no word torn."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

from hotrain.tables import bytes_text, parse_bytes, table

HEADERS = ["layer", "why", "bytes"]
ROWS = [
    ["stages.3.blocks.11.attn.qkv_projection", "its layer stays exact: 24 channels, fewer than 32", "1.50 MiB"],
    ["head", "classification head", "–"],
]


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda fallback=(80, 24): os.terminal_size((width, 24)))


def test_elsewhere_every_row_is_a_line() -> None:
    lines = table(HEADERS, ROWS).splitlines()
    assert len(lines) == 2 + len(ROWS)
    assert lines[2] == f"{ROWS[0][0]}  {ROWS[0][1]}  {ROWS[0][2]}"
    assert lines[3].endswith("       –"), "a missing number stands under the numbers"


@pytest.mark.parametrize("width", [100, 80, 60, 45])
def test_on_a_terminal_no_line_is_longer(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    on_a_terminal(monkeypatch, width)
    text = table(HEADERS, ROWS)
    assert max(map(len, text.splitlines())) <= width
    for word in (
        "its",
        "layer",
        "stays",
        "exact:",
        "channels,",
        "fewer",
        "classification",
        "MiB",
        "stages.",
        "blocks.",
    ):
        assert word in text, f"{word!r} is torn"


def test_numbers_are_broken_last_and_a_table_that_fits_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = table(HEADERS, ROWS)
    on_a_terminal(monkeypatch, 60)
    assert "1.50 MiB" in table(HEADERS, ROWS)
    on_a_terminal(monkeypatch, 200)
    assert table(HEADERS, ROWS) == wide


def test_what_cannot_be_broken_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer columns than words have letters: a long line is better than a torn one."""
    on_a_terminal(monkeypatch, 10)
    assert "classification" in table(HEADERS, ROWS)


def test_no_rows_and_empty_cells() -> None:
    assert table(["a", "b"], []) == "a  b\n─  ─"
    assert table(["a", "b"], [["", ""]]) == "a  b\n─  ─\n"


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (2**31, "2.00 GiB")])
def test_one_unit_everywhere(count: int, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GB", 24 * 10**9),
        ("24GiB", 24 * 2**30),
        ("800MB", 800 * 10**6),
        ("1.5 gib", 3 * 2**29),
        ("64k", 64000),
        ("1000", 1000),
        ("12B", 12),
        (16 * 2.0**30, 2**34),
    ],
)
def test_sizes(text: str | float, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "0GB", "-1GB", "24 apples", "iB", "1e9", "24"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="24GB"):
        parse_bytes(text)
