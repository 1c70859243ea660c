"""The two gradients of convolutions, as the matrix products of `hotrain.backward`.

Tokens are positions of an image, and channels the columns. Two cases:

* Patches that do not overlap (1×1 kernels, patch embeddings): the convolution *is* a Linear layer on its `patches`, and
  its gradients are exactly those of `hotrain.backward`.
* k×k kernels: P x is saved on x's own grid, never the unfolded matrix U(x), which is k² times as large. Backward
  computes x̂ = PᵀP x, and ``g_w = Q8(g_y)ᵀ U(Q8(x̂))``. For 1×1 kernels this is the formula of Linear, since
  g_yᵀ PᵀP x = (P g_y)ᵀ(P x); E[x̂] = x holds for drawn rows as before. Both products are PyTorch's convolutions *of
  codes*: what bf16 holds exactly, summed in float32. 8-bit units would need kernels that unfold as they read; none is
  here, so that such a layer gains memory and no time. `hotrain.kernels.convolution` makes the codes on a GPU.

Where a method multiplies a share of the rows, such a layer multiplies that share of the *lines* of its output, drawn by
importance (`picked_lines`): a line of g_y and the kh lines of x that it reads are an image of their own. An output of
fewer than 8 lines is multiplied whole: there a line is too large a part of what its image says (docs/noise.md).

A group of fewer than 16 output channels (depthwise above all) has no block for H to spread outliers over and few
operations: where the method rotates, its two products stay in floating point, of unrounded g_y and w. The saved x is
compressed all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from . import draws, published
from .backward import projected_grad, rotated_grad, rotated_weight
from .geometry import Geometry, Shape, channels_last
from .method import PARTNER, GradInput, Method
from .products import of_products
from .quantize import QUANTIZERS
from .quantize.integer import Quantized, wide
from .saved import Kept, values
from .transform.hadamard import TILE
from .transform.importance import drawn
from .transform.tokens import Layout, lift, project

LEAST_LINES = 8  # of an output from which lines are drawn


def grad_input(
    g_y: Tensor, w: Tensor, shape: Shape, geometry: Geometry, method: Method, key: draws.Key, lay: Layout
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
    if path.multiplies_codes and not stays_float(method, len(w), geometry):
        return _coded_grad_input(g_y, w, shape, geometry, path, key)
    g, weight, scale = _float_operands(g_y, w, path, key, lay)
    g_x = product_for_input(g, weight, shape, geometry)
    return g_x if scale is None else (g_x * scale).to(g_y.dtype)


def _coded_grad_input(
    g_y: Tensor, w: Tensor, shape: Shape, geometry: Geometry, path: GradInput, key: draws.Key
) -> Tensor:
    """The transposed convolution of Q(g_y H) with Q(Hᵀ w); H is along each group's channels.

    Scales multiply what they are of before the sum: those of tokens g_y's codes, all others the few codes of w.
    """
    dtype, grad = of_products(g_y), rotated_grad(padded_grad(g_y, path, geometry.groups), path, key)
    weight = rotated_weight(padded_weight(w, path, geometry.groups).to(grad.scale.dtype), path, key)
    k = weight.dequantize()
    if grad.scale.dim():
        g = grad.dequantize(dtype)
    else:
        g, k = grad.codes.to(dtype), k * grad.scale
    image, kernel = as_image(g, g_y.shape), as_kernel(k.to(dtype), w.shape)
    return product_for_input(image, kernel, shape, geometry).to(g_y.dtype)


def padded_grad(g_y: Tensor, path: GradInput, groups: int) -> Tensor:
    """g_y, (B, O, H', W'), as (T, O'): each group's channels padded to whole blocks of H, where there are groups."""
    t = channels_last(g_y).reshape(-1, g_y.shape[1])
    pad = _missing(g_y.shape[1], path, groups)
    return F.pad(t.unflatten(1, (groups, -1)), (0, pad)).flatten(1) if pad else t


def padded_weight(w: Tensor, path: GradInput, groups: int) -> Tensor:
    """w, (O, C/groups, kh, kw), as (O', kh·kw·C/groups), padded as `padded_grad` does."""
    t = channels_last(w).reshape(len(w), -1)
    pad = _missing(len(w), path, groups)
    return F.pad(t.unflatten(0, (groups, -1)), (0, 0, 0, pad)).flatten(0, 1) if pad else t


def _missing(outputs: int, path: GradInput, groups: int) -> int:
    return -(outputs // groups) % TILE if groups > 1 and path.transform == "hadamard" else 0


def as_image(t: Tensor, shape: Sequence[int]) -> Tensor:
    """Rows of positions, (B·H·W, C'), as (B, C', H, W); `shape`: (B, C, H, W)."""
    return t.view(shape[0], shape[2], shape[3], t.shape[1]).permute(0, 3, 1, 2)


def as_kernel(t: Tensor, shape: Sequence[int]) -> Tensor:
    """Rows of channels, (O', kh·kw·C), as (O', C, kh, kw); `shape`: (O, C, kh, kw)."""
    return t.view(len(t), shape[2], shape[3], shape[1]).permute(0, 3, 1, 2)


def _float_operands(
    g_y: Tensor, w: Tensor, path: GradInput, key: draws.Key, lay: Layout
) -> tuple[Tensor, Tensor, Tensor | None]:
    """g_y and w of a product in floating point, as the method changes them, and that product's scale (None: one)."""
    if path.number == "luq":
        return published.luq_operands(g_y, w, key)
    if path.transform == "lowpass":
        tokens = channels_last(g_y)
        g_y = lift(project(tokens, lay, key), lay, key).view(tokens.shape).permute(0, 3, 1, 2)
    return g_y, w.to(g_y.dtype), None


def grad_weight(
    g_y: Tensor, kept: Kept, w: Tensor, shape: Shape, geometry: Geometry, lay: Layout, method: Method, key: draws.Key
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
        g_y = published.dropped(g_y, path.drop, key)
    if path.multiplies_codes and not stays_float(method, len(w), geometry):
        return _coded_grad_weight(g_y, kept, w, shape, geometry, lay, method, key)
    if path.number == "luq":
        codes, alpha = published.luq(g_y, key, draws.GRAD_WEIGHT)
        x, scale = published.factors(kept, codes.dtype, alpha)
        return product_for_weight(codes, as_image(x, shape), w.shape, geometry).to(scale.dtype) * scale
    x, dtype = as_image(lift(values(kept, g_y.dtype), lay, key), shape), g_y.dtype
    share = share_of_lines(method, len(w), geometry, g_y.shape[2])
    if share < 1:
        g_y, x, geometry = picked_lines(g_y, x, geometry, share, key)
    return product_for_weight(g_y.to(dtype), x, w.shape, geometry)


def _coded_grad_weight(
    g_y: Tensor, kept: Kept, w: Tensor, shape: Shape, geometry: Geometry, lay: Layout, method: Method, key: draws.Key
) -> Tensor:
    """Q(g_y)ᵀ U(Q(x̂)): the convolution of x̂'s codes with those of g_y."""
    path, dtype = method.grad_weight, of_products(g_y)
    g_y = wide(g_y)
    if isinstance(kept, Quantized) and lay.lines.tile == 1 and kept.scale.dim() == 0:
        codes = kept  # x itself was saved in codes: no second rounding
    else:
        x, rounding = lift(values(kept, g_y.dtype), lay, key), method.saved.rounding
        codes = QUANTIZERS[PARTNER[path.number]](x, max(8, path.bits or 8), "tensor", rounding, key, draws.LIFTED)
    image, share = as_image(codes.codes.to(dtype), shape), share_of_lines(method, len(w), geometry, g_y.shape[2])
    if share < 1:
        g_y, image, geometry = picked_lines(g_y, image, geometry, share, key)
    grad = projected_grad(channels_last(g_y).reshape(-1, g_y.shape[1]), path, key)
    g = as_image(grad.codes.to(dtype), g_y.shape)
    g_w = product_for_weight(g, image, w.shape, geometry)
    return g_w.to(g_y.dtype) * (grad.scale.reshape(-1, 1, 1, 1) * codes.scale)


def picked_lines(
    g_y: Tensor, x: Tensor, geometry: Geometry, share: float, key: draws.Key
) -> tuple[Tensor, Tensor, Geometry]:
    """A share of the lines of the output, drawn by importance, each with the lines of x that it reads.

    The g_w of all of them is the sum over the lines of the output, as that of a matrix is the sum over its rows, so
    that E[g_w] is exact (`transform.importance`).

    Args:
        g_y: (B, O, H', W').
        x: (B, C, H, W), any scale.
        geometry: of the convolution.
        share: of the lines, in (0, 1); n = ⌈share·B·H'⌉ are drawn.
        key: of the draw.

    Returns:
        The lines of g_y times their weights (n, O, 1, W'), in float32 or float64; those of x that they read, padded,
        (n, C, kh, W); and the geometry of their convolution.
    """
    x, g_y = channels_last(geometry.pad(x)), channels_last(g_y)
    spans = [each * (k - 1) + 1 for each, k in zip(geometry.dilation, geometry.kernel, strict=True)]
    (down, across), (down_each, across_each) = geometry.stride, geometry.dilation
    energy = _norms(x, 3).square()
    energy = energy.unfold(1, spans[0], down).unfold(2, spans[1], across)[..., ::down_each, ::across_each]
    of_x = energy.sum((2, 3, 4)).sqrt()  # the norm of the line's rows of U(x)
    picked, weight = drawn(sizes_of_lines(_norms(g_y, (2, 3)), of_x).flatten(), share, key)
    image, line = picked // g_y.shape[1], picked % g_y.shape[1]
    g = wide(g_y[image, line])
    g = (g * weight.to(g.dtype)[:, None, None])[:, None]
    lines = x.unfold(1, spans[0], down)[..., ::down_each].movedim(-1, 2)[image, line]
    of_lines = replace(geometry, padding=(0, 0), padding_mode="zeros", dilation=(1, across_each))
    return g.permute(0, 3, 1, 2), lines.permute(0, 3, 1, 2), of_lines


def sizes_of_lines(of_g: Tensor, of_x: Tensor) -> Tensor:
    """What lines are drawn by: ‖g_l‖·‖U(x)_l‖, the second at least a quarter of its mean.

    A line of x near zero would be picked rarely, weigh much, and set the scale of all codes of g_y.
    """
    return of_g * of_x.clamp_min(of_x.mean() / 4)


def _norms(t: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Norms in float64, of sums in float32: a sum in float64 would copy t."""
    return torch.linalg.vector_norm(t, dim=dim, dtype=torch.promote_types(t.dtype, torch.float32)).double()


def share_of_lines(method: Method, outputs: int, geometry: Geometry, lines: int) -> float:
    """The share of the output's lines that g_w is computed from, of images of that many lines."""
    return 1.0 if lines < LEAST_LINES or stays_float(method, outputs, geometry) else method.grad_weight.share


def stays_float(method: Method, outputs: int, geometry: Geometry) -> bool:
    """Whether groups are too small for H, so that the products of a method that rotates stay in floating point."""
    return method.grad_input.transform == "hadamard" and geometry.groups > 1 and outputs // geometry.groups < TILE


def product_for_input(g_y: Tensor, w: Tensor, shape: Shape, geometry: Geometry) -> Tensor:
    """The transposed convolution, (B, C, H, W), of g_y, (B, O, H', W'), by PyTorch's own kernels."""
    pads = geometry.equal_pads
    if g_y.is_contiguous(memory_format=torch.channels_last):
        w = w.contiguous(memory_format=torch.channels_last)  # else g_y would be copied into w's layout
    size, (top, left) = (geometry.padded(shape) if pads is None else shape)[2:], pads or (0, 0)
    # Rows and columns of x that no patch of a strided convolution reaches.
    (down, right), (down_each, right_each) = geometry.stride, geometry.dilation
    rest = (
        size[0] + 2 * top - 1 - (g_y.shape[2] - 1) * down - (w.shape[2] - 1) * down_each,
        size[1] + 2 * left - 1 - (g_y.shape[3] - 1) * right - (w.shape[3] - 1) * right_each,
    )
    g_x = F.conv_transpose2d(g_y, w, None, geometry.stride, (top, left), rest, geometry.groups, geometry.dilation)
    return g_x if pads is not None else geometry.pad_transposed(g_x, *shape[2:])


def product_for_weight(g_y: Tensor, x: Tensor, shape: Sequence[int], geometry: Geometry) -> Tensor:
    """g_yᵀ U(x), of w's shape, by PyTorch's own kernels."""
    pads = geometry.equal_pads
    x = geometry.pad(x) if pads is None else x
    w = g_y.new_empty(1).expand(tuple(shape))  # only its shape is used
    grads = torch.ops.aten.convolution_backward.default(
        g_y, x, w, None, geometry.stride, pads or (0, 0), geometry.dilation, False, (0, 0), geometry.groups,
        [False, True, False],
    )  # fmt: skip
    g_w: Tensor = grads[1]
    return g_w
