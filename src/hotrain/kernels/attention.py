"""Triton kernels that pack and unpack q, k, v and the output of an attention at once, for eager mode.

Two of them have one format, two another.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .codes import Rows, output_of, pack_groups, tile_of, unpack_groups
from .launch import Plan, cdiv, is_wide


@triton.jit
def _pack_kernel(
    q, k, v, o, q_codes, k_codes, v_codes, o_codes, q_scale, k_scale, v_scale, o_scale,
    q_segments, q_run, q_stride, k_segments, k_run, k_stride, v_segments, v_run, v_stride, o_segments, o_run, o_stride,
    blocks,
    BITS_QK: tl.constexpr, BITS_VO: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    which, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if which == 0:
        pack_groups(block, q, q_codes, q_scale, q_segments, q_run, q_stride, BITS_QK, HALF, BLOCK, ROWS, WIDE)
    elif which == 1:
        pack_groups(block, k, k_codes, k_scale, k_segments, k_run, k_stride, BITS_QK, HALF, BLOCK, ROWS, WIDE)
    elif which == 2:
        pack_groups(block, v, v_codes, v_scale, v_segments, v_run, v_stride, BITS_VO, HALF, BLOCK, ROWS, WIDE)
    else:
        pack_groups(block, o, o_codes, o_scale, o_segments, o_run, o_stride, BITS_VO, HALF, BLOCK, ROWS, WIDE)


def pack(tensors: Sequence[Tensor], group: int, bits: tuple[int, int]) -> list[Tensor]:
    """`codes.pack` of q, k, v and the output: codes and scales of each, eight tensors.

    Args:
        tensors: (..., C) each, of one dtype and one C.
        bits: of the first two, and of the last two.
    """
    q, k, v, o = (Rows(t, group, bits[place // 2]) for place, t in enumerate(tensors))
    wide = q.wide or k.wide or v.wide or o.wide
    plan = _packs(q.x.device, q.x.dtype, bits, q.half, (q.place, k.place, v.place, o.place), wide)
    codes, scales = (q.codes, k.codes, v.codes, o.codes), (q.scale, k.scale, v.scale, o.scale)
    plan.run(q.x, k.x, v.x, o.x, *codes, *scales)
    return [part for pair in zip(codes, scales, strict=True) for part in pair]


@functools.cache
def _packs(
    device: torch.device, dtype: torch.dtype, bits: tuple[int, int], half: int,
    places: tuple[tuple[int, int, int], ...], wide: bool,
) -> Plan:  # fmt: skip
    block, each, warps = tile_of(half)
    blocks = cdiv(max(place[0] for place in places), each)
    constants = {"BITS_QK": bits[0], "BITS_VO": bits[1], "HALF": half, "BLOCK": block, "ROWS": each, "WIDE": wide}
    numbers = (*(word for place in places for word in place), blocks)
    return Plan(_pack_kernel, 4 * blocks, constants, numbers, warps, given=4)


@triton.jit
def _unpack_kernel(
    q_codes, k_codes, v_codes, o_codes, q_scale, k_scale, v_scale, o_scale, q, k, v, o,
    q_groups, k_groups, v_groups, o_groups, blocks,
    BITS_QK: tl.constexpr, BITS_VO: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    which, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if which == 0:
        unpack_groups(block, q_codes, q_scale, q, q_groups, BITS_QK, HALF, BLOCK, ROWS, WIDE)
    elif which == 1:
        unpack_groups(block, k_codes, k_scale, k, k_groups, BITS_QK, HALF, BLOCK, ROWS, WIDE)
    elif which == 2:
        unpack_groups(block, v_codes, v_scale, v, v_groups, BITS_VO, HALF, BLOCK, ROWS, WIDE)
    else:
        unpack_groups(block, o_codes, o_scale, o, o_groups, BITS_VO, HALF, BLOCK, ROWS, WIDE)


def unpack(kept: Sequence[Tensor], bits: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """`codes.unpack` of the codes of `pack`, or of its first three: (rows, C) each."""
    outputs = [output_of(codes, bits[place // 2], dtype) for place, codes in enumerate(kept[::2])]
    out = [output[0] for output in outputs]
    plan = _unpacks(out[0].device, dtype, bits, outputs[0][1], tuple([number for _, _, number in outputs]))
    missing = 4 - len(out)  # which no program asks for
    columns = (list(kept[::2]), list(kept[1::2]), out)
    plan.run(*[t for column in columns for t in (*column, *column[-1:] * missing)])
    return out


@functools.cache
def _unpacks(
    device: torch.device, dtype: torch.dtype, bits: tuple[int, int], half: int, numbers: tuple[int, ...]
) -> Plan:
    block, each, warps = tile_of(half)
    blocks = cdiv(max(numbers), each)
    constants = {
        "BITS_QK": bits[0], "BITS_VO": bits[1], "HALF": half, "BLOCK": block, "ROWS": each,
        "WIDE": is_wide(2 * half * max(numbers)),
    }  # fmt: skip
    words = (*numbers, *numbers[-1:] * (4 - len(numbers)), blocks)
    return Plan(_unpack_kernel, len(numbers) * blocks, constants, words, warps, given=8)
