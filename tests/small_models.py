"""Small models whose figures can be worked out by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class TokenNet(nn.Module):
    """Patches (4×4 of a 16×16 image: 16 tokens) → two Linear layers → mean → head. Nothing but these keeps x twice."""

    def __init__(self, width: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 4, 4)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        tokens = tokens + self.fc2(nn.functional.gelu(self.fc1(tokens)))
        return self.head(tokens.mean(1))


class ConvNet(nn.Module):
    """A convolution that unfolds, BatchNorm (buffers), dropout (draws), a 1×1 convolution, a head."""

    def __init__(self, width: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(0.5)
        self.point = nn.Conv2d(width, width, 1)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.relu(self.norm(self.conv(x))))
        return self.head(self.point(x).mean((2, 3)))


class Two(nn.Module):
    """Two Linear layers on the same tokens; the output is (a x, b x), so that a loss sets each one's g_y."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


def timm_model(name: str, **options: Any) -> nn.Module:
    from hotrain.train.torchvision_shim import ensure_torchvision

    ensure_torchvision()
    import timm

    return timm.create_model(name, **options)


def found(model: nn.Module) -> dict[str, Any]:
    """All that a look at a model must leave alone."""
    import random

    from hotrain.nn.state import layer_states

    states = [
        (name, s.draws.step, s.draws.generation, s.calls, s.fallback, s.method) for name, s in layer_states(model)
    ]
    return {
        "tensors": {name: t.detach().clone() for name, t in [*model.named_parameters(), *model.named_buffers()]},
        "identity": [id(t) for t in [*model.parameters(), *model.buffers()]],
        "grads": [None if p.grad is None else (id(p.grad), p.grad.clone()) for p in model.parameters()],
        "modes": [m.training for m in model.modules()],
        "classes": [type(m) for m in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "states": states,
    }


def assert_as_found(model: nn.Module, before: dict[str, Any]) -> None:
    after = found(model)
    for field in ("identity", "modes", "classes", "hooks", "python", "states"):
        assert after[field] == before[field], field
    assert torch.equal(after["torch"], before["torch"]), "torch generator"
    for name, value in before["tensors"].items():
        assert torch.equal(after["tensors"][name], value), name
    for old, new in zip(before["grads"], after["grads"], strict=True):
        assert (old is None) == (new is None)
        if old is not None:
            assert old[0] == new[0]
            assert torch.equal(old[1], new[1])
