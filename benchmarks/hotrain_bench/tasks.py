"""Tasks of `hotrain bench step`: timm's ViTs and convolutional networks, BERT, four blocks of Llama-3-8B's shape."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hotrain
from hotrain.train.models import create_model

Blocks = nn.Sequential | nn.ModuleList


@dataclass(frozen=True)
class Images:
    """A timm model, and the images it is trained on.

    Args:
        model: timm's name.
        batch: number of images.
        blocks: returns the model's containers of blocks.
        tiny: timm's arguments for the size for tests.
        tiny_size: side of the images in pixels for that size.
        channels_last: memory format of the images and the model's weights.
    """

    model: str
    batch: int
    blocks: Callable[[Any], Sequence[Blocks]]
    tiny: dict[str, Any]
    tiny_size: int = 64
    channels_last: bool = False


def _vit(model: str, batch: int) -> Images:
    tiny = {"embed_dim": 64, "depth": 1, "num_heads": 2, "patch_size": 16}
    return Images(model, batch, lambda vit: [vit.blocks], tiny, tiny_size=128)


IMAGES = {
    "vit_base_patch16_224/b128": _vit("vit_base_patch16_224", 128),
    "vit_large_patch16_224/b128": _vit("vit_large_patch16_224", 128),
    "vit_huge_patch14_224/b64": _vit("vit_huge_patch14_224", 64),
    "resnet50/b256": Images(
        "resnet50",
        256,
        lambda resnet: [resnet.layer1, resnet.layer2, resnet.layer3, resnet.layer4],
        {"layers": (1, 1, 1, 1), "channels": (32, 32, 64, 64)},
        channels_last=True,
    ),
    "efficientformer_l1/b256": Images(
        "efficientformer_l1",
        256,
        lambda former: [stage.blocks for stage in former.stages],
        {"depths": (1, 1, 1, 2), "embed_dims": (32, 32, 64, 64)},
        tiny_size=224,  # its attention is for 7×7 tokens
        channels_last=True,
    ),
}
BERT = "bert_base/b64x512"
LLAMA = "llama8b-4blocks/t8192"
SUBJECTS = (*IMAGES, BERT, LLAMA)
HEADS = ("head", "head_dist", "fc", "classifier")
BATCHES = 2  # that the steps cycle through
TINY = 4  # samples at the size for tests: enough that activations are worth compressing


def _fused_adamw(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


@dataclass
class Task:
    """A model and its training step.

    Args:
        model: the model.
        blocks: the model's containers of blocks, which checkpointing recomputes one by one.
        batches: arguments of `loss` besides the model.
        loss: forward and loss.
        kept_exact: whether the Linear of a name is left unchanged in every variant.
        trains: whether an optimizer step is part of the training step.
        adamw: the optimizer; called with the parameters and `lr`.
        report: the conversion report, where a variant converts.
    """

    model: nn.Module
    blocks: Sequence[Blocks]
    batches: Sequence[Any]
    loss: Callable[[nn.Module, Any], Tensor]
    kept_exact: Callable[[str], bool]
    trains: bool
    adamw: Callable[..., torch.optim.Optimizer] = _fused_adamw
    report: hotrain.ConversionReport | None = None

    def optimizer(self) -> torch.optim.Optimizer | None:
        """Create the optimizer; None if the task is timed without one."""
        return self.adamw(self.model.parameters(), lr=1e-4) if self.trains else None


class Checkpointed(nn.Module):
    """A block whose activations are recomputed in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block with `torch.utils.checkpoint`."""
        return checkpoint(self.block, *args, use_reentrant=False, **kwargs)


def with_checkpoints(task: Task) -> None:
    """Wrap every block of the task's model in `Checkpointed`."""
    for blocks in task.blocks:
        for number, block in enumerate(list(blocks)):
            blocks[number] = Checkpointed(block)


