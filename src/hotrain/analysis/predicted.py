"""What autograd would keep, predicted: a forward of tensors that have a shape and no memory.

The same audit as `saved_bytes`, of a copy of the model on PyTorch's ``meta`` device, so that it costs no memory and no
arithmetic, whatever the batch. Formats are asked for their bytes by the very code that keeps codes. What is predicted
is what the definition keeps on a CPU: on a GPU kernels keep a few bytes more beside low-rank codes, and attention's
back ends differ in statistics.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ..activations.attention import backend
from .saved_bytes import SavedBytes, saved_bytes

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class _AsOnACpu(TorchFunctionMode):
    """PyTorch chooses no kernel for attention without memory, but the formula in several steps."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            y = _attention(*args, **kwargs)
            if y is not None:
                return y
        return func(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    if enable_gqa or backend(query, key, value, attn_mask, dropout_p, is_causal) is None:
        return None
    found: Tensor = _flash(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return found


def predicted_bytes(model: nn.Module, *inputs: Any, **kwargs: Any) -> SavedBytes:
    """`saved_bytes` of ``model(*inputs, **kwargs)`` without running it.

    inputs, kwargs: of tensors only shapes and dtypes are read; ``torch.empty(shape, device="meta")`` will do. The model
    is left as it is.  Raises ValueError where it cannot run without values (a model that routes tokens, say).
    """
    memory: dict[int, Any] = {}
    for owner in (model.parameters(), model.buffers()):
        for t in owner:
            shaped = t.detach().to("meta")
            memory[id(t)] = nn.Parameter(shaped, t.requires_grad) if isinstance(t, nn.Parameter) else shaped
    shape_alone = copy.deepcopy(model, memory)

    def alone(t: Tensor) -> Tensor:
        return t.detach().to("meta").requires_grad_(t.requires_grad)

    args, named = tree_map_only(Tensor, alone, (inputs, kwargs))
    try:
        with _AsOnACpu():
            return saved_bytes(shape_alone, *args, **named)
    except (NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"predicted_bytes: {type(model).__name__} does not run without values ({str(error).splitlines()[0]}); use "
            "hotrain.saved_bytes, which runs it"
        ) from error
