"""The matrix products of a model: the shapes of its Linear, Conv2d and Conv1D layers, seen in one forward."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..audit.unchanged import as_found
from ..casting import autocast_to
from ..conversion.candidates import conv1d_of
from ..geometry import Geometry


@dataclass(frozen=True)
class LayerShape:
    """One call of one layer as the products y = x wᵀ, g_x = g_y w, g_w = g_yᵀ x, the same for each group.

    x: the shape of the input.  dtype: its own.  autocast: the dtype of the autocast context, or None.
    lead: the axes of y that are tokens: its shape without the channels, (B, H_out, W_out) for convolutions.
    outputs: columns of y, of all groups.  inputs: the contraction, of one group (convolutions: kernel·C_in/groups).
    kernel: k_h·k_w of a convolution, else 1.
    unfolds: a convolution whose patches overlap (or have borders), so that it is no Linear layer on patches.
    needs_grad_input, needs_grad_weight: whether a backward of this forward asks for them.
    """

    name: str
    kind: str
    x: torch.Size
    dtype: torch.dtype
    autocast: torch.dtype | None
    lead: tuple[int, ...]
    outputs: int
    inputs: int
    groups: int
    kernel: int
    unfolds: bool
    needs_grad_input: bool
    needs_grad_weight: bool

    @property
    def input_lead(self) -> tuple[int, ...]:
        """The axes of x that are tokens; the positions of a convolution's input, before any unfolding."""
        return _positions(self.x) if self.kind == "Conv2d" else tuple(self.x[:-1])

    @property
    def samples_only(self) -> bool:
        """Whether rows are samples rather than tokens: a 2-D input, one token a sample, a 1×1 image."""
        return math.prod(self.x[-2:] if self.kind == "Conv2d" else self.x[1:-1]) == 1

    @property
    def tokens(self) -> int:
        """Rows of y, the batch included."""
        return math.prod(self.lead)

    @property
    def channels(self) -> int:
        """Columns of x as the layer keeps it: a convolution that unfolds keeps its own channels, not the unfolded."""
        return self.columns // self.kernel if self.unfolds else self.columns

    @property
    def columns(self) -> int:
        """Columns of the (unfolded) x, of all groups."""
        return self.inputs * self.groups

    @property
    def products(self) -> int:
        """Multiply-accumulates of one of the three products."""
        return self.tokens * self.outputs * self.inputs


def kind_of(module: nn.Module) -> str | None:
    """``Linear``, ``Conv2d`` or ``Conv1D`` (transformers'), converted or not; None for every other module."""
    if isinstance(module, nn.Linear):
        return "Linear"
    if isinstance(module, nn.Conv2d):
        return "Conv2d"
    return None if conv1d_of(module) is None else "Conv1D"


def layer_shapes(model: nn.Module, *inputs: Any, **kwargs: Any) -> list[LayerShape]:
    """The shapes of every layer call in ``model(*inputs, **kwargs)``, in the order of the calls.

    The forward runs in eval mode with grad enabled (so that `needs_grad_input` is known) and saves no activation. It
    also runs on the meta device. The model is unchanged.

    Raises:
        ValueError: the forward calls no such layer.
    """
    seen: list[LayerShape] = []
    with as_found(model), torch.enable_grad(), saved_tensors_hooks(lambda t: None, _nothing), ExitStack() as hooks:
        for name, module in model.named_modules():
            if kind_of(module) is not None:
                hooks.enter_context(module.register_forward_hook(partial(_observe, seen, name)))
        model.eval()
        model(*inputs, **kwargs)
    if not seen:
        raise ValueError(
            f"{type(model).__name__}: its forward called no nn.Linear, nn.Conv2d or Conv1D, so there is no product "
            "to count; give the model that holds them"
        )
    return seen


def _nothing(_: None) -> Tensor:
    raise RuntimeError("layer_shapes keeps no activation, but the model's forward ran a backward of its own")


def _positions(shape: torch.Size) -> tuple[int, ...]:
    """(B, H, W) of images (B, C, H, W), or of one without a batch."""
    return (shape[0] if len(shape) == 4 else 1, *shape[-2:])


def _observe(seen: list[LayerShape], name: str, module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
    """A forward hook, which adds the products of one call ``y = module(x)``."""
    x, kind, weight = args[0], kind_of(module), module.weight
    assert kind is not None
    assert isinstance(weight, Tensor)
    lead, groups, kernel, unfolds = tuple(y.shape[:-1]), 1, 1, False
    if isinstance(module, nn.Conv2d):
        geometry = Geometry.of(module)
        lead, groups = _positions(y.shape), module.groups
        kernel, unfolds = math.prod(geometry.kernel), not geometry.is_patches
    w = weight.mT if kind == "Conv1D" else weight  # Conv1D keeps its weight transposed: (inputs, outputs)
    seen.append(
        LayerShape(
            name,
            kind,
            x=x.shape,
            dtype=x.dtype,
            autocast=autocast_to(y.device.type),
            lead=lead,
            outputs=w.shape[0],
            inputs=w[0].numel(),
            groups=groups,
            kernel=kernel,
            unfolds=unfolds,
            needs_grad_input=x.requires_grad,
            needs_grad_weight=weight.requires_grad,
        )
    )
