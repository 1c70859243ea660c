"""PEFT: on a LoRA model frozen base layers get the g_x path and save nothing, adapters stay exact; both orders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from zoo import ZOO, call

import hotrain
from hotrain.nn import layer_state

# What LoRA is put on, what is trained whole beside it, and whether weights are stored (I, O).
TARGETS: dict[str, dict[str, Any]] = {
    "vit": {"target_modules": ["qkv", "fc1"], "modules_to_save": ["head"]},
    "hf_vit": {"target_modules": ["q_proj", "v_proj", "query", "value"], "modules_to_save": ["classifier"]},
    "gpt2": {"target_modules": ["c_attn"], "fan_in_fan_out": True},
    "resnet": {"target_modules": ["conv1"], "modules_to_save": ["fc"]},
}

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*lm_head.*tie_word_embeddings.*:UserWarning", "ignore:Model has `tie_word_embeddings=True`.*:UserWarning"
)


def lora(name: str, order: str, method: str = "hot-unbiased", **options: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = ZOO[name].build()
    if order == "before":
        hotrain.convert(model, method)
    model = get_peft_model(model, LoraConfig(r=4, **TARGETS[name], **options))
    if order == "after":
        hotrain.convert(model, method)
    return model


def adapters(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(n, m) for n, m in model.named_modules() if n.endswith((".lora_A.default", ".lora_B.default"))]


ORDERS = pytest.mark.parametrize("order", ["before", "after"])
NAMES = pytest.mark.parametrize("name", list(TARGETS))


@ORDERS
@NAMES
def test_bases_are_converted_and_adapters_are_not(name: str, order: str) -> None:
    """PEFT builds convolution adapters with `type(base)(...)`: even those are plain layers."""
    model = lora(name, order)
    assert len(adapters(model)) >= 4
    assert {type(m) for _, m in adapters(model)} <= {nn.Linear, nn.Conv2d}
    bases = [m for n, m in model.named_modules() if n.endswith(".base_layer")]
    assert bases
    assert all(layer_state(m) is not None for m in bases)


def test_the_report_names_the_adapters() -> None:
    model = lora("vit", "none")
    rows = {row.name: row.reason for row in hotrain.convert(model).kept}
    assert {name for name, _ in adapters(model)} <= set(rows)
    assert rows[adapters(model)[0][0]] == "adapter of 'base_model.model.blocks.0.attn.qkv': adapters stay exact"
    assert {reason for name, reason in rows.items() if ".head." in name} == {"head"}


@ORDERS
@NAMES
def test_a_step_trains_the_adapters_and_only_them(name: str, order: str) -> None:
    model = lora(name, order)
    model.train()
    call(model, ZOO[name].inputs()).square().mean().backward()
    for parameter_name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, parameter_name
        assert parameter.grad is None or parameter.grad.isfinite().all()
    reached = [state for _, _, state in hotrain.converted_layers(model) if state.calls]
    assert reached


@ORDERS
def test_frozen_bases_keep_no_input(order: str) -> None:
    """Between forward and backward a frozen base layer waits with its weight alone: no codes, no activation."""
    model = lora("vit", order)
    kept: dict[str, list[Tensor]] = {}
    inside: list[str] = []

    def pack(t: Tensor) -> Tensor:
        if inside:
            kept.setdefault(inside[-1], []).append(t)
        return t

    for name, module, _ in hotrain.converted_layers(model):
        module.register_forward_pre_hook(lambda *_, name=name: inside.append(name))
        module.register_forward_hook(lambda *_: [inside.pop(), None][1])
    with saved_tensors_hooks(pack, lambda t: t):
        y = call(model, ZOO["vit"].inputs())
    assert len(kept) > 20
    for name, tensors in kept.items():
        weight = model.get_submodule(name).weight
        assert all(t.shape == weight.shape or t.numel() == 1 for t in tensors), name
    y.square().mean().backward()


@ORDERS
def test_adapters_get_the_exact_gradient(order: str) -> None:
    """With g_x unquantized, the frozen base is exact, so every adapter's gradient is the exact model's to the bit
    of float rounding, whatever the low-rank step of g_w would do to a trained weight."""
    torch.manual_seed(0)
    exact = lora("vit", "none")
    torch.manual_seed(0)
    model = lora("vit", order, hotrain.preset("hot", grad_input_bits=None))  # type: ignore[arg-type]
    x = ZOO["vit"].inputs()
    for part in (exact, model):
        part.train()
        call(part, x).square().mean().backward()
    compared = 0
    for (name, got), want in zip(model.named_parameters(), exact.parameters(), strict=True):
        if ".lora_" in name:
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-6)
            compared += 1
    assert compared >= 8


@ORDERS
@NAMES
def test_adapters_merge_into_converted_layers(name: str, order: str) -> None:
    """merge_and_unload hands the base layers back, still converted; reverting leaves the model as PEFT would."""
    model = lora(name, order, init_lora_weights=False).eval()
    inputs = ZOO[name].inputs()
    with torch.no_grad():
        want = call(model, inputs)
        merged = model.merge_and_unload()  # type: ignore[operator]
        # merging adds B·A to the weights: equal up to rounding through the depth of the network
        torch.testing.assert_close(call(merged, inputs), want, rtol=2e-3, atol=2e-3)
    assert list(hotrain.converted_layers(merged))
    hotrain.revert(merged)
    assert not [m for m in merged.modules() if type(m).__module__.startswith("hotrain")]


def test_revert_reaches_through_peft() -> None:
    model = lora("vit", "before")
    hotrain.revert(model)
    assert {type(m) for n, m in model.named_modules() if n.endswith("base_layer")} == {nn.Linear}
