"""hotrain's TorchFunctionModes on PyTorch's mode stack, in eager mode.

A mode costs time for each call and each attribute of a tensor, in hotrain's own code too. So a block within a model
that runs under its mode already enters none of its own (`top`), and hotrain's own computations run with its modes
removed (`aside`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Mode(TorchFunctionMode):
    """Base class of hotrain's TorchFunctionModes."""


def top() -> Any:
    """The innermost mode, which sees a call first; None if there is no mode."""
    depth = torch._C._len_torch_function_stack()
    return torch._C._get_function_stack_at(depth - 1) if depth else None


class aside:
    """Context that removes hotrain's TorchFunctionModes from the top of the mode stack."""

    __slots__ = ("modes",)

    def __enter__(self) -> None:
        self.modes: list[Any] = []
        while isinstance(top(), Mode):
            self.modes.append(torch._C._pop_torch_function_stack())

    def __exit__(self, *_: object) -> None:
        while self.modes:
            torch._C._push_on_torch_function_stack(self.modes.pop())
