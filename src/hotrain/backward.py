"""The two gradients of ``y = x wᵀ``, quantized and projected: the paper on one page. Start reading here.

::

    exact   y = x wᵀ      g_x = g_y w                       g_w = g_yᵀ x                 saved: x
    HOT     y = x wᵀ      g_x = Q4(g_y H) Q4(Hᵀ w)          g_w = Q8(P g_y)ᵀ Q8(P x)     saved: Q8(P x)

H: block-diagonal Walsh–Hadamard of order 16 along the output channels O. It is orthogonal, so it cancels in the
product; it spreads outliers over 16 channels before they are rounded. Nothing is lost but the rounding.
P: r of 16 Walsh rows along the tokens T. PᵀP is a projection: what is outside the kept rows is lost, or, with
drawn rows, kept on average (E[PᵀP] = I). Everything is orthonormal: at r = 16 without bits both are exact.
Q: integer codes, or fp8 codes (`Method.override(number="e4m3")`), which are rounded to nearest.

Matrices in, matrices out; no autograd context, no layer. docs/maths.md has the derivations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import draws
from .method import FLOATS, GradInput, Method, partner
from .products import code_matmul
from .quantize import floating, published
from .quantize.integer import Quantized, largest_code, quantize
from .saved import Kept, values
from .transform.hadamard import rotate
from .transform.tokens import Layout, lift, project


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the computation before rounding: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def grad_input(g_y: Tensor, w: Tensor, method: Method, key: int, lay: Layout | None = None) -> Tensor:
    """g_x = Q(g_y H) Q(Hᵀ w).

    Equivalent to ``g_y @ w`` when nothing is quantized.

    Args:
        g_y: (T, O).
        w: (O, I).
        method: whose `grad_input` is followed.
        key: of this step's draws.
        lay: of the tokens, for a low-pass g_x only.

    Returns:
        (T, I), in g_y's dtype.
    """
    path = method.grad_input
    if path.transform == "lowpass":
        assert lay is not None
        return lift(project(g_y, lay, key) @ w.to(g_y.dtype), lay, key)
    if path.bits is None:
        return g_y @ w.to(g_y.dtype)
    if path.number == "luq":
        codes, alpha = published.luq(g_y, key, draws.GRAD_INPUT)
        weight = quantize(w.to(codes.dtype), path.bits, step=published.sawb_step(w, path.bits))
        return ((codes @ weight.codes.to(codes.dtype)) * (alpha * weight.scale)).to(g_y.dtype)
    grad = rotated_grad(g_y, path, key)
    weight = rotated_weight(w, path, key)
    product = code_matmul(grad.codes, weight.codes, largest_code(path.bits) ** 2, grad.scale.dtype)
    return (product.to(grad.scale.dtype) * grad.scale * weight.scale).to(g_y.dtype)


def encode(t: Tensor, number: str, bits: int, scale: str, rounding: str, key: int, stream: int) -> Quantized:
    """Q(t): `floating.quantize` for an fp8 number, else integer codes as `quantize` makes them."""
    if number in FLOATS:
        return floating.quantize(t, number)
    return quantize(t, bits, scale, rounding, key, stream)


def rotated_grad(g_y: Tensor, path: GradInput, key: int) -> Quantized:
    """Q(g_y H): codes (T, O') with per-token or per-tensor scales; O' is O padded to a multiple of 16."""
    assert path.bits is not None
    g = g_y.to(wide(g_y.dtype))
    g = rotate(g) if path.transform == "hadamard" else g
    return encode(g, path.number, path.bits, path.scale_axis, path.rounding, key, draws.GRAD_INPUT)


def rotated_weight(w: Tensor, path: GradInput, key: int) -> Quantized:
    """Q(Hᵀ w): codes (O', I) with per-tensor or per-input-channel scales."""
    assert path.bits is not None
    w = w.to(wide(w.dtype))
    w = rotate(w, dim=0) if path.transform == "hadamard" else w
    number = partner(path.number)
    return encode(w, number, path.bits, path.weight_scale, path.weight_rounding, key, draws.WEIGHT)


def grad_weight(g_y: Tensor, kept: Kept, lay: Layout, method: Method, key: int) -> Tensor:
    """g_w = Q(P g_y)ᵀ Q(P x), with Q(P x) as forward saved it.

    Args:
        g_y: (..., O), tokens as in `lay`.
        kept: P x, (`lay.rows`, I).
        lay: of the tokens.
        method: whose `grad_weight` is followed.
        key: the one that drew P for x.

    Returns:
        (O, I): float32 (float64 for float64) after a product of codes, else g_y's dtype.
    """
    path = method.grad_weight
    if path.drop:
        g_y = dropped(g_y, path.drop, key)
    if path.bits is None:
        g = project(g_y, lay, key)
        return g.T @ values(kept, g.dtype)
    g = project(g_y.to(wide(g_y.dtype)), lay, key)
    return quantized_product(g, kept, method, key)


def quantized_product(g: Tensor, kept: Kept, method: Method, key: int) -> Tensor:
    """Q(g)ᵀ Q(x): an exact integer product, or of fp8 codes exact products summed in g's dtype.

    Per-row scales of x are on the contraction axis and cannot be applied after the product; they are folded into the
    rows of g before g is quantized.

    Args:
        g: P g_y, (R, O).
        kept: P x, (R, I).
        method: whose `grad_weight` is followed.
        key: of this step's draws.

    Returns:
        (O, I), in g's dtype.
    """
    path = method.grad_weight
    assert path.bits is not None
    if path.number == "luq":
        codes, alpha = published.luq(g, key, draws.GRAD_WEIGHT)
        return (codes.T @ values(kept, codes.dtype)) * alpha
    if not isinstance(kept, Quantized):
        x = kept.to(g.dtype)
        kept = encode(x, partner(path.number), path.bits, "tensor", path.rounding, key, draws.SAVED)
    scale = kept.scale
    if scale.dim() == 2:
        g, scale = g * scale, torch.ones((), dtype=g.dtype, device=g.device)
    grad = encode(g, path.number, path.bits, "tensor", path.rounding, key, draws.GRAD_WEIGHT)
    limit = largest_code(path.bits) * largest_code(kept.bits)
    product = code_matmul(grad.codes.T, kept.unpacked(), limit, g.dtype)
    return product.to(g.dtype) * (grad.scale * scale)


def dropped(g_y: Tensor, share: float, key: int) -> Tensor:
    """g_y with that share of its elements set to zero, drawn independently; not rescaled."""
    noise = draws.noise16(g_y.numel(), key, draws.DROP, g_y.device).view(g_y.shape)
    # A product, so that a NaN or infinity stays one where it is dropped.
    return g_y * (noise >= round(share * 2**16) - 2**15).to(g_y.dtype)
