"""How work is timed: variants in turn, so that a ratio compares neighbours in time; medians with their spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Work = Callable[[], object]

L2_BYTES = 64 << 20  # larger than the cache of any GPU this is run on (H200: 60 MB)
MOST_SETS = 4


class Clock(Protocol):
    """Marks on the device's time line, and the milliseconds between two of them once the work is done."""

    def mark(self) -> Any: ...

    def wait(self) -> None: ...

    def ms(self, begin: Any, end: Any) -> float: ...


class CudaEvents:
    """A GPU's own clock."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        torch.cuda.synchronize()

    def ms(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end)


class WallClock:
    """The host's clock, for devices whose work is done when a call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def wait(self) -> None:
        pass

    def ms(self, begin: float, end: float) -> float:
        return (end - begin) * 1e3


def clock_of(device: torch.device) -> Clock:
    return CudaEvents() if device.type == "cuda" else WallClock()


@dataclass(frozen=True)
class Times:
    """The median of the repeats, and the range from the 20th to the 80th percentile."""

    median_ms: float
    spread_ms: float

    @classmethod
    def of(cls, times: Sequence[float]) -> Times:
        ordered = sorted(times)
        spread = ordered[int(0.8 * (len(ordered) - 1))] - ordered[int(0.2 * (len(ordered) - 1))]
        return cls(statistics.median(ordered), spread)


def interleaved(
    works: Mapping[str, Work], repeats: int, clock: Clock, share: int = 1, halfway: Work | None = None
) -> dict[str, Times]:
    """The times of each work, one call of every work a round, `repeats` rounds after one that does not count.

    share: how many units a call does; times are of one unit.  halfway: called between two rounds.
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
    """The work as a CUDA graph: what it takes without the host between its kernels. Its inputs must stay alive."""
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
    """How many sets of inputs of that size to go through in turn so that none is in the cache when its turn comes."""
    if device.type != "cuda":
        return 1
    return min(MOST_SETS, 1 + -(-L2_BYTES // max(1, nbytes)))


def over(inputs: Sequence[Any], run: Callable[[Any], object]) -> Work:
    """One unit of work for each set of inputs; what it returns is dropped at once."""

    def work() -> None:
        for each in inputs:
            run(each)

    return work
