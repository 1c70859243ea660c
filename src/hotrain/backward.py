"""The two gradients of ``y = x wᵀ``, quantized and projected: the paper on one page. Start reading here.

::

    exact   y = x wᵀ      g_x = g_y w                       g_w = g_yᵀ x                 saved: x
    HOT     y = x wᵀ      g_x = Q4(g_y H) Q4(Hᵀ w)          g_w = Q8(P g_y)ᵀ Q8(P x)     saved: Q8(P x)

H: block-diagonal Walsh–Hadamard of order 16 along the output channels O. It is orthogonal, so it cancels in the
product; it spreads outliers over 16 channels before they are rounded. Nothing is lost but the rounding.
P: r of 16 Walsh rows along the tokens T. PᵀP is a projection: what is outside the kept rows is lost, or, with
drawn rows, kept on average (E[PᵀP] = I). Everything is orthonormal: at r = 16 without bits both are exact.
Q: integer codes, or fp8 codes (`Method.override(number="e4m3")`), which are rounded to nearest.

Matrices in, matrices out; no autograd context, no layer. docs/maths.md has the derivations, `hotrain.published` what
LBP-WHT, LUQ and dropout do differently.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from . import draws, published
from .method import PARTNER, GradInput, GradWeight, Method
from .products import code_matmul
from .quantize import QUANTIZERS
from .quantize.floating import DTYPES
from .quantize.integer import Quantized
from .saved import Kept, values
from .transform.hadamard import rotate
from .transform.importance import drawn
from .transform.tokens import Layout, project


def grad_input(g_y: Tensor, w: Tensor, method: Method, key: draws.Key, lay: Layout | None = None) -> Tensor:
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
    if path.multiplies_codes:
        grad = rotated_grad(g_y, path, key)
        weight = rotated_weight(w.to(grad.scale.dtype), path, key)
        product = code_matmul(grad.codes, weight.codes, grad.bits + weight.bits, grad.scale.dtype)
        return (product * grad.scale * weight.scale).to(g_y.dtype)
    if path.is_exact:
        return g_y @ w.to(g_y.dtype)
    return published.grad_input(g_y, w, path, key, lay)


def grad_weight(g_y: Tensor, kept: Kept, lay: Layout, method: Method, key: draws.Key) -> Tensor:
    """g_w = Q(P g_y)ᵀ Q(P x), with Q(P x) as forward saved it.

    Of integer codes the product is exact; of fp8 codes exact products are summed in float32.

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
        g_y = published.dropped(g_y, path.drop, key)
    if path.multiplies_codes:
        g, kept = _shared(project(g_y, lay, key, widened=True), kept, path, key)
        return _product_of_codes(g, kept, path, key)
    if path.number == "luq":
        return published.grad_weight(g_y, kept, lay, key)
    g, kept = _shared(project(g_y, lay, key), kept, path, key)
    return g.T @ values(kept, g.dtype)


def _shared(g: Tensor, kept: Kept, path: GradWeight, key: draws.Key) -> tuple[Tensor, Kept]:
    """The rows of g = P g_y, (R, O), and of P x, (R, I), that the product takes, with their weights in g."""
    if path.share == 1.0:
        return g, kept
    x = values(kept, torch.promote_types(g.dtype, torch.float32))
    picked, weight = drawn(_norms(g) * _norms(x), path.share, key)
    g = g[picked] * weight.to(g.dtype)[:, None]
    if not isinstance(kept, Quantized):
        return g, kept[picked]
    return g, replace(kept, codes=kept.codes[picked], scale=kept.scale[picked] if kept.scale.dim() else kept.scale)


def _norms(t: Tensor) -> Tensor:
    """The norms of rows, in float64: their products must not underflow."""
    return torch.linalg.vector_norm(t, dim=1, dtype=torch.float64)


def _product_of_codes(g: Tensor, kept: Kept, path: GradWeight, key: draws.Key) -> Tensor:
    """Q(g)ᵀ Q(x) of g = P g_y, (R, O), and P x, (R, I), which is quantized here if it is not yet."""
    if not isinstance(kept, Quantized):
        assert path.bits is not None
        kept = QUANTIZERS[PARTNER[path.number]](kept.to(g.dtype), path.bits, "tensor", path.rounding, key, draws.SAVED)
    scale = kept.scale
    if scale.dim() == 2:
        # Per-row scales are on the contraction axis: they cannot be applied after the product.
        g, scale = g * scale, torch.ones((), dtype=g.dtype, device=g.device)
    grad = projected_grad(g, path, key)
    codes = kept.codes
    if path.number in DTYPES and codes.dtype == torch.int8:  # of 4 bits: exact
        codes = codes.to(torch.float32).to(DTYPES[PARTNER[path.number]])
    product = code_matmul(grad.codes.T, codes, grad.bits + kept.bits, grad.scale.dtype)
    return product * (grad.scale.reshape(-1, 1) * scale)


# ---- the operands of products of codes ----


def rotated_grad(g: Tensor, path: GradInput, key: draws.Key) -> Quantized:
    """Q(g H) of g = g_y: codes (T, O') with per-token or per-tensor scales; O' is O padded to a multiple of 16."""
    assert path.bits is not None
    g = rotate(g, widened=True) if path.transform == "hadamard" else g
    return QUANTIZERS[path.number](g, path.bits, path.scale_axis, path.rounding, key, draws.GRAD_INPUT)


def rotated_weight(w: Tensor, path: GradInput, key: draws.Key) -> Quantized:
    """Q(Hᵀ w): codes (O', I) with per-tensor or per-input-channel scales; w is float32 or float64."""
    assert path.bits is not None
    w = rotate(w, dim=0) if path.transform == "hadamard" else w
    quantize = QUANTIZERS[PARTNER[path.number]]
    return quantize(w, path.bits, path.weight_scale, path.weight_rounding, key, draws.WEIGHT)


def projected_grad(g: Tensor, path: GradWeight, key: draws.Key) -> Quantized:
    """Q(g), with g = P g_y: codes (R, O) with a per-tensor or per-output scale."""
    assert path.bits is not None
    return QUANTIZERS[path.number](g, path.bits, path.scale, path.rounding, key, draws.GRAD_WEIGHT)
