"""What autograd would keep, predicted: a forward of tensors that have a shape and no memory.

The same audit as `saved_bytes`, of a copy of the model with fake tensors, so that it costs no memory
and no arithmetic, whatever the batch. Formats are asked for their bytes by the very code that packs. Predicted is what
the reference keeps on a CPU: on a GPU kernels keep a few bytes more beside low-rank codes, and attention's back ends
differ in statistics.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

from ..activations.mode import Example
from ..autograd import autocast_to
from .saved_bytes import SavedBytes, saved_bytes


def predicted_bytes(model: nn.Module, *inputs: Any, **kwargs: Any) -> SavedBytes:
    """`saved_bytes` of ``model(*inputs, **kwargs)`` without running it, under the autocast that is on.

    inputs, kwargs: of tensors only shapes and dtypes are read; ``torch.empty(shape, device="meta")`` will do. The model
    is left as it is.  Raises ValueError where it cannot run without values (a model that routes tokens, say).
    """
    return _predicted(model, inputs, kwargs)


def before_and_now(model: nn.Module, example: Example, revert: Callable[[nn.Module], object]) -> tuple[int, int]:
    """Bytes that a converted model keeps of a batch, exact and as it is.  revert: makes a copy of the model exact.

    Raises ValueError as `predicted_bytes`.
    """
    kind, dtype = example.autocast
    on = torch.autocast(kind, dtype or torch.bfloat16, enabled=dtype is not None)
    with on, torch.enable_grad():
        exact, now = (_predicted(model, example.args, example.kwargs, change).total for change in (revert, None))
    return exact, now


def _predicted(
    model: nn.Module, inputs: Any, kwargs: Any, change: Callable[[nn.Module], object] | None = None
) -> SavedBytes:
    """change: what is done to the copy first."""
    try:
        with FakeTensorMode(), _as_on_a_cpu():
            memory: dict[int, Any] = {}
            for owner in (model.parameters(), model.buffers()):
                for t in owner:
                    shaped = _shape_alone(t)
                    memory[id(t)] = nn.Parameter(shaped, t.requires_grad) if isinstance(t, nn.Parameter) else shaped
            shapes = copy.deepcopy(model, memory)
            if change is not None:
                change(shapes)
            args, named = tree_map_only(Tensor, _shape_alone, (inputs, dict(kwargs)))
            return saved_bytes(shapes, *args, **named)
    except (NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"predicted_bytes: {type(model).__name__} does not run without values ({str(error).splitlines()[0]}); use "
            "hotrain.saved_bytes, which runs it"
        ) from error


def _shape_alone(t: Tensor) -> Tensor:
    """A fake tensor on the CPU, dense, in t's memory layout."""
    fake = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu")
    return fake.requires_grad_(t.requires_grad)


@contextmanager
def _as_on_a_cpu() -> Iterator[None]:
    """The autocast of a GPU that is on, as one of the CPU: the tensors are there."""
    dtype = autocast_to("cuda")
    if dtype is None:
        yield
        return
    with torch.autocast("cpu", dtype):
        yield
