"""A small task, trained to its end: the unbiased method reaches the loss of exact training within the seeds' noise."""

from __future__ import annotations

import math
import statistics

import torch
from torch import Tensor, nn

import hotrain

SEEDS = range(3)
STEPS = 100


class Mixer(nn.Module):
    """Tokens see each other through a mean; two residual MLPs do the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)
        )
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        t = self.embed(x)
        for block in self.blocks:
            t = t + block(t + t.mean(1, keepdim=True))
        return self.head(t.mean(1))


def final_loss(method: str, seed: int, spoilt: bool = False) -> float:
    """Held-out cross-entropy of four classes told apart by the frequency of a wave along 32 tokens."""
    torch.manual_seed(seed)
    hotrain.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = Mixer()
    mixing = torch.randn(2, 16, generator=torch.Generator().manual_seed(99))

    def batch(size: int) -> tuple[Tensor, Tensor]:
        label = torch.randint(0, 4, (size,), generator=data)
        phase = 6.28 * torch.rand(size, 1, generator=data)
        angle = phase + torch.arange(32)[None] * (label[:, None] + 1) * 0.35
        wave = torch.stack((angle.sin(), angle.sin() * angle.sin().roll(1, 1)), -1) @ mixing
        return wave + 0.5 * torch.randn(size, 32, 16, generator=data), label

    if method != "exact":
        hotrain.convert(model, method, filter_fn=lambda module, name: name != "head")
    if spoilt:
        for weight in (p for p in model.parameters() if p.dim() == 2):
            weight.register_hook(lambda g: g * torch.tensor([1.0, -1.0]).repeat(g.shape[1] // 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        x, label = batch(32)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), label).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        x, label = batch(1024)
        return nn.functional.cross_entropy(model(x), label).item()


def test_hot_unbiased_reaches_the_loss_of_exact() -> None:
    """The same seed gives both methods the same start and the same data, so the losses are compared in pairs: their
    mean difference is less than three of its standard errors and a twentieth of what exact training gained."""
    exact = [final_loss("exact", seed) for seed in SEEDS]
    ours = [final_loss("hot-unbiased", seed) for seed in SEEDS]
    chance = math.log(4)
    assert max(exact) < chance / 4  # there was something to learn, and it was learnt
    assert max(ours) < chance / 4
    gaps = [a - b for a, b in zip(ours, exact, strict=True)]
    noise = 3 * statistics.stdev(gaps) / len(gaps) ** 0.5
    assert statistics.mean(gaps) < noise + (chance - statistics.mean(exact)) / 20


def test_the_task_tells_a_wrong_gradient_from_a_right_one() -> None:
    """The test above must be able to fail: with the sign of every other column of each g_w reversed, as unmatched
    rows of P would do, the task is not learnt."""
    assert final_loss("exact", 0, spoilt=True) > math.log(4) / 4
