"""From a run's description to its parts: data, model, converted layers, batches. The loop and the tools share it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotrain
from hotrain.train.batches import Feed
from hotrain.train.data import ArrayData, FolderData, load_data
from hotrain.train.distributed import Processes
from hotrain.train.models import add_lora, create_model, default_image_size, normalization, resolve_device
from hotrain.train.rng import seed_all
from hotrain.train.run import TrainRun


@dataclass
class Setup:
    """The parts of a run, ready for the first update.

    ``report`` is the conversion report, None for the exact method.
    """

    run: TrainRun
    device: torch.device
    data: ArrayData | FolderData
    feed: Feed
    model: nn.Module
    report: Any = None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The precision in which the run computes its forward passes."""
        return autocast(self.run, self.device)

    def example(self) -> tuple[Tensor, Tensor]:
        """The run's first training batch on its device: images (B, C, H, W), labels (B,)."""
        return self.feed.example()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy of ``output`` (B, classes) with labels (B,) or class probabilities (B, classes)."""
        return F.cross_entropy(output.float(), target)


def autocast(run: TrainRun, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """``torch.autocast`` as ``run.amp`` says, or nothing."""
    if run.amp is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if run.amp == "bf16" else torch.float16)


def create(
    run: TrainRun, *, classes: int, channels: int, image_size: int, device: torch.device, pretrained: bool | None = None
) -> nn.Module:
    """``run``'s model as it trains, before its layers are converted: adapters, checkpointing, layout and device.

    pretrained: instead of the run's, for a look at shapes.  Raises as :func:`build`.
    """
    model = create_model(
        run.model,
        classes=classes,
        channels=channels,
        image_size=image_size,
        pretrained=run.pretrained if pretrained is None else pretrained,
        args=run.model_args,
    )
    if run.grad_checkpointing:
        if not hasattr(model, "set_grad_checkpointing"):
            raise ValueError(f"grad_checkpointing: model {run.model!r} does not offer it")
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    if run.lora is not None:
        model = add_lora(model, run.lora)
    model.to(device)
    if run.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def convert(run: TrainRun, model: nn.Module) -> Any:
    """Convert ``model``'s layers as ``run`` says; the conversion report, None for the exact method."""
    method = run.resolve_method()
    return None if method.is_plain else hotrain.convert(model, method, plan=run.plan)


def build(run: TrainRun, processes: Processes | None = None) -> Setup:
    """Read the data, create the model under ``run.seed``, add adapters, convert its layers.

    Every generator is seeded anew; the same run builds the same weights and batches each time.

    Raises:
        ValueError, RuntimeError: anything the run asks for that is not there (data, model, weights, device), or a
            method that no layer of the model can be converted to.
    """
    processes = processes or Processes(device=resolve_device(run.device))
    data = load_data(run.data, data_dir=run.data_dir, corrupt=run.corrupt)
    seed_all(run.seed)
    hotrain.manual_seed(run.seed)
    size = run.image_size or default_image_size(run.model, data.image_size)
    model = create(run, classes=len(data.classes), channels=data.channels, image_size=size, device=processes.device)
    mean, std = normalization(model, run.pretrained, data.channels)
    feed = Feed(
        run,
        data,
        image_size=size,
        mean=mean,
        std=std,
        device=processes.device,
        rank=processes.rank,
        world=processes.world,
    )
    report = convert(run, model)
    # The weights of every process come from one seed; what is drawn while training differs between processes.
    seed_all(run.seed + processes.rank)
    return Setup(run, processes.device, data, feed, model, report)


def training_batches(setup: Setup, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The first ``count`` training batches of the run, or all of its first epoch if there are fewer."""
    taken = 0
    for update in setup.feed.updates(0):
        for batch in update:
            if taken == count:
                return
            taken += 1
            yield batch
