"""Timing: interleaved variants, so that ratios compare measurements close in time; medians with their spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Work = Callable[[], object]

L2_BYTES = 64 << 20  # larger than the L2 cache of the GPUs measured on (H200: 60 MB)
MOST_SETS = 4


class Clock(Protocol):
    """A device's clock: time marks, and the milliseconds between two of them after `wait`."""

    def mark(self) -> Any:
        """Record the time after the work queued so far."""

    def wait(self) -> None:
        """Synchronize with the device."""

    def ms(self, begin: Any, end: Any) -> float:
        """Return the milliseconds between two marks."""
        ...


class CudaEvents:
    """The GPU's clock, by CUDA events."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        torch.cuda.synchronize()

    def ms(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end)


class WallClock:
    """The host's clock, for devices without asynchronous execution."""

    def mark(self) -> float:
        return time.perf_counter()

    def wait(self) -> None:
        pass

    def ms(self, begin: float, end: float) -> float:
        return (end - begin) * 1e3


def clock_of(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return CudaEvents() if device.type == "cuda" else WallClock()


@dataclass(frozen=True)
class Times:
    """Median of the repeats, and the range from the 20th to the 80th percentile, in milliseconds."""

    median_ms: float
    spread_ms: float

    @classmethod
    def of(cls, times: Sequence[float]) -> Times:
        """Summarize times in milliseconds."""
        ordered = sorted(times)
        spread = ordered[int(0.8 * (len(ordered) - 1))] - ordered[int(0.2 * (len(ordered) - 1))]
        return cls(statistics.median(ordered), spread)


def interleaved(
    works: Mapping[str, Work], repeats: int, clock: Clock, share: int = 1, halfway: Work | None = None
) -> dict[str, Times]:
    """Time several works in rounds of one call each, after one round that does not count.

    Args:
        works: callables by name.
        repeats: number of rounds.
        clock: the device's clock.
        share: units of work per call; times are per unit.
        halfway: called once between two rounds in the middle.

    Returns:
        Times by name.
    """
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in works}
    for number in range(repeats + 1):
        if halfway is not None and number == repeats // 2 + 1:
            halfway()
        for name, work in works.items():
            begin = clock.mark()
            work()
            end = clock.mark()
            if number:
                marks[name].append((begin, end))
    clock.wait()
    return {name: Times.of([clock.ms(*pair) / share for pair in pairs]) for name, pairs in marks.items()}


def in_graph(work: Work) -> Work:
    """Capture the work in a CUDA graph, without launch overhead; return its replay. Its inputs must stay alive."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def sets_past_cache(nbytes: int, device: torch.device) -> int:
    """Return how many sets of inputs to cycle through so that none is still in the GPU's L2 cache when it is used.

    Args:
        nbytes: bytes of one set.
        device: the device; 1 on a CPU.
    """
    if device.type != "cuda":
        return 1
    return min(MOST_SETS, 1 + -(-L2_BYTES // max(1, nbytes)))


def over(inputs: Sequence[Any], run: Callable[[Any], object]) -> Work:
    """Return the work of calling ``run`` on each set of inputs; results are freed at once."""

    def work() -> None:
        for each in inputs:
            run(each)

    return work
