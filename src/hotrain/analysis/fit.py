"""The largest batch whose training step fits into a memory budget: exact, checkpointed, converted.

On a GPU the allocator is limited to the budget, and training steps of growing batches are run until one runs out of
memory. On a CPU there is no such limit: the bytes of a step are predicted from what autograd saves at two batch sizes,
with the parameters, gradients and optimizer state.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..compress.checkpointing import blocks
from ..functional import as_method
from ..method import Method
from ..plans import PREDICTED, Point
from ..presets import DEFAULT
from ..tables import bytes_text, parse_bytes, table
from . import steps

EXACT, CHECKPOINTED, CONVERTED, BOTH = "exact", "checkpointed", "converted", "converted+checkpointed"
VARIANTS = (EXACT, CHECKPOINTED, CONVERTED)
RAN, MEASURED = "training steps ran", "predicted from kept bytes, which were measured"
LARGEST = 1 << 20  # batches are not tried beyond

_SMALL, _LARGER = 2, 4  # the batches that a prediction is made from; one image alone has no batch statistics
_AFFORDABLE = 1 << 27  # bytes up to which larger batches are measured too
_ROUNDS = 12
_STRIDE = 8  # times the largest batch that was measured, the next one at most

MakeInputs = Callable[[int], Any]
InputsOf = Callable[[int], steps.Inputs]


@dataclass(frozen=True)
class FitRow:
    """One variant.

    Attributes:
        variant: of `VARIANTS`, or ``converted+checkpointed``.
        batch_size: the largest that fits, 0 where none does.
        needs: bytes of its step (of a batch of one where none fits), None where that could not be measured.
        how: `RAN`, `MEASURED` or `PREDICTED`.
        too_large: the smallest batch that is known not to fit, None where the search ended at its limit.
    """

    variant: str
    batch_size: int
    needs: int | None
    how: str
    too_large: int | None


@dataclass(frozen=True)
class FitReport:
    """The result of `fit`.

    Attributes:
        budget: bytes.
        device: that was measured, or predicted on.
        rows: one `FitRow` per variant.
    """

    budget: int
    device: str
    rows: list[FitRow]

    def __str__(self) -> str:
        first = next((row.batch_size for row in self.rows if row.variant == EXACT and row.too_large is not None), 0)
        cells = []
        for row in self.rows:
            more = "≥ " * (row.too_large is None)
            gain = f"{more}{row.batch_size / first:.2f} ×" if first else "–"
            needs = "–" if row.needs is None else bytes_text(row.needs)
            cells.append([row.variant, f"{more}{row.batch_size}", gain, needs, row.how])
        lines = [
            f"largest batch of a training step in {bytes_text(self.budget)} ({self.budget:,} bytes) on {self.device}",
            table(["variant", "batch", "against exact", "step takes", "how it is known"], cells),
        ]
        smallest = [row for row in self.rows if row.batch_size == 0]
        lines += [f"{row.variant}: not even a batch of {row.too_large} fits" for row in smallest]
        if any(row.too_large is None for row in self.rows):
            lines.append("≥: the search ends at this batch (largest=); larger ones may fit")
        if any(row.how != RAN for row in self.rows):
            lines.append(f"Predicted: there is no allocator here to hold a step to a budget.\n{steps.COUNTED}")
        return "\n".join(lines)


def fit(
    model: nn.Module,
    make_inputs: MakeInputs,
    budget_bytes: int | str,
    *,
    method: str | Method = DEFAULT,
    plan: str = "speed",
    variants: Sequence[str] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: steps.MakeOptimizer = torch.optim.AdamW,
    largest: int = LARGEST,
    on_row: Callable[[FitRow], None] | None = None,
) -> FitReport:
    """Find the largest batch whose training step fits into `budget_bytes`, for each of the variants.

    Call it under the autocast context that training uses. On a CUDA device whole steps run under a limit of the
    allocator, which counts everything that the process has allocated there; running out of memory is caught, and the
    memory freed. On other devices bytes are predicted; the result says so.

    Args:
        model: exact, on the device in question; it is unchanged.
        make_inputs: batch size → the model's inputs: a tensor, a tuple, or a mapping of keyword arguments.
        budget_bytes: of the device's memory, or a size as ``"24GB"``.
        method: of the converted variants, as in `hotrain.convert`.
        plan: as in `hotrain.convert`.
        variants: of ``exact``, ``checkpointed`` (all blocks are recomputed), ``converted``,
            ``converted+checkpointed``. None is the first three, without checkpointing for a model without blocks.
        loss: output → scalar; None is the sum of all outputs.
        optimizer: parameters → optimizer.
        largest: batch size at which the search ends.
        on_row: called with the result of each variant when it is known.

    Returns:
        The largest batch of each variant, and the bytes of its step.

    Raises:
        TypeError: `make_inputs` is no function.
        ValueError: the model is converted, a variant is unknown, the largest batch is none, or the budget is no size,
            not positive, or larger than the GPU.
    """
    if not callable(make_inputs):
        raise TypeError(
            f"fit: got make_inputs of type {type(make_inputs).__name__}, accepted are functions from a batch size to "
            "the model's inputs, as lambda n: torch.randn(n, 3, 224, 224)"
        )
    if isinstance(variants, str) or (variants is not None and not variants):
        raise ValueError(f"fit: got variants={variants!r}, accepted are sequences of {', '.join((*VARIANTS, BOTH))}")
    if type(largest) is not int or largest < 1:
        raise ValueError(f"fit: got largest={largest!r}, accepted are numbers from 1")
    if unknown := [name for name in variants or () if name not in (*VARIANTS, BOTH)]:
        raise ValueError(f"fit: unknown variant {unknown[0]!r}, accepted are {', '.join((*VARIANTS, BOTH))}")
    budget_bytes = parse_bytes(budget_bytes)
    if budget_bytes <= 0:
        raise ValueError(f"fit: got budget_bytes={budget_bytes}, accepted are numbers from 1")
    if variants is None:
        variants = VARIANTS if blocks(model) else tuple(name for name in VARIANTS if name != CHECKPOINTED)
    if any(name in (CHECKPOINTED, BOTH) for name in variants) and not blocks(model):
        rest = tuple(name for name in variants if name not in (CHECKPOINTED, BOTH))
        raise ValueError(f"fit: {type(model).__name__} has no blocks to recompute; pass variants={rest}")
    device = steps.device_of(model, "fit")
    chosen = as_method(method)
    step = steps.Step(model, loss, optimizer)
    rows = []
    for variant in variants:
        point = Point(
            variant,
            method=chosen if variant in (CONVERTED, BOTH) else None,
            plan=plan,
            recomputed=tuple(blocks(model)) if variant in (CHECKPOINTED, BOTH) else (),
        )
        with steps.following(model, point):
            find = _by_running if device.type == "cuda" else _by_prediction
            rows.append(find(step, lambda n: steps.as_inputs(make_inputs(n)), variant, budget_bytes, largest, device))
        if on_row is not None:
            on_row(rows[-1])
    return FitReport(budget_bytes, str(device), rows)


def search(fits: Callable[[int], bool], largest: int = LARGEST) -> tuple[int, int | None]:
    """Search the largest n up to `largest` that fits by doubling, then bisection: about 2·log₂ n calls.

    Returns:
        The largest n that fits (0: not even 1), and the smallest that was found not to, or None.
    """
    low, high = 0, None
    n = 1
    while high is None and low < largest:
        n = min(n, largest)
        if fits(n):
            low, n = n, 2 * n
        else:
            high = n
    if high is not None:
        between = range(low + 1, high)
        low += bisect_left(between, True, key=lambda n: not fits(n))
        high = low + 1
    return low, high


# ---- on a GPU ----


def _by_running(
    step: steps.Step, inputs: InputsOf, variant: str, budget: int, largest: int, device: torch.device
) -> FitRow:
    needs = 0

    def fits(batch: int) -> bool:
        nonlocal needs
        peak = steps.unless_out_of_memory(
            lambda: steps.timed(step, partial(inputs, batch), step.optimizer(), device)[1], step.model
        )
        needs = peak if peak is not None else needs
        return peak is not None

    with _limited(budget, device):
        batch, too_large = search(fits, largest)
        # Once more by itself, with nothing left over from other attempts.
        while batch and not fits(batch):
            batch, too_large = batch - 1, batch
    return FitRow(variant, batch, needs if batch else None, RAN, too_large)


@contextmanager
def _limited(budget: int, device: torch.device) -> Iterator[None]:
    total = torch.cuda.get_device_properties(device).total_memory
    if budget > total:
        raise ValueError(f"fit: a budget of {bytes_text(budget)} is more than {device} has, {bytes_text(total)}")
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(budget / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


# ---- elsewhere ----


def _by_prediction(
    step: steps.Step, inputs: InputsOf, variant: str, budget: int, largest: int, device: torch.device
) -> FitRow:
    optimizer = step.optimizer()
    step.run(inputs(_SMALL), optimizer)  # makes its state
    fixed = steps.fixed_bytes(step.model, optimizer)
    del optimizer
    needs: dict[int, int] = {}
    at_once: dict[int, int] = {}
    for batch in (_SMALL, _LARGER):
        needs[batch], at_once[batch] = steps.batch_bytes(step.model, inputs(batch))
    # Small tensors are not compressed and groups of codes are padded, so that bytes are no straight line in the batch:
    # it is drawn anew through the batch that it led to, or the largest that can be measured here. Step by step: where
    # the larger of two small batches is compressed and the other is not, a line says nothing of large ones.
    for _ in range(_ROUNDS):
        predict, limit = _line(needs), _line(at_once)
        batch, too_large = search(lambda n, of=predict: fixed + of(n) <= budget, largest)  # type: ignore[misc]
        affordable, _ = search(lambda n, of=limit: of(n) <= _AFFORDABLE, largest)  # type: ignore[misc]
        trial = min(batch, affordable, _STRIDE * max(needs))
        if trial in needs or trial < _SMALL:
            break
        needs[trial], at_once[trial] = steps.batch_bytes(step.model, inputs(trial))
    while fixed + needs.get(batch, 0) > budget and batch:
        batch, too_large = batch - 1, batch
    how = MEASURED if batch in needs else PREDICTED
    return FitRow(variant, batch, fixed + needs.get(batch, predict(batch or 1)), how, too_large)


def _line(points: Mapping[int, int]) -> Callable[[int], int]:
    """The straight line through the last two points."""
    (x0, y0), (x1, y1) = list(points.items())[-2:]
    slope = max((y1 - y0) / (x1 - x0), 1.0)
    return lambda x: max(round(y1 + slope * (x - x1)), 0)
