"""A stand-in for torchao's 8-bit AdamW, which is not among the packages that tests need."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

BLOCK = 256  # entries with one scale, as torchao has them


class State8bit(Tensor):
    """Codes and scales that say they were float32, as torchao's state does."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, like: Tensor) -> State8bit:
        self = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        self.codes = torch.zeros(like.shape, dtype=torch.uint8)
        self.scale = torch.zeros(like.numel() // BLOCK)
        return self

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


class AdamW8bit(torch.optim.Optimizer):
    """A step of plain descent, with the state that torchao's would have; as there, small parameters keep float32."""

    made: list[AdamW8bit]

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})
        self.made.append(self)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                small = p.numel() < 4096 or p.numel() % BLOCK
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(p) if small else State8bit(p))
                p.sub_(p.grad, alpha=group["lr"])


@pytest.fixture
def adamw8bit(monkeypatch: pytest.MonkeyPatch) -> list[AdamW8bit]:
    """Puts it in torchao's place; the optimizers that a test makes of it."""
    made: list[AdamW8bit] = []
    optim = ModuleType("torchao.optim")
    optim.AdamW8bit = type("AdamW8bit", (AdamW8bit,), {"made": made})  # type: ignore[attr-defined]
    package = ModuleType("torchao")
    package.__spec__ = ModuleSpec("torchao", None)  # transformers looks for it
    monkeypatch.setitem(sys.modules, "torchao", package)
    monkeypatch.setitem(sys.modules, "torchao.optim", optim)
    return made
