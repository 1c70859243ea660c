"""The kernels in plain PyTorch, for tests and for devices where one does not compile."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import draws
from ..products import int_matmul
from ..quantize import QUANTIZERS
from ..transform import tokens
from ..transform.hadamard import rotate as rotate_channels
from ..transform.tokens import Layout, project
from .formats import COPY, NONE, NOTHING, NUMBERS, Output, padded

_NAMES = {kind: name for name, kind in NUMBERS.items()}


def _reference_key(key: Tensor) -> draws.Key:
    return int(key) if key.device.type == "cpu" else draws.DeviceKey(key)


def codes_of(t: Tensor, output: Output, axis: str, key: draws.Key) -> tuple[Tensor, Tensor]:
    """Codes of a matrix and their scale; `axis`: of integer scales that are not per tensor."""
    bits, rounding = 8 if output.limit > 7 else 4, "stochastic" if output.stochastic else "nearest"
    quantize = QUANTIZERS[_NAMES[output.number]]
    found = quantize(t, bits, axis if output.each else "tensor", rounding, key, output.stream)
    return found.codes, found.scale.flatten() if output.each else found.scale


def padded_to_16(t: Tensor) -> Tensor:
    """A matrix padded with zeros to multiples of 16 on both axes."""
    pad = (0, padded(t.shape[1]) - t.shape[1], 0, padded(t.shape[0]) - t.shape[0])
    if t.dtype.itemsize == 1:
        return F.pad(t.contiguous().view(torch.int8), pad).view(t.dtype)
    return F.pad(t, pad).contiguous()


def kept_rows(lay: Layout, key: Tensor) -> Tensor:
    """`hotrain.kernels.rows.kept_rows`."""
    return tokens.row_indices(lay, _reference_key(key), key.device).to(torch.uint8)


def compress(
    t: Tensor, lay: Layout, key: Tensor, rotated: Output = NOTHING, projected: Output = NOTHING, *, rotate: bool = True,
    sums: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """`hotrain.kernels.quantize_kernels.compress`."""
    word, values = _reference_key(key), t.to(torch.float32)
    rot = rot_scale = proj = proj_scale = None
    if rotated.number != NONE:
        rows = rotate_channels(values) if rotate else values
        rot, rot_scale = codes_of(rows, rotated, "column" if rotated.across else "token", word)
        rot = F.pad(rot.view(torch.int8), (0, padded(rows.shape[1]) - rows.shape[1])).view(rot.dtype)
        if rotated.dtype is not None:
            rot = (rot.to(torch.float32) * (rot_scale[:, None] if rotated.by_token else 1.0)).to(rotated.dtype)
    if projected.number == COPY:
        proj = padded_to_16(project(values, lay, word).to(projected.dtype or t.dtype).T)
    elif projected.number != NONE:
        codes, proj_scale = codes_of(project(values, lay, word), projected, "column", word)
        proj = padded_to_16(codes.T)
    return rot, rot_scale, proj, proj_scale, values.sum(0).to(t.dtype) if sums else None


def lift(codes: Tensor, side: Tensor, lay: Layout, key: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """`hotrain.kernels.lift.lift`."""
    rows = codes[:columns, : lay.rows].T.to(torch.float32)
    return tokens.lift(rows * side[0], lay, _reference_key(key)).to(dtype)


def compress_weight(w: Tensor, key: Tensor, output: Output, rotate: bool = True) -> tuple[Tensor, Tensor]:
    """`hotrain.kernels.quantize_kernels.compress_weight`."""
    values = w.to(torch.float32)
    codes, scale = codes_of(rotate_channels(values, dim=0) if rotate else values, output, "column", _reference_key(key))
    return padded_to_16(codes.T), scale


def int8_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """`hotrain.kernels.gemm.int8_product`."""
    product = int_matmul(a, b.T).to(torch.float32)
    return (product * (scale_a[:, None] if scale_a.dim() else scale_a) * scale_b).to(dtype)
