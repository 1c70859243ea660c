"""`hotrain bench step`: time and memory of training steps of whole models, variant by variant.

Every variant gets a fresh model with the same weights and batches. Before anything is timed, the loss and gradients of
its first step are compared with those of the exact model in eager mode. After a warm-up its steps are timed on the
GPU's clock without synchronization between them. The baseline is measured first and again last, which shows a drift.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn

import hotrain
from hotrain import planning
from hotrain.compiling import compile_in_mode
from hotrain.compress.offload import offloading
from hotrain.presets import preset
from hotrain.train import parse_method
from hotrain_bench import side_by_side, timing
from hotrain_bench.conditions import Clocks
from hotrain_bench.tasks import SUBJECTS, Task, build, check, with_checkpoints

BASELINE = "exact+compile"
WARMUP = 8  # in eager mode the plan times blocks in the first seven
BUDGET = 0.5  # fraction of the activations that PyTorch's partitioner saves by default
REDRAWN = 3  # first steps with other dropout masks, which measure the noise of dropout
ROUNDOFF = 2.0**-9  # relative error of a number rounded to bf16, at most
MOST_S = 10.0  # of timed steps: what is offloaded takes seconds a step
LEEWAY = 3  # allowed difference of the loss, in units of the noise


@dataclass(frozen=True)
class Bounds:
    """Bounds on a first step against the exact one: relative difference of the loss, cosine of all gradients."""

    loss: float
    cosine: float


# EXACT: the same formulas with another order of bf16 roundings (2⁻⁸ each). FP8: fp8 in the forward product (2⁻⁴ per
# element). METHOD: the noise of gradients adds up from layer to layer and may exceed the signal (docs/maths.md), so the
# cosine is only required to be far from chance (the reference of hot-unbiased: 0.80 on ViT-B, 0.65 on Llama blocks of
# width 1024).
EXACT = Bounds(0.01, 0.98)
FP8 = Bounds(0.05, 0.5)
METHOD = Bounds(0.01, 0.4)
METHOD_FP8 = Bounds(0.05, 0.4)


@dataclass(frozen=True)
class Variant:
    """A way to train.

    Args:
        name: name on the command line and in the records.
        change: modifies a fresh task.
        bounds: of its first step.
        compiled: whether the model is compiled.
        graphs: whether the compiled model runs as CUDA graphs.
        within: context in which everything is compiled and run.
    """

    name: str
    change: Callable[[Task], None]
    bounds: Bounds
    compiled: bool = True
    graphs: bool = False
    within: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext


def _unchanged(task: Task) -> None:
    pass


def _torchao(task: Task) -> None:
    float8 = importlib.import_module("torchao.float8")

    def chosen(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and not task.kept_exact(name)

    float8.convert_to_float8_training(task.model, module_filter_fn=chosen)


def _adamw8bit(task: Task) -> None:
    """AdamW with its two moments in 8 bits; torchao compiles its step."""
    if not task.trains:
        raise ValueError("the subject is timed without an optimizer")
    task.adamw = importlib.import_module("torchao.optim").AdamW8bit


def _converted(**options: Any) -> Callable[[Task], None]:
    def change(task: Task) -> None:
        task.report = hotrain.convert(task.model, **options)

    return change


def _both(first: Callable[[Task], None], second: Callable[[Task], None]) -> Callable[[Task], None]:
    def change(task: Task) -> None:
        first(task)
        second(task)

    return change


def _budget() -> AbstractContextManager[object]:
    return torch._functorch.config.patch(activation_memory_budget=BUDGET)


def _offload(task: Task) -> None:
    """Offload the task's activations to the host's memory until backward, as torchtune does."""
    on_device = task.loss

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with offloading(task.model):
            return on_device(model, batch)

    task.loss = loss


LOW_RANK = "hot-unbiased"  # method of the variants that name none
_compressed = _converted(method=LOW_RANK, plan="graphs", memory="block")

VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("exact", _unchanged, EXACT, compiled=False),
        Variant("exact+compile", _unchanged, EXACT),
        Variant("exact+graphs", _unchanged, EXACT, graphs=True),
        Variant("exact+compile+checkpoint", with_checkpoints, EXACT),
        Variant("exact+compile+budget", _unchanged, EXACT, within=_budget),
        Variant("exact+compile+offload", _offload, EXACT),
        Variant("exact+compile+adamw8bit", _adamw8bit, EXACT),
        Variant("torchao-float8-tensorwise", _torchao, FP8),
        Variant("exact-block", _converted(method="exact", memory="block", plan="graphs"), METHOD, graphs=True),
        Variant("hotrain-default", _converted(plan="graphs"), METHOD, graphs=True),
        Variant("hotrain-default-all", _converted(plan="memory"), METHOD, graphs=True),
        Variant("hotrain-default-nographs", _converted(plan="speed"), METHOD),
        Variant("hotrain-default-eager", _converted(plan="speed"), METHOD, compiled=False),
        Variant("hotrain-default-linear-eager", _converted(plan="speed", memory="linear"), METHOD, compiled=False),
        Variant("hotrain", _converted(method=LOW_RANK, plan="graphs"), METHOD, graphs=True),
        Variant("hotrain-nographs", _converted(method=LOW_RANK, plan="speed"), METHOD),
        Variant("hotrain-fp8fwd", _converted(method=LOW_RANK, plan="graphs", forward="fp8"), METHOD_FP8, graphs=True),
        Variant("hotrain-all", _converted(method=LOW_RANK, plan="memory"), METHOD, graphs=True),
        Variant("hotrain-memory", _compressed, METHOD, graphs=True),
        Variant("hotrain-memory-nographs", _converted(method=LOW_RANK, plan="speed", memory="block"), METHOD),
        Variant("hotrain-memory+adamw8bit", _both(_compressed, _adamw8bit), METHOD, graphs=True),
    )
}
CHECKPOINTED = "+checkpoint"


def variant_of(name: str) -> Variant:
    """Return a variant by name.

    Args:
        name: one of `VARIANTS`, or ``hotrain:METHOD`` with optional overrides and plan (``graphs`` by default), as in
            ``hotrain:hot:rank=4+plan=memory``, or ``hotrain:hq8:spare=2.5`` (`hotrain.Point.spare_ms`); with
            ``+checkpoint`` every block is recomputed as well.

    Raises:
        ValueError: an unknown variant or method.
    """
    if name in VARIANTS:
        return VARIANTS[name]
    if (whole := name.removesuffix(CHECKPOINTED)) != name:
        variant = variant_of(whole)
        return replace(variant, name=name, change=_both(variant.change, with_checkpoints))
    kind, _, text = name.partition(":")
    if kind != "hotrain" or not text:
        accepted = f"{', '.join(VARIANTS)} and hotrain:METHOD, each also with {CHECKPOINTED}"
        raise ValueError(f"--variants: got {name!r}, accepted are {accepted}")
    base, overrides = parse_method(text)
    plan = overrides.pop("plan", "graphs")
    spare = overrides.pop("spare", None)
    method = preset(base, **overrides)
    if spare is not None:
        plan = hotrain.Point("spare", method, plan, spare_ms=float(spare))
        return Variant(name, _converted(plan=plan), METHOD, graphs=True)
    return Variant(name, _converted(method=method, plan=plan), METHOD, graphs=True)


@dataclass(frozen=True)
class Agreement:
    """Agreement of two first steps: relative difference of the losses, cosine of all gradients."""

    loss_difference: float
    gradient_cosine: float


@dataclass(frozen=True)
class FirstStep:
    """The loss and gradients of a first step.

    Args:
        loss: the loss.
        gradients: gradients of the parameters in the model's order (bf16, on the host).
        noise: the worst agreement with more first steps, whose weights are off by bf16's rounding and whose dropout
            masks are drawn again: no program that rounds elsewhere agrees better.
    """

    loss: float
    gradients: list[Tensor]
    noise: Agreement = Agreement(0.0, 1.0)

    @classmethod
    def of(cls, task: Task) -> FirstStep:
        """Measure the task's first step in eager mode."""
        before = _drawn(task)
        loss = first_loss(task, task.model)
        gradients = [torch.zeros(()) if p.grad is None else p.grad.to("cpu", torch.bfloat16) for p in _trained(task)]
        first = cls(loss, gradients)
        steps = 1 if torch.equal(before, _drawn(task)) else REDRAWN
        others = []
        for seed in range(steps):
            task.model.zero_grad()
            with _rounded(task, seed):
                others.append(agreement(task, first_loss(task, task.model), first))
        worst = Agreement(max(o.loss_difference for o in others), min(o.gradient_cosine for o in others))
        return cls(loss, gradients, worst)


