"""Models of kinds that timm, torchvision and transformers do not have, as their users write them.

Convolutions over sequences and volumes, UNets, a generator, attention of PyTorch's own modules, also with convolutions
between, and rows with batch norm.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Residual(nn.Module):
    def __init__(self, conv: Any, norm: Any, c: int, kernel: int) -> None:
        super().__init__()
        first, last = ((conv(c, c, kernel, padding=kernel // 2, bias=False), norm(c)) for _ in range(2))
        self.inner = nn.Sequential(*first, nn.ReLU(inplace=True), *last)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.inner(x))


class ResNetNd(nn.Module):
    """Residual convolutions over a sequence (1 axis) or a volume (3 axes), with batch norms."""

    def __init__(self, axes: int, inputs: int, widths: tuple[int, int], depth: int, kernel: int) -> None:
        super().__init__()
        conv, norm = (nn.Conv1d, nn.BatchNorm1d) if axes == 1 else (nn.Conv3d, nn.BatchNorm3d)
        first, last = widths
        self.stem = nn.Sequential(conv(inputs, first, 7, 2, 3, bias=False), norm(first), nn.ReLU(inplace=True))
        self.one = nn.Sequential(*(_Residual(conv, norm, first, kernel) for _ in range(depth)))
        self.down = conv(first, last, 3, 2, 1)
        self.two = nn.Sequential(*(_Residual(conv, norm, last, kernel) for _ in range(depth)))
        self.head = nn.Linear(last, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, *positions) to (N, 10)."""
        return self.head(self.two(self.down(self.one(self.stem(x)))).flatten(2).mean(2))  # type: ignore[no-any-return]


def _double(inputs: int, outputs: int) -> nn.Sequential:
    convolutions = (nn.Conv2d(a, outputs, 3, padding=1, bias=False) for a in (inputs, outputs))
    return nn.Sequential(*(part for conv in convolutions for part in (conv, nn.BatchNorm2d(outputs), nn.ReLU(True))))


class UNet(nn.Module):
    """For segmentation: two convolutions with batch norms on each of four scales."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.first = _double(3, widths[0])
        self.downs = nn.ModuleList(nn.Sequential(nn.MaxPool2d(2), _double(a, b)) for a, b in pairwise(widths))
        self.ups = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in reversed([*pairwise(widths)]))
        self.after = nn.ModuleList(_double(2 * a, a) for a in reversed(widths[:-1]))
        self.last = nn.Conv2d(widths[0], 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) to (N, 2, H, W)."""
        scales = [self.first(x)]
        for down in self.downs:
            scales.append(down(scales[-1]))
        y = scales.pop()
        for up, after in zip(self.ups, self.after, strict=True):
            y = after(torch.cat([scales.pop(), up(y)], 1))
        return self.last(y)  # type: ignore[no-any-return]


