"""What `hotrain bench step` trains: timm's ViTs on random images, and four transformer blocks of Llama-3-8B's shape."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hotrain.train.models import create_model

VIT = {
    "vit_base_patch16_224/b128": ("vit_base_patch16_224", 128),
    "vit_large_patch16_224/b128": ("vit_large_patch16_224", 128),
    "vit_huge_patch14_224/b64": ("vit_huge_patch14_224", 64),
}
LLAMA = "llama8b-4blocks/t8192"
SUBJECTS = (*VIT, LLAMA)
BATCHES = 2  # that steps go through in turn


@dataclass
class Task:
    """A model and what a step of it does.

    blocks: of the model, what checkpointing recomputes one by one.  batches: what `loss` takes beside the model.
    kept_exact: whether a Linear of that name stays as it is in every variant.  trains: whether AdamW follows.
    """

    model: nn.Module
    blocks: nn.Sequential | nn.ModuleList
    batches: Sequence[Any]
    loss: Callable[[nn.Module, Any], Tensor]
    kept_exact: Callable[[str], bool]
    trains: bool

    def optimizer(self) -> torch.optim.Optimizer | None:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True) if self.trains else None


class Checkpointed(nn.Module):
    """A block whose activations are recomputed in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **kwargs)


def checkpoint_blocks(task: Task) -> None:
    """Make every block of the task's model recompute its activations."""
    for number, block in enumerate(list(task.blocks)):
        task.blocks[number] = Checkpointed(block)


def build(subject: str, device: torch.device, tiny: bool = False) -> Task:
    """The task of that name, with the same weights and batches each time.

    tiny: the same code at a size for tests. Raises ValueError for an unknown subject.
    """
    torch.manual_seed(0)
    if subject in VIT:
        name, batch = VIT[subject]
        return _vit(name, 2 if tiny else batch, device, tiny)
    if subject == LLAMA:
        return _llama(device, tiny)
    raise ValueError(f"bench step: got {subject!r}, subjects are {', '.join(SUBJECTS)}")


def _vit(name: str, batch: int, device: torch.device, tiny: bool) -> Task:
    """224 px, float32 weights under bf16 autocast, cross-entropy, fused AdamW."""
    size, args = 224, {}
    if tiny:
        size, args = 64, {"embed_dim": 64, "depth": 2, "num_heads": 2, "patch_size": 16}
    classes = 10 if tiny else 1000
    with device:
        model = create_model(name, classes=classes, channels=3, image_size=size, args=args)
        batches = [(torch.randn(batch, 3, size, size), torch.randint(0, classes, (batch,))) for _ in range(BATCHES)]

    def loss(model: nn.Module, images_and_labels: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = images_and_labels
        with torch.autocast(device.type, torch.bfloat16):
            return F.cross_entropy(model(images), labels)

    blocks = model.blocks
    assert isinstance(blocks, nn.Sequential)
    return Task(model, blocks, batches, loss, lambda n: n.split(".")[-1] == "head", trains=True)


class Blocks(nn.Module):
    """Llama's decoder layers with their rotary positions: (B, L, hidden) to the same."""

    def __init__(self, count: int, **sizes: int) -> None:
        super().__init__()
        llama = importlib.import_module("transformers.models.llama.modeling_llama")
        config = llama.LlamaConfig(num_hidden_layers=count, attn_implementation="sdpa", rope_theta=500_000.0, **sizes)
        self.layers = nn.ModuleList(llama.LlamaDecoderLayer(config, number) for number in range(count))
        self.rotary = llama.LlamaRotaryEmbedding(config)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        cosine_and_sine = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, position_embeddings=cosine_and_sine)
        return x


def _llama(device: torch.device, tiny: bool) -> Task:
    """Four blocks on 4×2048 tokens, all bf16, forward and backward of a scalar; x has a gradient, as within a model."""
    sizes = {
        "hidden_size": 64 if tiny else 4096,
        "intermediate_size": 128 if tiny else 14336,
        "num_attention_heads": 4 if tiny else 32,
        "num_key_value_heads": 2 if tiny else 8,
    }
    lead = (2, 32) if tiny else (4, 2048)
    with device, _default_dtype(torch.bfloat16):
        model = Blocks(2 if tiny else 4, **sizes)
        for parameter in model.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        batches = [torch.randn(*lead, sizes["hidden_size"]).requires_grad_() for _ in range(BATCHES)]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x.grad = None
        return model(x).float().square().mean()

    return Task(model, model.layers, batches, loss, lambda n: False, trains=False)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
