"""Optimizer and learning-rate schedule of a run, from timm and PyTorch."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from hotrain.train.run import TrainRun

if TYPE_CHECKING:
    from timm.scheduler.scheduler import Scheduler


def create_optimizer(run: TrainRun, model: nn.Module) -> Optimizer:
    """Create timm's optimizer ``run.optimizer``; biases and one-dimensional parameters have no weight decay.

    Raises:
        ValueError: a name that timm does not have, or a model without trainable parameters.
    """
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
    return create_optimizer_v2(
        model, opt=run.optimizer, lr=run.lr, weight_decay=run.weight_decay, momentum=run.momentum
    )


def create_schedule(run: TrainRun, optimizer: Optimizer, updates: int, updates_per_epoch: int) -> Scheduler:
    """Create timm's scheduler of the rate: its ``step_update(n)`` sets that of the update after n finished ones.

    Args:
        updates: number of updates of the whole run.
        updates_per_epoch: updates per epoch, the unit of ``run.warmup_epochs``.
    """
    from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler

    common: dict[str, Any] = {
        "warmup_t": min(round(run.warmup_epochs * updates_per_epoch), updates),
        "warmup_lr_init": min(run.warmup_lr, run.lr),
        "t_in_epochs": False,
    }
    if run.schedule == "cosine":
        return CosineLRScheduler(optimizer, t_initial=updates, lr_min=run.min_lr, **common)
    # timm drops the rate one step before the milestone it is given. A constant rate never drops.
    drops = [round(m * updates) + 1 for m in run.milestones] if run.schedule == "multistep" else []
    return MultiStepLRScheduler(optimizer, decay_t=drops, decay_rate=0.1, **common)
