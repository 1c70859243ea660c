"""Tasks of `hotrain bench step`: models of timm, torchvision and transformers, four blocks of Llama-3-8B's shape."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hotrain
from hotrain.compress.checkpointing import blocks
from hotrain.train.models import create_model
from hotrain.train.torchvision_shim import ensure_torchvision
from hotrain_bench.others import OTHERS

# timm's models → what the size for tests changes, and the side of its images in pixels
_SMALL_VIT = ({"embed_dim": 64, "depth": 2, "num_heads": 2, "patch_size": 16}, 128)
SMALL: dict[str, tuple[dict[str, Any], int]] = {
    "vit_base_patch16_224": _SMALL_VIT,
    "vit_large_patch16_224": _SMALL_VIT,
    "vit_huge_patch14_224": _SMALL_VIT,
    "resnet50": ({"layers": (1, 1, 1, 1), "channels": (32, 32, 64, 64)}, 64),
    # Its attention is for 7×7 tokens.
    "efficientformer_l1": ({"depths": (1, 1, 1, 2), "embed_dims": (32, 32, 64, 64)}, 224),
}
# timm's models whose blocks are no elements of module lists → the classes of their blocks
BLOCKS = {
    "regnety_032": ("Bottleneck",),
    "densenet121": ("DenseLayer",),
    "coatnet_0_rw_224": ("MbConvBlock", "TransformerBlock2d"),
}
IMAGES = (
    "vit_base_patch16_224/b128",
    "vit_large_patch16_224/b128",
    "vit_huge_patch14_224/b64",
    "resnet50/b256",
    "efficientformer_l1/b256",
)
BERT = "bert_base/b64x512"
LLAMA = "llama8b-4blocks/t8192"


@dataclass(frozen=True)
class Hub:
    """A model of transformers that computes its own loss, and what it is trained on.

    Args:
        module: name under ``transformers.models``.
        model: name of the class.
        batch: number of samples.
        length: tokens of a sample, or the side of an image in pixels.
        config: arguments of its configuration.
        tiny: further ones for the size for tests.
        blocks: as of `Task`.
    """

    module: str
    model: str
    batch: int
    length: int
    config: dict[str, Any]
    tiny: dict[str, Any]
    blocks: tuple[str, ...] = ()


_TINY_TOKENS = {"vocab_size": 128, "bos_token_id": 2, "eos_token_id": 2}
HUB = {
    "gpt2/b8x1024": Hub(
        "gpt2", "GPT2LMHeadModel", 8, 1024, {}, {"n_embd": 64, "n_layer": 2, "n_head": 2, **_TINY_TOKENS}
    ),
    # Qwen2-1.5B with 12 of its 28 layers and a smaller vocabulary
    "qwen2/b4x2048": Hub(
        "qwen2",
        "Qwen2ForCausalLM",
        4,
        2048,
        {
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 32768,
        },
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            **_TINY_TOKENS,
        },
    ),
    "opt_350m/b8x1024": Hub(
        "opt",
        "OPTForCausalLM",
        8,
        1024,
        {
            "hidden_size": 1024,
            "ffn_dim": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
        },
        {
            "hidden_size": 64,
            "ffn_dim": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "word_embed_proj_dim": 32,
            **_TINY_TOKENS,
        },
    ),
    "t5_small/b16x512": Hub(
        "t5",
        "T5ForConditionalGeneration",
        16,
        512,
        {"decoder_start_token_id": 0},
        {"d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 2, "num_heads": 2, "vocab_size": 128},
        ("T5Block",),
    ),
    "segformer_b0/b16x512": Hub(
        "segformer", "SegformerForSemanticSegmentation", 16, 512, {"num_labels": 150}, {"num_labels": 10}
    ),
}
SUBJECTS = (*IMAGES, BERT, LLAMA, *HUB)
_TORCHVISION = "torchvision."
WAYS = ("/nchw", "/bf16", "/fp16")  # of training a subject, behind its name
_LOSS_SCALE = 2.0**12  # at first: no gradient of a first step overflows
HEADS_OF_HUB = ("MASKED_LM", "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION")  # the first that a type has
HEADS = ("head", "head_dist", "fc", "classifier", "lm_head")
BATCHES = 2  # that the steps cycle through
TINY = 4  # samples at the size for tests: enough that activations are worth compressing


def _fused_adamw(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


@dataclass
class Task:
    """A model and its training step.

    Args:
        model: the model.
        batches: arguments of `loss` besides the model.
        loss: forward and loss.
        kept_exact: whether the Linear of a name is left unchanged in every variant.
        trains: whether an optimizer step is part of the training step.
        adamw: the optimizer; called with the parameters and `lr`.
        blocks: names of the classes that checkpointing recomputes; empty: what `hotrain.checkpoint_blocks` finds.
        scaler: of the loss; of one, but in float16.
        report: the conversion report, where a variant converts.
    """

    model: nn.Module
    batches: Sequence[Any]
    loss: Callable[[nn.Module, Any], Tensor]
    kept_exact: Callable[[str], bool]
    trains: bool
    adamw: Callable[..., torch.optim.Optimizer] = _fused_adamw
    blocks: tuple[str, ...] = ()
    scaler: torch.amp.GradScaler = field(default_factory=lambda: torch.amp.GradScaler(enabled=False))
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
        fixed = [list(arg) if isinstance(arg, list) else arg for arg in args]  # DenseNet goes on appending to its list
        return checkpoint(self.block, *fixed, use_reentrant=False, **kwargs)


def with_checkpoints(task: Task) -> None:
    """Wrap every block of the task's model in `Checkpointed`."""
    chosen = dict(task.model.named_modules()) if task.blocks else blocks(task.model)
    for name, block in chosen.items():
        if task.blocks and not any(kind.__name__ in task.blocks for kind in type(block).__mro__):
            continue
        parent, _, key = name.rpartition(".")
        setattr(task.model.get_submodule(parent), key, Checkpointed(block))


