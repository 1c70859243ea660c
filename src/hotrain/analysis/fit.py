"""The largest batch whose training step fits into a memory budget: exact, checkpointed, converted.

On a GPU the allocator is limited to the budget, and training steps of growing batches are run until one runs out of
memory. On a CPU there is no such limit: the bytes of a step are predicted from what autograd saves at two batch sizes,
with the parameters, gradients and optimizer state.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..audit.saved_bytes import bytes_inside, saved_bytes, tensors
from ..audit.unchanged import as_found
from ..compress.checkpointing import Recomputed, blocks, keep_all, recompute
from ..compress.interpose import Wrapped
from ..conversion import convert, revert
from ..method import Method
from ..nn.state import layer_states
from ..presets import DEFAULT
from ..tables import bytes_text, table

EXACT, CHECKPOINTED, CONVERTED, BOTH = "exact", "checkpointed", "converted", "converted+checkpointed"
VARIANTS = (EXACT, CHECKPOINTED, CONVERTED)
RAN, MEASURED, PREDICTED = "training steps ran", "kept bytes measured", "predicted"
LARGEST = 1 << 20  # batches are not tried beyond

_SMALL, _LARGER = 2, 4  # the batches that a prediction is made from; one image alone has no batch statistics
_AFFORDABLE = 1 << 29  # bytes up to which larger batches are measured too
_ROUNDS = 12
_STRIDE = 8  # times the largest batch that was measured, the next one at most
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|_ALLOC_FAILED", re.IGNORECASE)

MakeInputs = Callable[[int], Any]


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
    """The result of `fit`: one row per variant."""

    budget: int
    device: str
    rows: list[FitRow]

    def __str__(self) -> str:
        first = next((row.batch_size for row in self.rows if row.variant == EXACT), 0)
        cells = []
        for row in self.rows:
            gain = f"{row.batch_size / first:.2f} ×" if first else "–"
            needs = "–" if row.needs is None else bytes_text(row.needs)
            cells.append([row.variant, row.batch_size, gain, needs, row.how])
        lines = [
            f"largest batch of a training step in {bytes_text(self.budget)} ({self.budget:,} bytes) on {self.device}",
            table(["variant", "batch", "against exact", "step takes", "how it is known"], cells),
        ]
        smallest = [row for row in self.rows if row.batch_size == 0]
        lines += [f"{row.variant}: not even a batch of {row.too_large} fits" for row in smallest]
        if any(row.how != RAN for row in self.rows):
            lines.append(_PREDICTED)
        return "\n".join(lines)


_PREDICTED = """\
Predicted, no step was run: there is no allocator here to hold to a budget.
Counted are what autograd keeps for backward (of recomputed blocks: their inputs,
and all that the largest one keeps), the batch, parameters, gradients and the
optimizer's state; what single operators need while they run comes on top."""


