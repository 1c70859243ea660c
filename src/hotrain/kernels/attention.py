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

from ..quantize.channels import OF_MIDDLES
from .codes import Rows, output_of, pack_groups, sampled_rows, tile_of, unpack_groups
from .launch import Place, Plan, cdiv, is_nested, is_wide, power_of_2

_CHANNELS = 128  # of a program that finds middles


@triton.jit
def _middles_kernel(
    k, v, out, tokens, blocks, k_sample, k_token, k_head, k_column, v_sample, v_token, v_head, v_column,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program for some channels, of all heads, of each sample of k, and of v."""
    sample, which = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(1)
    channel = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    there = channel < CHANNELS
    head, column = (channel // COLUMNS).to(tl.int64)[None, :], (channel % COLUMNS)[None, :]
    token = sampled_rows(tokens, ROWS)[:, None]
    if which == 0:
        at = k + sample * k_sample + token * k_token + head * k_head + column * k_column
        t = tl.load(at, mask=there[None, :], other=0).to(tl.float32)
    else:
        at = v + sample * v_sample + token * v_token + head * v_head + column * v_column
        t = tl.load(at, mask=there[None, :], other=0).to(tl.float32)
    middle = (tl.sum(t, axis=0) - tl.max(t, axis=0) - tl.min(t, axis=0)) / (ROWS - 2)
    middle = tl.where(tl.abs(middle) < float("inf"), middle, 0.0)
    samples = tl.num_programs(0) // blocks
    tl.store(out + (which * samples + sample) * CHANNELS + channel, middle, mask=there)


def middles(tensors: Sequence[Tensor]) -> Tensor:
    """`quantize.channels.middles` of k and v, or of k: (B, T, H, D) each, of one shape and dtype."""
    first, last = tensors[0], tensors[-1]
    samples, _, heads, columns = first.shape
    out = torch.empty(len(tensors), samples, heads, columns, dtype=torch.float32, device=first.device)
    _middles(first.device, first.dtype, first.shape, len(tensors), first.stride(), last.stride()).run(first, last, out)
    return out


@functools.lru_cache(maxsize=1024)
def _middles(
    device: torch.device, dtype: torch.dtype, shape: torch.Size, count: int, *strides: tuple[int, ...]
) -> Plan:
    samples, tokens, heads, columns = shape
    channels = heads * columns
    block = min(_CHANNELS, power_of_2(channels))
    blocks = cdiv(channels, block)
    constants = {"CHANNELS": channels, "COLUMNS": columns, "BLOCK": block, "ROWS": OF_MIDDLES}
    numbers = (tokens, blocks, *strides[0], *strides[1])
    return Plan(_middles_kernel, (samples * blocks, count), constants, numbers, given=2)


@triton.jit
def _pack_kernel(
    q, k, v, o, middles, q_codes, k_codes, v_codes, o_codes, q_scale, k_scale, v_scale, o_scale,
    q_segments, q_run, q_stride, q_many, q_further, k_segments, k_run, k_stride, k_many, k_further,
    v_segments, v_run, v_stride, v_many, v_further, o_segments, o_run, o_stride, o_many, o_further,
    period, sample, middles_of_k, blocks,
    BITS_QK: tl.constexpr, BITS_VO: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr, NESTED: tl.constexpr, CENTERS_V: tl.constexpr,
):  # fmt: skip
    """`middles`: so many numbers of k, and if CENTERS_V, of v behind them. Of k and v, `period` groups are a token."""
    which, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if which == 0:
        pack_groups(
            block, q, q_codes, q_scale, q_segments, q_run, q_stride, q_many, q_further, BITS_QK, HALF, BLOCK, ROWS,
            WIDE, NESTED,
        )  # fmt: skip
    elif which == 1:
        pack_groups(
            block, k, k_codes, k_scale, k_segments, k_run, k_stride, k_many, k_further, BITS_QK, HALF, BLOCK, ROWS,
            WIDE, NESTED, middles, period, sample, True,
        )  # fmt: skip
    elif which == 2:
        pack_groups(
            block, v, v_codes, v_scale, v_segments, v_run, v_stride, v_many, v_further, BITS_VO, HALF, BLOCK, ROWS,
            WIDE, NESTED, middles + middles_of_k, period, sample, CENTERS_V,
        )  # fmt: skip
    else:
        pack_groups(
            block, o, o_codes, o_scale, o_segments, o_run, o_stride, o_many, o_further, BITS_VO, HALF, BLOCK, ROWS,
            WIDE, NESTED,
        )  # fmt: skip


def pack(tensors: Sequence[Tensor], group: int, bits: tuple[int, int], middle: Tensor) -> list[Tensor]:
    """`codes.pack` of q, k less its middles, v, less its middles if there are, and the output, if it is given.

    Args:
        tensors: (B, T, H, C) each, of one dtype and one C; k and v of one shape.
        bits: of the first two, and of the last two.
        middle: of `middles`, (1 or 2, B, H, C), contiguous.

    Returns:
        Codes and scales of each.
    """
    rows = [Rows(t, group, bits[place // 2]) for place, t in enumerate(tensors)]
    count, samples, heads, columns = middle.shape
    q, k, period = rows[0], rows[1], heads * columns // group
    steps = period, k.x.shape[1] * period, samples * heads * columns
    wide, places = any(each.wide for each in rows), tuple([each.place for each in rows])
    plan = _packs(q.x.device, q.x.dtype, bits, q.half, places, steps, wide, count == 2)
    four = rows if len(rows) == 4 else [*rows, rows[-1]]  # which no program asks for
    plan.run(*(each.x for each in four), middle, *(each.codes for each in four), *(each.scale for each in four))
    return [part for each in rows for part in (each.codes, each.scale)]


@functools.lru_cache(maxsize=1024)
def _packs(
    device: torch.device, dtype: torch.dtype, bits: tuple[int, int], half: int,
    places: tuple[Place, ...], steps: tuple[int, int, int], wide: bool, centers_v: bool,
) -> Plan:  # fmt: skip
    block, each, warps = tile_of(half)
    blocks = cdiv(max(place[0] for place in places), each)
    constants = {
        "BITS_QK": bits[0], "BITS_VO": bits[1], "HALF": half, "BLOCK": block, "ROWS": each, "WIDE": wide,
        "NESTED": any(map(is_nested, places)), "CENTERS_V": centers_v,
    }  # fmt: skip
    four = (*places, *places[-1:] * (4 - len(places)))
    numbers = (*(word for place in four for word in place), *steps, blocks)
    return Plan(_pack_kernel, len(places) * blocks, constants, numbers, warps, given=5)


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


@functools.lru_cache(maxsize=1024)
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
