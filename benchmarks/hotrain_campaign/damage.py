"""Damage to files: bytes, JSON values, and what may be found at a path in the place of a file."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORDS = [
    "",
    " ",
    "none",
    "null",
    "true",
    "nan",
    "inf",
    "-inf",
    "hot",
    "exact",
    "é",
    "日本語",
    "\u202e",
    "a\nb",
    "🙂" * 50,
]
NUMBERS: list[Any] = [-1, 0, 1, 2, 3, 17, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 0.5, 1e-300, 1e308, 10**400]
NOT_NUMBERS = [float("nan"), float("inf"), -float("inf")]


def _flip(data: bytearray, draw: random.Random) -> None:
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def _replace(data: bytearray, draw: random.Random) -> None:
    data[draw.randrange(len(data))] = draw.randrange(256)


def _several(data: bytearray, draw: random.Random) -> None:
    for _ in range(draw.randrange(2, 40)):
        _replace(data, draw)


def _truncate(data: bytearray, draw: random.Random) -> None:
    del data[draw.randrange(len(data)) :]


def _zero(data: bytearray, draw: random.Random) -> None:
    start = draw.randrange(len(data))
    stop = min(len(data), start + draw.choice((1, 16, 512, 4096)))
    data[start:stop] = bytes(stop - start)


def _cut_out(data: bytearray, draw: random.Random) -> None:
    start = draw.randrange(len(data))
    del data[start : start + draw.choice((1, 2, 16, 300))]


def _repeat(data: bytearray, draw: random.Random) -> None:
    start = draw.randrange(len(data))
    data[start:start] = data[start : start + draw.choice((1, 2, 16, 300))]


def _insert(data: bytearray, draw: random.Random) -> None:
    start = draw.randrange(len(data) + 1)
    data[start:start] = draw.randbytes(draw.choice((1, 2, 16, 300)))


def _append(data: bytearray, draw: random.Random) -> None:
    data += draw.randbytes(draw.choice((1, 2, 16, 300)))


def _foreign(data: bytearray, draw: random.Random) -> None:
    heads = (
        b"",
        b"\x89PNG\r\n\x1a\n",
        b"PK\x03\x04",
        b"\x80\x04",
        b"{",
        b"[" * 100_000,
        b"\xff\xfe",
        b"\x93NUMPY\x01\x00",
    )
    data[:] = draw.choice(heads) + draw.randbytes(draw.choice((0, 10, 1000)))


BYTES: dict[str, Callable[[bytearray, random.Random], None]] = {
    "a bit flipped": _flip,
    "a byte replaced": _replace,
    "several bytes replaced": _several,
    "truncated": _truncate,
    "a stretch of zeros": _zero,
    "a stretch removed": _cut_out,
    "a stretch twice": _repeat,
    "garbage inserted": _insert,
    "garbage appended": _append,
    "another file's bytes": _foreign,
}


def damaged(data: bytes, how: str, draw: random.Random) -> bytes:
    """``data``, not empty, damaged in one of the ways of `BYTES`."""
    changed = bytearray(data)
    BYTES[how](changed, draw)
    return bytes(changed)


def _nested(draw: random.Random) -> Any:
    value: Any = []
    for _ in range(draw.choice((3, 50))):
        value = [value] if draw.random() < 0.5 else {"a": value}
    return value


def some_value(draw: random.Random) -> Any:
    """Any JSON value, among them those that Python writes and JSON does not have."""
    kind = draw.randrange(6)
    if kind == 0:
        return draw.choice(WORDS)
    if kind == 1:
        return draw.choice(NUMBERS)
    if kind == 2:
        return draw.choice(NOT_NUMBERS)
    if kind == 3:
        return draw.choice((None, True, False, [], {}, [[]], [None], {"": None}))
    return _nested(draw) if kind == 4 else "x" * draw.choice((1, 300, 100_000))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Containers of a JSON value, with each of their keys."""
    found: list[tuple[Any, Any]] = []
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            found.append((value, key))
            found += _places(value[key])
    return found


def misshapen(text: str, draw: random.Random) -> tuple[str, str]:
    """JSON with one to three values replaced, removed, added or moved, and what was done."""
    value = json.loads(text)
    done = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = _places(value)
        if not places:
            break
        holder, key = draw.choice(places)
        how = draw.choice(("replace", "replace", "replace", "remove", "add", "copy"))
        if how == "remove":
            del holder[key]
        elif how == "add" and isinstance(holder, dict):
            holder[draw.choice(WORDS)] = some_value(draw)
        elif how == "copy":
            holder[key] = copy.deepcopy(draw.choice(places)[0])
        else:
            holder[key] = some_value(draw)
        done.append(f"{how} {key!r}"[:60])
    return json.dumps(value), ", ".join(done)


def _directory(path: Path, good: Path) -> None:
    path.mkdir()


def _broken_link(path: Path, good: Path) -> None:
    path.symlink_to(path.with_name("absent"))


def _link_to_itself(path: Path, good: Path) -> None:
    path.symlink_to(path)


def _link(path: Path, good: Path) -> None:
    path.symlink_to(good)


def _pipe(path: Path, good: Path) -> None:
    os.mkfifo(path)


def _device(name: str) -> Callable[[Path, Path], None]:
    return lambda path, good: path.symlink_to(name)


# What is at the path in the place of a file.
PLACES: dict[str, Callable[[Path, Path], None]] = {
    "nothing": lambda path, good: None,
    "a directory": _directory,
    "a broken link": _broken_link,
    "a link to itself": _link_to_itself,
    "a link to a good file": _link,
    "a named pipe": _pipe,
    "/dev/null": _device("/dev/null"),
    "/dev/zero": _device("/dev/zero"),
    "/dev/full": _device("/dev/full"),
    "/proc/self/mem": _device("/proc/self/mem"),
}

NAMES = [
    "a b",
    "é.x",
    "日本語",
    "🙂",
    "a'b\"c",
    "-x",
    "--set",
    "[red]x[/red]",
    "%s",
    "{0}",
    "a\nb",
    "x" * 255,
    "x" * 300,
    "\udcff",
    ".",
]