def fit(
    model: nn.Module,
    make_inputs: MakeInputs,
    budget_bytes: int,
    *,
    method: str | Method = DEFAULT,
    memory: str | None = None,
    plan: str = "speed",
    variants: Sequence[str] = VARIANTS,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW,
    largest: int = LARGEST,
) -> FitReport:
    """Find the largest batch whose training step fits into `budget_bytes`, for each of the variants.

    Call it under the autocast context that training uses. On a CUDA device whole steps run under a limit of the
    allocator, which counts everything that the process has allocated there; running out of memory is caught, and the
    memory freed. On other devices bytes are predicted; the result says so.

    Args:
        model: exact, on the device in question; it is unchanged.
        make_inputs: batch size → the model's inputs: a tensor, a tuple, or a mapping of keyword arguments.
        budget_bytes: of the device's memory.
        method: of the converted variants, as in `hotrain.convert`.
        memory: as in `hotrain.convert`.
        plan: as in `hotrain.convert`.
        variants: of ``exact``, ``checkpointed`` (all blocks are recomputed), ``converted``,
            ``converted+checkpointed``.
        loss: output → scalar; None is the sum of all outputs.
        optimizer: parameters → optimizer.
        largest: batch size at which the search ends.

    Returns:
        The largest batch of each variant, and the bytes of its step.

    Raises:
        ValueError: the model is converted, a variant is unknown, or the budget is not positive or larger than the
            device.
    """
    if unknown := [name for name in variants if name not in (*VARIANTS, BOTH)]:
        raise ValueError(f"fit: unknown variant {unknown[0]!r}, accepted are {', '.join((*VARIANTS, BOTH))}")
    if budget_bytes <= 0:
        raise ValueError(f"fit: got budget_bytes={budget_bytes}, accepted are numbers from 1")
    if any(True for _ in layer_states(model)) or any(isinstance(m, Wrapped | Recomputed) for m in model.modules()):
        raise ValueError("fit: the model is converted or checkpointed; give it as it was before (hotrain.revert)")
    if any(name in (CHECKPOINTED, BOTH) for name in variants) and not blocks(model):
        raise ValueError(f"fit: {type(model).__name__} has no blocks to recompute; leave out the checkpointed variants")
    device = next((p.device for p in model.parameters() if p.requires_grad), None)
    if device is None:
        raise ValueError(f"fit: no parameter of {type(model).__name__} requires grad")
    step = _Step(model, make_inputs, loss or _sum, optimizer)
    rows = []
    for variant in variants:
        with as_found(model), _parameters_as_found(model), torch.enable_grad():
            if not model.training:
                model.train()
            with _variant(model, variant, method, memory, plan):
                find = _by_running if device.type == "cuda" else _by_prediction
                rows.append(find(step, variant, budget_bytes, largest, device))
    return FitReport(budget_bytes, str(device), rows)


def parse_bytes(text: str) -> int:
    """Parse a size in bytes.

    Args:
        text: as ``24GB``, ``24GiB``, ``800 MB`` or ``1000``: powers of 1000, with an i of 1024.

    Raises:
        ValueError: the text is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text, re.IGNORECASE)
    factor = {**_UNITS, **_BINARY}.get(match[2].lower()) if match else None
    if match is None or factor is None or (size := int(float(match[1]) * factor)) <= 0:
        raise ValueError(f"got {text!r}, accepted are sizes as 24GB, 24GiB or 800MB")
    return size


def search(fits: Callable[[int], bool], largest: int = LARGEST) -> tuple[int, int | None]:
    """Search the largest n that fits by doubling, then bisection: about 2·log₂ n calls.

    Args:
        fits: n → whether it fits.
        largest: where the search ends.

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
    while high is not None and high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low, high


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: PyTorch's own error, or what libraries and the host's allocator say of it."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
    )


