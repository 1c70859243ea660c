"""Activation checkpointing of as many blocks as a memory budget requires, on top of compressed activations."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from .audit.saved_bytes import SavedBytes, bytes_inside, saved_bytes
from .audit.unchanged import as_found
from .compress.checkpointing import blocks, keep_all, recompute
from .planning import clock
from .tables import bytes_text, parse_bytes

_TIMED = 3  # forwards that a block's time is the median of


@dataclass(frozen=True)
class CheckpointReport:
    """What `checkpoint_blocks` did.

    Attributes:
        recomputed: names of the blocks that are recomputed in backward.
        kept: names of the other blocks.
        before: bytes saved between forward and backward without recomputing; None where nothing was measured.
        after: the same with it.
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
    model: nn.Module, *inputs: Any, budget_bytes: int | str | None = None, **kwargs: Any
) -> CheckpointReport:
    """Checkpoint blocks of the model, in place, until a forward saves no more bytes than a budget.

    Blocks are the elements of ``nn.ModuleList`` and ``nn.Sequential`` that have modules of their own. A recomputed
    block saves only its inputs. Blocks that free most bytes for their time come first, and no more are recomputed than
    the budget requires.

    Convert first, then checkpoint, then compile. A further call starts again; `hotrain.revert` undoes it. Call it
    under the autocast context that training uses, with inputs of its batch size.

    Args:
        model: converted or not.
        *inputs: of ``model(*inputs, **kwargs)``; not needed without a budget.
        budget_bytes: bytes that a forward may save for backward, or a size as ``"2GiB"``; None recomputes all blocks.
        **kwargs: of the model.

    Returns:
        Which blocks are recomputed, and the bytes before and after.

    Raises:
        TypeError: a keyword is none of the model's; without a budget also a size among the inputs, and a keyword that
            the model's forward does not name.
        ValueError: the model has no blocks, there is a budget without inputs, or the budget cannot be met; the message
            then states the least that can be reached, and the model is unchanged.
    """
    _refuse_strangers(model, inputs, kwargs, budget_bytes is not None)
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
        raise ValueError("checkpoint_blocks: budget_bytes needs a batch to measure; give the model's inputs too")
    budget_bytes = parse_bytes(budget_bytes)
    if budget_bytes < 0:
        raise ValueError(f"checkpoint_blocks: got budget_bytes={budget_bytes}, accepted are numbers from 0")
    before = keep_all(model)
    try:
        return _within(model, found, inputs, kwargs, budget_bytes)
    except BaseException:
        keep_all(model)
        recompute({name: found[name] for name in before if name in found})
        raise


def _refuse_strangers(model: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], measures: bool) -> None:
    """Raise TypeError for what is no argument of the model: without a budget nothing would call the model with it."""
    taken = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in taken if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in taken)
    wrong = [] if accepts_any and measures else [name for name in kwargs if name not in names]
    if wrong:
        name, of = wrong[0], f"{type(model).__name__}.forward"
        why = f", which without budget_bytes nothing calls: leave {name} out" if accepts_any else ""
        raise TypeError(
            f"checkpoint_blocks: got {name}={kwargs[name]!r:.40}; accepted are budget_bytes (bytes, or a size as "
            f"'2GiB') and the arguments of {of} ({', '.join([*names, '…'] if accepts_any else names)}){why}"
        )
    sizes = [value for value in inputs if isinstance(value, int | str)]
    if sizes and not measures:
        raise TypeError(
            f"checkpoint_blocks: got {sizes[0]!r} as an input of the model; a budget is given by its name: "
            f"budget_bytes={sizes[0]!r}"
        )


def _within(
    model: nn.Module, found: dict[str, nn.Module], inputs: tuple[Any, ...], kwargs: dict[str, Any], budget: int
) -> CheckpointReport:
    full = saved_bytes(model, *inputs, **kwargs)
    if full.total <= budget:
        return CheckpointReport([], list(found), full.total, full.total, budget)
    gains = by_gain(model, found, full, inputs, kwargs)
    order = list(gains)
    count, after, reached = 0, full.total, {full.total: 0}
    while after > budget and count < len(order):
        expected = after
        while count < len(order) and expected > budget:
            expected -= gains[order[count]]
            count += 1
        recompute({name: found[name] for name in order[:count]})
        after = saved_bytes(model, *inputs, **kwargs).total
        reached.setdefault(after, count)
    if after > budget:
        least = min(reached)
        raise ValueError(
            f"checkpoint_blocks: budget_bytes={budget} ({bytes_text(budget)}) cannot be met: {bytes_text(full.total)} "
            f"are kept without recomputing, and {least} ({bytes_text(least)}) at least, with {reached[least]} blocks "
            "recomputed"
        )
    chosen = order[:count]
    spared, slack = list(chosen), budget - after
    for name in reversed(chosen):  # a block that was chosen early may be unnecessary after a larger one
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


def by_gain(
    model: nn.Module, found: dict[str, nn.Module], full: SavedBytes, inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, int]:
    """Bytes that recomputing frees, by block: those of most bytes for their time first, and none that frees nothing.

    No block of the model is recomputed, before and after; ``full`` is what it saves so.
    """
    recompute(found)
    least = saved_bytes(model, *inputs, **kwargs)
    keep_all(model)
    inside, at_least = bytes_inside(full, found), bytes_inside(least, found)
    gains = {name: inside[name] - at_least[name] for name in found if inside[name] > at_least[name]}
    for name in gains:
        if not at_least[name]:  # its input is counted for another block that reads it
            recompute({name: found[name]})
            gains[name] = full.total - saved_bytes(model, *inputs, **kwargs).total
            keep_all(model)
    gains = {name: gain for name, gain in gains.items() if gain > 0}
    seconds = _seconds(model, {name: found[name] for name in gains}, inputs, kwargs)
    # Equal blocks differ in their measured times by noise; rounding gives them the same priority, and the first ones
    # are recomputed first.
    order = sorted(gains, key=lambda name: -round(2 * math.log2(gains[name] / max(seconds[name], 1e-9))))
    return {name: gains[name] for name in order}


def _seconds(
    model: nn.Module, modules: Mapping[str, nn.Module], inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, float]:
    """Time of each block's forward, in seconds."""
    times: dict[str, list[float]] = {name: [] for name in modules}
    started: dict[str, float] = {}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def start(name: str, *_: Any) -> None:
        started[name] = clock(device)

    def stop(name: str, *_: Any) -> None:
        times[name].append(clock(device) - started[name])

    with as_found(model), torch.enable_grad(), ExitStack() as hooks:
        for name, module in modules.items():
            hooks.enter_context(module.register_forward_pre_hook(partial(start, name)))
            hooks.enter_context(module.register_forward_hook(partial(stop, name)))
        if not model.training:
            model.train()
        for _ in range(_TIMED):
            model(*inputs, **kwargs)
    return {name: median(values) if values else 0.0 for name, values in times.items()}
