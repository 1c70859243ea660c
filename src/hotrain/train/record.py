"""Records: one JSON object per run in ``<out_dir>/runs.jsonl``, and each run's history in its own folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import re
import secrets
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from hotrain._version import __version__
from hotrain.files import digest, parse_json, read_text, write_text

VERSION = 3  # of the rows of RUNS, under "record"; 1 had no version, 2 no checksum
RUNS = "runs.jsonl"
METRICS = "metrics.jsonl"
LOCK = ".lock"


def new_run_id(name: str, method: str, seed: int) -> str:
    """Make a unique folder name: name, method, seed, time and four random hexadecimal digits."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{name}-{method}-s{seed}").strip("-")[:200]  # names have 255 bytes
    return f"{slug}-{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(2)}"


@contextlib.contextmanager
def held(path: Path, otherwise: str) -> Iterator[None]:
    """Hold the lock of the file ``path``, which is created. It is released when this process ends.

    Raises:
        ValueError: another process holds it; ``otherwise`` is the message.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not _flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB):
            raise ValueError(otherwise)
        yield
    finally:
        os.close(handle)


def _flock(handle: int, how: int) -> bool:
    """Whether the lock was acquired. Always True on file systems without locks."""
    try:
        fcntl.flock(handle, how)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    return True


def append(path: Path, row: dict[str, Any]) -> None:
    """Append one JSON line atomically and sync it to disk, also while other processes append.

    An incomplete last line, of a killed process or a full disk, is removed first with a warning.

    Args:
        path: the file; its folder is created.
        row: finite JSON values; others are written as strings.

    Raises:
        OSError: the line cannot be written; the file is as before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    line = (json.dumps(row, allow_nan=False, default=str) + "\n").encode()
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        _flock(handle, fcntl.LOCK_EX)
        end = _repair_end(handle, path)
        try:
            written = 0
            while written < len(line):
                written += os.write(handle, line[written:])
            os.fsync(handle)
        except OSError as error:
            os.ftruncate(handle, end)
            raise OSError(error.errno, f"a record could not be written ({error.strerror})", str(path)) from error
    finally:
        os.close(handle)


def signed(row: dict[str, Any]) -> dict[str, Any]:
    """The row as finite JSON data, other values as strings, with its checksum under ``sha256``, for `read`."""
    plain = json.loads(json.dumps(row, allow_nan=False, default=str))
    return {**plain, "sha256": digest(plain)}


def _repair_end(handle: int, path: Path) -> int:
    """Make the file end with a complete line; returns its size."""
    end = os.fstat(handle).st_size
    start = end  # of what follows the last line break
    tail = b""
    while start and b"\n" not in tail:
        size = min(start, 1 << 16)
        start -= size
        tail = os.pread(handle, size, start) + tail
    keep = tail.rfind(b"\n") + 1
    torn = tail[keep:]
    if not torn:
        return end
    try:
        parse_json(torn.decode(errors="replace"))
    except ValueError:
        end = start + keep
        os.ftruncate(handle, end)
        warnings.warn(f"{path}: removed {len(torn)} bytes of a record that was not written to its end", stacklevel=3)
        return end
    return end + os.write(handle, b"\n")  # complete except for its line break


def rewrite(path: Path, rows: list[dict[str, Any]]) -> None:
    """Replace all lines of ``path``, as on resume, where the file may be ahead of the checkpoint."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))


def read(path: Path) -> list[dict[str, Any]]:
    """Read a record file.

    The key ``record`` of a row is its version; without it the version is 1. A line that is not JSON (an incomplete
    write), or does not have the checksum that was written with it, is left out with a warning.

    Returns:
        The rows, oldest first; empty if there is no file.

    Raises:
        ValueError: a record of a later version, or no regular file.
    """
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(read_text(path, errors="replace").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            warnings.warn(f"{path} line {number} is not a record and is left out", stacklevel=2)
            continue
        version = row.get("record", 1)
        if version not in range(1, VERSION + 1):
            raise ValueError(f"{path} line {number}: record of version {version!r}, this version reads 1 to {VERSION}")
        contents = {name: row[name] for name in row if name != "sha256"}
        if (version == VERSION or "sha256" in row) and row.get("sha256") != digest(contents):
            warnings.warn(f"{path} line {number} is damaged (its checksum is another) and is left out", stacklevel=2)
            continue
        rows.append(row)
    return rows


def environment(device: torch.device) -> dict[str, Any]:
    """Return what a run ran on: versions, device, threads, commit and command."""
    versions = {"hotrain": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in ("timm", "peft", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "versions": versions,
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "commit": commit(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*:(.*)", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.is_file() else None
    return named[1].strip() if named else platform.processor() or platform.machine()


def commit() -> str | None:
    """Return the commit of this checkout, with ``+`` for uncommitted changes; None outside of git."""
    describe = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(describe, cwd=here, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
