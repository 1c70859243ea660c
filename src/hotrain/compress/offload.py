"""Offloading: what forward saves waits in the host's memory until backward. Gradients do not change."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .mixins import Mixin, mix, unmix

SMALLEST = 1 << 20  # bytes of the smallest tensor that is offloaded
ATTRIBUTE = "_hotrain_offloaded"

Packed = Tensor | tuple[torch.device, tuple[int, ...], Tensor]


class offloading(saved_tensors_hooks):
    """Context in which saved tensors go to the host's memory, pinned where they come from a GPU.

    Strides are preserved, which compiled backwards need and `torch.autograd.graph.save_on_cpu` does not do. Tensors
    that are small, expanded, or views of a parameter of the model stay on the device.
    """

    def __init__(self, model: nn.Module) -> None:
        stay = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

        def pack(tensor: Tensor) -> Packed:
            expanded = any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            if expanded or tensor.nbytes < SMALLEST or tensor.untyped_storage().data_ptr() in stay:
                return tensor
            host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            return tensor.device, tensor.stride(), host.copy_(tensor, non_blocking=True)

        def unpack(packed: Packed) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            device, strides, host = packed
            back = torch.empty_strided(host.shape, strides, dtype=host.dtype, device=device)
            return back.copy_(host, non_blocking=True)

        super().__init__(pack, unpack)


class Offloaded(Mixin):
    """Mixin for a whole model: with grad enabled, its forward runs under `offloading`.

    Compiled, Dynamo leaves this frame to Python and compiles what is called in it: the hooks get what the graph saves.
    """

    rank = -1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, Offloaded):
            return type(self).forward(self, *args, **kwargs)
        if not torch.is_grad_enabled() or ATTRIBUTE not in self.__dict__:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        with offloading(self):  # type: ignore[arg-type]
            return super().forward(*args, **kwargs)  # type: ignore[misc]


def offload(model: nn.Module) -> None:
    """Switch offloading on, in place."""
    mix(model, Offloaded)
    model.__dict__[ATTRIBUTE] = True


def keep_on_device(model: nn.Module) -> None:
    """Switch offloading off in the whole model, in place."""
    for module in model.modules():
        if module.__dict__.pop(ATTRIBUTE, False):
            unmix(module, Offloaded)
