"""int8 and fp8 GEMMs with scales in the epilogue; both operands are contiguous along the contraction.

``a (M, K)`` and ``b (N, K)`` give ``a bᵀ`` times the scales of a's rows and of b's rows. fp8 is PyTorch's own product;
int8 is a kernel, because cuBLAS writes int32 to memory and needs another pass for the scales. Outputs too small to fill
the device are split along the contraction (split-K) into integer partial sums, so the result is exact in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import aligned, cdiv, launch, multiprocessors


@triton.jit
def _product_kernel(
    a, b, out, scale_a, scale_b, M, N, K, a_pitch, b_pitch, out_pitch, steps,
    EACH_A: tl.constexpr, EACH_B: tl.constexpr, SPLIT: tl.constexpr, WHOLE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    pid, part = tl.program_id(0), tl.program_id(1)
    # Programs in groups of GROUP rows of blocks: neighbours share operands in L2.
    down, across = tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = pid // (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    m = (group * GROUP + pid % (GROUP * across) % height) * BM + tl.arange(0, BM)
    n = (pid % (GROUP * across) // height) * BN + tl.arange(0, BN)
    k = part * steps * BK + tl.arange(0, BK)
    a_at = a + (m % M).to(tl.int64)[:, None] * a_pitch + k[None, :]
    b_at = b + (n % N).to(tl.int64)[:, None] * b_pitch + k[None, :]
    total = tl.zeros((BM, BN), tl.int32)
    for step in range(tl.minimum(steps, tl.cdiv(K - part * steps * BK, BK))):
        if WHOLE:
            x, y = tl.load(a_at), tl.load(b_at)
        else:
            left = K - (part * steps + step) * BK
            x = tl.load(a_at, mask=(tl.arange(0, BK) < left)[None, :], other=0)
            y = tl.load(b_at, mask=(tl.arange(0, BK) < left)[None, :], other=0)
        total = tl.dot(x, tl.trans(y), total, out_dtype=tl.int32)
        a_at += BK
        b_at += BK
    inside = (m < M)[:, None] & (n < N)[None, :]
    at = m.to(tl.int64)[:, None] * out_pitch + n[None, :]
    if SPLIT:
        at = (part * M + m).to(tl.int64)[:, None] * out_pitch + n[None, :]
        tl.store(out + at, total, mask=inside)
    else:
        tl.store(
            out + at, _scaled(total, scale_a, scale_b, m, n, M, N, EACH_A, EACH_B).to(out.dtype.element_ty), mask=inside
        )


@triton.jit
def _scaled(total, scale_a, scale_b, m, n, M, N, EACH_A: tl.constexpr, EACH_B: tl.constexpr):
    v = total.to(tl.float32)
    v = v * (tl.load(scale_a + m, mask=m < M, other=0.0)[:, None] if EACH_A else tl.load(scale_a))
    return v * (tl.load(scale_b + n, mask=n < N, other=0.0)[None, :] if EACH_B else tl.load(scale_b))


@triton.jit
def _sum_kernel(
    parts, out, scale_a, scale_b, M, N, PARTS: tl.constexpr, EACH_A: tl.constexpr,
    EACH_B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    inside = (m < M)[:, None] & (n < N)[None, :]
    total = tl.zeros((BM, BN), tl.int32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + (part * M + m).to(tl.int64)[:, None] * N + n[None, :], mask=inside, other=0)
    tl.store(
        out + m.to(tl.int64)[:, None] * N + n[None, :],
        _scaled(total, scale_a, scale_b, m, n, M, N, EACH_A, EACH_B).to(out.dtype.element_ty),
        mask=inside,
    )


@dataclass(frozen=True)
class Blocks:
    """Block sizes of a product: rows, columns, contraction per step, warps, pipeline stages, and group of blocks."""

    m: int = 128
    n: int = 128
    k: int = 128
    warps: int = 8
    stages: int = 3
    group: int = 8


def int8_product(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    dtype: torch.dtype,
    blocks: Blocks = Blocks(),
    split: int | None = None,
) -> Tensor:
    """(a bᵀ) · scale_a · scale_b of int8 codes; the sum is exact in int32.

    Args:
        a: int8, (M, K).
        b: int8, (N, K).
        scale_a: float32, () or (M,).
        scale_b: float32, () or (N,).
        dtype: of the result.
        blocks: block sizes.
        split: number of pieces of the contraction; None fills the device.

    Returns:
        (M, N), in `dtype`.
    """
    (m, k), n = a.shape, b.shape[0]
    across = cdiv(m, blocks.m) * cdiv(n, blocks.n)
    steps = cdiv(k, blocks.k)
    if split is None:
        split = max(1, min(multiprocessors(a.device) // across, steps // 8))
    each = cdiv(steps, split)
    split = cdiv(steps, each)
    out = torch.empty(m, n, dtype=dtype, device=a.device)
    to = out if split == 1 else torch.empty(split, m, n, dtype=torch.int32, device=a.device)
    flags = {"EACH_A": scale_a.dim() == 1, "EACH_B": scale_b.dim() == 1}
    sizes = m, n, k, a.stride(0), b.stride(0), n, each
    case = (*sizes, *flags.values(), split, dtype, blocks, aligned(a, b, scale_a, scale_b), a.device)
    constants = {
        **flags, "SPLIT": split > 1, "WHOLE": k % blocks.k == 0,
        "BM": blocks.m, "BN": blocks.n, "BK": blocks.k, "GROUP": blocks.group,
    }  # fmt: skip
    launch(
        _product_kernel, (across, split), case, (a, b, to, scale_a, scale_b, *sizes), constants,
        num_warps=blocks.warps, num_stages=blocks.stages, enable_fp_fusion=False,
    )  # fmt: skip
    if split > 1:
        launch(
            _sum_kernel, (cdiv(m, 32), cdiv(n, 128)), case, (to, out, scale_a, scale_b, m, n),
            {"PARTS": split, **flags, "BM": 32, "BN": 128}, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def fp8_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """(a bᵀ) · scale_a · scale_b of fp8 codes, by `torch._scaled_mm`.

    The tensor cores accumulate without promoting partial sums to float32 ("fast accumulation"): measured on an H200,
    the sums have an error of 0.27 % at 12,928 terms, compared with 3.7 % of the codes' rounding, and the products take
    3 to 11 % less time.

    Args:
        a: float8, (M, K); K a multiple of 16.
        b: float8, (N, K); N a multiple of 16.
        scale_a: float32, () or (M,), aligned to 16 bytes.
        scale_b: float32, () or (N,), aligned to 16 bytes.
        dtype: of the result.

    Returns:
        (M, N), in `dtype`.
    """
    return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=True)
