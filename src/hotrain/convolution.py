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

import torch
from torch import Tensor

from . import draws, published
from .backward import projected_grad, rotated_grad, rotated_weight
from .geometry import Geometry, Shape, channels_last, fold, unfold
from .method import GradInput, Method, partner
from .products import code_matmul
from .quantize import encode
from .quantize.integer import Quantized, largest_code
from .quantize.rounding import wide
from .saved import Kept, values
from .transform.hadamard import TILE
from .transform.tokens import Layout, lift, project

_UNFOLDED = {"cpu": 1 << 20, "cuda": 1 << 28}  # elements of the unfolded matrix made at a time


def grad_input(
    g_y: Tensor, w: Tensor, shape: Shape, geometry: Geometry, method: Method, key: int, lay: Layout
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
    if path.multiplies_codes and not _has_small_groups(w, geometry):
        g_x = _coded_grad_input(g_y, w, geometry.padded(shape), geometry, path, key)
    else:
        g, weight, scale = _float_operands(g_y, w, path, key, lay)
        x = g.new_empty(1).expand(geometry.padded(shape))  # only its shape is used
        g_x = _exact(g, x, weight, geometry, of_input=True)
        g_x = g_x if scale is None else (g_x * scale).to(g_y.dtype)
    return geometry.pad_transposed(g_x, *shape[2:])


def _coded_grad_input(g_y: Tensor, w: Tensor, padded: Shape, geometry: Geometry, path: GradInput, key: int) -> Tensor:
    """Q(g_y H) Q(Hᵀ w) as patches, a few samples at a time, folded back into the padded image."""
    groups = geometry.groups
    batch, outputs, down, across = g_y.shape
    positions, inputs, taps = down * across, w.shape[1], w[0, 0].numel()
    out = torch.empty(padded[0], *padded[2:], padded[1], dtype=g_y.dtype, device=g_y.device)
    matrix = channels_last(g_y).reshape(batch * positions, groups, outputs // groups)
    kernels = w.permute(0, 2, 3, 1).reshape(groups, outputs // groups, taps * inputs)
    for group in range(groups):
        own = draws.mix(key, group)
        grad, weight = rotated_grad(matrix[:, group], path, own), rotated_weight(kernels[group], path, own)
        limit = largest_code(grad.bits) * largest_code(weight.bits)
        for samples, rows in _blocks(batch, positions, taps * inputs, g_y.device):
            scale = grad.scale[rows] if grad.scale.dim() else grad.scale
            product = code_matmul(grad.codes[rows], weight.codes, limit, wide(g_y.dtype))
            columns = (product * (scale * weight.scale)).view(-1, down, across, taps, inputs)
            image = fold(columns, geometry, (padded[2], padded[3]))
            out[samples, :, :, group * inputs : (group + 1) * inputs] = image
    return out.permute(0, 3, 1, 2)


def _float_operands(
    g_y: Tensor, w: Tensor, path: GradInput, key: int, lay: Layout
) -> tuple[Tensor, Tensor, Tensor | None]:
    """g_y and w of a product in floating point, as the method changes them, and that product's scale (None: one)."""
    if path.number == "luq":
        return published.luq_operands(g_y, w, key)
    tokens = channels_last(g_y)
    if path.transform == "lowpass":
        g = lift(project(tokens, lay, key), lay, key)
    elif path.bits is not None and path.transform is None:
        g = rotated_grad(tokens.reshape(-1, tokens.shape[-1]), path, key).dequantize(g_y.dtype)
        w = rotated_weight(w.flatten(1), path, key).dequantize(w.dtype).view(w.shape)
    else:
        return g_y, w.to(g_y.dtype), None
    return g.view(tokens.shape).permute(0, 3, 1, 2), w.to(g_y.dtype), None


def grad_weight(
    g_y: Tensor,
    kept: Kept,
    w: Tensor,
    shape: Shape,
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
        g_y = published.dropped(g_y, path.drop, key)
    if path.multiplies_codes and not _has_small_groups(w, geometry):
        return _coded_grad_weight(g_y, kept, w, shape, geometry, lay, method, key)
    alpha = None
    if path.number == "luq":
        g_y, alpha = published.luq(g_y, key, draws.GRAD_WEIGHT)
    elif path.multiplies_codes and method.grad_input.transform is None:
        g_y = projected_grad(g_y.flatten(1), path, key).dequantize(g_y.dtype).view(g_y.shape)
    batch, channels, height, width = shape
    x = lift(values(kept, g_y.dtype), lay, key).view(batch, height, width, channels).permute(0, 3, 1, 2)
    g_w = _exact(g_y, geometry.pad(x), w.to(g_y.dtype), geometry, of_input=False)
    return g_w if alpha is None else g_w * alpha


def _coded_grad_weight(
    g_y: Tensor,
    kept: Kept,
    w: Tensor,
    shape: Shape,
    geometry: Geometry,
    lay: Layout,
    method: Method,
    key: int,
) -> Tensor:
    """Q(g_y)ᵀ U(Q(x̂)): codes are unfolded, a few samples at a time, and multiplied as codes."""
    path, groups = method.grad_weight, geometry.groups
    batch, outputs, down, across = g_y.shape
    matrix = channels_last(g_y).reshape(-1, outputs).to(wide(g_y.dtype))
    grad = projected_grad(matrix, path, key)
    if isinstance(kept, Quantized) and lay.lines.tile == 1 and kept.scale.dim() == 0:
        codes = kept  # x itself was saved in codes: no second rounding
    else:
        x = lift(values(kept, matrix.dtype), lay, key)
        bits, rounding = max(8, grad.bits), method.saved.rounding
        codes = encode(x, partner(path.number), bits, "tensor", rounding, key, draws.LIFTED)
    kept_codes = codes.unpacked()
    dtype = kept_codes.dtype
    # fp8 codes are unfolded as their bits: PyTorch does not pad float8, and code 0 is bits 0.
    image = kept_codes.view(torch.int8).view(batch, shape[2], shape[3], shape[1])
    limit = largest_code(grad.bits) * largest_code(codes.bits)
    inputs, taps, own = w.shape[1], w[0, 0].numel(), outputs // groups
    summed = matrix.dtype if dtype.is_floating_point else torch.int64
    total = torch.zeros(groups, own, taps * inputs, dtype=summed, device=g_y.device)
    for samples, rows in _blocks(batch, down * across, taps * shape[1], g_y.device):
        columns = unfold(geometry.pad_codes(image[samples]), geometry, (down, across))
        for group in range(groups):
            g = grad.codes[rows, group * own : (group + 1) * own]
            x_codes = columns[..., group * inputs : (group + 1) * inputs].reshape(-1, taps * inputs)
            total[group] += code_matmul(g.T, x_codes.view(dtype), limit, matrix.dtype)
    g_w = total.to(matrix.dtype) * (grad.scale * codes.scale)
    return g_w.view(outputs, *w.shape[2:], inputs).permute(0, 3, 1, 2)


def _has_small_groups(w: Tensor, geometry: Geometry) -> bool:
    return w.shape[0] // geometry.groups < TILE and geometry.groups > 1


def _blocks(batch: int, positions: int, columns: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Slices of a few samples, and of their rows of a matrix (batch·positions, columns), so that memory is bounded."""
    size = max(1, _UNFOLDED.get(device.type, 1 << 24) // max(1, positions * columns))
    for first in range(0, batch, size):
        last = min(first + size, batch)
        yield slice(first, last), slice(first * positions, last * positions)


def _exact(g_y: Tensor, x: Tensor, w: Tensor, geometry: Geometry, of_input: bool) -> Tensor:
    """A gradient of the convolution of an already padded x, by PyTorch's own kernels."""
    grads = torch.ops.aten.convolution_backward(
        g_y, x, w, None, geometry.stride, (0, 0), geometry.dilation, False, (0, 0), geometry.groups,
        [of_input, not of_input, False],
    )  # fmt: skip
    return grads[0] if of_input else grads[1]
