"""x saved as integers with a scale for each row of P x, and g_w of all of these rows or of the important ones.

The kernel of `quantize_kernels` writes P x and P g_y as copies; `picked_rows` rounds and packs their rows and picks
them. What is saved is what the definition saves (`hotrain.saved.Format`): 4-bit codes two to a byte, in uint8, or 8-bit
ones, in int8. The references here are for where these kernels do not compile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..method import Method
from ..quantize.integer import pack, unpack
from ..transform.importance import drawn
from ..transform.tokens import Layout
from .formats import Output
from .operands import device_key, product
from .reference import codes_of, padded_to_16
from .support import run

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
    bits = method.saved.bits
    assert bits is not None

    def reference() -> Kept:
        codes, scale = codes_of(copied[:columns, : lay.rows].T, output, "token", device_key(key))
        return (pack(codes) if bits == 4 else codes.contiguous()), scale[:, None]

    return run("picked_rows.pack_rows", reference, copied, columns, lay.rows, output, bits, key)  # type: ignore[no-any-return]


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
    (outputs, columns), (codes, scales) = size, kept

    def reference() -> tuple[Tensor, Tensor, Tensor]:
        g, x, factor = copied[:outputs, : lay.rows].T, _codes(codes, columns), scales[:, 0]
        if share < 1:
            of_g, of_x = (torch.linalg.vector_norm(t, dim=1, dtype=torch.float64) for t in (g, x.to(torch.float32)))
            picked, weight = drawn(of_g * of_x * factor, share, device_key(key))
            g, x, factor = g[picked], x[picked], factor[picked] * weight.to(torch.float32)
        of_g_y, scale = codes_of(g * factor[:, None], output, "tensor", device_key(key))
        x = x.to(torch.float32).to(torch.float8_e4m3fn) if output.is_fp8 else x
        return padded_to_16(of_g_y.T), scale, padded_to_16(x.T)

    of_g_y, scale, of_x = run("picked_rows.picked_codes", reference, copied, kept, share, output, key, size)
    one = torch.ones((), dtype=torch.float32, device=copied.device)
    if transposed:
        return product(of_x[:columns], of_g_y, scale, one, dtype, outputs)
    return product(of_g_y[:outputs], of_x, one, scale, dtype, columns)


def restored(kept: Kept, columns: int, dtype: torch.dtype) -> Tensor:
    """P x as a copy, transposed and padded, (I', R'), as `lift` reads it."""

    def reference() -> Tensor:
        return padded_to_16((_codes(kept[0], columns) * kept[1]).to(dtype).T)

    return run("picked_rows.restored", reference, kept, columns, dtype)  # type: ignore[no-any-return]


def _codes(kept: Tensor, columns: int) -> Tensor:
    """The codes as int8, (R, I)."""
    return unpack(kept, columns) if kept.dtype == torch.uint8 else kept
