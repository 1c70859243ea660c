"""Optimizer and learning-rate schedule of a run, from timm and PyTorch."""

from __future__ import annotations

import difflib
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotrain.train.run import TrainRun
from hotrain.train.torchvision_shim import ensure_torchvision


def create_optimizer(run: TrainRun, model: nn.Module) -> Optimizer:
    """Create timm's optimizer ``run.optimizer``; biases and one-dimensional parameters have no weight decay.

    Raises:
        ValueError: a name that timm does not have, or a model without trainable parameters.
    """
    ensure_torchvision()
    from timm.optim import create_optimizer_v2, list_optimizers

    known = [str(name) for name in list_optimizers()]
    if run.optimizer not in known:
        near = difflib.get_close_matches(run.optimizer, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ", such as adamw, momentum, sgd, lamb and lion"
        raise ValueError(
            f"optimizer: got {run.optimizer!r}, accepted are the {len(known)} names of timm.optim.list_optimizers()"
            + hint
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"model {run.model!r} has no trainable parameter")
    optimizer: Optimizer = create_optimizer_v2(
        model, opt=run.optimizer, lr=run.lr, weight_decay=run.weight_decay, momentum=run.momentum
    )
    return optimizer


def check_optimizer_state(run: TrainRun, optimizer: Optimizer, state: dict[str, Any], begun: bool) -> None:
    """Refuse a state that ``optimizer`` would take but fail with, or start anew from, at its next step.

    What states this optimizer keeps is read off one that has made a step on a single layer.

    Args:
        begun: whether an update was made, so that there must be states.

    Raises:
        ValueError: other groups or settings, states missing, or one of another shape than its parameter.
    """
    groups = state["param_groups"]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if [len(g["params"]) for g in groups] != [len(g["params"]) for g in optimizer.param_groups]:
        raise ValueError("its groups have other numbers of parameters than the model's")
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        for name in own.keys() - {"params"}:
            if name not in group or not _is_like(group[name], own[name]):
                raise ValueError(f"{name} is {group.get(name, 'absent')!r}, here it is {own[name]!r}")
    device = parameters[0].device  # some optimizers are for GPUs only
    layer = nn.Linear(4, 4, device=device)
    layer(torch.ones(1, 4, device=device)).sum().backward()
    probe = create_optimizer(run, layer)
    probe.step()
    kept = {p.ndim: probe.state.get(p, {}) for p in layer.parameters()}
    if begun and any(kept.values()) and not any(state["state"].values()):
        raise ValueError("it has no states although updates were made")
    shaped = {name for p in layer.parameters() for name, v in probe.state.get(p, {}).items() if _has_shape_of(v, p)}
    for i, states in state["state"].items():
        for name in shaped & states.keys():
            if states[name] is not None and not _has_shape_of(states[name], parameters[i]):
                got = tuple(getattr(states[name], "shape", ()))
                raise ValueError(f"{name} of parameter {i} has shape {got}, accepted is {tuple(parameters[i].shape)}")


def _is_like(value: Any, own: Any) -> bool:
    """Whether ``value`` can replace the setting ``own``: a finite number for a number, else the same type."""
    if isinstance(own, (int, float)) and not isinstance(own, bool):
        return isinstance(value, (int, float)) and math.isfinite(value)
    if isinstance(own, (tuple, list)):
        return isinstance(value, (tuple, list)) and len(value) == len(own) and all(map(_is_like, value, own))
    return isinstance(value, type(own))


def _has_shape_of(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


class Schedule:
    """The learning rate of every update, by timm's schedulers: a function of the update's number.

    Args:
        run: schedule, warm-up and rates.
        optimizer: its parameter groups get the rate.
        updates: number of updates of the whole run.
        updates_per_epoch: updates per epoch, the unit of ``run.warmup_epochs``.
    """

    def __init__(self, run: TrainRun, optimizer: Optimizer, updates: int, updates_per_epoch: int) -> None:
        ensure_torchvision()
        from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, StepLRScheduler

        common: dict[str, Any] = {
            "warmup_t": min(round(run.warmup_epochs * updates_per_epoch), updates),
            "warmup_lr_init": min(run.warmup_lr, run.lr),
            "t_in_epochs": False,
        }
        self._timm: Any
        if run.schedule == "cosine":
            self._timm = CosineLRScheduler(optimizer, t_initial=updates, lr_min=run.min_lr, **common)
        elif run.schedule == "multistep":
            # timm drops the rate one step before the milestone it is given.
            drops = [round(m * updates) + 1 for m in run.milestones]
            self._timm = MultiStepLRScheduler(optimizer, decay_t=drops, decay_rate=run.decay_rate, **common)
        else:
            self._timm = StepLRScheduler(optimizer, decay_t=max(1, updates), decay_rate=1.0, **common)

    def step(self, update: int) -> None:
        """Set the rate of the update that follows ``update`` finished ones."""
        self._timm.step_update(update)
