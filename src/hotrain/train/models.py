"""Models by name: timm's models, and small variants of them for images of 16 and 32 pixels."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hotrain._version import require
from hotrain.train import dense, language
from hotrain.train.run import Lora

Normalization = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation of each channel, of values from 0 to 1."""


@dataclass(frozen=True)
class SmallModel:
    """A timm architecture with other sizes.

    Args:
        base: timm's name of the architecture.
        image_size: side of its images in pixels.
        args: keyword arguments of ``timm.create_model``.
        small_stem: replace a ResNet's 7×7 stride-2 stem and its pooling by a 3×3 stride-1 convolution, as usual
            for images of 32 pixels.
        position_std: standard deviation of a ViT's initial position embeddings; None is timm's 0.02.
    """

    base: str
    image_size: int
    args: dict[str, Any] = field(default_factory=dict)
    small_stem: bool = False
    position_std: float | None = None


_NO_CLASS_TOKEN = {"class_token": False, "global_pool": "avg"}

SMALL = {
    # 7 blocks of width 256 on 8×8 tokens: the network of the accuracy study in docs/maths.md.
    "small_vit": SmallModel(
        "vit_tiny_patch16_224", 32, {"patch_size": 4, "embed_dim": 256, "depth": 7, "num_heads": 4, **_NO_CLASS_TOKEN}
    ),
    "small_resnet18": SmallModel("resnet18", 32, small_stem=True),
    "small_resnet50": SmallModel("resnet50", 32, small_stem=True),
    # 4×4 tokens of 4×4 pixels, and 3×3 convolutions on 16×16 to 2×2: the demo on digits. With timm's small
    # initial position embeddings the ViT spends half of so short a run on learning positions.
    "demo_vit": SmallModel(
        "vit_tiny_patch16_224",
        16,
        {"patch_size": 4, "embed_dim": 64, "depth": 3, "num_heads": 2, **_NO_CLASS_TOKEN},
        position_std=0.3,
    ),
    "demo_resnet": SmallModel("resnet18", 16, {"layers": (1, 1, 1, 1), "channels": (32, 48, 64, 96)}, small_stem=True),
}


def nearest(name: str, known: Sequence[str]) -> list[str]:
    """Up to three known names for a message: the shortest that begin with `name`, or with what is most like it."""
    begin = sorted((other for other in known if name and other.startswith(name)), key=len)
    parts = name.count("_") + 1
    cut = {"_".join(other.split("_")[:parts]): other for other in sorted(known, key=len, reverse=True)}
    return begin[:3] or [cut[like] for like in difflib.get_close_matches(name, cut, n=3)]


def default_image_size(name: str, data_size: int) -> int:
    """Side in pixels of a run that does not set one: the model's own for one of ``SMALL``, else the data's."""
    return SMALL[name].image_size if name in SMALL else data_size


def create_model(
    name: str,
    *,
    classes: int,
    channels: int,
    image_size: int,
    pretrained: bool = False,
    args: dict[str, Any] | None = None,
) -> nn.Module:
    """Build a model of ``SMALL``, of timm, for texts (`hotrain.train.language`) or dense (`hotrain.train.dense`).

    Args:
        name: a key of ``SMALL`` or a timm model name (with or without a tag of pretrained weights), or for texts.
        classes, channels: number of outputs, and channels of the input; of texts the number of token ids.
        image_size: side of the input in pixels; given to architectures that need it (ViT, DeiT, Swin). Of texts the
            number of tokens.
        pretrained: load timm's published weights, from the local cache or the hub.
        args: further keyword arguments of ``timm.create_model``.

    Raises:
        ValueError: an unknown name, arguments that the architecture does not take, or pretrained weights that it
            does not have.
        RuntimeError: pretrained weights that are neither cached nor can be downloaded.
    """
    if name in language.MODELS:
        return language.create(name, classes=classes, vocabulary=channels, length=image_size, args=args)
    if name in dense.MODELS:
        return dense.create(name, classes=classes, channels=channels, image_size=image_size, args=args)
    require("timm", "1.0.20", "vision")
    import timm

    small = SMALL.get(name)
    base = small.base if small else name
    if not timm.is_model(base):
        near = nearest(name, [*SMALL, *timm.list_models()])
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"model: unknown name {name!r}, accepted are {', '.join(SMALL)} and timm's models{hint}")
    if pretrained and (small or not timm.models.is_model_pretrained(base)):
        raise ValueError(f"model {name!r} has no published weights; use pretrained=False")
    settings = {**(small.args if small else {}), **(args or {})}
    if base.startswith(("vit_", "deit", "swin", "beit", "cait", "mixer", "eva")):  # built for images of one size
        settings.setdefault("img_size", image_size)
    try:
        model: nn.Module = timm.create_model(
            base, pretrained=pretrained, num_classes=classes, in_chans=channels, **settings
        )
    except Exception as error:  # whatever an architecture raises for arguments that it does not take
        if pretrained and isinstance(error, OSError | RuntimeError):
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise RuntimeError(
                f"model {name!r}: its pretrained weights are neither cached nor reachable ({reason}). "
                "Use a machine with network, put them into the Hugging Face cache, or set pretrained=False"
            ) from error
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"model {name!r} cannot be built with {settings} ({why})") from error
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if isinstance(patch, (int, tuple)) and image_size < (side := max(patch) if isinstance(patch, tuple) else patch):
        raise ValueError(
            f"model {name!r} cuts images into patches of {side} pixels, the images have {image_size}; "
            f"enlarge them with image_size={default_image_size(name, 224)}, or take a smaller model"
        )
    if small and small.small_stem:
        stem: Any = model.conv1
        model.conv1 = nn.Conv2d(channels, stem.out_channels, 3, stride=1, padding=1, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
        model.maxpool = nn.Identity()
    if small and small.position_std is not None:
        nn.init.trunc_normal_(model.pos_embed, std=small.position_std)  # type: ignore[arg-type]
    return model


def normalization(model: Any, pretrained: bool, channels: int) -> Normalization | None:
    """Normalization that pretrained weights expect; None where that of the data is to be used."""
    if not pretrained or channels != 3:
        return None
    return model.pretrained_cfg["mean"], model.pretrained_cfg["std"]


def add_lora(model: nn.Module, lora: Lora) -> nn.Module:
    """Freeze ``model``, add low-rank adapters to its linear layers named in ``lora.targets``, train the classifier.

    Raises:
        ValueError: no linear layer has one of these names.
        ImportError: peft is not installed, or too old.
    """
    require("peft", "0.18", "text")
    from peft import LoraConfig, get_peft_model

    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    targets = [name for name in linear if name.rsplit(".", 1)[-1] in lora.targets]
    if not targets:
        known = sorted({name.rsplit(".", 1)[-1] for name in linear})
        raise ValueError(f"lora.targets: got {lora.targets}, linear layers here are named {', '.join(known)}")
    head = model.get_classifier()  # type: ignore[operator]
    heads = [name for name, m in model.named_modules() if m is head]
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets, modules_to_save=heads
    )
    return get_peft_model(model, config)  # type: ignore[arg-type]


def resolve_device(name: str) -> torch.device:
    """Return the device of a name.

    Args:
        name: ``cpu``, ``cuda``, ``cuda:N`` or ``auto``, which is CUDA where there is a device, else the CPU.

    Raises:
        ValueError: a CUDA device that this machine or PyTorch build does not have.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                f"device: got {name!r}, but this PyTorch ({torch.__version__}) finds no CUDA device; use cpu"
            )
        if (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"device: got {name!r}, there are {torch.cuda.device_count()} CUDA devices")
    return device
