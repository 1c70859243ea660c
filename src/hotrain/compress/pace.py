"""Which blocks of a model stay exact in eager mode on a GPU, so that the host keeps pace with it.

A compressed block takes the GPU about as long as an exact one, and the host two to three times as long. Where the host
takes longer than the GPU, the step takes longer than exact training. So one block of each kind is timed behind the
first training step, which compiles kernels and plans layers: compressed in some steps, then exact in as many, from the
host and from the GPU, which gets other work first, so that it does not wait for the host in between. From then on as
many blocks are compressed as the time allows (`choose`). No block runs more often than the user calls it.
"""

from __future__ import annotations

import functools
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..planning import Roofs, agreed
from ..private import saved_tensor_hooks
from .mode_stack import without_own_modes
from .report import tensors

IN_EAGER = "_hotrain_in_eager"  # of a block: one of
TIMED, EXACT, COMPRESSED = "timed", "exact", "compressed"

_ALLOWED = 1.03  # of exact's time
_MARGIN = 1.2  # of the host's time, which changes from step to step
_WORK_MS = 12.0  # of the GPU before a timed pass: more than the host takes to issue that
_SIZE = 4096  # of the matrices of that work
_LARGEST = 8.0  # times the bytes of a compressed block that an exact one may keep
_FREE = 0.9  # of the free memory that exact blocks may take
_SAMPLES = 3  # of the time of a block, either way: the first one allocates memory
_PATIENCE = 20  # calls of a block after which nothing is timed any more


# ---- the choice ----


@dataclass(frozen=True)
class Cost:
    """What a block costs.

    Attributes:
        host: ms of the host to issue forward, and backward.
        gpu: ms of the GPU to run them.
        nbytes: kept between the two.
    """

    host: tuple[float, float]
    gpu: tuple[float, float]
    nbytes: int


@dataclass(frozen=True)
class Kind:
    """Blocks of one class, with parameters and inputs of equal shapes: how many, and the cost of one."""

    count: int
    exact: Cost
    compressed: Cost

    @property
    def saved(self) -> int:
        """Bytes by which a compressed one keeps less."""
        return self.exact.nbytes - self.compressed.nbytes

    @property
    def worth(self) -> float:
        """These bytes for a ms of the host."""
        return self.saved / max(sum(self.compressed.host) - sum(self.exact.host), 1e-3)


def step_ms(kinds: Sequence[Kind], chosen: Sequence[int], margin: float = 1.0) -> float:
    """Σ over forward and backward of max(host, GPU), for so many compressed blocks of each kind; the host's times a
    margin."""
    ms = 0.0
    for way in (0, 1):
        host = gpu = 0.0
        for kind, count in zip(kinds, chosen, strict=True):
            for times, cost in ((count, kind.compressed), (kind.count - count, kind.exact)):
                host, gpu = host + times * cost.host[way], gpu + times * cost.gpu[way]
        ms += max(margin * host, gpu)
    return ms


def choose(kinds: Sequence[Kind], free: float) -> list[int]:
    """How many blocks of each kind are compressed: as many as leave the step within `_ALLOWED` of exact's time, and
    more where the exact ones would not fit.

    Args:
        kinds: the kinds of blocks.
        free: bytes that the model may keep beyond what it does with all blocks compressed.
    """
    chosen = [0] * len(kinds)
    most = _ALLOWED * step_ms(kinds, chosen)
    order = [n for n in sorted(range(len(kinds)), key=lambda n: -kinds[n].worth) if kinds[n].saved > 0]
    for place in order:
        while chosen[place] < kinds[place].count:
            chosen[place] += 1
            if step_ms(kinds, chosen, _MARGIN) > most:
                chosen[place] -= 1
                break
    for place in order:
        while (
            chosen[place] < kinds[place].count
            and sum((kind.count - count) * kind.saved for kind, count in zip(kinds, chosen, strict=True)) > free
        ):
            chosen[place] += 1
    return chosen


# ---- timing ----


