"""Inputs and output gradients of converted layers in an exact training step, for a loss as users write it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .casting import autocast_to
from .nn.state import LayerState, layer_states

LossFn = Callable[..., Any]


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

    def token_gradient(self) -> Tensor:
        """g_y as tokens × channels, (T, O)."""
        return self.module.token_matrix(self.grad_output)  # type: ignore[operator]


def exact_calls(
    model: nn.Module, batch: Any, loss_fn: LossFn | None, layers: Collection[str] | None = None
) -> list[Call]:
    """Run one forward and backward with every converted layer exact, and return each call of `layers` (default: all).

    To be run inside `as_found`: it sets modes. Nothing is accumulated in ``.grad``; no optimizer is involved. x and
    g_y of all these calls are in memory at once.

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
    with ExitStack() as hooks, torch.enable_grad():
        for name, state in converted.items():
            module = model.get_submodule(name)
            module.training = False  # a converted layer in eval mode is the exact layer
            if layers is None or name in layers:
                hooks.enter_context(module.register_forward_hook(partial(_record, calls, name, state)))
        loss = loss_of(model, batch, loss_fn)
        leaves = [p for p in model.parameters() if p.requires_grad]
        torch.autograd.grad(loss, leaves, allow_unused=True)
    if not calls:
        raise ValueError("no gradient reached a converted layer: the loss does not depend on what they compute")
    return calls


def _record(calls: list[Call], name: str, state: LayerState, module: nn.Module, args: Any, y: Tensor) -> None:
    x, autocast = args[0], autocast_to(y.device.type)
    if not y.requires_grad:
        return

    def arrived(g_y: Tensor) -> None:
        calls.append(Call(name, module, state, x.detach(), g_y.detach(), x.requires_grad, autocast))

    y.register_hook(arrived)


def loss_of(model: nn.Module, batch: Any, loss_fn: LossFn | None = None) -> Tensor:
    """The scalar loss of one batch.

    The contract is ``loss_fn(model, batch)``: it calls the model and returns a scalar. For convenience

    - a criterion (an `nn.Module`, a function of `torch.nn.functional`, or any function of (output, target) that fails
      on (model, batch) without having called the model) works for batches of (input, target):
      ``criterion(model(input), target)``;
    - None is cross-entropy for batches of (input, target), and ``model(**batch).loss`` for mappings, as transformers'
      models have it.

    In these two cases the batch is moved to the model's device.

    Returns:
        One finite number that requires grad, ().

    Raises:
        ValueError: the batch does not fit, or the result is not such a number.
    """
    if loss_fn is None:
        return _checked(_default(model, batch))
    if _is_criterion(loss_fn):
        return _checked(_criterion(model, batch, loss_fn))
    called: list[nn.Module] = []
    try:
        with _watched(model, called):
            loss = loss_fn(model, batch)
    except (TypeError, AttributeError):
        if called or not _is_pair(batch):
            raise
        loss = _criterion(model, batch, loss_fn)
    return _checked(loss)


@contextmanager
def _watched(model: nn.Module, called: list[nn.Module]) -> Iterator[None]:
    """Note which parts of the model are called, and refuse to move or cast it (a criterion's ``output.float()``)."""
    own = set(model.modules())

    def note(module: nn.Module, _: Any) -> None:
        if module in own:
            called.append(module)

    def refuse(*_: Any, **__: Any) -> nn.Module:
        raise TypeError("a loss function must not move or cast the model")

    handle = nn.modules.module.register_module_forward_pre_hook(note)
    model.__dict__["_apply"] = refuse  # all of .float(), .to() and the like go through it
    try:
        yield
    finally:
        del model.__dict__["_apply"]
        handle.remove()


def _is_criterion(loss_fn: LossFn) -> bool:
    home = getattr(loss_fn, "__module__", None) or ""
    return isinstance(loss_fn, nn.Module) or home in ("torch.nn.functional", "torch._C._nn")


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, (tuple, list)) and len(batch) == 2


def _criterion(model: nn.Module, batch: Any, criterion: LossFn) -> Any:
    if not _is_pair(batch):
        raise ValueError(
            f"a criterion of (output, target) needs batches of (input, target), got {type(batch).__name__}; "
            "give loss_fn(model, batch) instead"
        )
    x, target = (_to_device(part, model) for part in batch)
    output = model(x)
    return criterion(getattr(output, "logits", output), target)


def _default(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        output = model(**{name: _to_device(value, model) for name, value in batch.items()})
        loss = getattr(output, "loss", None)
        if loss is None:
            raise ValueError(
                f"{type(model).__name__} returned no loss for a batch of {', '.join(batch)}; "
                "add its labels to the batch, or give loss_fn(model, batch)"
            )
        return loss
    if _is_pair(batch):
        return _criterion(model, batch, F.cross_entropy)
    raise ValueError(
        f"without a loss_fn a batch is (input, target) or a mapping with labels, got {type(batch).__name__}; "
        "give loss_fn(model, batch)"
    )


def _to_device(value: Any, model: nn.Module) -> Any:
    device = next((p.device for p in model.parameters()), None)
    return value.to(device) if isinstance(value, Tensor) and device is not None else value


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        if isinstance(loss, Tensor) and not loss.requires_grad:
            got += " that requires no grad"
        raise ValueError(f"loss_fn(model, batch) must return one number that requires grad, got {got}")
    if not torch.isfinite(loss.detach()).all():
        raise ValueError(
            f"the loss is {loss.item()}: gradients of this batch are meaningless; check the batch and the model"
        )
    return loss
