"""hotrain's TorchFunctionModes on PyTorch's mode stack, in eager mode.

A mode costs time for each call and each attribute of a tensor, in hotrain's own code too. So a block within a model
that runs under its mode already enters none of its own (`top`), and hotrain's own computations run with its modes
removed (`without_own_modes`, which calls them so).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch.overrides import TorchFunctionMode

from ..private import function_modes, saved_tensor_hooks, traced_graph_of


class Mode(TorchFunctionMode):
    """Base class of hotrain's TorchFunctionModes."""


current_checkpoint = saved_tensor_hooks.checkpoint
_left_to_eager: list[Callable[..., Any]] = [current_checkpoint]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def left_to_eager(function: _Function) -> _Function:
    """Decorator: where the function runs in eager mode, after a graph break, Dynamo compiles neither it nor what it
    calls. It may be traced all the same."""
    _left_to_eager.append(function)
    return function


top = function_modes.top
without_own_modes = partial(function_modes.without, Mode)
traced_graph = partial(traced_graph_of, _left_to_eager)
