"""Where hotrain's modes stand among PyTorch's, in eager mode.

A mode costs its price for each call and each attribute of a tensor that is asked for, hotrain's own too. So a block
within a model that has its mode already gets none of its own (`top`), and what hotrain computes itself runs with its
modes put `aside`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Mode(TorchFunctionMode):
    """One of hotrain's."""


def top() -> Any:
    """The mode that sees a call first, None for none."""
    standing = torch._C._len_torch_function_stack()
    return torch._C._get_function_stack_at(standing - 1) if standing else None


class aside:
    """Within it, those of hotrain's modes that would see a call first do not see it."""

    __slots__ = ("modes",)

    def __enter__(self) -> None:
        self.modes: list[Any] = []
        while isinstance(top(), Mode):
            self.modes.append(torch._C._pop_torch_function_stack())

    def __exit__(self, *_: object) -> None:
        while self.modes:
            torch._C._push_on_torch_function_stack(self.modes.pop())
