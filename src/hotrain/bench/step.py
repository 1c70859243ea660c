"""`hotrain bench step`: whole training steps of whole models, variant by variant.

Every variant gets a fresh model with the same weights and batches. Its first step is held against the exact model's in
eager mode, loss and gradients, before anything is timed; then it warms up, and its steps are timed on the GPU's clock
without a wait between them. The baseline is measured first and again last, so that a drift of the machine shows.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import hotrain
from hotrain.bench import timing
from hotrain.bench.conditions import Clocks
from hotrain.bench.subjects import SUBJECTS, Task, build, checkpoint_blocks
from hotrain.presets import preset
from hotrain.train import parse_method

BASELINE = "exact+compile"
WARMUP = 5


@dataclass(frozen=True)
class Bounds:
    """How far a first step may be from the exact one: relative difference of the loss, cosine of all gradients."""

    loss: float
    cosine: float


# The same formulas in another order of bf16 roundings (2⁻⁸ each); fp8 in the forward product (2⁻⁴ an entry); gradients
# whose noise adds up from layer to layer and may exceed the signal (docs/maths.md), so that what is asked is a
# direction far from chance (hot-unbiased by definition: 0.80 on ViT-B, 0.65 on Llama blocks of width 1024).
EXACT = Bounds(0.01, 0.98)
FP8 = Bounds(0.05, 0.5)
METHOD = Bounds(0.01, 0.4)
METHOD_FP8 = Bounds(0.05, 0.4)


@dataclass(frozen=True)
class Variant:
    """change: what is done to a fresh task.  graphs: whether the compiled model runs as CUDA graphs."""

    name: str
    change: Callable[[Task], None]
    bounds: Bounds
    compiled: bool = True
    graphs: bool = False


def _unchanged(task: Task) -> None:
    pass


def _torchao(task: Task) -> None:
    float8 = importlib.import_module("torchao.float8")

    def chosen(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and not task.kept_exact(name)

    float8.convert_to_float8_training(task.model, module_filter_fn=chosen)


def _hotrain(task: Task) -> None:
    hotrain.convert(task.model)


def _hotrain_fp8_forward(task: Task) -> None:
    hotrain.convert(task.model, forward="fp8")


def _hotrain_graphs(task: Task) -> None:
    hotrain.convert(task.model, plan="graphs")


def _hotrain_fp8_forward_graphs(task: Task) -> None:
    hotrain.convert(task.model, forward="fp8", plan="graphs")


def _hotrain_memory(task: Task) -> None:
    hotrain.convert(task.model, plan="memory")


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("exact", _unchanged, EXACT, compiled=False),
        Variant("exact+compile", _unchanged, EXACT),
        Variant("exact+compile+checkpoint", checkpoint_blocks, EXACT),
        Variant("torchao-float8-tensorwise", _torchao, FP8),
        Variant("hotrain", _hotrain, METHOD),
        Variant("hotrain-fp8fwd", _hotrain_fp8_forward, METHOD_FP8),
        Variant("exact+graphs", _unchanged, EXACT, graphs=True),
        Variant("hotrain+graphs", _hotrain_graphs, METHOD, graphs=True),
        Variant("hotrain-fp8fwd+graphs", _hotrain_fp8_forward_graphs, METHOD_FP8, graphs=True),
        Variant("hotrain-all", _hotrain_memory, METHOD),
    )
}


def variant_of(name: str) -> Variant:
    """A variant by name; ``hotrain:METHOD`` is a method of one's own, ``hotrain:hot:rank=4`` with overrides.

    Raises ValueError for an unknown variant or method.
    """
    if name in VARIANTS:
        return VARIANTS[name]
    kind, _, text = name.partition(":")
    if kind != "hotrain" or not text:
        raise ValueError(f"--variants: got {name!r}, accepted are {', '.join(VARIANTS)} and hotrain:METHOD")
    base, overrides = parse_method(text)
    method = preset(base, **overrides)

    def change(task: Task) -> None:
        hotrain.convert(task.model, method, number=None, plan="memory")

    return Variant(name, change, METHOD)


@dataclass(frozen=True)
class FirstStep:
    """The loss of a first step, and the gradients of the parameters (bf16, on the host), in the model's order."""

    loss: float
    gradients: list[Tensor]

    @classmethod
    def of(cls, task: Task) -> FirstStep:
        loss = first_loss(task, task.model)
        gradients = [torch.zeros(()) if p.grad is None else p.grad.to("cpu", torch.bfloat16) for p in _trained(task)]
        return cls(loss, gradients)


def first_loss(task: Task, model: nn.Module) -> float:
    """One forward and backward on the first batch; gradients stay in the parameters."""
    loss = task.loss(model, task.batches[0])
    loss.backward()
    return loss.item()


def _trained(task: Task) -> list[nn.Parameter]:
    return [p for p in task.model.parameters() if p.requires_grad]


class Wrong(RuntimeError):
    """The first step is too far from the exact model's: no times."""


