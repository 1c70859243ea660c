"""transformers' checkpointing of a converted model: what is kept is what the exact model keeps, and gradients stay."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotrain
import hotrain.train

transformers = pytest.importorskip("transformers")

TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(**TEXT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=128, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
        )
    ),
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(**{k: v for k, v in TEXT.items() if k != "vocab_size"}, image_size=64, patch_size=8)
    ),
}


def batch_of(model: nn.Module) -> dict[str, Tensor]:
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.tensor([0, 1])}
    ids = torch.randint(3, 128, (2, 64))
    return {"input_ids": ids, "labels": ids}


def gradient(model: nn.Module, batch: dict[str, Any], run: Callable[..., Any] | None = None) -> Tensor:
    model.zero_grad()
    (model if run is None else run)(**batch).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("first", ["converted", "checkpointed"])
@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_is_checkpointed(name: str, first: str) -> None:
    """Layers are recomputed whichever comes first, as often as of the exact model, and to the same gradient."""
    torch.manual_seed(0)
    exact = MODELS[name]().train()
    converted = copy.deepcopy(exact)
    batch = batch_of(exact)
    for model in (exact, converted):
        if model is converted and first == "converted":
            hotrain.convert(model)
            kept, plain = hotrain.saved_bytes(model, **batch).total, gradient(model, batch)
        model.gradient_checkpointing_enable()
    if first == "checkpointed":
        hotrain.convert(converted)
    most = hotrain.saved_bytes(exact, **batch).total
    assert hotrain.saved_bytes(converted, **batch).total <= most
    torch.testing.assert_close(gradient(converted, batch), gradient(exact, batch), rtol=0, atol=0.05)
    if first == "converted":
        assert most < kept / 2, "it has an effect"
        again = gradient(converted, batch)
        # Two runs round 8-bit codes by other draws; another gradient is as far off as its norm.
        assert (again - plain).norm() < 0.2 * plain.norm()
    hotrain.revert(converted)
    assert hotrain.saved_bytes(converted, **batch).total == most
    assert torch.equal(gradient(converted, batch), gradient(exact, batch))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of transformers' own hook
def test_checkpointed_and_compiled() -> None:
    torch.manual_seed(0)
    exact = MODELS["llama"]().train()
    converted, batch = copy.deepcopy(exact), batch_of(exact)
    hotrain.convert(converted)
    converted.gradient_checkpointing_enable({"use_reentrant": False})
    torch._dynamo.reset()
    got = gradient(converted, batch, torch.compile(converted, backend="aot_eager"))  # type: ignore[arg-type]
    want = gradient(exact, batch)
    assert (got - want).norm() < 0.1 * want.norm()