def check(subject: str) -> None:
    """Refuse a subject that `build` does not know.

    Raises:
        ValueError: an unknown subject.
    """
    name, way = _parts(subject)
    images = _image_model(name) is not None
    known = images or name in SUBJECTS or _hub_model(name) is not None
    if not known or ("/nchw" in way and not images) or len(way & {"/bf16", "/fp16"}) > 1 or (name == LLAMA and way):
        raise ValueError(
            f"bench step: got {subject!r}, subjects are {', '.join(SUBJECTS)} and NAME/bN of a timm model, such as "
            "deit_small_patch16_224/b256, torchvision.NAME/bN, such as torchvision.vit_b_16/b128, or of "
            f"{', '.join(OTHERS)}; all of these also in PyTorch's default memory layout, such as resnet50/b256/nchw; "
            "TYPE/bNxL or "
            "TYPE@LAYERS/bNxL of a model type of transformers, such as roberta/b32x512 or mistral@2/b2x2048; all but "
            "the Llama blocks also with /bf16, weights in bf16, or /fp16, autocast with a gradient scaler"
        )


def _parts(subject: str) -> tuple[str, frozenset[str]]:
    """A subject's name and the ways (`WAYS`) behind it."""
    way = set()
    while (found := next((each for each in WAYS if subject.endswith(each)), None)) is not None:
        way.add(found)
        subject = subject.removesuffix(found)
    return subject, frozenset(way)


def _image_model(name: str) -> tuple[str, int] | None:
    """The name and the number of samples of ``NAME/bN``, also of ``torchvision.NAME/bN``; None: no such subject."""
    model, _, batch = name.partition("/b")
    ensure_torchvision()
    if model in OTHERS:
        known = True
    elif model.startswith(_TORCHVISION):
        known = model.removeprefix(_TORCHVISION) in importlib.import_module("torchvision.models").list_models()
    else:
        known = importlib.import_module("timm").is_model(model)
    if not known or not batch.isdecimal() or int(batch) == 0:
        return None
    return model, int(batch)


