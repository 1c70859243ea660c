"""Peak memory against step time: one model exact, checkpointed, offloaded, converted, and converted with checkpointing.

`frontier` measures the points on the device, `Frontier.best` picks the fastest within a budget, and
``hotrain.convert(model, plan=point)`` follows it. On a CPU times are measured and bytes predicted, as in `hotrain.fit`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .._version import __version__
from ..audit.saved_bytes import saved_bytes
from ..budget import by_gain
from ..casting import autocast_to
from ..compiling import compile_in_mode, mode_of
from ..compress.checkpointing import blocks
from ..compress.report import tensors
from ..files import parse_json, read_text, write_text
from ..functional import as_method
from ..method import Method
from ..plans import PREDICTED, RAN, Point, device_name, size_of, undominated
from ..presets import DEFAULT
from ..tables import bytes_text, parse_bytes, table
from .steps import (
    COUNTED,
    Inputs,
    MakeOptimizer,
    Step,
    batch_bytes,
    device_of,
    fixed_bytes,
    following,
    timed,
    unless_out_of_memory,
)

VERSION = 1  # of the rows of `Frontier.save`, under "record"
SHARES = (0.25, 0.5, 1.0)  # of the blocks that are checkpointed in a converted model
_SPARE = 0.02  # of exact's time: what a converted model must be faster, compiled, for a point that spends it
_WARM = 3  # steps after the first, in which CUDA graphs are recorded


@dataclass(frozen=True)
class Frontier:
    """The result of `frontier`.

    Attributes:
        points: that were measured, also those that ran out of memory.
        conditions: of the measurement: model, inputs (shapes), autocast, compile, steps, optimizer, device, versions.
    """

    points: tuple[Point, ...]
    conditions: dict[str, Any]

    @property
    def front(self) -> tuple[Point, ...]:
        """The points that no other one beats in time or memory without being beaten in the other, fastest first."""
        return tuple(undominated({p: (p.ms or 0.0, p.peak_bytes or 0) for p in self.points if p.fits}))

    def best(self, budget: int | str) -> Point:
        """The fastest point whose peak is within a budget.

        Args:
            budget: bytes, or a size as ``"16GiB"``.

        Raises:
            ValueError: none is; the message names the one that comes nearest. Or the budget is no size.
        """
        size = parse_bytes(budget)
        within = [point for point in self.front if point.peak_bytes is not None and point.peak_bytes <= size]
        if within:
            return within[0]
        least = self._any()[-1]
        assert least.peak_bytes is not None
        raise ValueError(
            f"frontier: a budget of {bytes_text(size)} cannot be met: the least is {bytes_text(least.peak_bytes)} "
            f"({least.peak_bytes} bytes), {least.peak_bytes / max(size, 1):.2f} times as much, with {least.name} at "
            f"{least.ms:.1f} ms/step"
        )

    def smallest(self, at_most_ms: float) -> Point:
        """The point of the least peak whose step takes no longer than `at_most_ms`.

        Args:
            at_most_ms: ms/step.

        Raises:
            ValueError: none is as fast; the message names the fastest.
        """
        within = [point for point in self.front if point.ms is not None and point.ms <= at_most_ms]
        if within:
            return within[-1]
        fastest = self._any()[0]
        raise ValueError(
            f"frontier: no point takes at most {at_most_ms:g} ms/step: the fastest is {fastest.name}, {fastest.ms:.1f} "
            f"ms/step and {bytes_text(fastest.peak_bytes or 0)}"
        )

    def _any(self) -> tuple[Point, ...]:
        if not self.front:
            raise ValueError("frontier: every point ran out of memory; measure a smaller batch")
        return self.front

    def __str__(self) -> str:
        front, cells = self.front, []
        exact = next((point for point in self.points if point.name == "exact" and point.fits), None)
        for point in self.points:
            if point.ms is None or point.peak_bytes is None:
                cells.append([point.name, "–", "–", "–", "–", "out of memory"])
                continue
            ratios = ["–", "–"]
            if exact is not None and exact.ms and exact.peak_bytes:
                ratios = [f"{point.ms / exact.ms:.2f}", f"{point.peak_bytes / exact.peak_bytes:.2f}"]
            note = "" if point in front else "dominated"
            cells.append([point.name, f"{point.ms:.1f}", ratios[0], bytes_text(point.peak_bytes), ratios[1], note])
        about = self.conditions
        shapes = ", ".join("×".join(map(str, shape)) for shape in about["inputs"])
        text = (
            f"{about['model']} on {about['device']}, inputs {shapes}, {about['autocast'] or 'no'} "
            f"autocast, {'compiled' if about['compile'] else 'eager'}, median of {about['steps']} steps"
        )
        predicted = any(point.how == PREDICTED for point in self.points)
        peak = "peak (predicted)" if predicted else "peak"
        lines = [text, table(["point", "ms/step", "× exact", peak, "× exact", ""], cells)]
        if any(point.method is not None and point.recomputed for point in self.points):
            lines.append("+n/m: n of m blocks are checkpointed")
        if predicted:
            lines.append(f"Times were measured; peaks are predicted: there is no allocator here to ask.\n{COUNTED}")
        return "\n".join(lines)

    def rows(self) -> list[dict[str, Any]]:
        """One dict of JSON values for each point: its own fields under ``point``, ``dominated``, and the conditions."""
        front = self.front
        return [
            {"record": VERSION, **self.conditions, "dominated": point not in front, "point": point.to_json()}
            for point in self.points
        ]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `rows` as JSON, one a line, atomically; a file that is there is replaced."""
        write_text(path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in self.rows()))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Frontier:
        """Read what `save` wrote.

        Raises:
            ValueError: the file is no such record.
        """
        try:
            rows = [parse_json(line) for line in read_text(path).splitlines() if line.strip()]
            versions = {row.pop("record") for row in rows}
            points = tuple(Point.from_json(row.pop("point")) for row in rows)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{path} is no record of hotrain.frontier ({error})") from error
        if versions != {VERSION}:
            raise ValueError(f"{path}: record of version {sorted(versions, key=str)}, this hotrain reads {VERSION}")
        rows[0].pop("dominated", None)
        return cls(points, rows[0])