class Gpu:
    """The clock of a GPU, and its memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        own = torch.Generator(device).manual_seed(0)  # the user's draws stay what they are
        self.a = torch.randn(_SIZE, _SIZE, device=device, dtype=torch.bfloat16, generator=own)
        self.b = torch.empty_like(self.a)
        roofs = Roofs.of(device)
        once = 2e3 * _SIZE**3 / (5e14 if roofs is None else roofs.product)
        self.times = max(1, round(_WORK_MS / once))

    def work(self) -> None:
        """Give it work, during which the host issues what is timed."""
        with torch.no_grad():
            for _ in range(self.times):
                torch.mm(self.a, self.a, out=self.b)

    def close(self) -> None:
        """Free the matrices: who keeps a tensor of a timed step keeps its hooks."""
        del self.a, self.b

    def mark(self) -> Any:
        """A point of time in the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def ms(begin: Any, end: Any) -> float:
        """Between two points of time."""
        end.synchronize()
        return float(begin.elapsed_time(end))

    def allocated(self) -> int:
        """Bytes of all tensors."""
        return torch.cuda.memory_allocated(self.device)

    def free(self) -> int:
        """Bytes that a step may take beyond the largest one so far."""
        reserved = torch.cuda.memory_reserved(self.device) - torch.cuda.max_memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + max(0, reserved)


@dataclass
class Timing:
    """A timed forward and backward of a block.

    Attributes:
        gpu: the clock.
        running: the timing that has begun and not ended, of all blocks.
        host: ms of forward, and backward, once they have ended.
        marks: where both begin and end on the GPU.
        nbytes: kept between them.
    """

    gpu: Any
    running: list[Timing]
    host: list[float] = field(default_factory=list)
    marks: list[tuple[Any, Any]] = field(default_factory=list)
    nbytes: int = 0
    began: tuple[Any, float] | None = None

    def forward(self, run: Callable[..., Any], x: Tensor, /, *args: Any, **kwargs: Any) -> Any:
        """The result of the block; x is its argument, with whose gradient backward ends."""
        before = self.gpu.allocated()  # which takes the host as long as a block
        self._begin()
        y = run(*args, **kwargs)
        self._end()
        self.nbytes = self.gpu.allocated() - before
        result = next((t for t in tensors(y) if t.grad_fn is not None and t is not x), None)
        if result is not None:
            result.register_hook(lambda _: self._begin())
            x.register_hook(lambda _: self._end())
        return y

    def _begin(self) -> None:
        for other in list(self.running):  # of the block behind: its x is this result, whose first hook this is
            other._end()
        if not self.complete:
            self.gpu.work()
            self.running.append(self)
            self.began = self.gpu.mark(), time.perf_counter()

    def _end(self) -> None:
        if self.began is not None:
            (mark, began), self.began = self.began, None
            self.host.append(1e3 * (time.perf_counter() - began))
            self.marks.append((mark, self.gpu.mark()))
            self.running.remove(self)

    @property
    def complete(self) -> bool:
        return len(self.host) == 2


def cost(timings: Sequence[Timing]) -> Cost:
    """The medians of several timings of a block."""

    def medians(pairs: Iterable[Sequence[float]]) -> tuple[float, float]:
        forward, backward = zip(*pairs, strict=True)
        return statistics.median(forward), statistics.median(backward)

    gpu = medians([timing.gpu.ms(*pair) for pair in timing.marks] for timing in timings)
    return Cost(medians(timing.host for timing in timings), gpu, timings[-1].nbytes)


@dataclass
class _Blocks:
    """Blocks of a kind, in the order of their first calls, and the timings of one of them."""

    members: list[weakref.ref[nn.Module]] = field(default_factory=list)
    timed: weakref.ref[nn.Module] | None = None
    compressed: list[Timing] = field(default_factory=list)
    exact: list[Timing] = field(default_factory=list)
    given_up: bool = False

    @property
    def complete(self) -> bool:
        return self.given_up or (len(self.exact) == _SAMPLES and self.exact[-1].complete)

    @property
    def waits(self) -> bool:
        """Whether a backward of it has not ended."""
        last = (self.exact or self.compressed)[-1:]
        return bool(last) and not last[0].complete


# ---- the blocks of a model ----