def _hub_model(subject: str) -> Hub | None:
    """A model type of transformers as it is configured by default, of a subject ``TYPE[@LAYERS]/bNxL``."""
    found = re.fullmatch(r"([\w-]+)(?:@([1-9]\d*))?/b([1-9]\d*)x([1-9]\d*)", subject)
    if found is None:
        return None
    ensure_torchvision()
    auto = importlib.import_module("transformers.models.auto")
    name, layers, batch, length = found.groups()
    if name not in auto.CONFIG_MAPPING:
        return None
    kind = auto.CONFIG_MAPPING[name]
    heads = (getattr(auto, f"MODEL_FOR_{what}_MAPPING") for what in HEADS_OF_HUB)
    model = next((mapping[kind] for mapping in heads if kind in mapping), None)
    if model is None:
        return None
    sizes = {} if layers is None else {"num_hidden_layers": int(layers)}
    positions = getattr(kind(), "max_position_embeddings", None)
    if positions is not None:
        sizes["max_position_embeddings"] = max(positions, int(length) + 2)  # RoBERTa's first position is 2
    return Hub(model.__module__.split(".")[-2], model.__name__, int(batch), int(length), sizes, {})


def build(subject: str, device: torch.device, tiny: bool = False) -> Task:
    """Build a task, with the same weights and batches each time.

    Args:
        subject: one of `SUBJECTS`, ``NAME/bN`` of a timm model, or one of `OTHERS`, and a number of samples,
            ``torchvision.NAME/bN``, any of these with ``/nchw`` behind for PyTorch's default memory layout, or
            ``TYPE/bNxL`` of a model type of transformers, a number of samples and their length; ``TYPE@LAYERS/bNxL``
            has fewer layers. With ``/bf16`` behind, weights and images are in bf16 without autocast, with ``/fp16``
            autocast is float16 and the loss is scaled.
        device: device of model and batches.
        tiny: the size for tests.

    Raises:
        ValueError: an unknown subject.
    """
    check(subject)
    name, way = _parts(subject)
    torch.manual_seed(0)
    if name == LLAMA:
        return _llama(device, tiny)
    if name == BERT:
        task = _bert(device, tiny)
    elif name in HUB:
        task = _hub(HUB[name], device, tiny)
    elif (hub := _hub_model(name)) is not None:
        task = _hub(hub, device, tiny)
    else:
        images = _image_model(name)
        assert images is not None
        task = (_other if images[0] in OTHERS else _images)(*images, "/nchw" in way, device, tiny)
    _set_precision(task, device, way)
    return task


def _set_precision(task: Task, device: torch.device, way: frozenset[str]) -> None:
    """bf16 autocast over the loss; with ``/fp16`` float16's, scaled, with ``/bf16`` weights and images in bf16."""
    if "/bf16" in way:
        task.model.to(torch.bfloat16)
        task.batches = [tuple(t.bfloat16() if t.is_floating_point() else t for t in batch) for batch in task.batches]
        return
    dtype = torch.float16 if "/fp16" in way else torch.bfloat16
    if dtype is torch.float16:
        task.scaler = torch.amp.GradScaler(device.type, init_scale=_LOSS_SCALE)
    plain = task.loss

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast(device.type, dtype):
            return plain(model, batch)

    task.loss = loss


