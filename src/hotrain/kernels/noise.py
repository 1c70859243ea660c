"""Triton functions of the random numbers of `hotrain.draws`, bit for bit; only the key is read from memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import aligned, cdiv, is_wide, launch

_HASHES = 1024  # per program

# Elements get (noise + ½)/2¹⁶ + ½ of a step, as in `quantize.integer`.
STEP16 = tl.constexpr(2.0**-16)
HALF16 = tl.constexpr(0.5 + 2.0**-17)


@triton.jit
def mix(state, word):
    """One round of `draws.mix`: splitmix64's finaliser of state + word. uint64."""
    h = state + word + 0x9E3779B97F4A7C15
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9
    h = (h ^ (h >> 27)) * 0x94D049BB133111EB
    return h ^ (h >> 31)


@triton.jit
def stream_words(key, STREAM: tl.constexpr):
    """The two 32-bit words with which `draws.hash_bits` mixes an index. key: int64."""
    zero = key.to(tl.uint64, bitcast=True) * 0
    word = mix(mix(zero, key.to(tl.uint64, bitcast=True)), zero + STREAM)
    return word.to(tl.uint32), (word >> 32).to(tl.uint32)


@triton.jit
def hash_bits(index, k0, k1):
    """`draws.hash_bits` at `index`. uint32 in and out."""
    h = index + k0
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15) ^ k1) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def _low(h):
    return h.to(tl.int32, bitcast=True) << 16 >> 16


@triton.jit
def _high(h):
    return h.to(tl.int32, bitcast=True) >> 16


@triton.jit
def noise16(rows, first, PITCH, k0, k1, N: tl.constexpr, PAIRS: tl.constexpr):
    """`draws.noise` of a block, (M, N), as float32.

    Args:
        rows: (M, 1), row indices.
        first: first column.
        PITCH: elements per row.
        k0, k1: of `stream_words`.
        N: number of columns.
        PAIRS: whether PITCH and `first` are even, so that two neighbours share a hash.
    """
    if PAIRS:
        pair = rows.to(tl.int64) * (PITCH // 2) + first // 2 + tl.arange(0, N // 2)[None, :]
        h = hash_bits(pair.to(tl.uint32), k0, k1)
        return tl.interleave(_low(h), _high(h)).to(tl.float32)
    # The index in int64 first: its lowest bit is the half, the 32 bits above it the pair.
    index = rows.to(tl.int64) * PITCH + first + tl.arange(0, N)[None, :]
    h = hash_bits((index >> 1).to(tl.uint32), k0, k1)
    return tl.where((index & 1) == 0, _low(h), _high(h)).to(tl.float32)


@triton.jit
def round_stochastic(v, noise):
    """`quantize.integer.stochastic` with that noise."""
    return tl.floor(v + noise * STEP16 + HALF16)


@triton.jit
def round_nearest(v):
    """Halves to even, for |v| below 2²²: adding and subtracting 1.5·2²³ leaves the integer."""
    return (v + 12582912.0) - 12582912.0


@triton.jit
def _hash_kernel(key, out, count, start, STREAM: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    k0, k1 = stream_words(tl.load(key), STREAM)
    first = tl.program_id(0)
    i = (first.to(tl.int64) if WIDE else first) * BLOCK + tl.arange(0, BLOCK)
    h = hash_bits((i + start).to(tl.uint32), k0, k1)
    tl.store(out + i, h.to(tl.int32, bitcast=True), mask=i < count)


def hashes(word: Tensor, count: int, stream: int, start: int) -> Tensor:
    """`draws.hash_bits` with a key on a device."""
    out = torch.empty(count, dtype=torch.int32, device=word.device)
    constants = {"STREAM": stream, "BLOCK": _HASHES, "WIDE": is_wide(start + count)}
    of_numbers = [(n == 1, n % 16 == 0, n >= 1 << 31) for n in (count, start)]  # what Triton specializes
    case = (stream, *of_numbers, constants["WIDE"], word.device, aligned(word))
    launch(_hash_kernel, max(1, cdiv(count, _HASHES)), case, (word, out, count, start), constants, num_warps=4)
    return out