@contextlib.contextmanager
def _rounded(task: Task, seed: int) -> Iterator[None]:
    """Within, each weight is off by a random fraction of itself, at most `ROUNDOFF`."""
    weights = _trained(task)
    before = [w.detach().clone() for w in weights]
    random = torch.Generator(weights[0].device).manual_seed(seed)
    with torch.no_grad():
        for w in weights:
            w.mul_(1 + ROUNDOFF * (2 * torch.rand(w.shape, generator=random, device=w.device) - 1))
    try:
        yield
    finally:
        with torch.no_grad():
            for w, old in zip(weights, before, strict=True):
                w.copy_(old)


def first_loss(task: Task, model: nn.Module) -> float:
    """Run forward and backward on the first batch and return the loss; gradients stay in the parameters."""
    loss = task.loss(model, task.batches[0])
    task.scaler.scale(loss).backward()
    return loss.item()


def _drawn(task: Task) -> Tensor:
    """The state of the device's generator: whatever draws, dropout in a module or a function, changes it."""
    device = _trained(task)[0].device
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _trained(task: Task) -> list[nn.Parameter]:
    return [p for p in task.model.parameters() if p.requires_grad]


class Wrong(RuntimeError):
    """The first step is too far from the exact model's, so nothing is timed."""


def agreement(task: Task, loss: float, truth: FirstStep) -> Agreement:
    """Return the agreement of the task's loss, and the gradients in its parameters, with the first step ``truth``."""
    inner = torch.zeros((), dtype=torch.float64)
    mine, theirs = inner.clone(), inner.clone()
    for parameter, want in zip(_trained(task), truth.gradients, strict=True):
        got = torch.zeros(()) if parameter.grad is None else parameter.grad.float()
        reference = want.to(got.device).float()
        inner += (got * reference).sum().cpu()
        mine += got.square().sum().cpu()
        theirs += reference.square().sum().cpu()
    return Agreement(abs(loss - truth.loss) / abs(truth.loss), (inner / (mine * theirs).sqrt()).item())


