"""Files of JSON and text: written in one step, read with errors that name the file; checksums and types of values."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, Union, get_args, get_origin


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Context whose file takes the place of `path` in one step: that is always the old one or the new one, complete.

    A draft that a killed process has left is written over.

    Raises:
        OSError: it cannot be written, for instance because the disk is full. The old file stays, and nothing else.
    """
    draft = path.with_name(path.name + ".draft")
    try:
        with open(draft, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    # The new name itself must reach the disk too.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file of text in UTF-8, as `replacing` does.

    Raises:
        OSError: as `replacing`.
    """
    with replacing(Path(path)) as file:
        file.write(text.encode())


def read_text(path: str | os.PathLike[str], errors: str = "strict") -> str:
    """Read a file of text in UTF-8; `errors` says what to do with other bytes, as for `open`.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no regular file (a pipe would wait for ever), cannot be read, or is not UTF-8.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file")
    try:
        return path.read_text(encoding="utf-8", errors=errors)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(f"{path} is not UTF-8 (byte 0x{byte:02x} at {error.start})") from error


def parse_json(text: str) -> Any:
    """Parse JSON; every way in which that fails is a ValueError.

    Raises:
        ValueError: the text is not JSON, or is nested deeper than Python's stack.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def digest(value: Any) -> str:
    """SHA-256 of a JSON value, in hexadecimal digits: equal for equal values, whatever the layout of their file."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def is_a(value: Any, kind: Any) -> bool:
    """Whether a value is of a type annotation, as JSON means it: a number is finite, and a bool is no number.

    Args:
        kind: a class, a union, a Literal, ``tuple[T, ...]``, ``list[T]`` or ``dict[str, T]``.
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        return any(is_a(value, each) for each in args)
    if origin is Literal:
        return value in args
    if origin in (list, tuple):
        return isinstance(value, origin) and all(is_a(each, args[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(is_a(each, args[1]) for each in value.values())
    if kind in (int, float):
        numbers = (int,) if kind is int else (int, float)
        return isinstance(value, numbers) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return kind is Any or isinstance(value, kind)


def kind_text(kind: Any) -> str:
    """What `is_a` accepts, for a message."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        return " or ".join(map(kind_text, args))
    if origin is Literal:
        return ", ".join(map(repr, args))
    if kind in (float, types.NoneType):
        return "a finite number" if kind is float else "none"
    return str(kind) if origin else kind.__name__