class _TimedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, times: int) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(32, inputs), nn.GroupNorm(32, outputs)
        self.one = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.two = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time, self.dropout = nn.Linear(times, outputs), nn.Dropout(0.1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.one(F.silu(self.first(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.two(self.dropout(F.silu(self.second(h))))  # type: ignore[no-any-return]


class _Attention2d(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(32, c), nn.Linear(c, 3 * c), nn.Linear(c, c)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        qkv = self.qkv(self.norm(x).flatten(2).transpose(1, 2)).view(n, h * w, 3, 8, c // 8)
        y = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4)).transpose(1, 2).reshape(n, h * w, c)
        return x + self.out(y).transpose(1, 2).view(n, c, h, w)  # type: ignore[no-any-return]


class DiffusionUNet(nn.Module):
    """As of diffusion models: group norms, SiLU, a time embedding, and attention below the first scale."""

    def __init__(self, *widths: int, times: int = 512) -> None:
        super().__init__()
        self.first, self.time = nn.Conv2d(3, widths[0], 3, padding=1), nn.Linear(256, times)
        self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
        for scale, (a, b) in enumerate(pairwise([widths[0], *widths])):
            mixer = _Attention2d(b) if scale else nn.Identity()
            self.downs.append(nn.ModuleList([_TimedResidual(a, b, times), mixer, nn.Conv2d(b, b, 3, 2, 1)]))
        self.middle = _TimedResidual(widths[-1], widths[-1], times)
        for a, b in pairwise([widths[-1], *reversed(widths)]):
            mixer = _Attention2d(b) if len(self.ups) < len(widths) - 1 else nn.Identity()
            self.ups.append(nn.ModuleList([nn.Conv2d(a, a, 3, padding=1), _TimedResidual(a + b, b, times), mixer]))
        self.norm, self.last = nn.GroupNorm(32, widths[0]), nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """(N, 3, H, W) and (N, 256) to (N, 3, H, W)."""
        time, x, scales = self.time(time), self.first(x), []
        for block, mixer, down in cast(Any, self.downs):
            scales.append(mixer(block(x, time)))
            x = down(scales[-1])
        x = self.middle(x, time)
        for up, block, mixer in cast(Any, self.ups):
            x = torch.cat([up(F.interpolate(x, scale_factor=2.0, mode="nearest")), scales.pop()], 1)
            x = mixer(block(x, time))
        return self.last(F.silu(self.norm(x)))  # type: ignore[no-any-return]


class _ConformerBlock(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.before, self.norm, self.attended, self.after = (nn.LayerNorm(c) for _ in range(4))
        self.feed = nn.Sequential(nn.Linear(c, 4 * c), nn.SiLU(), nn.Dropout(0.1), nn.Linear(4 * c, c), nn.Dropout(0.1))
        self.attention = nn.MultiheadAttention(c, 4, 0.1, batch_first=True)
        self.gated, self.point = nn.Conv1d(c, 2 * c, 1), nn.Conv1d(c, c, 1)
        self.depth, self.batch = nn.Conv1d(c, c, 31, padding=15, groups=c), nn.BatchNorm1d(c)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.feed(self.before(x))
        h = self.attended(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        h = F.glu(self.gated(self.norm(x).transpose(1, 2)), 1)
        return self.after(x + self.point(F.silu(self.batch(self.depth(h)))).transpose(1, 2))  # type: ignore[no-any-return]


class Conformer(nn.Sequential):
    """As of speech recognition: attention and convolutions over a sequence in each block."""

    def __init__(self, c: int, depth: int) -> None:
        super().__init__(*(_ConformerBlock(c) for _ in range(depth)), nn.Linear(c, 100))


class Encoder(nn.Sequential):
    """PyTorch's Transformer encoder with its defaults: norms behind, ReLU, a dropout of 0.1."""

    def __init__(self, c: int, heads: int, depth: int) -> None:
        layer = nn.TransformerEncoderLayer(c, heads, batch_first=True)
        super().__init__(nn.TransformerEncoder(layer, depth, enable_nested_tensor=False), nn.Linear(c, 100))


class PointNet(nn.Module):
    """Points one by one, with batch norms over all of them, and their maximum."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        layers = ((nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU()) for a, b in pairwise([3, *widths]))
        self.points, self.head = nn.Sequential(*(part for each in layers for part in each)), nn.Linear(widths[-1], 40)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, points) to (N, 40)."""
        return self.head(self.points(x).max(2)[0])  # type: ignore[no-any-return]


class Generator(nn.Sequential):
    """Of images, from small to large: transposed convolutions with batch norms."""

    def __init__(self, *widths: int) -> None:
        layers = (
            (nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2))
            for a, b in pairwise(widths)
        )
        super().__init__(*(p for each in layers for p in each), nn.Conv2d(widths[-1], 3, 3, padding=1), nn.Tanh())


class RowNet(nn.Sequential):
    """Rows of a table: layers with batch norm and dropout."""

    def __init__(self, c: int, depth: int) -> None:
        layers = ((nn.Linear(c, c), nn.BatchNorm1d(c), nn.ReLU(), nn.Dropout(0.1)) for _ in range(depth))
        super().__init__(*(part for each in layers for part in each), nn.Linear(c, 10))


class Other(NamedTuple):
    """A model and the shapes of its inputs behind the batch, each also at the size for tests."""

    model: Callable[[], nn.Module]
    inputs: tuple[tuple[int, ...], ...]
    tiny: Callable[[], nn.Module]
    tiny_inputs: tuple[tuple[int, ...], ...]


OTHERS = {
    "conv1d_resnet": Other(
        lambda: ResNetNd(1, 12, (64, 256), 3, 7), ((12, 16384),), lambda: ResNetNd(1, 12, (32, 32), 1, 7), ((12, 512),)
    ),
    "conv3d_resnet": Other(
        lambda: ResNetNd(3, 3, (64, 128), 2, 3),
        ((3, 16, 112, 112),),
        lambda: ResNetNd(3, 3, (16, 16), 1, 3),
        ((3, 8, 32, 32),),
    ),
    "unet": Other(lambda: UNet(64, 128, 256, 512), ((3, 256, 256),), lambda: UNet(16, 32), ((3, 32, 32),)),
    "diffusion_unet": Other(
        lambda: DiffusionUNet(128, 256, 256),
        ((3, 64, 64), (256,)),
        lambda: DiffusionUNet(32, 64, times=32),
        ((3, 32, 32), (256,)),
    ),
    "conformer": Other(lambda: Conformer(256, 4), ((800, 256),), lambda: Conformer(32, 1), ((128, 32),)),
    "encoder": Other(lambda: Encoder(512, 8, 6), ((512, 512),), lambda: Encoder(64, 4, 1), ((64, 64),)),
    "pointnet": Other(lambda: PointNet(64, 64, 128, 1024), ((3, 4096),), lambda: PointNet(16, 32), ((3, 512),)),
    "generator": Other(
        lambda: Generator(128, 512, 256, 128, 64), ((128, 8, 8),), lambda: Generator(16, 32, 16), ((16, 8, 8),)
    ),
    "rows": Other(lambda: RowNet(512, 6), ((512,),), lambda: RowNet(64, 2), ((64,),)),
}
