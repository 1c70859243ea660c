"""A mixture of compressing and checkpointing: as many blocks recompute as a budget of bytes asks for."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from ..activations.checkpointing import blocks, keep_all, recompute
from ..audit.saved_bytes import bytes_inside, saved_bytes
from ..audit.unchanged import as_found
from ..tables import bytes_text

_TIMED = 3  # forwards that a block's time is the median of


@dataclass(frozen=True)
class CheckpointReport:
    """What `checkpoint_blocks` did.

    recomputed: names of the blocks that recompute.  kept: names of those that do not.
    before, after: bytes between forward and backward without and with it; None where nothing was measured.
    budget: in bytes, or None.
    """

    recomputed: list[str]
    kept: list[str]
    before: int | None = None
    after: int | None = None
    budget: int | None = None

    def __str__(self) -> str:
        of = len(self.recomputed) + len(self.kept)
        text = f"hotrain: {len(self.recomputed)} of {of} blocks recompute"
        if self.before is not None and self.after is not None and self.budget is not None:
            text += (
                f"; {bytes_text(self.before)} → {bytes_text(self.after)} kept, of a budget of {bytes_text(self.budget)}"
            )
        return "\n".join([text, *(f"  {name}" for name in self.recomputed)])


def checkpoint_blocks(
    model: nn.Module, *inputs: Any, budget_bytes: int | None = None, **kwargs: Any
) -> CheckpointReport:
    """Make blocks of the model recompute in backward, in place, until a forward keeps few enough bytes.

    Blocks are what stands in ``nn.ModuleList`` and ``nn.Sequential`` and has modules itself. A recomputed block keeps
    its inputs alone. With `budget_bytes` those come first that free most bytes for their time, and no more recompute
    than are needed; without it all do, and `inputs` may be left out.

    Convert first, checkpoint then, compile last. A further call decides anew; `hotrain.revert` takes it back. Call it
    under the autocast context that training uses, with inputs of the batch size that it uses.

    Raises ValueError when the model has no blocks, when there is a budget without inputs, and, with the least that can
    be reached, when the budget cannot be met; the model is then as it was.
    """
    found = blocks(model)
    if not found:
        raise ValueError(
            f"checkpoint_blocks: {type(model).__name__} has no blocks: modules with modules of their own in an "
            "nn.ModuleList or nn.Sequential"
        )
    if budget_bytes is None:
        recompute(found)
        return CheckpointReport(list(found), [])
    if not (inputs or kwargs):
        raise ValueError("checkpoint_blocks: budget_bytes is held against what a batch keeps; give its inputs too")
    if budget_bytes < 0:
        raise ValueError(f"checkpoint_blocks: got budget_bytes={budget_bytes}, accepted are numbers from 0")
    before = keep_all(model)
    try:
        return _within(model, found, inputs, kwargs, budget_bytes)
    except BaseException:
        keep_all(model)
        recompute({name: found[name] for name in before if name in found})
        raise


def _within(
    model: nn.Module, found: dict[str, nn.Module], inputs: tuple[Any, ...], kwargs: dict[str, Any], budget: int
) -> CheckpointReport:
    full = saved_bytes(model, *inputs, **kwargs)
    if full.total <= budget:
        return CheckpointReport([], list(found), full.total, full.total, budget)
    recompute(found)
    least = saved_bytes(model, *inputs, **kwargs)
    keep_all(model)
    inside, at_least = bytes_inside(full, found), bytes_inside(least, found)
    gains = {name: inside[name] - at_least[name] for name in found if inside[name] > at_least[name]}
    seconds = _seconds(model, {name: found[name] for name in gains}, inputs, kwargs)
    # Blocks of one kind differ in their measured times by noise; among such the earlier ones are recomputed when the
    # later ones' bytes are free already.
    order = sorted(gains, key=lambda name: -round(2 * math.log2(gains[name] / max(seconds[name], 1e-9))))
    count, after = 0, full.total
    while after > budget and count < len(order):
        expected = after
        while count < len(order) and expected > budget:
            expected -= gains[order[count]]
            count += 1
        recompute({name: found[name] for name in order[:count]})
        after = saved_bytes(model, *inputs, **kwargs).total
    if after > budget:
        raise ValueError(
            f"checkpoint_blocks: budget_bytes={budget} ({bytes_text(budget)}) cannot be met: {bytes_text(full.total)} "
            f"are kept without recomputing, and {after} ({bytes_text(after)}) at least, with {count} blocks recomputed"
        )
    chosen = order[:count]
    spared, slack = list(chosen), budget - after
    for name in reversed(chosen):  # one that came early may be needless beside a large one that came late
        if gains[name] <= slack:
            spared.remove(name)
            slack -= gains[name]
    if len(spared) < len(chosen):
        keep_all(model)
        recompute({name: found[name] for name in spared})
        fewer = saved_bytes(model, *inputs, **kwargs).total
        if fewer <= budget:
            chosen, after = spared, fewer
        else:
            recompute({name: found[name] for name in chosen})
    names = [name for name in found if name in chosen]
    return CheckpointReport(names, [name for name in found if name not in chosen], full.total, after, budget)


def _seconds(
    model: nn.Module, modules: Mapping[str, nn.Module], inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, float]:
    """How long each block's forward takes."""
    times: dict[str, list[float]] = {name: [] for name in modules}
    with as_found(model), _timed(modules, times), torch.enable_grad():
        if not model.training:
            model.train()
        for _ in range(_TIMED):
            model(*inputs, **kwargs)
    return {name: median(values) if values else 0.0 for name, values in times.items()}


@contextmanager
def _timed(modules: Mapping[str, nn.Module], times: dict[str, list[float]]) -> Iterator[None]:
    started: dict[str, float] = {}

    def start(name: str, *_: Any) -> None:
        started[name] = _now()

    def stop(name: str, *_: Any) -> None:
        times[name].append(_now() - started[name])

    handles = []
    for name, module in modules.items():
        handles.append(module.register_forward_pre_hook(partial(start, name)))
        handles.append(module.register_forward_hook(partial(stop, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
