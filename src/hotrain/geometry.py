"""The geometry of convolutions: sizes, padding, patches, memory layout; no arithmetic of ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .private import CONV_PADS, memory_format_of

Pair = tuple[int, int]
Shape = tuple[int, int, int, int]
LAID_OUT = {"cuda"}  # types of devices on which compiled models convolve in channels_last
FEW = 16  # channels of an image below which cuDNN has no fast kernels for patches


@dataclass(frozen=True)
class Geometry:
    """The arguments of `torch.nn.Conv2d` besides its channels.

    Attributes:
        kernel: (height, width).
        stride: (vertical, horizontal).
        padding: a pair, ``"same"``, ``"valid"``, or (left, right, top, bottom) where the mode is not zeros.
        dilation: (vertical, horizontal).
        groups: divides both numbers of channels.
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.
    """

    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair | tuple[int, int, int, int] | str = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    padding_mode: str = "zeros"

    @classmethod
    def of(cls, module: nn.Conv2d) -> Geometry:
        """The geometry of a module."""
        kernel, stride, dilation = ((v[0], v[1]) for v in (module.weight.shape[2:], module.stride, module.dilation))
        return cls(kernel, stride, padding_of(module), dilation, module.groups, module.padding_mode)

    @property
    def pads(self) -> tuple[int, int, int, int]:
        """(left, right, top, bottom), the order of `torch.nn.functional.pad`; 'same' puts the odd one last."""
        if self.padding == "valid":
            return 0, 0, 0, 0
        if isinstance(self.padding, str):
            (vertical, horizontal) = (d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True))
            return horizontal // 2, horizontal - horizontal // 2, vertical // 2, vertical - vertical // 2
        if len(self.padding) == 4:
            return self.padding
        (vertical, horizontal) = self.padding
        return horizontal, horizontal, vertical, vertical

    @property
    def equal_pads(self) -> Pair | None:
        """(vertical, horizontal) zeros on both sides, which PyTorch's kernels pad with themselves; None for others."""
        left, right, top, bottom = self.pads
        return (top, left) if self.padding_mode == "zeros" and (left, top) == (right, bottom) else None

    @property
    def is_patches(self) -> bool:
        """Whether every pixel belongs to at most one patch: the convolution is a Linear layer on patches."""
        return self.cuts or (self.groups == 1 and self.kernel == (1, 1) and not any(self.pads))

    @property
    def cuts(self) -> bool:
        """Whether the patches are of several pixels, and one beside the other."""
        single = self.groups == 1 and self.dilation == (1, 1)
        return single and self.kernel == self.stride != (1, 1) and not any(self.pads)

    def output_size(self, height: int, width: int) -> Pair:
        """(height, width) of the output for an input of that size."""
        sizes = self.padded((1, 1, height, width))[2:]
        spans = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel, strict=True)]
        down, across = ((n - span) // s + 1 for n, span, s in zip(sizes, spans, self.stride, strict=True))
        return down, across

    def forward(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        """The output of `torch.nn.Conv2d`, bit for bit."""
        if self.padding_mode != "zeros":
            x = F.pad(x, self.pads, mode=self.padding_mode)
            return F.conv2d(x, w, b, self.stride, 0, self.dilation, self.groups)
        return F.conv2d(x, w, b, self.stride, self.padding, self.dilation, self.groups)

    def pad(self, x: Tensor) -> Tensor:
        """An image, (B, C, H, W), padded as the convolution pads it."""
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        return F.pad(x, self.pads, mode=mode) if any(self.pads) else x

    def padded(self, shape: Shape) -> Shape:
        """The shape of a padded image."""
        left, right, top, bottom = self.pads
        return shape[0], shape[1], shape[2] + top + bottom, shape[3] + left + right

    def pad_transposed(self, g: Tensor, height: int, width: int) -> Tensor:
        """The transpose of `pad`: gradients of the padded image to gradients of the image."""
        if not any(self.pads):
            return g
        if self.padding_mode == "zeros":
            left, _, top, _ = self.pads
            return g[:, :, top : top + height, left : left + width]
        with torch.enable_grad():
            image = torch.zeros(*g.shape[:2], height, width, dtype=g.dtype, device=g.device, requires_grad=True)
            return torch.autograd.grad(self.pad(image), image, g)[0]


def padding_of(module: nn.Conv2d) -> Any:
    """A module's padding as its forward reads it."""
    pads = None if module.padding_mode == "zeros" else getattr(module, CONV_PADS, None)
    return module.padding if pads is None else tuple(pads)


def patches(x: Tensor, geometry: Geometry) -> Tensor:
    """The patches of a convolution whose patches do not overlap: (B, C, H, W) to (B, H', W', C·kh·kw)."""
    sh, sw = geometry.stride
    if geometry.kernel == (1, 1):
        return x[:, :, ::sh, ::sw].permute(0, 2, 3, 1)
    return rows_of_patches(x, geometry.kernel)


def is_multiplied(x: Tensor, w: Tensor, b: Tensor | None) -> bool:
    """Whether compiled code computes a convolution whose stride is its kernel as `product_of_patches`.

    Of an image that PyTorch takes, of a size that the graph knows: which patches a symbolic one has would be guarded.
    """
    static = all(isinstance(n, int) for n in (*x.shape[1:], *w.shape))
    if x.device.type not in LAID_OUT or x.dtype.itemsize != 2 or not static or x.dim() != w.dim():
        return False
    fits = x.shape[1] == w.shape[1] and all(n >= k for n, k in zip(x.shape[2:], w.shape[2:], strict=True))
    return x.shape[1] < FEW and fits and (b is None or b.shape == w.shape[:1])


def product_of_patches(rows: Tensor, w: Tensor, b: Tensor | None, last: bool) -> Tensor:
    """A convolution whose stride is its kernel, with other roundings than PyTorch's.

    Of few channels, cuDNN's forward and gradient take ten times as long: 2.7 of 29 ms for the 16×16 patches of DeiT-S,
    1.3 for the 4×4 of Swin-T, on an H200.

    Args:
        rows: `rows_of_patches` of an image or a video.
        w: (O, C, kh, kw), or (O, C, kt, kh, kw).
        b: (O,) or None.
        last: `keeps_channels_last`, of the result.
    """
    y = F.linear(rows.flatten(0, -2), w.flatten(1), b).view(*rows.shape[:-1], len(w)).movedim(-1, 1)
    return y if last else y.clone(memory_format=torch.contiguous_format)


def keeps_channels_last(x: Tensor, w: Tensor) -> bool:
    """Whether PyTorch's convolution of x with w is in channels_last on a GPU."""
    last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    return last in (memory_format_of(x), memory_format_of(w))


def rows_of_patches(x: Tensor, kernel: Sequence[int]) -> Tensor:
    """(B, C, H, W) to (B, H/kh, W/kw, C·kh·kw), and likewise of a video."""
    axes = len(kernel)
    for axis in range(axes - 1, -1, -1):
        count = x.shape[2 + axis] // kernel[axis]
        x = x.narrow(2 + axis, 0, count * kernel[axis]).unflatten(2 + axis, (count, kernel[axis]))
    return x.permute(0, *range(2, 2 + 2 * axes, 2), 1, *range(3, 3 + 2 * axes, 2)).flatten(1 + axes)


def patches_transposed(g: Tensor, shape: Shape, geometry: Geometry) -> Tensor:
    """The transpose of `patches`: (B, H', W', C·kh·kw) to (B, C, H, W) in channels-last; pixels of no patch get 0."""
    (kh, kw), (sh, sw) = geometry.kernel, geometry.stride
    batch, down, across, _ = g.shape
    if (kh, kw) == (1, 1) == (sh, sw):
        return g.permute(0, 3, 1, 2)
    if (kh, kw) == (1, 1):
        out = g.new_zeros(batch, *shape[2:], shape[1])
        out[:, ::sh, ::sw] = g
    else:
        out = g.view(batch, down, across, shape[1], kh, kw).permute(0, 1, 4, 2, 5, 3)
        out = out.reshape(batch, down * kh, across * kw, shape[1])
        below, beside = shape[2] - down * kh, shape[3] - across * kw
        out = F.pad(out, (0, 0, 0, beside, 0, below)) if below or beside else out
    return out.permute(0, 3, 1, 2)


def laid_as(g_w: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A weight's gradient with the weight's own strides, where they differ in axes of size 1 only.

    PyTorch does not correct such strides, and DDP and foreach optimizers require equal ones.
    """
    pairs = zip(g_w.shape, g_w.stride(), strides, strict=True)
    differs = [size for size, own, asked in pairs if own != asked]
    return g_w.as_strided(g_w.shape, strides) if differs and all(size == 1 for size in differs) else g_w


def laid_out(t: Tensor) -> Tensor:
    """An image or a weight, (B, C, H, W), in channels_last on a GPU, for compiled graphs alone (`compress.layouts`)."""
    return t.contiguous(memory_format=torch.channels_last) if t.device.type in LAID_OUT else t


def channels_last(t: Tensor) -> Tensor:
    """(B, C, H, W) as a view (B, H, W, C): positions are tokens."""
    return t.permute(0, 2, 3, 1)
