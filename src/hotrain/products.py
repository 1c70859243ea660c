"""Matrix products of codes: int8 with exact int32 accumulation on every device, and fp8.

CUDA and CPUs with VNNI have `torch._int_mm`. Elsewhere the product runs in float32: a partial sum below 2²⁴ is exact,
so the contraction is split into pieces that cannot exceed it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from .private import no_dispatch_modes

_EXACT_IN_FLOAT32 = 1 << 24
_INT32 = (1 << 31) - 1


@functools.cache
def has_int8_units(device_type: str) -> bool:
    """Whether `torch._int_mm` runs on int8 units of that device and is exact (checked once on full-range codes)."""
    if device_type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability() >= (7, 5)
    if device_type != "cpu" or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    with no_dispatch_modes():  # those of a tracer, whose tensors have no data
        a = torch.tensor([[127, -127] * 32, [-128, 127] * 32], dtype=torch.int8, device="cpu")
        want = (a.double() @ a.double().T).to(torch.int32)
        return bool(torch.equal(torch._int_mm(a, a.T.contiguous()), want))


def int_matmul(a: Tensor, b: Tensor, limit: int = 127 * 127) -> Tensor:
    """a @ b of int8 codes, exact.

    Args:
        a: int8, (M, K).
        b: int8, (K, N).
        limit: the largest |a|·|b| that can occur (49 for two int4 operands); it bounds the partial sums.

    Returns:
        (M, N), int32, or int64 where int32 could overflow.
    """
    (m, k), n = a.shape, b.shape[1]
    longest = _INT32 // limit
    if k > longest:
        pieces = [slice(i, i + longest) for i in range(0, k, longest)]
        return torch.stack([int_matmul(a[:, p], b[p], limit).to(torch.int64) for p in pieces]).sum(0)
    if 0 in (m, n, k):
        return torch.zeros(m, n, dtype=torch.int32, device=a.device)
    if has_int8_units(a.device.type):
        if a.device.type == "cuda":
            # cuBLAS asks for more than 16 rows, multiples of 8 elsewhere (zeros change nothing), and, for some
            # shapes, a row-major a with a column-major b.
            a = F.pad(a, (0, -k % 8, 0, max(0, 17 - m))).contiguous()
            b = F.pad(b, (0, -n % 8, 0, -k % 8)).t().contiguous().t()
        return torch._int_mm(_single_row(a), _single_row(b))[:m, :n]
    piece = max(1, _EXACT_IN_FLOAT32 // limit)
    total = torch.zeros(m, n, dtype=torch.int32, device=a.device)
    for first in range(0, k, piece):
        part = a[:, first : first + piece].to(torch.float32) @ b[first : first + piece].to(torch.float32)
        total += part.to(torch.int32)
    return total


def code_matmul(a: Tensor, b: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """a @ b of codes, with `bits` of a and b together, in `dtype`: `int_matmul`; of float8 a product in `dtype`."""
    if a.dtype.is_floating_point:
        return a.to(dtype) @ b.to(dtype)
    return int_matmul(a, b, 1 << (bits - 2)).to(dtype)


def _single_row(t: Tensor) -> Tensor:
    """A matrix of one row with the strides of a new one: the CPU's `_int_mm` misreads the transpose of a column."""
    return t.reshape(-1).view(t.shape) if t.shape[0] == 1 else t


def of_products(g_y: Tensor) -> torch.dtype:
    """The dtype in which codes of g_y are multiplied as floats: codes of 8 bits and powers of two are exact in bf16."""
    short = g_y.is_cuda and g_y.dtype == torch.bfloat16
    return torch.bfloat16 if short else torch.promote_types(g_y.dtype, torch.float32)
