"""Random programs, converted and not: a fixed number in each run, as many as wanted by hand (`programs`)."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator

import programs
import pytest
import torch
from torch import Tensor

from hotrain import autograd, kernels
from hotrain.compress.operators.activation import Slope

# HOTRAIN_PROGRAMS=123456 for other programs than the usual ones.
FIRST = int(os.environ.get("HOTRAIN_PROGRAMS", "0"))
COUNT, SECONDS = 200, 40.0
COMPILED = 8


@pytest.fixture(autouse=True)
def _small_and_fine() -> Iterator[None]:
    with programs.small_and_fine(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch, about hooks and strides
        yield


def _told(p: programs.Program, wrong: list[str]) -> str:
    return "\n".join([f"HOTRAIN_PROGRAMS={p.seed}", *wrong, str(p)])


def test_programs_run_as_without() -> None:
    """Forward, in-place writes, strides and gradients of each program; a failing one is printed, to be pasted."""
    ran, begin = 0, time.monotonic()
    for tried in range(COUNT):
        p = programs.program(FIRST + tried)
        wrong = programs.examine(p)
        assert not wrong, _told(p, wrong)
        ran += wrong is not None
        if time.monotonic() - begin > SECONDS:
            break
    assert ran > 0.8 * tried


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of which the interpreter is made
def test_programs_run_with_kernels_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU runs them in eager mode, in Triton's interpreter. Codes of a few channels are padded to 16: their bytes
    are not compared."""
    pytest.importorskip("triton")
    monkeypatch.setattr(autograd, "KERNELS", dict.fromkeys(("cpu", "cuda"), kernels))
    ran, begin = 0, time.monotonic()
    for tried in range(COUNT):
        p = programs.program(FIRST + 200 + tried)
        wrong = programs.examine(p)
        found = [] if wrong is None else [line for line in wrong if not line.startswith("bytes:")]
        assert not found, _told(p, found)
        ran += wrong is not None
        if time.monotonic() - begin > SECONDS:
            break
    assert ran > 0.8 * tried


@pytest.mark.slow
def test_programs_run_compiled() -> None:
    ran = 0
    for tried in range(COMPILED):
        p = programs.program(FIRST + tried)
        wrong = programs.examine_compiled(p)
        assert not wrong, _told(p, wrong)
        ran += wrong is not None
    torch._dynamo.reset()
    assert ran > 0.5 * COMPILED


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [302177, 302929, 303938], ids=["backward hook", "hook in a mode", "in-place on a slice"]
)
def test_compiled_programs_that_once_failed(seed: int) -> None:
    """Dynamo compiled the mode itself after a graph break; an in-place function returned a tensor without its gaps."""
    p = programs.program(seed)
    wrong = programs.examine_compiled(p)
    assert wrong == [], _told(p, wrong or ["PyTorch does not run it"])
    torch._dynamo.reset()


@pytest.mark.parametrize("broken", ["gradient", "forward", "in place", "layout", "raises"])
def test_what_is_broken_is_found(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth too much in one gradient, and each of the other findings."""
    forward, backward = Slope.forward, Slope.backward

    def changed_forward(ctx: object, x: Tensor, name: str, in_place: bool = False) -> Tensor:
        y: Tensor = forward(ctx, x, name, in_place)
        if broken == "raises":
            raise RuntimeError("on purpose")
        if broken == "in place":
            x.add_(1)
        if broken == "layout":
            y = y.transpose(0, 1).contiguous().transpose(0, 1)
        return y + 1e-6 if broken == "forward" else y

    def changed_backward(ctx: object, g: Tensor) -> tuple[Tensor | None, ...]:
        g_x, *rest = backward(ctx, g)
        assert g_x is not None
        return g_x * 1.1 if broken == "gradient" else g_x, *rest

    monkeypatch.setattr(Slope, "forward", staticmethod(changed_forward))
    monkeypatch.setattr(Slope, "backward", staticmethod(changed_backward))
    lines = [("x = F.relu(x)", programs.EXACT), ("x = self.l(x)", programs.ROUND)]
    p = programs.Program(0, (2, 16, 32), setup=["self.l = nn.Linear(32, 32)"], lines=lines)
    kinds = {"gradient": "error", "in place": "input", "layout": "strides"}
    assert {what.partition(":")[0] for what in programs.examine(p) or ()} >= {kinds.get(broken, broken)}
