"""x saved as integers with a scale for each row of P x, and g_w of all of these rows or of the important ones.

The kernel of `quantize_kernels` writes P x and P g_y as copies and rounds their rows; packing, norms and the choice of
rows are PyTorch's. What is saved is what the definition saves (`hotrain.saved.Format`): 4-bit codes two to a byte, in
uint8, or 8-bit ones, in int8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..method import Method
from ..quantize import floating
from ..quantize.packing import pack, unpack
from ..transform.importance import drawn
from ..transform.tokens import Layout
from .operands import device_key, product, tilings
from .support import or_reference

if TYPE_CHECKING:
    from .quantize_kernels import Output

Kept = tuple[Tensor, ...]


def applies(method: Method) -> bool:
    """Whether the method saves x so."""
    return method.saved.scale == "row"


def kept_shapes(columns: int, lay: Layout, method: Method) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of codes and scales."""
    codes = ((lay.rows, -(-columns // 2)), torch.uint8) if method.saved.bits == 4 else ((lay.rows, columns), torch.int8)
    return [codes, ((lay.rows, 1), torch.float32)]


def packed(copied: Tensor, columns: int, lay: Layout, output: Output, method: Method, key: Tensor) -> Kept:
    """Codes and scales of the rows of P x, as in `kept_shapes`.

    Args:
        copied: P x, transposed, (I', R').
        columns: I.
        lay: of x's tokens.
        output: the format of a row.
        method: of the layer.
        key: of the draws.
    """
    rows = copied[:columns, : lay.rows].T.contiguous()
    codes, scale = _rounded(rows, key, output, transposed=False)
    codes = codes[:, :columns]
    return (pack(codes) if method.saved.bits == 4 else codes.contiguous()), scale[:, None]


def _codes(kept: Tensor, columns: int) -> Tensor:
    """The codes as int8, (R, I)."""
    return unpack(kept, columns) if kept.dtype == torch.uint8 else kept


def grad_weight(
    copied: Tensor, kept: Kept, share: float, output: Output, lay: Layout, key: Tensor, size: tuple[int, int],
    dtype: torch.dtype, transposed: bool,
) -> Tensor:  # fmt: skip
    """g_w: the scales of rows, and the weights of those that are picked, go into P g_y before it is rounded.

    Args:
        copied: P g_y, transposed, (O', R').
        kept: of `packed`.
        share: of the rows that are multiplied.
        output: the format of P g_y.
        lay: of the tokens.
        key: of the draws.
        size: O and I.
        dtype: of the result.
        transposed: whether w is (I, O).

    Returns:
        (O, I), or (I, O) when `transposed`.
    """
    from .reference import padded_to_16

    (outputs, columns), (codes, scale) = size, kept
    g, factor = copied[:outputs, : lay.rows], scale[:, 0]
    if share < 1:
        of_g = torch.linalg.vector_norm(g, dim=0, dtype=torch.float64)
        of_x = torch.linalg.vector_norm(_codes(codes, columns).to(torch.float32), dim=1, dtype=torch.float64)
        picked, weight = drawn(of_g * of_x * factor, share, device_key(key))
        g, codes = g.index_select(1, picked), codes.index_select(0, picked)
        factor = factor[picked] * weight.to(torch.float32)
    rows = torch.empty(g.shape[1], outputs, dtype=torch.float32, device=g.device)
    torch.mul(g.T, factor[:, None], out=rows)
    codes, one = _codes(codes, columns), torch.ones((), dtype=torch.float32, device=g.device)
    if output.is_fp8:
        of_g_y, g_scale, codes = *_in_fp8(rows, output), codes.to(torch.bfloat16).to(torch.float8_e4m3fn)
    else:
        of_g_y, g_scale = _rounded(rows, key, output, transposed=True)
    of_x = padded_to_16(codes.T)
    if transposed:
        return product(of_x[:columns], of_g_y, g_scale, one, dtype, outputs)
    return product(of_g_y[:outputs], of_x, one, g_scale, dtype, columns)


def _in_fp8(rows: Tensor, output: Output) -> tuple[Tensor, Tensor]:
    """Codes (C', T') of a matrix (T, C), transposed, and their scale."""
    from .reference import NUMBERS, padded_to_16

    found = floating.quantize(rows, NUMBERS[output.number])
    return padded_to_16(found.codes.T), found.scale


def restored(kept: Kept, columns: int, dtype: torch.dtype) -> Tensor:
    """P x as a copy, transposed and padded, (I', R'), as `lift` reads it."""
    from .reference import padded_to_16

    codes, scale = kept
    return padded_to_16((_codes(codes, columns) * scale).to(dtype).T)


def _rounded(t: Tensor, key: Tensor, output: Output, transposed: bool) -> tuple[Tensor, Tensor]:
    """Codes of a matrix, (T, C') or `transposed`, (C', T'), and their scale."""
    from .quantize_kernels import NOTHING, compress, whole

    lay = whole(len(t), False)
    outputs = (NOTHING, output) if transposed else (output, NOTHING)

    def kernel() -> tuple[Tensor | None, ...]:
        return compress(t, lay, None, key, *outputs, rotate=False, tiling=tilings(t.dtype, False)[1])

    def reference() -> tuple[Tensor | None, ...]:
        from .reference import compress

        return compress(t, lay, key, *outputs, rotate=False)

    codes, scale = or_reference("rows", kernel, reference)[2 * transposed :][:2]
    assert codes is not None
    assert scale is not None
    return codes, scale