class _Step:
    """Training steps of any batch size."""

    def __init__(
        self,
        model: nn.Module,
        make_inputs: MakeInputs,
        loss: Callable[[Any], Tensor],
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        self.model, self.make_inputs, self.loss, self.make_optimizer = model, make_inputs, loss, optimizer

    def inputs(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        made = self.make_inputs(batch)
        if isinstance(made, Mapping):
            return (), dict(made)
        return (tuple(made) if isinstance(made, tuple | list) else (made,)), {}

    def optimizer(self) -> torch.optim.Optimizer:
        return self.make_optimizer([p for p in self.model.parameters() if p.requires_grad])

    def run(self, batch: int, optimizer: torch.optim.Optimizer) -> None:
        args, kwargs = self.inputs(batch)
        loss = self.loss(self.model(*args, **kwargs))
        with torch.autocast(loss.device.type, enabled=False):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _sum(output: Any) -> Tensor:
    return torch.stack([t.float().sum() for t in tensors(output) if t.requires_grad]).sum()


@contextmanager
def _variant(model: nn.Module, variant: str, method: str | Method, memory: str | None, plan: str) -> Iterator[None]:
    try:
        if variant in (CONVERTED, BOTH):
            convert(model, method, memory=memory, plan=plan)
        if variant in (CHECKPOINTED, BOTH):
            recompute(blocks(model))
        yield
    finally:
        keep_all(model)
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


# ---- on a GPU ----


def _by_running(step: _Step, variant: str, budget: int, largest: int, device: torch.device) -> FitRow:
    needs = 0

    def fits(batch: int) -> bool:
        nonlocal needs
        peak = _peak(step, batch, device)
        needs = peak if peak is not None else needs
        return peak is not None

    with _limited(budget, device):
        batch, too_large = search(fits, largest)
        # Once more by itself, with nothing left over from other attempts.
        while batch and not fits(batch):
            batch, too_large = batch - 1, batch
    return FitRow(variant, batch, needs if batch else None, RAN, too_large)


def _peak(step: _Step, batch: int, device: torch.device) -> int | None:
    """The allocator's peak over two steps; None: out of memory. What they took is free again."""
    peak = None
    try:
        peak = _two_steps(step, batch, device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    # Past the handler, whose traceback held the frames and so the tensors of the step.
    for p in step.model.parameters():
        p.grad = None
    gc.collect()
    torch.cuda.empty_cache()
    return peak


def _two_steps(step: _Step, batch: int, device: torch.device) -> int:
    """The allocator's peak over two steps; the one before them makes the optimizer's state, and the plan its times."""
    optimizer = step.optimizer()
    step.run(batch, optimizer)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(2):
        step.run(batch, optimizer)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


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


def _by_prediction(step: _Step, variant: str, budget: int, largest: int, device: torch.device) -> FitRow:
    fixed = _fixed(step)
    needs: dict[int, int] = {}
    at_once: dict[int, int] = {}
    for batch in (_SMALL, _LARGER):
        needs[batch], at_once[batch] = _of_batch(step, batch)
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
        needs[trial], at_once[trial] = _of_batch(step, trial)
    while fixed + needs.get(batch, 0) > budget and batch:
        batch, too_large = batch - 1, batch
    how = MEASURED if batch in needs else PREDICTED
    return FitRow(variant, batch, fixed + needs.get(batch, predict(batch or 1)), how, too_large)


def _line(points: Mapping[int, int]) -> Callable[[int], int]:
    """The straight line through the last two points."""
    (x0, y0), (x1, y1) = list(points.items())[-2:]
    slope = max((y1 - y0) / (x1 - x0), 1.0)
    return lambda x: max(round(y1 + slope * (x - x1)), 0)


def _fixed(step: _Step) -> int:
    """Bytes that do not depend on the batch: parameters, buffers, gradients, the optimizer's state."""
    optimizer = step.optimizer()
    step.run(_SMALL, optimizer)
    model = [*step.model.parameters(), *step.model.buffers()]
    gradients = [p for p in step.model.parameters() if p.requires_grad]
    state = [t for values in optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]
    return sum(t.nbytes for t in (*model, *gradients, *state))


def _of_batch(step: _Step, batch: int) -> tuple[int, int]:
    """Bytes that a step of this batch needs beside the fixed ones, and what measuring them keeps at once."""
    args, kwargs = step.inputs(batch)
    own = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors([args, kwargs])}.values())
    kept = saved_bytes(step.model, *args, **kwargs)
    inside, whole = _largest_inside(step.model, args, kwargs)
    return own + kept.total - kept.of_inputs + inside, own + max(kept.total, whole)


def _largest_inside(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Bytes that the largest recomputed block keeps while it runs backward, and the model if none recomputed."""
    found = blocks(model)
    names = keep_all(model)
    if not names:
        return 0, 0
    audit = saved_bytes(model, *args, **kwargs)
    recompute({name: found[name] for name in names})
    return max(bytes_inside(audit, names).values()), audit.total