def frontier(
    model: nn.Module,
    *inputs: Any,
    method: str | Method = DEFAULT,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: MakeOptimizer = torch.optim.AdamW,
    compile: bool = False,
    steps: int = 5,
    on_point: Callable[[Point], None] | None = None,
    **kwargs: Any,
) -> Frontier:
    """Measure peak memory and time of training steps: exact, and with what reduces memory.

    The points: exact; with every block checkpointed; with saved tensors offloaded to the host's memory (on a GPU);
    converted as by default, and, compiled on a GPU where that is faster than exact, with more compressed for the time
    that is left (``hotrain+spare``); converted with ``plan="memory"``, alone and with a quarter, a half and all of its
    blocks checkpointed, those first that free most bytes for their time (on a CPU in eager mode the two plans are one,
    and only the latter is there). Points whose steps run out of memory say so.

    Call it under the autocast context that training uses. The model is unchanged afterwards, to the bit. On a GPU a
    peak is the allocator's, with all that the process has allocated there; its statistics are reset.

    Args:
        model: exact, not compiled, on the device in question.
        *inputs: a batch, of ``model(*inputs, **kwargs)``.
        method: of the converted points, as in `hotrain.convert`.
        loss: output → scalar; None is the sum of all outputs.
        optimizer: parameters → optimizer.
        compile: whether to run each point as `hotrain.compile` does: compiled anew, on a GPU as CUDA graphs. All other
            compiled code of the process is dropped.
        steps: timed for each point, after some that are not.
        on_point: called with each point when it has been measured.
        **kwargs: of the model.

    Raises:
        ValueError: the model is converted, has no parameter that requires grad, or is compiled; or ``steps < 1``, or
            the method is exact.
    """
    device = device_of(model, "frontier")
    if type(steps) is not int or steps < 1:
        raise ValueError(f"frontier: steps={steps!r} is not a positive integer")
    chosen = as_method(method)
    if chosen.is_plain:
        raise ValueError(f"frontier: method {chosen.name!r} is exact, which is measured anyway; name another preset")
    batch: Inputs = (inputs, kwargs)
    points: list[Point] = []
    if compile:
        torch.compiler.reset()
    for plan in _plans(model, batch, chosen, device, compile, points):
        try:
            points.append(_measured(model, batch, plan, device, loss, optimizer, compile, steps))
        except Exception as error:
            error.add_note(f"hotrain.frontier: at the point {plan.name!r}")
            raise
        if on_point is not None:
            on_point(points[-1])
    autocast = autocast_to(device.type)
    conditions = {
        "model": type(model).__name__,
        "inputs": [list(t.shape) for t in tensors([inputs, kwargs])],
        "autocast": None if autocast is None else str(autocast).removeprefix("torch."),
        "compile": compile,
        "steps": steps,
        "optimizer": getattr(optimizer, "__name__", type(optimizer).__name__),
        "device": device_name(device),
        "versions": {"hotrain": __version__, "torch": torch.__version__, "python": sys.version.split()[0]},
    }
    return Frontier(tuple(points), conditions)


