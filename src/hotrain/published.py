"""What other papers do differently: LBP-WHT's low-pass g_x, LUQ's logarithmic g_y and SAWB's clip, dropout of g_y."""

from __future__ import annotations

import torch
from torch import Tensor

from . import draws
from .method import GradInput
from .products import of_products
from .quantize.integer import Quantized, amax, largest_code, quantize, wide
from .transform.tokens import Layout, lift, project

LUQ_LEVELS = 8  # powers of two 2⁰..2⁷, a sign and zero: 4 bits


def grad_input(g_y: Tensor, w: Tensor, path: GradInput, key: draws.Key, lay: Layout | None) -> Tensor:
    """g_x of LBP-WHT, PᵀP g_y w, and of LUQ; arguments and result as in `hotrain.backward.grad_input`."""
    if path.transform == "lowpass":
        assert lay is not None
        return lift(project(g_y, lay, key) @ w.to(g_y.dtype), lay, key)
    codes, weight, scale = luq_operands(g_y, w, key)
    return ((codes @ weight) * scale).to(g_y.dtype)


def grad_weight(g_y: Tensor, kept: Quantized | Tensor, lay: Layout, key: draws.Key) -> Tensor:
    """g_w of LUQ: of (..., O), and P x, (`lay.rows`, I), to (O, I)."""
    codes, alpha = luq(project(g_y, lay, key), key, draws.GRAD_WEIGHT)
    x, scale = factors(kept, codes.dtype, alpha)
    return (codes.T @ x).to(scale.dtype) * scale


def factors(kept: Quantized | Tensor, dtype: torch.dtype, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """P x, (R, I), as codes that `dtype` holds exactly, where they have one scale, and that scale times alpha, ()."""
    if isinstance(kept, Quantized) and kept.scale.dim() == 0:
        return kept.codes.to(dtype), alpha * kept.scale
    return (kept.dequantize(dtype) if isinstance(kept, Quantized) else kept.to(dtype)), alpha


def dropped(g_y: Tensor, share: float, key: draws.Key) -> Tensor:
    """g_y with that share of its elements set to zero, drawn independently; not rescaled."""
    noise = draws.noise(key, draws.DROP, g_y.device)(0, g_y.numel()).view(g_y.shape)
    # A product, so that a NaN or infinity stays one where it is dropped.
    return g_y * (noise >= round(share * 2**16) - 2**15).to(g_y.dtype)


def luq_operands(g_y: Tensor, w: Tensor, key: draws.Key) -> tuple[Tensor, Tensor, Tensor]:
    """LUQ's codes of g_y and SAWB's of w (O, ...), both floating point, and the scale of their product, ()."""
    codes, alpha = luq(g_y, key, draws.GRAD_INPUT)
    weight = sawb(w.flatten(1))
    return codes, weight.codes.view(w.shape).to(codes.dtype), alpha * weight.scale


def luq(t: Tensor, key: draws.Key, stream: int) -> tuple[Tensor, Tensor]:
    """Logarithmic unbiased quantization to 4 bits: (codes, alpha) with t ≈ alpha × codes.

    Below alpha a value becomes alpha with probability |t|/alpha, else 0; above, it becomes one of the two neighbouring
    powers of two so that the mean is t. Unlike the published code this takes the largest magnitude, not the largest
    value, and rounds between neighbouring powers by an exact Bernoulli draw (theirs is unbiased to about 1 %;
    docs/maths.md).

    Args:
        t: floating point, any shape.
        key: of the draws.
        stream: of the draws.

    Returns:
        Codes in {0, ±1, ±2, ..., ±128}, shaped as t, in `of_products` of t's dtype, and alpha = max|t|/128, ().
    """
    alpha = amax(t) / 2 ** (LUQ_LEVELS - 1)
    alpha, dtype = alpha.clamp(min=torch.finfo(alpha.dtype).tiny), of_products(t)
    if isinstance(key, draws.DeviceKey) and key.luq is not None and t.dtype != torch.float64:
        return key.luq(t, alpha, key.word, stream, dtype), alpha
    return luq_codes(t, alpha, key, stream, dtype), alpha


def luq_codes(t: Tensor, alpha: Tensor, key: draws.Key, stream: int, dtype: torch.dtype) -> Tensor:
    """The codes of `luq`, given alpha."""
    t = wide(t)
    y = t.abs() / alpha
    noise = draws.noise(key, stream, t.device)(0, t.numel()).view(t.shape)
    u = noise.to(t.dtype).add_(0.5 + 2**15).mul_(2.0**-16)  # in (0, 1)
    # The exponent is exact, where a logarithm would be rounded.
    floor = torch.exp2((torch.frexp(y.clamp(min=1.0)).exponent - 1).to(t.dtype))
    below, above = torch.where(y < 1, 0.0, floor), torch.where(y < 1, 1.0, 2 * floor)
    codes = torch.where(u * (above - below) < y - below, above, below)
    # A NaN compares false everywhere; alpha carries it, as it carries an infinity.
    return codes.clamp(max=2.0 ** (LUQ_LEVELS - 1)).copysign(t).to(dtype)


def sawb(t: Tensor, rounding: str = "nearest", key: draws.Key | None = None) -> Quantized:
    """int4 codes of a matrix with the scale of `sawb_scale`, beyond which they are clamped."""
    return quantize(t, 4, "tensor", rounding, key, draws.SAVED, step=sawb_scale(t))


def sawb_scale(t: Tensor) -> Tensor:
    """The scale of SAWB ("statistics-aware weight binning") for 4 bits: clip/7, clip = 12.1·rms − 12.2·mean|t|.

    Coefficients of LUQ. The clip is negative where the magnitudes are nearly equal, and may exceed the
    largest one: both are replaced by max|t|.

    Args:
        t: floating point, any shape.

    Returns:
        float32 (float64 for float64), ().
    """
    largest, n = amax(t), t.numel()
    smallest = torch.finfo(largest.dtype).tiny
    if not n:
        return largest.new_full((), smallest)
    rms, mean = (torch.linalg.vector_norm(t, order, dtype=largest.dtype) / n ** (1 / order) for order in (2, 1))
    clip = 12.1 * rms - 12.2 * mean
    clip = torch.where((clip > 0) & (clip < largest), clip, largest)
    return (clip / largest_code(4)).clamp(min=smallest)
