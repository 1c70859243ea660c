"""`compile`: converts a model for CUDA graphs, compiles it, and warns when a training step got slower."""

from __future__ import annotations

import copy
import functools
import inspect
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .compress.report import Buffers, Example
from .conversion import ConversionReport, convert, revert
from .functional import check_model
from .method import Method
from .planning import clock
from .plans import Point
from .presets import DEFAULT
from .private import differentiates

_CHECKED = 5  # the training forward before which the compiled step is timed: its graphs are recorded by then
_WARM, _TIMED = 2, 5  # passes of each model
_NOISE = 1.03  # of a ratio of two such medians


def compile(model: nn.Module, method: str | Method = DEFAULT, *, check: bool = True, **options: Any) -> Any:
    """Convert `model` in place and compile it: ``fast = hotrain.compile(model)``, then train `fast` as before.

    On a CUDA device the plan is ``"graphs"`` and the mode of `torch.compile` ``"reduce-overhead"`` (CUDA graphs);
    elsewhere both have their defaults. Parameters and state_dict stay those of `model`. Logits that a language model
    returns beside its loss have their gradient outside of the graph, where it costs nothing unless it is asked for.

    Args:
        model: as for `hotrain.convert`.
        method: as for `hotrain.convert`.
        check: on a CUDA device, time forward and backward of the exact model in eager mode on the first training
            batch, and of the compiled one a few steps later, and warn when it got slower. This takes the memory of one
            exact step for a moment and resets PyTorch's peak memory statistics. Where that does not fit, and in a
            distributed run, nothing is compared.
        **options: further arguments of `hotrain.convert`.

    Returns:
        What `torch.compile` returns; its ``report`` is that of `hotrain.convert`, with ``report.times``.

    Raises:
        TypeError: an argument is one of `torch.compile`, or the model none.
        ValueError: as `hotrain.convert`.
    """
    if theirs := sorted(options.keys() & inspect.signature(torch.compile).parameters.keys()):
        raise TypeError(
            f"hotrain.compile: got {', '.join(theirs)}, of torch.compile, whose arguments it chooses; for others call "
            f"hotrain.convert(model), then torch.compile(model, {theirs[0]}=…)"
        )
    check_model("compile", model)
    on_gpu = any(p.is_cuda for p in model.parameters())
    if on_gpu:
        options.setdefault("plan", "graphs")
    report = convert(model, method, **options)
    fast = compile_in_mode(model, mode_of(model, report.point))
    fast.__dict__["report"] = report
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if report.buffers is not None:
        fast.forward = _seeing(fast.forward, model, report.buffers)
    if check and on_gpu and not distributed:
        Check(fast, model, report)
    return fast


def mode_of(model: nn.Module, point: Point | None) -> str | None:
    """The mode of `torch.compile`: CUDA graphs on a GPU, if no copy to the host's memory comes between."""
    on_gpu = any(p.is_cuda for p in model.parameters())
    return "reduce-overhead" if on_gpu and not (point is not None and point.offload) else None


def compile_in_mode(model: nn.Module, mode: str | None) -> Any:
    """`torch.compile` in a mode, with logits that are returned beside a loss as `compress.logits` has them."""
    try:
        from .compress.logits import Backend

        backend = Backend(mode)
    except (ImportError, AttributeError):  # a PyTorch without what that uses of it
        return torch.compile(model, mode=mode)
    return torch.compile(model, backend=backend)


def _seeing(forward: Callable[..., Any], model: nn.Module, buffers: Buffers) -> Callable[..., Any]:
    """The forward of a compiled model, which runs no Python of hotrain, recording the first training step that returns:
    the shapes of its inputs and the bytes that it keeps."""
    from .audit.saved_bytes import counting

    @functools.wraps(forward)
    def seeing(*args: Any, **kwargs: Any) -> Any:
        if buffers.seen or torch.compiler.is_compiling() or not (model.training and differentiates()):
            return forward(*args, **kwargs)
        buffers.example, buffers.uncut = Example.of(model, args, kwargs), False
        with counting(model) as kept:
            output = forward(*args, **kwargs)
        buffers.seen, buffers.kept = True, kept()
        # Without any record Dynamo has taken the graphs of another model.
        buffers.uncut |= not (buffers.graphs or buffers.formats or buffers.full)
        return output

    return seeing


class Check:
    """A hook on a compiled model that writes the times of the exact and of the compiled step into its report.

    It removes itself after the second measurement. ``fast`` is the compiled ``model``.
    """

    def __init__(self, fast: nn.Module, model: nn.Module, report: ConversionReport) -> None:
        self.fast, self.model, self.report = fast, model, report
        self.before: float | None = None
        self.forwards = 0
        self.handle = fast.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (self.model.training and torch.is_grad_enabled()):
            return
        self.forwards += 1
        try:
            if self.forwards == 1:
                self.before = self._before(args, kwargs)
            elif self.forwards == _CHECKED:
                self.handle.remove()
                self._after(args, kwargs)
        except torch.OutOfMemoryError:
            self.handle.remove()  # exact training does not fit: nothing to compare with

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        # Parameters are shared, buffers are not: running statistics stay as they are.
        exact = copy.deepcopy(self.model, {id(p): p for p in self.model.parameters()})
        revert(exact)
        with torch.random.fork_rng():
            ms = _milliseconds(exact, exact, args, kwargs)
        del exact
        if torch.cuda.is_available():
            # The exact step was only for comparison: its memory and its peak must not count as the model's.
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return ms

    def _after(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        from .audit.unchanged import as_found

        assert self.before is not None
        with as_found(self.model):
            after = _milliseconds(self.fast.forward, self.model, args, kwargs)
        self.report.times = self.before, after
        if after > _NOISE * self.before:
            warnings.warn(
                f"hotrain: forward and backward take {after:.1f} ms, {self.before:.1f} ms before (exact, eager). "
                "hotrain.revert(model) undoes the conversion; print(fast.report) says what each layer does.",
                stacklevel=2,
            )


def _milliseconds(
    forward: Callable[..., Any], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> float:
    """Median time of forward and backward in ms; gradients are discarded."""
    from .audit.saved_bytes import sum_of_results

    parameters = [p for p in model.parameters() if p.requires_grad]
    device = next((p.device for p in model.parameters() if p.is_cuda), torch.device("cpu"))
    times = []
    for number in range(_WARM + _TIMED):
        begin = clock(device)
        loss = sum_of_results(forward(*args, **kwargs))
        with torch.autocast(loss.device.type, enabled=False):
            torch.autograd.grad(loss, parameters, allow_unused=True)
        if number >= _WARM:
            times.append((clock(device) - begin) * 1e3)
    return statistics.median(times)
