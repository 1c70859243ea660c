"""The parts of a run: data, model, converted layers and batches, built from its configuration."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotrain
from hotrain.conversion import converted_layers
from hotrain.train import checkpoint, contrastive, dense, language
from hotrain.train.batches import Feed
from hotrain.train.contexts import seed_all
from hotrain.train.data import ArrayData, Data, FolderData, load_data
from hotrain.train.dense_folder import DenseFolder
from hotrain.train.detection import set_loss
from hotrain.train.distributed import Processes
from hotrain.train.models import add_lora, create_model, default_image_size, normalization, resolve_device
from hotrain.train.run import TrainRun
from hotrain.train.scenes import SceneData
from hotrain.train.tokens import TokenData


@dataclass
class Setup:
    """The parts of a run, ready for the first update. Of the exact method there is no ``report`` of a conversion."""

    run: TrainRun
    device: torch.device
    data: Data
    feed: Feed
    model: nn.Module
    report: Any = None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast context of the run's forward passes."""
        return autocast(self.run, self.device)

    def example(self) -> tuple[Tensor, Tensor]:
        """Return the run's first training batch on its device: images (B, C, H, W) or tokens (B, L), and labels."""
        return next(self.feed.updates(0))[0]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of the model's output.

        Args:
            output: logits (B, classes), of pixels (B, classes, H, W), or predicted boxes (B, boxes, classes + 5).
            target: labels (B,) or probabilities (B, classes), masks (B, H, W), or objects (B, K, 5).
        """
        loss = set_loss if self.run.task == "detection" else F.cross_entropy
        return loss(output.float(), target)


def autocast(run: TrainRun, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return ``torch.autocast`` with the dtype of ``run.amp``, or an empty context."""
    if run.amp is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if run.amp == "bf16" else torch.float16)


def create(run: TrainRun, *, classes: int, channels: int, image_size: int, device: torch.device) -> nn.Module:
    """Create the model of ``run`` with its adapters, gradient checkpointing, memory format and device; not converted.

    Raises:
        ValueError, RuntimeError: as :func:`build`.
    """
    with torch.device("cpu"):  # a seed draws the same weights there, whatever the default device
        model = create_model(
            run.model,
            classes=classes,
            channels=channels,
            image_size=image_size,
            pretrained=run.pretrained,
            args=run.model_args,
        )
        if run.init is not None:
            start_from(model, run.init)
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


def start_from(model: nn.Module, path: str) -> None:
    """Load the weights of a checkpoint, or of a run's folder, into a timm model with a classifier of its own.

    Raises:
        ValueError: no such checkpoint, or one of another model.
    """
    head = model.get_classifier()  # type: ignore[operator]
    own = tuple(f"{name}." for name, module in model.named_modules() if module is head)
    state = {k: v for k, v in checkpoint.load(path)["model"].items() if not k.startswith(own)}
    state |= {k: v for k, v in model.state_dict().items() if k.startswith(own)}
    checkpoint.check_same_weights(model, state)
    model.load_state_dict(state)


def convert(run: TrainRun, model: nn.Module) -> Any:
    """Convert ``model`` in place with the method and plan of ``run``: the report; None for the exact method."""
    method = run.resolve_method()
    if method.is_plain:
        return None
    if run.lora is None or run.lora.convert == "frozen":
        return hotrain.convert(model, method, plan=run.plan)
    frozen = set()
    if run.lora.convert == "both":
        hotrain.convert(model, method, plan=run.plan)
        frozen = {name for name, _, _ in converted_layers(model)}
    return hotrain.convert(model, method, plan=run.plan, filter_fn=lambda _, name: ".lora_" in name or name in frozen)