def _images(name: str, batch: int, nchw: bool, device: torch.device, tiny: bool) -> Task:
    """224 px, cross-entropy, fused AdamW.

    Models that convolve beyond their patch embedding are in channels_last, as are their images, unless `nchw`.
    """
    args, size, classes = None, 224, 1000
    if tiny:
        (args, size), batch, classes = SMALL.get(name, ({}, 224)), TINY, 10
    with device:
        if name.startswith(_TORCHVISION):
            zoo = importlib.import_module("torchvision.models")
            model = zoo.get_model(name.removeprefix(_TORCHVISION), num_classes=classes)
        else:
            model = create_model(name, classes=classes, channels=3, image_size=size, args=args)
        layout = _lay_out(model, nchw)
        batches = [
            (torch.randn(batch, 3, size, size).to(memory_format=layout), torch.randint(0, classes, (batch,)))
            for _ in range(BATCHES)
        ]

    def loss(model: nn.Module, images_and_labels: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = images_and_labels
        return F.cross_entropy(model(images), labels)

    return Task(model, batches, loss, _is_head, trains=True, blocks=BLOCKS.get(name, ()))


def _lay_out(model: nn.Module, nchw: bool) -> torch.memory_format:
    """Put a model that convolves beyond its patch embedding in channels_last, unless `nchw`; its images' layout."""
    kernels = [module.kernel_size for module in model.modules() if isinstance(module, nn.Conv2d | nn.ConvTranspose2d)]
    convolves = sum(kernel != (1, 1) for kernel in kernels) > 1
    layout = torch.channels_last if convolves and not nchw else torch.contiguous_format
    model.to(memory_format=layout)  # type: ignore[call-overload]
    return layout


def _other(name: str, batch: int, nchw: bool, device: torch.device, tiny: bool) -> Task:
    """Random numbers, the mean square of the result, fused AdamW; layouts as of `_images`."""
    what = OTHERS[name]
    make, shapes = (what.tiny, what.tiny_inputs) if tiny else (what.model, what.inputs)
    with device:
        model = make()
        layout = _lay_out(model, nchw)
        batches = [[torch.randn(TINY if tiny else batch, *shape) for shape in shapes] for _ in range(BATCHES)]
    batches = [[t.to(memory_format=layout) if t.dim() == 4 else t for t in batch] for batch in batches]

    def loss(model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
        return model(*inputs).float().square().mean()  # type: ignore[no-any-return]

    return Task(model, batches, loss, _is_head, trains=True)


def _is_head(name: str) -> bool:
    return name.split(".")[-1] in HEADS


def _hub(what: Hub, device: torch.device, tiny: bool) -> Task:
    """Random tokens or images, dropout as published, own loss, fused AdamW."""
    kind = getattr(importlib.import_module(f"transformers.models.{what.module}"), what.model)
    config = kind.config_class(**(what.config | (what.tiny if tiny else {})))
    config.use_cache = False
    batch, length = (TINY, 64) if tiny else (what.batch, what.length)
    with device:
        model = kind(config)
        if model.main_input_name == "pixel_values":
            pixels = (batch, length, length) if "Segmentation" in what.model else (batch,)
            labels = (config.num_labels, pixels)
            batches = [(torch.randn(batch, 3, length, length), torch.randint(*labels)) for _ in range(BATCHES)]
        else:
            tokens = [torch.randint(config.vocab_size, (batch, length)) for _ in range(BATCHES)]
            batches = [(each, each.clone()) for each in tokens]
    name = model.main_input_name
    model.loss_type = model.loss_type or "ForCausalLM"  # not told by the name GPT2LMHeadModel
    with torch.no_grad():
        first, label = (t[:1] for t in batches[0])
        model.eval()(**{name: first, "labels": label})  # may install hooks, which break a graph
    model.train()

    def loss(model: nn.Module, inputs_and_labels: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = inputs_and_labels
        return model(**{name: inputs, "labels": labels}).loss  # type: ignore[no-any-return]

    return Task(model, batches, loss, _is_head, trains=True, blocks=what.blocks)


def _bert(device: torch.device, tiny: bool) -> Task:
    """64×512 random tokens, dropout as published, cross-entropy, fused AdamW."""
    bert = importlib.import_module("transformers.models.bert.modeling_bert")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config = bert.BertConfig(attn_implementation="sdpa", num_labels=2, **(sizes if tiny else {}))
    lead = (TINY, 64) if tiny else (64, 512)
    with device:
        model = bert.BertForSequenceClassification(config)
        batches = [(torch.randint(0, config.vocab_size, lead), torch.randint(0, 2, (lead[0],))) for _ in range(BATCHES)]

    def loss(model: nn.Module, tokens_and_labels: tuple[Tensor, Tensor]) -> Tensor:
        tokens, labels = tokens_and_labels
        return F.cross_entropy(model(tokens).logits, labels)

    # The pooler gets one token per sequence, so no method gains there.
    return Task(model, batches, loss, lambda n: _is_head(n) or "pooler" in n.split("."), trains=True)


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
        model = Decoder(2 if tiny else 4, **sizes)
        for parameter in model.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        batches = [torch.randn(*lead, sizes["hidden_size"]).requires_grad_() for _ in range(BATCHES)]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x.grad = None
        return model(x).float().square().mean()

    return Task(model, batches, loss, lambda n: False, trains=False)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
