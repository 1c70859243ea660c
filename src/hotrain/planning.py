"""Whether a layer gains time on the GPU it is on: its training step exact and converted, measured once a shape.

`convert(plan="speed")` asks here at a layer's first training forward on a GPU; what loses stays exact, and the report says
so with both times. On a CPU nothing is measured: there `hotrain.plan` looks at a whole model.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from . import autograd
from .autograd import Step
from .convolution import Geometry
from .method import Method
from .transform.tokens import Grid

_REPEATS = 7
_HOPELESS = 3.0  # times slower in the first pair: not worth the repeats

_verdicts: dict[Question, tuple[float, float] | None] = {}


@dataclass(frozen=True)
class Question:
    """All that the time of a layer's training step depends on.

    x, w: shapes.  dtype: of the product; weights: of the parameters.  bias: whether there is one.  needs_x: whether x
    wants a gradient.  geometry: of a convolution, None for a Linear; transposed: as in transformers' Conv1D.
    """

    x: tuple[int, ...]
    w: tuple[int, ...]
    dtype: torch.dtype
    weights: torch.dtype
    bias: bool
    needs_x: bool
    method: Method
    grid: Grid | None
    transposed: bool
    geometry: Geometry | None
    device: torch.device

    @property
    def outputs(self) -> int:
        return self.w[1 if self.transposed else 0]


def times(question: Question) -> tuple[float, float] | None:
    """Milliseconds of forward and backward, exact and by the method; None where they cannot be taken.

    That is within a captured CUDA graph, and where memory does not suffice for a second set of tensors. Each question
    is measured once a process, on random data.
    """
    if question not in _verdicts:
        if torch.cuda.is_current_stream_capturing():
            return None
        try:
            _verdicts[question] = _measure(question)
        except torch.OutOfMemoryError:
            _verdicts[question] = None
    return _verdicts[question]


def verdict(question: Question) -> str | None:
    """Why the layer stays exact, with the two times; None where it gains."""
    found = times(question)
    if found is None or found[1] <= found[0]:
        return None
    exact, converted = found
    return f"slower on this GPU: {converted:.3f} ms a step against {exact:.3f} ms exact"


def _measure(q: Question) -> tuple[float, float]:
    def noise(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, device=q.device, dtype=torch.float32).to(dtype)

    generator = torch.cuda.get_rng_state(q.device)
    try:
        x = noise(*q.x, dtype=q.dtype).requires_grad_(q.needs_x)
        if q.geometry is not None:
            x = x.detach().to(memory_format=torch.channels_last).requires_grad_(q.needs_x)
        w = noise(*q.w, dtype=q.weights).requires_grad_()
        b = noise(q.outputs, dtype=q.weights).requires_grad_() if q.bias else None
    finally:
        torch.cuda.set_rng_state(generator, q.device)
    step = Step(q.method, 1, q.grid, q.transposed, "planned", handle=-1)

    def exact() -> Tensor:
        if q.geometry is not None:
            return q.geometry.forward(x, w, b)
        return F.linear(x, w.T if q.transposed else w, b)

    def converted() -> Tensor:
        if q.geometry is not None:
            return autograd.Conv2d.apply(x, w, b, q.geometry, step)
        return autograd.Linear.apply(x, w, b, step)

    inputs = [t for t in (x if q.needs_x else None, w, b) if t is not None]

    def timed(forward: Callable[[], Tensor], g: Tensor) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(2):
            torch.autograd.grad(forward(), inputs, g)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 2

    with torch.enable_grad(), torch.autocast(q.device.type, q.dtype, enabled=q.dtype != q.weights):
        g = torch.randn_like(exact())
        for forward in (exact, converted):
            torch.autograd.grad(forward(), inputs, g)  # compiles, and finds the scales
        first = timed(exact, g), timed(converted, g)
        if first[1] > _HOPELESS * first[0]:
            return first
        pairs = [(timed(exact, g), timed(converted, g)) for _ in range(_REPEATS)]
    return statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs)
