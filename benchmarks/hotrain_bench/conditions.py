"""Conditions of a measurement (device, versions, clocks, commit, command), and writing its record."""

from __future__ import annotations

import argparse
import contextlib
import platform
import re
import secrets
import shlex
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from hotrain.train import record

PACKAGES = ("triton", "timm", "transformers", "torchao")
# Options that do not change what is measured.
UNRECORDED = ("--out", "-o", "--commit")
FOLDERS = re.compile(r"(?<![\w./])/(?:[^\s/\"']+/)+")  # of an absolute path: they are a machine's own
CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu")


def device_named(name: str | None) -> torch.device:
    """Return the device to measure on.

    Args:
        name: ``cuda``, ``cuda:N`` or ``cpu``; None: ``cuda``.

    Raises:
        ValueError: CUDA without a CUDA device, or another kind of device.
    """
    device = torch.device(name or "cuda")
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"--device: got {name!r}, accepted are cuda, cuda:N and cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("bench: there is no CUDA device here; --device cpu --tiny tries the same code on small shapes")
    return device


def conditions(device: torch.device, argv: Sequence[str], commit: str | None = None) -> dict[str, Any]:
    """Return the fields that all records of one run share.

    Args:
        device: the device measured on.
        argv: the command line of the process.
        commit: overrides the commit that git reports.
    """
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "run_id": secrets.token_hex(4),
        "device": record.device_name(device),
        "torch": torch.__version__,
        "versions": versions,
        "commit": commit or record.commit(),
        "command": command(argv),
        "conditions": {
            "host_threads": torch.get_num_threads(),
            "multiprocessors": torch.cuda.get_device_properties(device).multi_processor_count
            if device.type == "cuda"
            else None,
        },
    }


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """The command line of a script that writes records, described by the first line of its docstring."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--commit", help="commit of the tree, where git does not report it")
    parser.add_argument("--out", type=Path, help="append the records to this file")
    return parser


def command(argv: Sequence[str]) -> str:
    """Return the command line as typed in a checkout, without `UNRECORDED` options and without folders of files."""
    program = Path(argv[0])
    place = f"{program.parent.name}/{program.name}"
    words = ["hotrain"] if program.name == "hotrain" or place == "cli/__main__.py" else ["python", place]
    skip = False
    for word in argv[1:]:
        option, equals, value = word.partition("=")
        if skip or option in UNRECORDED:
            skip = not skip and not equals
            continue
        shown = equals and value.startswith("/")
        words.append(f"{option}={Path(value).name}" if shown else Path(word).name if word.startswith("/") else word)
    return shlex.join(words)


class Clocks:
    """Clocks, power and temperature of a GPU from nvidia-smi, queried while work is queued. Nothing is set.

    Args:
        device: the GPU; on other devices nothing is queried.
    """

    def __init__(self, device: torch.device) -> None:
        self._process: subprocess.Popen[str] | None = None
        if device.type != "cuda":
            return
        # PyTorch's number counts what CUDA_VISIBLE_DEVICES shows; the UUID is the same for both.
        uuid = "GPU-" + str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
        query = ["nvidia-smi", "-i", uuid, f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader"]
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def read(self) -> dict[str, str] | None:
        """Wait for the query; return its values by name, or None if there are none."""
        if self._process is None:
            return None
        try:
            answer, _ = self._process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return None
        cells = [cell.strip() for cell in answer.strip().split(",")]
        return dict(zip(CLOCKS, cells, strict=True)) if len(cells) == len(CLOCKS) else None


def write(out: Path | None, row: dict[str, Any]) -> None:
    """Append one record to the file at once, so that it is kept if a later measurement fails.

    Args:
        out: the JSONL file; None: nothing is written.
        row: the record; the paths in its error lose their folders.
    """
    if out is not None:
        error = row.get("error")
        record.append(out, row | {"error": FOLDERS.sub("", error)} if isinstance(error, str) else row)