def build(run: TrainRun, processes: Processes | None = None) -> Setup:
    """Read the data, create the model with ``run.seed``, add adapters, convert its layers.

    All generators are seeded; the same run builds the same weights and batches each time.

    Args:
        processes: the processes of the run; None: this process alone.

    Raises:
        ValueError, RuntimeError: data, model, weights or device that are not available, or a method that no layer of
            the model supports, or a tracker that is not installed.
    """
    if run.log is not None and importlib.util.find_spec(run.log) is None:
        raise RuntimeError(f"log: {run.log} is not installed: pip install {run.log}")
    processes = processes or Processes(device=resolve_device(run.device))
    data = load_data(run.data, data_dir=run.data_dir)
    seed_all(run.seed)
    hotrain.manual_seed(run.seed)
    _check_text(run, data)
    _check_dense(run, data)
    data = seen_by(run, data)
    size = run.image_size or default_image_size(run.model, data.image_size)
    labelled = run.task not in contrastive.TASKS
    if not labelled and not isinstance(data, ArrayData):
        raise ValueError(f"task: {run.task} takes images in memory (.npz, cifar10, cifar100, digits), not a folder")
    classes = len(data.classes) if labelled else 0
    model = create(run, classes=classes, channels=data.channels, image_size=size, device=processes.device)
    scaling = normalization(model, run.pretrained, data.channels)
    feed = Feed(run, data, image_size=size, normalization=scaling, processes=processes)
    if labelled:
        report = convert(run, model)
    else:
        with torch.device("cpu"):
            learner = contrastive.TwoViews(run.task, model)
        model = learner.to(processes.device)
        target = learner.exact_target()
        report = convert(run, learner)
        learner.target = target
    # The weights of every process come from one seed; what is drawn while training differs between processes.
    seed_all(run.seed + processes.rank)
    return Setup(run, processes.device, data, feed, model, report)


def seen_by(run: TrainRun, data: Data) -> Data:
    """The data as a run sees them: where it predicts masks or boxes, scenes of the images in memory."""
    if run.task in dense.METRICS and isinstance(data, ArrayData):
        return SceneData.of(data, masks=run.task == "segmentation")
    return data


def _check_text(run: TrainRun, data: Data) -> None:
    """Refuse a model of texts with images, one of images with texts, and what changes images alone."""
    is_text = isinstance(data, TokenData)
    if is_text != (run.model in language.MODELS):
        own, other = ("texts", "images") if is_text else ("images", "texts")
        wanted = f"; accepted are {' and '.join(language.MODELS)}" if is_text else ""
        raise ValueError(f"model: {run.model!r} takes {other}, the data {run.data!r} are {own}{wanted}")
    if isinstance(data, TokenData):
        if data.is_text_model != (run.model in language.DECODERS):
            wants = "texts without labels" if run.model in language.DECODERS else "labels"
            raise ValueError(f"model: {run.model!r} needs {wants}, the data {run.data!r} are others")
        for name in ("image_size", "mixup", "cutmix", "random_erase", "lora", "init", "pretrained"):
            if getattr(run, name):
                raise ValueError(f"{name}: it is not for texts; leave it out")


def _check_dense(run: TrainRun, data: Data) -> None:
    """Refuse a model of another task, and data without what the task predicts."""
    if dense.MODELS.get(run.model) != (run.task if run.task in dense.METRICS else None):
        raise ValueError(
            f"model: {run.model!r} is not for task={run.task!r}; accepted are "
            + ", ".join(f"{name} with {task}" for name, task in dense.MODELS.items())
        )
    if isinstance(data, DenseFolder):
        has = "segmentation" if data.masks else "detection"
        if run.task != has:
            raise ValueError(f"task: got {run.task!r}, the data {run.data!r} are for {has}")
    elif run.task in dense.METRICS and isinstance(data, FolderData):
        raise ValueError(
            f"task: {run.task} takes images in memory (.npz, cifar10, cifar100, digits), of which it draws scenes, or "
            "a folder with annotations/, not one of classes"
        )


def training_batches(setup: Setup, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The first ``count`` training batches of the run, or those of its first epoch if there are fewer."""
    return islice(chain.from_iterable(setup.feed.updates(0)), count)
