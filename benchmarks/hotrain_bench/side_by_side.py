"""Variants prepared in parallel processes and timed one after the other on their GPU.

Tracing and compiling take a minute of CPU time, timing takes a second of the GPU. A process signals that it is ready to
be timed, waits until all are ready, and then for its turn. A waiting process is idle.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER, PLACE, COUNT = "HOTRAIN_BENCH_FOLDER", "HOTRAIN_BENCH_PLACE", "HOTRAIN_BENCH_COUNT"
BEFORE = "HOTRAIN_BENCH_BEFORE"  # comma-separated numbers of the parts with earlier turns
LOCK = "HOTRAIN_BENCH_LOCK"  # file that a process locks while it takes memory for a moment
AT_ONCE = 2  # processes on a GPU that may do so
ALONE = "HOTRAIN_BENCH_ALONE"  # file that a process locks while it times something before its turn
PROGRAM = (sys.executable, "-m", "hotrain.cli", "bench", "step")
BYTES = {
    "peak_bytes": "peak GiB",
    "reserved_bytes": "reserved GiB",
    "activation_bytes": "activations GiB",
    "above_bytes": "above state GiB",
}
MEASURED = ("median_ms", "spread_ms", *BYTES)


def blank(subject: str, variant: str, steps: int, tiny: bool) -> dict[str, Any]:
    """Return the record of a variant before it is measured.

    Args:
        subject: name of the task.
        variant: name of the variant.
        steps: timed steps.
        tiny: the size for tests.
    """
    row = {"bench": "step", "subject": subject, "variant": variant, "round": 1, "steps": steps, "tiny": tiny}
    return dict.fromkeys(MEASURED) | row | {"error": None}


@contextmanager
def turn() -> Iterator[bool]:
    """Context in which this process has the GPU to itself.

    Yields:
        Whether the process had to wait.
    """
    if FOLDER not in os.environ:
        yield False
        return
    folder, place = Path(os.environ[FOLDER]), int(os.environ[PLACE])
    (folder / f"ready.{place}").touch()
    while not all((folder / f"ready.{other}").exists() for other in range(int(os.environ[COUNT]))):
        time.sleep(0.02)
    while not all((folder / f"done.{other}").exists() for other in os.environ[BEFORE].split(",") if other):
        time.sleep(0.02)
    try:
        yield True
    finally:
        (folder / f"done.{place}").touch()


@contextmanager
def briefly() -> Iterator[None]:
    """Context that at most `AT_ONCE` processes of a GPU are in, for work that needs its memory only for a moment."""
    with _locked(LOCK):
        yield


@contextmanager
def alone() -> Iterator[None]:
    """Context that one process of a GPU is in, for what is timed while the others prepare: the times of plans."""
    with _locked(ALONE):
        yield


@contextmanager
def _locked(variable: str) -> Iterator[None]:
    """Context that holds the file which an environment variable names; without it there is nobody to wait for."""
    if variable not in os.environ:
        yield
        return
    with Path(os.environ[variable]).open("w") as file:  # a process that dies releases the lock
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def together(
    parts: Sequence[tuple[str, str]],
    device: str,
    steps: int,
    tiny: bool = False,
    seconds: float | None = None,
    gpus: int = 1,
) -> Iterator[dict[str, Any]]:
    """Run ``hotrain bench step`` for several parts, prepared in parallel and timed in their order.

    Args:
        parts: (subject, variant) pairs.
        device: the device to measure on.
        steps: timed steps of each part.
        tiny: the size for tests.
        seconds: after this time parts that are not ready are stopped, and the others get their turns; None: never.
        gpus: number of GPUs that the subjects are distributed over; the turns of different GPUs are independent.

    Yields:
        The records as the parts end, each with the conditions of its own process. A part that ends without a record
        gives one with its error.
    """
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    subjects = list(dict.fromkeys(subject for subject, _ in parts))
    gpu = [subjects.index(subject) % gpus for subject, _ in parts]
    options = ["--once", "--device", device, "--steps", str(steps), *(["--tiny"] if tiny else [])]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        running: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for place, (subject, variant) in enumerate(parts):
                before = [other for other in range(place) if gpu[other] == gpu[place]]
                own = {FOLDER: name, COUNT: str(len(parts)), PLACE: str(place), BEFORE: ",".join(map(str, before))}
                own[LOCK] = str(folder / f"lock.{gpu[place]}.{len(before) % AT_ONCE}")
                own[ALONE] = str(folder / f"alone.{gpu[place]}")
                if gpus > 1:
                    own["CUDA_VISIBLE_DEVICES"] = str(gpu[place])
                argv = [*PROGRAM, subject, "--variants", variant, *options, "--out", str(folder / f"{place}.jsonl")]
                with (folder / f"{place}.log").open("w") as log:
                    process = subprocess.Popen(argv, env=os.environ | own, stdout=log, stderr=subprocess.STDOUT)
                running[place] = process
            late: dict[int, str] = {}
            while running:
                time.sleep(0.05)
                for place, process in list(running.items()):
                    if process.poll() is None:
                        continue
                    del running[place]
                    for what in ("ready", "done"):  # so that the others do not wait for it
                        (folder / f"{what}.{place}").touch()
                    path = folder / f"{place}.jsonl"
                    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
                    error = late.get(place) or _last_words(folder / f"{place}.log", process.returncode)
                    yield from rows or [blank(*parts[place], steps, tiny) | {"error": error}]
                if time.monotonic() > deadline:
                    deadline = math.inf
                    for place, process in running.items():
                        if not (folder / f"ready.{place}").exists():
                            late[place] = f"TimeoutError: not ready after {seconds:.3g} seconds"
                            process.kill()
        finally:
            for process in running.values():
                process.kill()
                process.wait()


def _last_words(log: Path, returncode: int) -> str:
    """Why a process has ended without a record: the signal or exit code, and the last line that it wrote."""
    how = f"ended by {signal.Signals(-returncode).name}" if returncode < 0 else f"ended with exit code {returncode}"
    return ": ".join([how, *log.read_text(errors="replace").strip().splitlines()[-1:]])
