"""Real architectures: conversion and revert bit for bit, and one training step with every layer accounted for."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import nn
from zoo import ZOO, call, products

import hotrain

# What each model is expected to convert, so that a change of the defaults or of timm is noticed.
CONVERTED = {
    "vit": 25,
    "swin": 14,
    "resnet": 20,
    "efficientformer": 36,
    "convnext": 40,
    "efficientnet": 10,
    "efficientnetv2": 165,
    "bert": 13,
    "hf_vit": 13,
    "gpt2": 8,
}

# Layers that see one row a sample in these models: pooled features.
SAMPLES = {"efficientnetv2": 58, "bert": 1}


@pytest.fixture(scope="module", params=list(ZOO))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return ZOO[name].build()


@pytest.fixture
def model(built: nn.Module) -> nn.Module:
    return copy.deepcopy(built)


def test_convert_and_revert_bit_for_bit(name: str, model: nn.Module) -> None:
    inputs = ZOO[name].inputs()
    model.eval()
    state = copy.deepcopy(model.state_dict())
    classes = {n: type(m) for n, m in model.named_modules()}
    text, parameters = repr(model), [id(p) for p in model.parameters()]
    with torch.no_grad():
        want = call(model, inputs)
    report = hotrain.convert(model)
    assert len(report.converted) == CONVERTED[name]
    assert [id(p) for p in model.parameters()] == parameters
    assert all(issubclass(type(m), classes[n]) for n, m in model.named_modules())
    after = model.state_dict()
    assert list(after) == list(state)
    assert all(torch.equal(after[k], state[k]) for k in state)
    with torch.no_grad():
        assert torch.equal(call(model, inputs), want)
    hotrain.revert(model)
    assert {n: type(m) for n, m in model.named_modules()} == classes
    assert repr(model) == text
    with torch.no_grad():
        assert torch.equal(call(model, inputs), want)


def test_a_training_step_and_a_report_of_every_layer(name: str, model: nn.Module) -> None:
    inputs = ZOO[name].inputs()
    model.train()
    exact = copy.deepcopy(model)
    report = hotrain.convert(model, "hot-unbiased")
    torch.manual_seed(1)
    y = call(model, inputs)
    torch.manual_seed(1)
    assert torch.equal(y, call(exact, inputs))  # the forward in training mode, dropout and batch statistics included
    y.square().mean().backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None]
    assert missing == []
    assert all(p.grad.isfinite().all() for p in model.parameters())
    rows = [row.name for row in report.converted] + [row.name for row in report.kept]
    assert sorted(rows) == sorted(set(rows))
    assert set(rows) == products(model)
    assert CONVERTED[name] - len(report.converted) == SAMPLES.get(name, 0)
    assert all(row.reason for row in report.kept)


def test_vit_b_converts_within_a_second(timm) -> None:  # type: ignore[no-untyped-def]
    """The issue's limit is 1 s; three times that here, because tests share the machine."""
    with torch.device("meta"):
        vit = timm.create_model("vit_base_patch16_224")
    start = time.perf_counter()
    report = hotrain.convert(vit)
    assert time.perf_counter() - start < 3.0
    assert len(report.converted) == 1 + 4 * 12


def test_weights_used_behind_a_layers_back_are_reported(timm) -> None:  # type: ignore[no-untyped-def]
    """timm's BEiT calls F.linear with qkv's weight and a bias put together: found out by the first training step."""
    beit = timm.create_model("beit_base_patch16_224", img_size=64, embed_dim=64, depth=2, num_heads=2)
    report = hotrain.convert(beit)
    beit(torch.randn(2, 3, 64, 64)).square().mean().backward()
    uncalled = {row.name for row in report.kept if row.reason.startswith("no training forward has called it")}
    assert uncalled == {"blocks.0.attn.qkv", "blocks.1.attn.qkv"}
    assert uncalled.isdisjoint(row.name for row in report.converted)
