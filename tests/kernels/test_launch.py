"""Launches by case: a compiled kernel is launched again only where it is valid, as Triton launches it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.compiler import CompiledKernel

from hotrain.kernels.launch import aligned, launch


def test_the_case_says_which_tensors_are_unaligned() -> None:
    """A kernel that reads the one in wide loads would read the other so."""
    words = torch.zeros(64, dtype=torch.int16)
    offset = -words.data_ptr() // 2 % 8
    even, odd = words[offset:], words[offset + 1 :]
    assert aligned(even, None, even) is True
    assert len({aligned(odd, even), aligned(even, odd), aligned(odd, odd), aligned(even, even)}) == 4


class Kernel:
    """A kernel of `triton.jit` that compiles to one whose launcher notes its calls."""

    arg_names = ("t", "n", "SECOND", "FIRST")

    def __init__(self) -> None:
        self.compilations, self.calls = 0, []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return self.compile

    def compile(self, *args: Any, **named: Any) -> Any:
        self.compilations += 1
        compiled = object.__new__(CompiledKernel)
        known = {"module": 1, "function": 1234, "packed_metadata": (4, 1, 0), "name": "", "src": SimpleNamespace()}
        compiled.__dict__.update(known, _run=lambda *given: self.calls.append(given))
        self.compiled = compiled
        return compiled


@pytest.mark.parametrize(("programs", "grid"), [(5, (5, 1, 1)), ((5, 2), (5, 2, 1))])
def test_a_launch_again_is_what_tritons_own_is(monkeypatch, programs, grid) -> None:
    """The same arguments in the same places, but for hooks; constants in the kernel's order."""
    module = sys.modules["hotrain.kernels.launch"]
    monkeypatch.setattr(module, "INTERPRETED", False)
    monkeypatch.setattr(module, "_compiled", {})
    monkeypatch.setattr(module, "_current_stream", lambda: lambda index: 77)
    kernel, t, constants = Kernel(), torch.zeros(4), {"FIRST": 1, "SECOND": 2}
    for _ in range(3):
        launch(kernel, programs, "case", (t, 8), constants, num_warps=4)
    assert (kernel.compilations, len(kernel.calls)) == (1, 2)
    kernel.compiled[grid](t, 8, 2, 1, stream=77)
    ours, theirs = kernel.calls[1:]
    hooks = slice(6, 9)
    assert ours[:6] + ours[9:] == theirs[:6] + theirs[9:] == (*grid, 77, 1234, (4, 1, 0), t, 8, 2, 1)
    assert ours[hooks] == (None, None, None)
    launch(kernel, programs, "another case", (t, 8), constants, num_warps=4)
    launch(kernel, programs, "case", (t, 8), constants, num_warps=8)
    assert kernel.compilations == 3