def compare(task: Task, loss: float, truth: FirstStep, bounds: Bounds) -> dict[str, float]:
    """Relative difference of the loss, and cosine of the gradients, of a first step against the exact one.

    Raises `Wrong` where one is out of bounds or not a number.
    """
    inner = torch.zeros((), dtype=torch.float64)
    mine, theirs = inner.clone(), inner.clone()
    for parameter, want in zip(_trained(task), truth.gradients, strict=True):
        got = torch.zeros(()) if parameter.grad is None else parameter.grad.float()
        reference = want.to(got.device).float()
        inner += (got * reference).sum().cpu()
        mine += got.square().sum().cpu()
        theirs += reference.square().sum().cpu()
    cosine = (inner / (mine * theirs).sqrt()).item()
    difference = abs(loss - truth.loss) / abs(truth.loss)
    if not difference <= bounds.loss:
        raise Wrong(f"the loss of the first step is {loss:.5f}, exact has {truth.loss:.5f}; no times")
    if not cosine >= bounds.cosine:
        raise Wrong(f"cosine of the first gradients with exact: {cosine:.3f}, at least {bounds.cosine}; no times")
    return {"loss_difference": difference, "gradient_cosine": cosine}


def measure(
    subject: str,
    variant: Variant,
    truth: FirstStep,
    device: torch.device,
    steps: int,
    tiny: bool = False,
    clock: timing.Clock | None = None,
) -> dict[str, Any]:
    """Times and bytes of one variant. Raises whatever the variant raises, `Wrong` for a wrong first step."""
    clock = clock or timing.clock_of(device)
    on_gpu = device.type == "cuda"
    task = build(subject, device, tiny)
    variant.change(task)
    model = task.model
    if variant.compiled:
        # On small shapes the question is whether it traces, not what the compiler makes of it.
        options: dict[str, Any] = {"backend": "eager"} if tiny else {"backend": "inductor"}
        if variant.graphs and on_gpu:
            options["mode"] = "reduce-overhead"
        model = torch.compile(model, **options)  # type: ignore[assignment]
    began = time.perf_counter()
    agreement = compare(task, first_loss(task, model), truth, variant.bounds)
    optimizer = task.optimizer()

    def finish() -> None:
        if optimizer is not None:
            optimizer.step()
        task.model.zero_grad(set_to_none=True)

    def one(number: int) -> None:
        task.loss(model, task.batches[number % len(task.batches)]).backward()
        finish()

    finish()
    for number in range(WARMUP):
        one(number)
    clock.wait()
    warmup_s = time.perf_counter() - began
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values()) if variant.compiled else None

    activations = None
    if on_gpu:
        before = torch.cuda.memory_allocated(device)
        loss = task.loss(model, task.batches[0])
        torch.cuda.synchronize(device)
        activations = torch.cuda.memory_allocated(device) - before
        loss.backward()
        del loss
        finish()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)

    asked: list[Clocks] = []
    marks = [clock.mark()]
    for number in range(steps):
        if number == steps // 2:
            asked.append(Clocks(device))
        one(number)
        marks.append(clock.mark())
    clock.wait()
    times = timing.Times.of([clock.ms(*pair) for pair in itertools.pairwise(marks)])
    return {
        "median_ms": times.median_ms,
        "spread_ms": times.spread_ms,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        "activation_bytes": activations,
        "agreement": agreement,
        "warmup_s": warmup_s,
        "graph_breaks": breaks,
        "clocks": asked[0].read(),
    }


def clean_up(device: torch.device) -> None:
    """Free what the last variant left: its model, its compiled code, its memory."""
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
    """One record a variant of a subject; a failed one has its ``error`` and no times.

    subjects, variants: none for all.  again: measure the baseline a second time after the others.
    seconds: after so long no further variant is started; it is recorded as left out.
    Raises ValueError for an unknown subject or variant before anything runs.
    """
    for subject in subjects:
        if subject not in SUBJECTS:
            raise ValueError(f"bench step: got {subject!r}, subjects are {', '.join(SUBJECTS)}")
    chosen = [variant_of(name) for name in variants or VARIANTS]
    order = sorted(chosen, key=lambda variant: variant.name != BASELINE)
    if again and len(order) > 1 and order[0].name == BASELINE:
        order.append(order[0])
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    for subject in subjects or SUBJECTS:
        truth = None
        seen: dict[str, int] = {}
        for variant in order:
            seen[variant.name] = seen.get(variant.name, 0) + 1
            row: dict[str, Any] = dict.fromkeys(("median_ms", "spread_ms", "peak_bytes", "activation_bytes"))
            row |= {"bench": "step", "subject": subject, "variant": variant.name, "round": seen[variant.name]}
            row |= {"steps": steps, "tiny": tiny, "error": None}
            try:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"left out: {seconds:g} seconds were over")
                if truth is None:
                    truth = FirstStep.of(build(subject, device, tiny))
                    clean_up(device)
                row |= measure(subject, variant, truth, device, steps, tiny)
            except Exception as error:  # whatever a variant breaks on, the others are still worth measuring
                row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            clean_up(device)
            yield row
