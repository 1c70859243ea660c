"""The two gradients of convolutions, as the matrix products of `hotrain.backward`.

Tokens are positions of an image, and channels the columns. Two cases:

* Patches that do not overlap (1×1 kernels, patch embeddings): the convolution *is* a Linear layer on its `patches`, and
  its gradients are exactly those of `hotrain.backward`.
* k×k kernels: P x is saved on x's own grid, never the unfolded matrix, which is k² times as large. Backward
  computes x̂ = PᵀP x and unfolds it a few samples at a time: ``g_w = Q8(g_y)ᵀ Q8(U(x̂))``. For 1×1 kernels this is the
  formula of Linear, since g_yᵀ PᵀP x = (P g_y)ᵀ(P x); E[x̂] = x holds for drawn rows as before.

A group of fewer than 16 output channels (depthwise above all) has no block for H to spread outliers over and few
operations: the two products stay in floating point, of unrounded g_y and w where the method rotates. The saved x is
compressed all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from . import backward, draws
from .method import GradInput, Method, partner
from .products import code_matmul
from .quantize import published
from .quantize.integer import Quantized, largest_code, quantize
from .saved import Kept, values
from .transform.hadamard import TILE
from .transform.tokens import Layout, lift, project

Pair = tuple[int, int]

_UNFOLDED = {"cpu": 1 << 20, "cuda": 1 << 28}  # elements of the unfolded matrix made at a time


@dataclass(frozen=True)
class Geometry:
    """The arguments of `torch.nn.Conv2d` besides its channels.

    Attributes:
        kernel: (height, width).
        stride: (vertical, horizontal).
        padding: a pair, ``"same"`` or ``"valid"``.
        dilation: (vertical, horizontal).
        groups: divides both numbers of channels.
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.
    """

    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair | str = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    padding_mode: str = "zeros"

    @property
    def pads(self) -> tuple[int, int, int, int]:
        """(left, right, top, bottom), the order of `torch.nn.functional.pad`; 'same' puts the odd one last."""
        if self.padding == "valid":
            return 0, 0, 0, 0
        if isinstance(self.padding, str):
            (vertical, horizontal) = (d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True))
            return horizontal // 2, horizontal - horizontal // 2, vertical // 2, vertical - vertical // 2
        (vertical, horizontal) = self.padding
        return horizontal, horizontal, vertical, vertical

    @property
    def is_patches(self) -> bool:
        """Whether every pixel belongs to at most one patch: the convolution is a Linear layer on patches."""
        return (
            self.groups == 1
            and not any(self.pads)
            and (self.kernel == (1, 1) or (self.kernel == self.stride and self.dilation == (1, 1)))
        )

    def output_size(self, height: int, width: int) -> Pair:
        """(height, width) of the output for an input of that size."""
        left, right, top, bottom = self.pads
        sizes = (height + top + bottom, width + left + right)
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


def patches(x: Tensor, geometry: Geometry) -> Tensor:
    """The patches of a convolution whose patches do not overlap: (B, C, H, W) to (B, H', W', C·kh·kw)."""
    (kh, kw), (sh, sw) = geometry.kernel, geometry.stride
    down, across = geometry.output_size(*x.shape[2:])
    if (kh, kw) == (1, 1):
        return x[:, :, ::sh, ::sw].permute(0, 2, 3, 1)
    x = x[:, :, : down * kh, : across * kw].unflatten(3, (across, kw)).unflatten(2, (down, kh))
    return x.permute(0, 2, 4, 1, 3, 5).flatten(3)


def patches_transposed(g: Tensor, shape: tuple[int, int, int, int], geometry: Geometry) -> Tensor:
    """The transpose of `patches`: (B, H', W', C·kh·kw) to (B, C, H, W); pixels of no patch get zero."""
    (kh, kw), (sh, sw) = geometry.kernel, geometry.stride
    batch, down, across, _ = g.shape
    if (kh, kw) == (1, 1) == (sh, sw):
        return g.permute(0, 3, 1, 2)
    out = g.new_zeros(shape)
    if (kh, kw) == (1, 1):
        out[:, :, ::sh, ::sw] = g.permute(0, 3, 1, 2)
    else:
        blocks = g.view(batch, down, across, shape[1], kh, kw).permute(0, 3, 1, 4, 2, 5)
        out[:, :, : down * kh, : across * kw] = blocks.reshape(batch, shape[1], down * kh, across * kw)
    return out


def _taps(geometry: Geometry, down: int, across: int) -> Iterator[tuple[slice, slice]]:
    """For every element of the kernel, row by row, the pixels of a padded image that it is multiplied with."""
    (kh, kw), (sh, sw), (dh, dw) = geometry.kernel, geometry.stride, geometry.dilation
    for i in range(kh):
        for j in range(kw):
            top, left = i * dh, j * dw
            yield slice(top, top + (down - 1) * sh + 1, sh), slice(left, left + (across - 1) * sw + 1, sw)


def unfold(image: Tensor, geometry: Geometry, size: Pair) -> Tensor:
    """Patches of a padded image of any dtype: (B, H, W, C) to (B, H', W', kh·kw, C), `size` = (H', W')."""
    columns = image.new_empty(image.shape[0], *size, geometry.kernel[0] * geometry.kernel[1], image.shape[3])
    for tap, (rows, cols) in enumerate(_taps(geometry, *size)):
        columns[..., tap, :] = image[:, rows, cols]
    return columns


def fold(columns: Tensor, geometry: Geometry, size: Pair) -> Tensor:
    """The transpose of `unfold`: (B, H', W', kh·kw, C) to a padded image (B, H, W, C), `size` = (H, W)."""
    image = columns.new_zeros(columns.shape[0], *size, columns.shape[4])
    for tap, (rows, cols) in enumerate(_taps(geometry, *columns.shape[1:3])):
        image[:, rows, cols] += columns[..., tap, :]
    return image


def laid_as(g_w: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A weight's gradient with the weight's own strides, where they differ in axes of size 1 only.

    PyTorch does not correct such strides, and DDP and foreach optimizers require equal ones.
    """
    pairs = zip(g_w.shape, g_w.stride(), strides, strict=True)
    differs = [size for size, own, asked in pairs if own != asked]
    return g_w.as_strided(g_w.shape, strides) if differs and all(size == 1 for size in differs) else g_w