def compare(task: Task, loss: float, truth: FirstStep, bounds: Bounds) -> Agreement:
    """Check `agreement` with the exact model's first step against `bounds`, widened by that step's noise.

    Raises:
        Wrong: the loss or the cosine is out of bounds or NaN.
    """
    found = agreement(task, loss, truth)
    least = bounds.cosine * truth.noise.gradient_cosine
    if not found.loss_difference <= bounds.loss + LEEWAY * truth.noise.loss_difference:
        raise Wrong(f"the loss of the first step is {loss:.5f}, exact has {truth.loss:.5f}; no times")
    if not found.gradient_cosine >= least:
        cosine = f"{found.gradient_cosine:.3f}, at least {least:.3g}"
        raise Wrong(f"cosine of the first gradients with exact: {cosine}; no times")
    return found


def measure(
    subject: str,
    variant: Variant,
    truth: FirstStep,
    device: torch.device,
    steps: int,
    tiny: bool = False,
    clock: timing.Clock | None = None,
) -> dict[str, Any]:
    """Time one variant.

    Args:
        subject: name of the task.
        variant: the variant.
        truth: the exact model's first step.
        device: the device to measure on.
        steps: timed steps.
        tiny: the size for tests.
        clock: overrides the device's clock.

    Returns:
        Times (ms), bytes and what ran, for the record.

    Raises:
        Wrong: the first step is wrong. Errors of the variant itself are not caught.
    """
    task = build(subject, device, tiny)
    variant.change(task)
    with variant.within():
        return _measure(task, variant, truth, device, steps, tiny, clock or timing.clock_of(device))


