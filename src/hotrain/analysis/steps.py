"""Training steps of a model that follows a point: their time and peak memory, and on a CPU the bytes predicted.

On a GPU steps run, and the allocator tells their peak. Elsewhere there is none to ask: what is `COUNTED` instead.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..audit.saved_bytes import SavedBytes, bytes_inside, saved_bytes, sum_of_results
from ..audit.unchanged import as_found
from ..compress.checkpointing import Recomputed, blocks, keep_all, recompute
from ..compress.interpose import Wrapped
from ..compress.offload import Offloaded
from ..compress.report import tensors
from ..conversion import convert, revert
from ..nn.state import layer_states
from ..plans import Point

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
T = TypeVar("T")
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

COUNTED = """\
Counted are what autograd keeps for backward (of recomputed blocks: their inputs,
and what one keeps while it runs again), the batch, parameters, gradients and the
optimizer's state; what single operators need while they run comes on top."""

_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|_ALLOC_FAILED", re.IGNORECASE)


class Step:
    """Training steps of a model.

    Args:
        loss: output → scalar; None is the sum of all outputs.
        make_optimizer: parameters → optimizer.
        forward: what is called: the model, or the compiled one.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any], Tensor] | None,
        make_optimizer: MakeOptimizer,
        forward: Callable[..., Any] | None = None,
    ) -> None:
        self.model, self.loss, self.make_optimizer = model, loss or sum_of_results, make_optimizer
        self.forward = model if forward is None else forward

    def optimizer(self) -> torch.optim.Optimizer:
        """A new optimizer of the parameters that require grad."""
        return self.make_optimizer([p for p in self.model.parameters() if p.requires_grad])

    def run(self, inputs: Inputs, optimizer: torch.optim.Optimizer) -> None:
        """One step. Under autocast, the weights are cast anew, as where every forward has a context of its own."""
        args, kwargs = inputs
        loss = self.loss(self.forward(*args, **kwargs))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"hotrain: loss= gave {got}, accepted are functions from the model's output to a scalar tensor"
            )
        torch.clear_autocast_cache()
        with torch.autocast(loss.device.type, enabled=False):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def as_inputs(made: Any) -> Inputs:
    """Positional and keyword arguments from a tensor, a tuple, or a mapping of keyword arguments."""
    if isinstance(made, Mapping):
        return (), dict(made)
    return (tuple(made) if isinstance(made, tuple | list) else (made,)), {}


def device_of(model: nn.Module, who: str) -> torch.device:
    """The device of an exact model that can be trained.

    Raises:
        ValueError: the model is converted, checkpointed or offloaded, or no parameter requires grad; the message
            begins with `who`.
    """
    changed = any(isinstance(module, Wrapped | Recomputed | Offloaded) for module in model.modules())
    if changed or any(True for _ in layer_states(model)):
        raise ValueError(f"{who}: the model is converted or checkpointed; give it as it was before (hotrain.revert)")
    device = next((p.device for p in model.parameters() if p.requires_grad), None)
    if device is None:
        raise ValueError(f"{who}: no parameter of {type(model).__name__} requires grad")
    return device


@contextmanager
def following(model: nn.Module, point: Point) -> Iterator[None]:
    """Context in which an exact model follows a point, in training mode and with grad.

    Afterwards model, parameters, their gradients, buffers and generators are as found, bit for bit.
    """
    with as_found(model), _parameters_as_found(model), torch.enable_grad():
        if not model.training:
            model.train()
        try:
            convert(model, plan=point)
            yield
        finally:
            revert(model)


@contextmanager
def _parameters_as_found(model: nn.Module) -> Iterator[None]:
    """Steps change parameters: they wait on the host, where they take nothing of the budget."""
    values = [p.detach().to("cpu", copy=True) for p in model.parameters()]
    grads = [p.grad for p in model.parameters()]
    for p in model.parameters():
        p.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value, grad in zip(model.parameters(), values, grads, strict=True):
                p.copy_(value)
                p.grad = grad


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: PyTorch's own error, or what libraries and the host's allocator say of it."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
    )


def unless_out_of_memory(what: Callable[[], T], model: nn.Module) -> T | None:
    """The result of a function; None where memory ran out. What its steps of the model took is free again."""
    result = None
    try:
        result = what()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    # Past the handler, whose traceback held the frames and so the tensors of the step.
    for p in model.parameters():
        p.grad = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return result


def timed(
    step: Step,
    inputs: Callable[[], Inputs],
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    *,
    warm: int = 0,
    steps: int = 2,
) -> tuple[float, int | None]:
    """Run training steps: one that is not counted, which compiles and makes the optimizer's state, then those that are.

    Args:
        warm: steps before the timed ones; their memory counts, as CUDA graphs allocate when they are recorded.

    Returns:
        Median ms of a step, and on a GPU the allocator's peak in bytes.
    """
    on_gpu = device.type == "cuda"
    step.run(inputs(), optimizer)
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(warm):
        step.run(inputs(), optimizer)
    timer = StepTimer(device)
    for _ in range(steps):
        timer.start()
        step.run(inputs(), optimizer)
        timer.stop()
    return median(timer.all_ms()), torch.cuda.max_memory_allocated(device) if on_gpu else None


class StepTimer:
    """Milliseconds of every step: by CUDA events, read on demand so that no step waits, or the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.done_ms: list[float] = []
        self.pending: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.began: Any = None

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        self.began = self._now()

    def stop(self) -> None:
        if self.cuda:
            self.pending.append((self.began, self._now()))
        else:
            self.done_ms.append((self._now() - self.began) * 1e3)

    def all_ms(self) -> list[float]:
        for begin, end in self.pending:
            end.synchronize()
            self.done_ms.append(begin.elapsed_time(end))
        self.pending.clear()
        return self.done_ms

    def median_ms(self) -> float | None:
        times = self.all_ms()
        return median(times) if times else None


# ---- where there is no allocator to ask ----


def fixed_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes that do not depend on the batch: parameters, buffers, gradients, the state of an optimizer that has run."""
    gradients = [p for p in model.parameters() if p.requires_grad]
    state = [t for values in optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *gradients, *state))


def batch_bytes(model: nn.Module, inputs: Inputs) -> tuple[int, int]:
    """Bytes that a step of this batch needs beside the fixed ones, and what measuring them keeps at once."""
    args, kwargs = inputs
    own = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors([args, kwargs])}.values())
    kept = saved_bytes(model, *args, **kwargs)
    again, whole = _while_recomputing(model, kept, args, kwargs)
    return own + kept.total - kept.of_inputs + again, own + max(kept.total, whole)


def _while_recomputing(
    model: nn.Module, kept: SavedBytes, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, int]:
    """Bytes above `kept` when a recomputed block runs again, and all that the model keeps if none is recomputed.

    Blocks are taken to run in their order in the model: what later ones keep is free by then.
    """
    found = blocks(model)
    names = keep_all(model)
    if not names:
        return 0, 0
    audit = saved_bytes(model, *args, **kwargs)
    recompute({name: found[name] for name in names})
    inside, of_block = bytes_inside(audit, names), bytes_inside(kept, found)
    most, freed = 0, 0
    for name in reversed(found):
        if name in inside:
            most = max(most, inside[name] - freed)
        freed += of_block[name]
    return most, audit.total
