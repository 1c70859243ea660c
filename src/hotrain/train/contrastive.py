"""Learning from two views of each image without labels: SimCLR, BYOL, and how their features are judged.

SimCLR: Chen et al., ICML 2020, arXiv 2002.05709. BYOL: Grill et al., NeurIPS 2020, arXiv 2006.07733; all of its online
network is trained, the predictor too, and its target is a moving average that no gradient reaches.
"""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TASKS = ("simclr", "byol")
TEMPERATURE = 0.2  # of SimCLR
MOMENTUM = 0.99  # of BYOL's target at the first update; it rises to 1 along a cosine
HIDDEN, OUT = 512, 128


class TwoViews(nn.Module):
    """A backbone with the heads of SimCLR or BYOL.

    Args:
        task: ``simclr`` or ``byol``.
        backbone: images → features (B, F); its ``num_features`` is F.
    """

    def __init__(self, task: str, backbone: nn.Module) -> None:
        super().__init__()
        self.task = task
        self.backbone = backbone
        self.projector = _head(int(backbone.num_features))  # type: ignore[arg-type]
        self.predictor: nn.Module = _head(OUT) if task == "byol" else nn.Identity()
        self.target: nn.Module | None = None

    def forward(self, images: Tensor) -> Tensor:
        """Embeddings (2B, 128) of the views (2B, C, H, W), all first views before all second ones."""
        return self.predictor(self.projector(self.backbone(images)))

    def exact_target(self) -> nn.Module | None:
        """BYOL's target as it starts: a copy of backbone and projector. Taken before they are converted."""
        if self.task != "byol":
            return None
        return nn.Sequential(copy.deepcopy(self.backbone), copy.deepcopy(self.projector)).requires_grad_(False)

    def loss(self, embedded: Tensor, images: Tensor) -> Tensor:
        """The loss of what `forward` returned for ``images``, in float32."""
        first, second = F.normalize(embedded.float(), dim=1).chunk(2)
        if self.target is None:
            return info_nce(first, second, TEMPERATURE)
        with torch.no_grad():
            goal_first, goal_second = F.normalize(self.target(images).float(), dim=1).chunk(2)
        return 4.0 - 2.0 * ((first * goal_second).sum(1) + (second * goal_first).sum(1)).mean()

    @torch.no_grad()
    def move_target(self, progress: float) -> None:
        """Move BYOL's target towards the online network, ``progress`` (0 to 1) through the run."""
        if self.target is None:
            return
        momentum = 1.0 - (1.0 - MOMENTUM) * (math.cos(math.pi * progress) + 1.0) / 2.0
        online = [*self.backbone.parameters(), *self.projector.parameters()]
        for own, towards in zip(self.target.parameters(), online, strict=True):
            own.lerp_(towards, 1.0 - momentum)


def _head(inputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, HIDDEN, bias=False), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUT)
    )


def info_nce(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """SimCLR's loss (NT-Xent): each view must find the other view of its image among all of the batch.

    Args:
        first, second: unit vectors (B, D).
    """
    both = torch.cat((first, second))
    logits = both @ both.T / temperature
    logits = logits.masked_fill(torch.eye(len(both), dtype=torch.bool, device=both.device), -math.inf)
    other = torch.arange(len(both), device=both.device).roll(len(first))
    return F.cross_entropy(logits, other)


def two_views(x: Tensor, generator: torch.Generator) -> Tensor:
    """Two augmented views of each image, computed on the images' device, drawn on the CPU.

    Crops of 20 to 100 % of the area, flips, jitter of brightness, contrast, saturation and hue (of 80 % of the views),
    greyscale (of 20 %), as SimCLR does for CIFAR; images of one channel have no colour to change.

    Args:
        x: (B, C, H, W), values 0 to 1.
        generator: on the CPU.

    Returns:
        (2B, C, H, W), all first views before all second ones.
    """
    x = torch.cat((x, x))
    draws = torch.rand(11, len(x), generator=generator, device="cpu").to(x.device, non_blocking=True)
    x = _crop(x, *draws[:5])
    return _recolour(x, *draws[5:]).clamp_(0, 1) if x.shape[1] == 3 else x


def _crop(x: Tensor, area: Tensor, ratio: Tensor, across: Tensor, down: Tensor, flip: Tensor) -> Tensor:
    share = 0.2 + 0.8 * area
    aspect = torch.exp((2 * ratio - 1) * math.log(4 / 3))
    width, height = (share * aspect).sqrt().clamp(max=1), (share / aspect).sqrt().clamp(max=1)
    zero = torch.zeros_like(width)
    mirror = torch.where(flip < 0.5, -1.0, 1.0)
    rows = (
        torch.stack((width * mirror, zero, (2 * across - 1) * (1 - width)), 1),
        torch.stack((zero, height, (2 * down - 1) * (1 - height)), 1),
    )
    grid = F.affine_grid(torch.stack(rows, 1), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


_YIQ = ((0.299, 0.587, 0.114), (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))


def _recolour(
    x: Tensor, bright: Tensor, contrast: Tensor, saturation: Tensor, hue: Tensor, jitter: Tensor, grey: Tensor
) -> Tensor:
    """Jitter in YIQ, where brightness is Y, saturation the length and hue the angle of (I, Q)."""
    on = (jitter < 0.8).float()

    def factor(draw: Tensor) -> Tensor:
        return (1 + on * 0.8 * (draw - 0.5))[:, None, None]

    to = torch.tensor(_YIQ, device=x.device)
    y, i, q = torch.einsum("oc,bchw->bohw", to, x).unbind(1)
    y = y * factor(bright)
    mean = y.mean((1, 2), keepdim=True)
    y = mean + (y - mean) * factor(contrast)
    length = factor(saturation) * (grey >= 0.2).float()[:, None, None]
    angle = (on * 0.4 * math.pi * (hue - 0.5))[:, None, None]
    i, q = length * (angle.cos() * i - angle.sin() * q), length * (angle.sin() * i + angle.cos() * q)
    return torch.einsum("oc,bchw->bohw", torch.linalg.inv(to), torch.stack((y, i, q), 1))


@torch.no_grad()
def nearest_neighbours(train: Tensor, labels: Tensor, test: Tensor, classes: int) -> Tensor:
    """Classify features by their 20 nearest neighbours (or all, if fewer), weighted by exp(cosine / 0.07).

    Args:
        train: (N, F).
        labels: (N,).
        test: (M, F).

    Returns:
        Classes (M,).
    """
    train, chosen = F.normalize(train.float(), dim=1), []
    for part in F.normalize(test.float(), dim=1).split(1000):
        near, index = (part @ train.T).topk(min(20, len(train)), dim=1)
        votes = torch.zeros(len(part), classes, device=part.device)
        votes.scatter_add_(1, labels[index], (near / 0.07).exp())
        chosen.append(votes.argmax(1))
    return torch.cat(chosen)


def linear_probe(train: Tensor, labels: Tensor, test: Tensor, classes: int) -> Tensor:
    """Logits of a linear classifier that is trained on frozen features, by L-BFGS on all of them.

    Args:
        train: (N, F); features are standardized by their mean and deviation.
        labels: (N,).
        test: (M, F).

    Returns:
        (M, classes).
    """
    mean, spread = train.float().mean(0), train.float().std(0).clamp_min(1e-6)
    train, test = (train.float() - mean) / spread, (test.float() - mean) / spread
    layer = nn.Linear(train.shape[1], classes, device=train.device)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(layer(train), labels) + 1e-3 * layer.weight.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[arg-type]
    with torch.no_grad():
        logits: Tensor = layer(test)
    return logits
