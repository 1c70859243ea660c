"""Random programs, converted and not: a fixed number in each run, as many as wanted by hand (`programs`)."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator

import programs
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional as F

import hotrain
from hotrain.activations import functions, partition

# HOTRAIN_PROGRAMS=123456 for other programs than the usual ones.
FIRST = int(os.environ.get("HOTRAIN_PROGRAMS", "0"))
COUNT, SECONDS = 600, 40.0
COMPILED = 36


@pytest.fixture(autouse=True)
def _small_and_fine() -> Iterator[None]:
    with programs.small_and_fine(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch, about hooks and strides
        yield


def test_programs_run_as_without() -> None:
    """Forward, in-place writes, strides and gradients of each program; a failing one is printed, to be pasted."""
    ran, begin = 0, time.monotonic()
    for seed in range(FIRST, FIRST + COUNT):
        p = programs.program(seed)
        exact = programs.usable(p)
        if exact is not None:
            wrong = programs.examine(p, exact)
            assert not wrong, "\n".join([*wrong, str(p)])
            ran += 1
        if time.monotonic() - begin > SECONDS:
            break
    assert ran > 0.8 * (seed + 1 - FIRST)


def _transposed(self: nn.Module, x: Tensor) -> Tensor:
    return x


# What is broken on purpose → (lines, with what they lose; what is broken; the finding)
def _wrong_slope(ctx: object, g: Tensor) -> tuple[Tensor, None]:
    return g * 1.1, None


def _two_lines(*lines: str, setup: str = "self.l = nn.Linear(32, 32)") -> programs.Program:
    return programs.Program(0, (2, 16, 32), setup=[setup], lines=[(line, programs.ROUND) for line in lines])


@pytest.mark.parametrize("broken", ["gradient", "forward", "in place", "layout", "raises"])
def test_what_is_broken_is_found(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth too much in one gradient, and each of the other findings."""
    forward, backward = functions.Slope.forward, functions.Slope.backward

    def changed_forward(ctx: object, x: Tensor, name: str) -> Tensor:
        y: Tensor = forward(ctx, x, name)
        if broken == "raises":
            raise RuntimeError("on purpose")
        if broken == "in place":
            x.add_(1)
        if broken == "layout":
            y = y.transpose(0, 1).contiguous().transpose(0, 1)
        return y + 1e-6 if broken == "forward" else y

    def changed_backward(ctx: object, g: Tensor) -> tuple[Tensor | None, ...]:
        g_x, none = backward(ctx, g)
        assert g_x is not None
        return g_x * 1.1 if broken == "gradient" else g_x, none

    monkeypatch.setattr(functions.Slope, "forward", staticmethod(changed_forward))
    monkeypatch.setattr(functions.Slope, "backward", staticmethod(changed_backward))
    p = _two_lines("x = self.l(x)", "x = F.relu(x)")
    kinds = {"gradient": "error", "in place": "forward", "layout": "strides"}
    assert {what.partition(":")[0] for what in programs.examine(p)} >= {kinds.get(broken, broken)}
