"""Records: one JSON object a run in ``<out_dir>/runs.jsonl``, and its history as it grows in its own folder."""

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

VERSION = 2  # of the rows of RUNS, under "record"; 1 had no version
RUNS = "runs.jsonl"
METRICS = "metrics.jsonl"
LOCK = ".lock"


def new_run_id(name: str, method: str, seed: int) -> str:
    """A folder name that no other run has: what, when, and four random hexadecimal digits."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{name}-{method}-s{seed}").strip("-")[:200]  # names have 255 bytes
    return f"{slug}-{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(2)}"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the run's ``folder`` against other processes; it is let go when this process ends, however that ends.

    Raises:
        ValueError: another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not _flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB):
            raise ValueError(f"{folder}: another process is training this run; wait for it, or stop it first")
        yield
    finally:
        os.close(handle)


def _flock(handle: int, how: int) -> bool:
    """Whether the lock was taken. A file system that has no locks gives it to everyone."""
    try:
        fcntl.flock(handle, how)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    return True


def append(path: Path, row: dict[str, Any]) -> None:
    """Add one JSON line and force it to disk: the whole line or nothing, whoever else appends.

    Half a line at the end, of a process that was killed or a disk that was full, is removed first with a warning.

    Raises:
        OSError: the line cannot be written; the file is as before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    line = (json.dumps(row, allow_nan=False, default=str) + "\n").encode()
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        _flock(handle, fcntl.LOCK_EX)
        end = _mend(handle, path)
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


def _mend(handle: int, path: Path) -> int:
    """Make the file end with a whole line; returns its size."""
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
        json.loads(torn)
    except ValueError:
        end = start + keep
        os.ftruncate(handle, end)
        warnings.warn(f"{path}: removed {len(torn)} bytes of a record that was not written to its end", stacklevel=3)
        return end
    return end + os.write(handle, b"\n")  # whole but for its line break


def rewrite(path: Path, rows: list[dict[str, Any]]) -> None:
    """Replace the lines of ``path``: on resume the checkpoint, not the file, says how far the history goes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
    os.replace(temporary, path)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a record file, oldest first; empty when there is none.

    A record says its version under ``record``; one without is of version 1. A line that is not JSON (a write that was
    cut short) is left out with a warning.

    Raises:
        ValueError: a record of a later version.
    """
    if not path.is_file():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if not isinstance(row, dict):
            warnings.warn(f"{path} line {number} is not a record and is left out", stacklevel=2)
            continue
        version = row.get("record", 1)
        if version not in range(1, VERSION + 1):
            raise ValueError(f"{path} line {number}: record of version {version!r}, this version reads 1 to {VERSION}")
        rows.append(row)
    return rows


def conditions(device: torch.device) -> dict[str, Any]:
    """Under what a run was made: versions, device, commit and command."""
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
    """What the device calls itself: the GPU's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of the checkout that this file lies in, with ``+`` for uncommitted changes; None outside of git."""
    here = Path(__file__).resolve().parent
    try:
        head = _git(here, "rev-parse", "HEAD")
        return head + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()
