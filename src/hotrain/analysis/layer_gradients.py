"""The inputs x and output gradients g_y of the converted layers in an exact training step."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.state import LayerState, layer_states
from .loss import LossFn, loss_of


@dataclass(frozen=True)
class Call:
    """One call of a converted layer, and the gradient that reached it.

    Attributes:
        name: of the layer.
        module: the layer.
        state: its state.
        x: as given to the layer.
        grad_output: g_y, shaped as the layer's output.
        needs_grad_input: whether x required grad.
        autocast: the dtype of the autocast context of the call, or None.
    """

    name: str
    module: nn.Module
    state: LayerState
    x: Tensor
    grad_output: Tensor
    needs_grad_input: bool
    autocast: torch.dtype | None

    def same_autocast(self) -> Any:
        """The autocast context that the call ran under."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.x.device.type, self.autocast)

    def token_gradient(self) -> Tensor:
        """g_y as tokens × channels, (T, O)."""
        return self.module.token_matrix(self.grad_output)  # type: ignore[operator]


def exact_calls(
    model: nn.Module, batch: Any, loss_fn: LossFn | None, layers: Collection[str] | None = None
) -> list[Call]:
    """Run one forward and backward with every converted layer exact, and return each call of `layers` (default: all).

    To be run inside `as_found`: it sets modes. Nothing is accumulated in ``.grad``; no optimizer is involved. x and
    g_y of all these calls are in memory at once.

    Args:
        model: converted.
        batch: as the loss function takes it.
        loss_fn: as in `hotrain.analysis.loss`.
        layers: names of converted layers.

    Raises:
        ValueError: the model has no converted layer, or no gradient reaches any of them.
    """
    converted = dict(layer_states(model))
    if not converted:
        raise ValueError(
            f"{type(model).__name__} has no converted layer to measure; run hotrain.convert(model, method) first"
        )
    unknown = sorted(set(layers or ()) - set(converted))
    if unknown:
        raise ValueError(f"no converted layers {', '.join(unknown)}; there are {', '.join(converted)}")
    if not model.training:
        model.train()
    calls: list[Call] = []
    with ExitStack() as undo, torch.enable_grad():
        for name, state in converted.items():
            module = model.get_submodule(name)
            module.training = False  # a converted layer in eval mode is the exact layer
            if layers is None or name in layers:
                undo.callback(module.register_forward_hook(partial(_record, calls, name, state)).remove)
        loss = loss_of(model, batch, loss_fn)
        leaves = [p for p in model.parameters() if p.requires_grad]
        torch.autograd.grad(loss, leaves, allow_unused=True)
    if not calls:
        raise ValueError("no gradient reached a converted layer: the loss does not depend on what they compute")
    return calls


def _record(calls: list[Call], name: str, state: LayerState, module: nn.Module, args: Any, y: Tensor) -> None:
    x, kind = args[0], y.device.type
    if not y.requires_grad:
        return
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def arrived(g_y: Tensor) -> None:
        calls.append(Call(name, module, state, x.detach(), g_y.detach(), x.requires_grad, autocast))

    y.register_hook(arrived)
