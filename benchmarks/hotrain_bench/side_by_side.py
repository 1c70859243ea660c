"""Variants prepared in parallel processes and timed one after the other on their GPU.

Tracing and compiling take a minute of CPU time, timing takes a second of the GPU. A process signals that it is ready to
be timed, waits until all are ready, and then for its turn. A waiting process is idle.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER, PLACE, COUNT = "HOTRAIN_BENCH_FOLDER", "HOTRAIN_BENCH_PLACE", "HOTRAIN_BENCH_COUNT"
BEFORE = "HOTRAIN_BENCH_BEFORE"  # comma-separated numbers of the parts with earlier turns; default: all lower numbers


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
    before = [int(other) for other in os.environ[BEFORE].split(",") if other] if BEFORE in os.environ else range(place)
    while not all((folder / f"done.{other}").exists() for other in before):
        time.sleep(0.02)
    try:
        yield True
    finally:
        (folder / f"done.{place}").touch()


def together(
    parts: Sequence[tuple[str, str]],
    options: Sequence[str],
    seconds: float | None = None,
    waits: Sequence[float] | None = None,
    gpus: Sequence[int] | None = None,
) -> Iterator[dict[str, Any]]:
    """Run ``hotrain bench step`` for several parts, prepared in parallel and timed in their order.

    Args:
        parts: (subject, variant) pairs.
        options: command-line options for every part.
        seconds: after this time parts that are not ready are stopped, and the others get their turns; None: never.
        waits: seconds to wait before each part is started.
        gpus: the GPU of each part; the turns of different GPUs are independent.

    Yields:
        The records, each with the conditions of its own process. A part that ends without a record gives one with its
        error.
    """
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, FOLDER: name, COUNT: str(len(parts))}
        running = []
        for place, (subject, variant) in enumerate(parts):
            time.sleep(waits[place] if waits else 0.0)
            argv = [sys.executable, "-m", "hotrain.cli.main", "bench", "step", subject, "--variants", variant]
            argv += ["--once", "--out", str(folder / f"{place}.jsonl"), *options]
            own = environment | {PLACE: str(place)}
            if gpus is not None:
                own["CUDA_VISIBLE_DEVICES"] = str(gpus[place])
                own[BEFORE] = ",".join(str(other) for other in range(place) if gpus[other] == gpus[place])
            with (folder / f"{place}.log").open("w") as log:
                running.append(subprocess.Popen(argv, env=own, stdout=log, stderr=subprocess.STDOUT))
        try:
            while sum(_runs(process, folder, place) for place, process in enumerate(running)):
                time.sleep(0.05)
                if time.monotonic() > deadline:
                    deadline = math.inf
                    for place, process in enumerate(running):
                        if not (folder / f"ready.{place}").exists():
                            with (folder / f"{place}.log").open("a") as log:
                                log.write(f"\nTimeoutError: not ready after {seconds:g} seconds\n")
                            process.kill()
        finally:
            for process in running:
                process.kill()
        for place, (subject, variant) in enumerate(parts):
            path = folder / f"{place}.jsonl"
            rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
            if not rows:
                last = (folder / f"{place}.log").read_text().strip().splitlines()[-1:]
                failed = dict.fromkeys(("median_ms", "spread_ms", "peak_bytes", "activation_bytes"))
                what = {"bench": "step", "subject": subject, "variant": variant, "round": 1}
                rows = [failed | what | {"error": " ".join(last)}]
            yield from rows


def _runs(process: subprocess.Popen[bytes], folder: Path, place: int) -> bool:
    """Whether the process still runs; if it has ended, mark it as done so that the others do not wait for it."""
    if process.poll() is None:
        return True
    for what in ("ready", "done"):
        (folder / f"{what}.{place}").touch()
    return False