def channels_last(t: Tensor) -> Tensor:
    """(B, C, H, W) as a view (B, H, W, C): positions are tokens."""
    return t.permute(0, 2, 3, 1)


def _chunks(batch: int, elements: int, device: torch.device) -> Iterator[slice]:
    """Slices of a few samples each, so that with `elements` per sample memory stays bounded."""
    size = max(1, _UNFOLDED.get(device.type, 1 << 24) // max(1, elements))
    return (slice(i, i + size) for i in range(0, batch, size))


def _small_groups(w: Tensor, geometry: Geometry) -> bool:
    return w.shape[0] // geometry.groups < TILE and geometry.groups > 1


def _exact(g_y: Tensor, x: Tensor, w: Tensor, geometry: Geometry, of_input: bool) -> Tensor:
    """A gradient of the convolution of an already padded x, by PyTorch's own kernels."""
    grads = torch.ops.aten.convolution_backward(
        g_y, x, w, None, geometry.stride, (0, 0), geometry.dilation, False, (0, 0), geometry.groups,
        [of_input, not of_input, False],
    )  # fmt: skip
    return grads[0] if of_input else grads[1]


def _padded_shape(shape: tuple[int, int, int, int], geometry: Geometry) -> tuple[int, int, int, int]:
    left, right, top, bottom = geometry.pads
    return shape[0], shape[1], shape[2] + top + bottom, shape[3] + left + right


def grad_input(
    g_y: Tensor,
    w: Tensor,
    shape: tuple[int, int, int, int],
    geometry: Geometry,
    method: Method,
    key: int,
    lay: Layout,
) -> Tensor:
    """g_x of a convolution whose patches overlap: (B, O, H', W') to `shape` = (B, C, H, W), in g_y's dtype.

    Equivalent to the exact gradient when nothing is quantized.

    Args:
        g_y: (B, O, H', W').
        w: (O, C/groups, kh, kw).
        shape: of x.
        geometry: of the convolution.
        method: whose `grad_input` is followed.
        key: of this step's draws.
        lay: of the output's positions, for a low-pass g_x.
    """
    path = method.grad_input
    padded = _padded_shape(shape, geometry)
    if path.transform == "lowpass":
        low = lift(project(channels_last(g_y), lay, key), lay, key)
        g_y = low.view(channels_last(g_y).shape).permute(0, 3, 1, 2)
    if path.number == "luq":
        codes, alpha = published.luq(g_y, key, draws.GRAD_INPUT)
        weight = quantize(w.flatten(1).to(codes.dtype), 4, step=published.sawb_step(w))
        w_codes = weight.codes.view(w.shape).to(codes.dtype)
        g_x = _exact(codes, codes.new_empty(1).expand(padded), w_codes, geometry, of_input=True)
        g_x = (g_x * (alpha * weight.scale)).to(g_y.dtype)
    elif path.bits is None or _small_groups(w, geometry):
        if path.bits is not None and path.transform is None:
            g_y, w = _rounded(g_y, w, path, key)
        g_x = _exact(g_y, g_y.new_empty(1).expand(padded), w.to(g_y.dtype), geometry, of_input=True)
    else:
        g_x = _coded_grad_input(g_y, w, padded, geometry, method, key)
    return geometry.pad_transposed(g_x, *shape[2:])


def _rounded(g_y: Tensor, w: Tensor, path: GradInput, key: int) -> tuple[Tensor, Tensor]:
    """g_y and w quantized and dequantized, where the product is in floating point."""
    tokens = channels_last(g_y)
    grad = backward.rotated_grad(tokens.reshape(-1, tokens.shape[-1]), path, key).dequantize(g_y.dtype)
    weight = backward.rotated_weight(w.flatten(1), path, key).dequantize(w.dtype)
    return grad.view(tokens.shape).permute(0, 3, 1, 2), weight.view(w.shape)


def _coded_grad_input(
    g_y: Tensor, w: Tensor, padded: tuple[int, int, int, int], geometry: Geometry, method: Method, key: int
) -> Tensor:
    """Q(g_y H) Q(Hᵀ w) as patches, a few samples at a time, folded back into the padded image."""
    path, groups = method.grad_input, geometry.groups
    assert path.bits is not None
    batch, outputs, down, across = g_y.shape
    positions, inputs, taps = down * across, w.shape[1], w[0, 0].numel()
    out = torch.empty(padded[0], *padded[2:], padded[1], dtype=g_y.dtype, device=g_y.device)
    matrix = channels_last(g_y).reshape(batch * positions, groups, outputs // groups)
    kernels = w.permute(0, 2, 3, 1).reshape(groups, outputs // groups, taps * inputs)
    limit, wide = largest_code(path.bits) ** 2, backward.wide(g_y.dtype)
    for group in range(groups):
        own = draws.mix(key, group)
        grad = backward.rotated_grad(matrix[:, group], path, own)
        weight = backward.rotated_weight(kernels[group], path, own)
        for part in _chunks(batch, positions * taps * inputs, g_y.device):
            rows = slice(part.start * positions, min(part.stop, batch) * positions)
            scale = grad.scale[rows] if grad.scale.dim() else grad.scale
            product = code_matmul(grad.codes[rows], weight.codes, limit, wide)
            columns = (product * (scale * weight.scale)).view(-1, down, across, taps, inputs)
            image = fold(columns, geometry, (padded[2], padded[3]))
            out[part, :, :, group * inputs : (group + 1) * inputs] = image
    return out.permute(0, 3, 1, 2)


def grad_weight(
    g_y: Tensor,
    kept: Kept,
    w: Tensor,
    shape: tuple[int, int, int, int],
    geometry: Geometry,
    lay: Layout,
    method: Method,
    key: int,
) -> Tensor:
    """g_w of a convolution whose patches overlap, shaped as w.

    Args:
        g_y: (B, O, H', W').
        kept: P of x's positions, (`lay.rows`, C).
        w: (O, C/groups, kh, kw); only its shape is used.
        shape: of x.
        geometry: of the convolution.
        lay: of x's positions.
        method: whose `grad_weight` is followed.
        key: of this step's draws.
    """
    path = method.grad_weight
    if path.drop:
        g_y = backward.dropped(g_y, path.drop, key)
    if path.bits is not None and path.number != "luq" and not _small_groups(w, geometry):
        return _coded_grad_weight(g_y, kept, w, shape, geometry, lay, method, key)
    alpha = None
    if path.bits is not None and path.number == "luq":
        g_y, alpha = published.luq(g_y, key, draws.GRAD_WEIGHT)
    elif path.bits is not None and method.grad_input.transform is None:
        matrix = g_y.flatten(1)
        codes = backward.encode(matrix, path.number, path.bits, "tensor", path.rounding, key, draws.GRAD_WEIGHT)
        g_y = codes.dequantize(g_y.dtype).view(g_y.shape)
    x = _image(values(kept, g_y.dtype), shape, lay, key)
    g_w = _exact(g_y, geometry.pad(x), w.to(g_y.dtype), geometry, of_input=False)
    return g_w if alpha is None else g_w * alpha


def _image(rows: Tensor, shape: tuple[int, int, int, int], lay: Layout, key: int) -> Tensor:
    """x̂ = Pᵀ rows as an image (B, C, H, W)."""
    batch, channels, height, width = shape
    return lift(rows, lay, key).view(batch, height, width, channels).permute(0, 3, 1, 2)


def _coded_grad_weight(
    g_y: Tensor,
    kept: Kept,
    w: Tensor,
    shape: tuple[int, int, int, int],
    geometry: Geometry,
    lay: Layout,
    method: Method,
    key: int,
) -> Tensor:
    """Q(g_y)ᵀ U(Q(x̂)): codes are unfolded, a few samples at a time, and multiplied as codes."""
    path, groups = method.grad_weight, geometry.groups
    assert path.bits is not None
    batch, outputs, down, across = g_y.shape
    matrix = channels_last(g_y).reshape(-1, outputs).to(backward.wide(g_y.dtype))
    grad = backward.encode(matrix, path.number, path.bits, "tensor", path.rounding, key, draws.GRAD_WEIGHT)
    if isinstance(kept, Quantized) and lay.lines.tile == 1 and kept.scale.dim() == 0:
        codes = kept  # x itself was saved in codes: no second rounding
    else:
        x = lift(values(kept, matrix.dtype), lay, key)
        rounding = method.saved.rounding
        codes = backward.encode(x, partner(path.number), max(8, path.bits), "tensor", rounding, key, draws.LIFTED)
    kept_codes = codes.unpacked()
    dtype = kept_codes.dtype
    # fp8 codes are unfolded as their bits: PyTorch does not pad float8, and code 0 is bits 0.
    image = kept_codes.view(torch.int8).view(batch, shape[2], shape[3], shape[1])
    limit = largest_code(path.bits) * largest_code(codes.bits)
    inputs, taps, positions = w.shape[1], w[0, 0].numel(), down * across
    summed = matrix.dtype if dtype.is_floating_point else torch.int64
    total = torch.zeros(groups, outputs // groups, taps * inputs, dtype=summed, device=g_y.device)
    for part in _chunks(batch, positions * taps * shape[1], g_y.device):
        columns = unfold(_pad_codes(image[part], geometry), geometry, (down, across))
        rows = grad.codes[part.start * positions : min(part.stop, batch) * positions]
        for group in range(groups):
            g = rows[:, group * (outputs // groups) : (group + 1) * (outputs // groups)]
            x_codes = columns[..., group * inputs : (group + 1) * inputs].reshape(-1, taps * inputs)
            total[group] += code_matmul(g.T, x_codes.view(dtype), limit, matrix.dtype)
    g_w = total.to(matrix.dtype) * (grad.scale * codes.scale)
    return g_w.view(outputs, *w.shape[2:], inputs).permute(0, 3, 1, 2)


def _pad_codes(codes: Tensor, geometry: Geometry) -> Tensor:
    """`Geometry.pad` of an image of codes, (B, H, W, C)."""
    if not any(geometry.pads):
        return codes
    if geometry.padding_mode == "zeros":
        return F.pad(codes, (0, 0, *geometry.pads))
    # PyTorch's other modes support neither int8 nor channels-last; codes are exact in float32.
    return channels_last(geometry.pad(codes.permute(0, 3, 1, 2).to(torch.float32)).to(torch.int8))
