"""Small real models, each with an input: the architectures of the issue at sizes that train a step in a moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import hotrain.train  # noqa: F401  (makes timm and transformers importable beside a CPU-only PyTorch)


@dataclass(frozen=True)
class Entry:
    """build: the model.  inputs: what its forward takes, as keyword arguments or one tensor."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor | dict[str, Tensor]]


def timm_model(name: str, size: int, **options: Any) -> Entry:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=10, **options)

    return Entry(build, lambda: torch.randn(2, 3, size, size))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=3, **sizes))


def _hf_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=4, num_labels=5, **sizes))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=60, n_positions=32, n_embd=32, n_layer=2, n_head=2))


def _tokens() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 50, (2, 24))}


SWIN = {"embed_dim": 32, "depths": (2, 1), "num_heads": (2, 4)}

ZOO: dict[str, Entry] = {
    "vit": timm_model("test_vit", 160),
    "swin": timm_model("swin_tiny_patch4_window7_224", 56, img_size=56, window_size=7, **SWIN),
    "resnet": timm_model("resnet18", 64),
    "efficientformer": timm_model("efficientformer_l1", 224),
    "convnext": timm_model("convnext_atto", 64),
    "efficientnet": timm_model("test_efficientnet", 64),
    "efficientnetv2": timm_model("efficientnetv2_s", 64),
    "bert": Entry(_bert, _tokens),
    "hf_vit": Entry(_hf_vit, lambda: {"pixel_values": torch.randn(2, 3, 32, 32)}),
    "gpt2": Entry(_gpt2, _tokens),
}


def call(model: nn.Module, inputs: Tensor | dict[str, Tensor]) -> Tensor:
    """The model's output as one tensor: logits, or what it returns."""
    out = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return out if isinstance(out, Tensor) else out.logits


def products(model: nn.Module) -> set[str]:
    """The names of every Linear, convolution and Conv1D of a model, by duck and by class."""
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, kinds) or any(c.__name__ == "Conv1D" for c in type(module).__mro__)
    }