def _plans(
    model: nn.Module, batch: Inputs, method: Method, device: torch.device, compile: bool, measured: list[Point]
) -> Iterator[Point]:
    """The points, not measured yet: each before the next one is asked for."""
    on_gpu, found = device.type == "cuda", list(blocks(model))
    yield Point("exact")
    if found:
        yield Point("exact+checkpoint", recomputed=tuple(found))
    if on_gpu:
        yield Point("exact+offload", offload=True)
    memory = Point("hotrain-memory", method, "memory")
    if on_gpu or compile:  # elsewhere every plan converts all layers
        own = Point("hotrain", method, "graphs" if compile else "speed")
        yield own
        exact, now = measured[0].ms, measured[-1].ms
        if on_gpu and compile and exact and now and exact - now > _SPARE * exact:
            yield replace(own, name="hotrain+spare", spare_ms=round(exact - now, 2))
    yield memory
    order = _worth_recomputing(model, batch, memory) if found else []
    for count in sorted({max(1, round(share * len(order))) for share in SHARES} if order else ()):
        names = set(order[:count])
        recomputed = tuple(name for name in found if name in names)
        yield replace(memory, name=f"{memory.name}+{count}/{len(found)}", recomputed=recomputed)


def _worth_recomputing(model: nn.Module, batch: Inputs, point: Point) -> list[str]:
    """Blocks whose recomputation frees bytes, most for their time first; in the model's order if that does not fit."""
    found, (args, kwargs) = blocks(model), batch
    with following(model, point):
        gains = unless_out_of_memory(
            lambda: by_gain(model, found, saved_bytes(model, *args, **kwargs), args, kwargs), model
        )
    return list(found if gains is None else gains)


def _measured(
    model: nn.Module, batch: Inputs, plan: Point, device: torch.device, loss: Callable[[Any], Tensor] | None,
    optimizer: MakeOptimizer, compile: bool, steps: int,
) -> Point:  # fmt: skip
    """The point with its time and memory; without them where memory ran out."""

    def measure() -> tuple[float, int]:
        try:
            step = Step(model, loss, optimizer, compile_in_mode(model, mode_of(model, plan)) if compile else model)
            own = step.optimizer()
            ms, peak = timed(step, lambda: batch, own, device, warm=_WARM if device.type == "cuda" else 0, steps=steps)
            return ms, fixed_bytes(model, own) + batch_bytes(model, batch)[0] if peak is None else peak
        finally:
            if compile:  # graphs hold memory, and the next point is another model to Dynamo only if it forgets this one
                torch.compiler.reset()

    with following(model, plan):
        result = unless_out_of_memory(measure, model)
    ms, peak = result or (None, None)
    how = RAN if device.type == "cuda" else PREDICTED
    layers, parameters = size_of(model)
    return replace(
        plan, ms=ms, peak_bytes=peak, how=how, device=device_name(device), torch_version=torch.__version__,
        layers=layers, parameters=parameters,
    )  # fmt: skip
