"""Counts what a training step goes through inside src/hotrain: files, functions, and changes of file.

Prints a Markdown table, which docs/map.md holds with its date. Each step is the second of its model, so that caches are
filled; of the compiled one the first call is counted, which traces the model. Functions are counted once, without
lambdas and comprehensions. A change of file: a call of a function in another file than that of the call before.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import hotrain

SOURCE = str(Path(hotrain.__file__).parent)


@dataclass
class Trace:
    """What ran inside src/hotrain.

    Attributes:
        calls: (file, function) of each call, in order.
    """

    calls: list[tuple[str, str]] = field(default_factory=list)

    def see(self, frame: FrameType, event: str, _: Any) -> None:
        """The profile function: calls of named Python functions of src/hotrain."""
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE) and not code.co_name.startswith("<"):
            self.calls.append((code.co_filename, code.co_qualname))

    def __str__(self) -> str:
        files = [file for file, _ in self.calls]
        changes = sum(a != b for a, b in itertools.pairwise(files))
        return f"{len(set(files))} / {len(set(self.calls))} / {changes}"


@contextmanager
def traced() -> Iterator[Trace]:
    """Context that counts the calls of this thread; autograd's backward of a CPU model runs in it."""
    trace = Trace()
    sys.setprofile(trace.see)
    try:
        yield trace
    finally:
        sys.setprofile(None)


def step(
    model: nn.Module, x: Tensor, before: int, run: Callable[[Tensor], Tensor] | None = None
) -> tuple[Trace, Trace]:
    """Count one training step.

    Args:
        model: converted.
        x: its input.
        before: steps that are not counted.
        run: the compiled model; None for the model itself.

    Returns:
        What ran in forward, and in backward.
    """
    run = model if run is None else run
    for _ in range(before):
        run(x.clone().requires_grad_()).sum().backward()
    x = x.clone().requires_grad_()
    with traced() as forward:
        y = run(x)
    loss = y.sum()
    with traced() as backward:
        loss.backward()
    return forward, backward


def linear() -> tuple[nn.Module, Tensor]:
    """One layer."""
    model = nn.Linear(64, 64)
    hotrain.convert(model, memory="linear", filter_fn=lambda *_: True)
    return model, torch.randn(8, 64, 64)


def mlp() -> tuple[nn.Module, Tensor]:
    """The half of a transformer's block that has a norm and two layers."""
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    hotrain.convert(model, memory="block")
    return model, torch.randn(8, 64, 64)


def table() -> str:
    """The counts as Markdown."""
    lines = ["| step, on the CPU | forward | backward |", "| --- | --- | --- |"]
    for title, make in (("`nn.Linear`", linear), ('`memory="block"`: norm → fc1 → GELU → fc2', mlp)):
        torch.manual_seed(0)
        model, x = make()
        forward, backward = step(model, x, before=1)
        lines.append(f"| {title}, eager | {forward} | {backward} |")
    for title, make in (("`nn.Linear`", linear), ("norm → fc1 → GELU → fc2", mlp)):
        torch.manual_seed(0)
        model, x = make()
        torch._dynamo.reset()
        forward, backward = step(model, x, before=0, run=torch.compile(model, backend="aot_eager"))
        lines.append(f"| {title}, first call compiled (traced) | {forward} | {backward} |")
    return "\n".join(lines)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("Files / functions / changes of file:\n")
    print(table())
