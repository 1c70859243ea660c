"""Records: one JSON object a run in ``<out_dir>/runs.jsonl``, and its history as it grows in its own folder."""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from hotrain._version import __version__

RUNS = "runs.jsonl"
METRICS = "metrics.jsonl"


def new_run_id(name: str, method: str, seed: int) -> str:
    """A folder name that no other run has: what, when, and four random hexadecimal digits."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{name}-{method}-s{seed}").strip("-")
    return f"{slug}-{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(2)}"


def append(path: Path, row: dict[str, Any]) -> None:
    """Add one JSON line and force it to disk; a line is written in one piece."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = (json.dumps(row, allow_nan=False, default=str) + "\n").encode()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(handle, line)
        os.fsync(handle)
    finally:
        os.close(handle)


def rewrite(path: Path, rows: list[dict[str, Any]]) -> None:
    """Replace the lines of ``path``: on resume the checkpoint, not the file, says how far the history goes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
    os.replace(temporary, path)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a record file, oldest first; empty when there is none."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


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