def build(subject: str, device: torch.device, tiny: bool = False) -> Task:
    """Build a task, with the same weights and batches each time.

    Args:
        subject: one of `SUBJECTS`.
        device: device of model and batches.
        tiny: the size for tests.

    Raises:
        ValueError: an unknown subject.
    """
    torch.manual_seed(0)
    if subject in IMAGES:
        return _images(IMAGES[subject], device, tiny)
    if subject == BERT:
        return _bert(device, tiny)
    if subject == LLAMA:
        return _llama(device, tiny)
    raise ValueError(f"bench step: got {subject!r}, subjects are {', '.join(SUBJECTS)}")


def _images(what: Images, device: torch.device, tiny: bool) -> Task:
    """224 px, float32 weights under bf16 autocast, cross-entropy, fused AdamW."""
    size, classes, batch = (what.tiny_size, 10, TINY) if tiny else (224, 1000, what.batch)
    layout = torch.channels_last if what.channels_last else torch.contiguous_format
    args = what.tiny if tiny else None
    with device:
        model: nn.Module = create_model(what.model, classes=classes, channels=3, image_size=size, args=args)
        model.to(memory_format=layout)  # type: ignore[call-overload]
        batches = [
            (torch.randn(batch, 3, size, size).to(memory_format=layout), torch.randint(0, classes, (batch,)))
            for _ in range(BATCHES)
        ]

    def loss(model: nn.Module, images_and_labels: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = images_and_labels
        with torch.autocast(device.type, torch.bfloat16):
            return F.cross_entropy(model(images), labels)

    return Task(model, what.blocks(model), batches, loss, _is_head, trains=True)


def _is_head(name: str) -> bool:
    return name.split(".")[-1] in HEADS


def _bert(device: torch.device, tiny: bool) -> Task:
    """64×512 random tokens, dropout as published, float32 weights under bf16 autocast, cross-entropy, fused AdamW."""
    bert = importlib.import_module("transformers.models.bert.modeling_bert")
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
    config = bert.BertConfig(attn_implementation="sdpa", num_labels=2, **(sizes if tiny else {}))
    lead = (TINY, 64) if tiny else (64, 512)
    with device:
        model = bert.BertForSequenceClassification(config)
        batches = [(torch.randint(0, config.vocab_size, lead), torch.randint(0, 2, (lead[0],))) for _ in range(BATCHES)]

    def loss(model: nn.Module, tokens_and_labels: tuple[Tensor, Tensor]) -> Tensor:
        tokens, labels = tokens_and_labels
        with torch.autocast(device.type, torch.bfloat16):
            return F.cross_entropy(model(tokens).logits, labels)

    blocks = model.bert.encoder.layer
    # The pooler gets one token per sequence, so no method gains there.
    return Task(model, [blocks], batches, loss, lambda n: _is_head(n) or "pooler" in n.split("."), trains=True)


class Decoder(nn.Module):
    """Llama's decoder layers with rotary position embeddings: (B, L, hidden) to (B, L, hidden)."""

    def __init__(self, count: int, **sizes: int) -> None:
        super().__init__()
        llama = importlib.import_module("transformers.models.llama.modeling_llama")
        config = llama.LlamaConfig(num_hidden_layers=count, attn_implementation="sdpa", rope_theta=500_000.0, **sizes)
        self.layers = nn.ModuleList(llama.LlamaDecoderLayer(config, number) for number in range(count))
        self.rotary = llama.LlamaRotaryEmbedding(config)

    def forward(self, x: Tensor) -> Tensor:
        """Run all layers on ``x`` (B, L, hidden)."""
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
    lead = (TINY, 64) if tiny else (4, 2048)
    with device, _default_dtype(torch.bfloat16):
        model = Decoder(1 if tiny else 4, **sizes)
        for parameter in model.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        batches = [torch.randn(*lead, sizes["hidden_size"]).requires_grad_() for _ in range(BATCHES)]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x.grad = None
        return model(x).float().square().mean()

    return Task(model, [model.layers], batches, loss, lambda n: False, trains=False)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