class Pace:
    """The blocks of a model that follows ``plan="speed"``, while they are timed in eager mode.

    Args:
        clock: of a device, with the methods of `Gpu`.

    Attributes:
        keeps_exact: whether it was chosen that some blocks are exact: the GPU has the memory for it, and not the time.
    """

    def __init__(self, clock: Callable[[torch.device], Any] = Gpu) -> None:
        self.clock = clock
        self.gpu: Any = None
        self.keeps_exact = False
        self.kinds: dict[Any, _Blocks] = {}
        self.running: list[Timing] = []
        self.calls: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> Pace:
        return Pace(self.clock)

    def __reduce__(self) -> Any:
        return Pace, (self.clock,)

    def way(
        self, buffers: Any, block: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any
    ) -> Callable[..., Any]:
        """How the forward `run` of a block is called with these arguments, as it is where the block is compressed."""
        chosen = block.__dict__.get(IN_EAGER)
        if chosen == TIMED:
            return self._timed(buffers, block, run, args, kwargs)
        return functools.partial(without_own_modes, run) if chosen == EXACT else run

    def _timed(self, buffers: Any, block: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        first = next(tensors((args, kwargs)), None)
        hooks, allowed = saved_tensor_hooks.innermost()
        if first is None or type(first) is not Tensor or not self._times(first.device) or hooks or not allowed:
            return run
        calls = self.calls[block] = self.calls.get(block, 0) + 1
        key = _kind(block, args, kwargs)
        if calls == 1:
            self.kinds.setdefault(key, _Blocks()).members.append(weakref.ref(block))
            return run
        if calls > _PATIENCE or all(kind.complete for kind in self.kinds.values()):
            self._decide(buffers)
            return self.way(buffers, block, run, args, kwargs)
        kind, x = self.kinds.get(key), next((t for t in tensors((args, kwargs)) if t.grad_fn is not None), None)
        if kind is None or x is None or kind.given_up or kind.complete or kind.waits:
            return run
        kind.timed = kind.timed or weakref.ref(block)
        if kind.timed() is not block:
            return run
        self.gpu = self.gpu or self.clock(first.device)
        exact = len(kind.compressed) == _SAMPLES
        if exact and self.gpu.free() < _LARGEST * kind.compressed[-1].nbytes:
            kind.given_up = True
            return run
        timing = Timing(self.gpu, self.running)
        (kind.exact if exact else kind.compressed).append(timing)
        return functools.partial(timing.forward, functools.partial(without_own_modes, run) if exact else run, x)

    @staticmethod
    def _times(device: torch.device) -> bool:
        return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()

    def _decide(self, buffers: Any) -> None:
        """Choose, and write to each block what was chosen."""
        for kind in self.kinds.values():
            if not kind.complete:
                kind.given_up = True
        timed = {key: kind for key, kind in self.kinds.items() if not kind.given_up}
        found = [Kind(len(kind.members), cost(kind.exact), cost(kind.compressed)) for kind in timed.values()]
        own = choose(found, _FREE * self.gpu.free()) if found else []
        counts = list(agreed(f"blocks in eager mode {list(timed)}", own))
        chosen = dict(zip(timed, counts, strict=True))
        for key, kind in self.kinds.items():
            count = len(kind.members)
            compressed = chosen.get(key, count)
            for place, member in enumerate(kind.members):
                block = member()
                if block is not None:  # evenly among all
                    is_one = (place + 1) * compressed // count > place * compressed // count
                    block.__dict__[IN_EAGER] = COMPRESSED if is_one else EXACT
        of = sum(len(kind.members) for kind in self.kinds.values())
        exact = sum(kind.count for kind in found) - sum(counts)
        self.keeps_exact = exact > 0
        if exact:
            all_of = [kind.count for kind in found]
            now, then = step_ms(found, [0] * len(found)), step_ms(found, all_of)
            buffers.formats.clear()  # until the next forward: what is compressed now
            buffers.record_full(
                f"blocks in eager mode, {exact} of {of}",
                f"faster so: the blocks take {now:.1f} ms/step exact and, as the host issues them, {then:.1f} ms "
                "compressed; hotrain.compile and plan='memory' compress them",
            )
        if self.gpu is not None:
            self.gpu.close()
        self.gpu, self.kinds = None, {}


def _kind(block: nn.Module, args: Any, kwargs: Any) -> Any:
    parameters = tuple((tuple(p.shape), str(p.dtype), p.requires_grad) for p in block.parameters())
    return type(block).__qualname__, parameters, tuple(tuple(t.shape) for t in tensors((args, kwargs)))