def _measure(
    task: Task,
    variant: Variant,
    truth: FirstStep,
    device: torch.device,
    steps: int,
    tiny: bool,
    clock: timing.Clock,
) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    model = task.model
    if variant.compiled:
        graphs = variant.graphs and on_gpu
        mode = "reduce-overhead" if graphs else None
        if tiny and not graphs:  # small shapes test tracing only, not code generation
            model = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
        elif task.report is not None:
            model = compile_in_mode(model, mode)
        else:
            model = torch.compile(model, mode=mode)  # type: ignore[assignment]
    began = time.perf_counter()
    found = compare(task, first_loss(task, model), truth, variant.bounds)
    optimizer = task.optimizer()

    def finish() -> None:
        if optimizer is not None:
            task.scaler.step(optimizer)
            task.scaler.update()
        task.model.zero_grad(set_to_none=True)

    def one(number: int) -> None:
        task.scaler.scale(task.loss(model, task.batches[number % len(task.batches)])).backward()
        finish()

    finish()
    if on_gpu:
        # The first step, which compiles and creates the optimizer's state, is excluded from the peak. All later ones
        # count: CUDA graphs allocate their pool when they are recorded, in the second step, and not when replayed.
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    for number in range(WARMUP):
        one(number)
    clock.wait()
    warmup_s = time.perf_counter() - began
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values()) if variant.compiled else None

    activations = None
    if on_gpu and not variant.graphs:
        before = torch.cuda.memory_allocated(device)
        loss = task.loss(model, task.batches[0])
        torch.cuda.synchronize(device)
        activations = torch.cuda.memory_allocated(device) - before
        task.scaler.scale(loss).backward()
        del loss
        finish()
        torch.cuda.synchronize(device)

    asked: list[Clocks] = []
    with side_by_side.turn() as waited:
        for number in range(WARMUP if waited else 0):  # the GPU's clocks fell while it waited
            one(number)
        marks, began_timing = [clock.mark()], time.perf_counter()
        for number in range(steps):
            if number == steps // 2:
                asked.append(Clocks(device))
            one(number)
            marks.append(clock.mark())
            if time.perf_counter() - began_timing > MOST_S:
                break
        if not asked:
            asked.append(Clocks(device))
        clock.wait()
    times = timing.Times.of([clock.ms(*pair) for pair in itertools.pairwise(marks)])
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else None
    return {
        "steps": len(marks) - 1,
        "median_ms": times.median_ms,
        "spread_ms": times.spread_ms,
        "peak_bytes": peak,
        "reserved_bytes": torch.cuda.max_memory_reserved(device) if on_gpu else None,
        "activation_bytes": activations,
        "above_bytes": None if peak is None else peak - standing_bytes(task, optimizer),
        "agreement": asdict(found),
        "noise": asdict(truth.noise),
        "warmup_s": warmup_s,
        "graph_breaks": breaks,
        "layers": None if task.report is None else task.report.ran(),
        "clocks": asked[0].read(),
    }


def standing_bytes(task: Task, optimizer: torch.optim.Optimizer | None) -> int:
    """Return the bytes of a task besides activations: parameters, gradients, optimizer state and batches."""
    held: list[Tensor] = [*task.model.parameters(), *_trained(task)]
    if optimizer is not None:
        held += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    for batch in task.batches:
        held += [batch] if isinstance(batch, Tensor) else batch
    return sum(_nbytes(tensor) for tensor in held)


def _nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor; of a wrapper subclass (torchao's 8-bit state) the sum of its inner tensors."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    return sum(_nbytes(getattr(tensor, name)) for name in names)


def clean_up(device: torch.device) -> None:
    """Free the model, compiled code and memory of the last variant."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def run(
    subjects: Sequence[str],
    variants: Sequence[str] | None,
    device: torch.device,
    steps: int,
    tiny: bool = False,
    again: bool = True,
    seconds: float | None = None,
) -> Iterator[dict[str, Any]]:
    """Time variants of subjects.

    Args:
        subjects: names as for `tasks.build`; empty: all of `SUBJECTS`.
        variants: names as for `variant_of`; None: all of `VARIANTS`.
        device: the device to measure on.
        steps: timed steps of each variant.
        tiny: the size for tests.
        again: measure the baseline a second time after the others.
        seconds: after this time no further variant is started; those are recorded with an error. None: no limit.

    Yields:
        One record per variant of a subject; a failed one has its ``error`` and no times.

    Raises:
        ValueError: an unknown subject or variant, before anything runs.
    """
    for subject in subjects:
        check(subject)
    chosen = [variant_of(name) for name in variants or VARIANTS]
    order = sorted(chosen, key=lambda variant: variant.name != BASELINE)
    if again and len(order) > 1 and order[0].name == BASELINE:
        order.append(order[0])
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    _time_plans_alone()
    for subject in subjects or SUBJECTS:
        truth = None
        seen: dict[str, int] = {}
        for variant in order:
            seen[variant.name] = seen.get(variant.name, 0) + 1
            row = side_by_side.blank(subject, variant.name, steps, tiny) | {"round": seen[variant.name]}
            try:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"left out: {seconds:g} seconds were over")
                if truth is None:
                    with side_by_side.briefly():
                        truth = FirstStep.of(build(subject, device, tiny))
                        clean_up(device)
                row |= measure(subject, variant, truth, device, steps, tiny)
            except Exception as error:  # recorded, so that a variant that fails does not stop the others
                row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            clean_up(device)
            yield row


def _time_plans_alone() -> None:
    """Let a plan's times be taken while no other process of `side_by_side.together` takes its own: beside its work."""
    timed = planning.timed
    if side_by_side.FOLDER not in os.environ:
        return

    def one(work: Callable[[], object], count: int = 2) -> float:
        with side_by_side.alone():
            torch.cuda.synchronize()
            return timed(work, count)

    planning.timed = one
