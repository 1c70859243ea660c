"""The definitions, a second time: dense float64 matrices and plain loops, written from the documents.

Nothing here calls the code under test. `Layout`, `Method` and `Geometry` objects are read as data: which token is in
which slot, which bits a path has. docs/maths.md is the source; noise is the hash that
`hotrain.draws` documents, in plain unsigned integers.
"""

from __future__ import annotations

import bisect
import itertools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

# The streams of `hotrain.draws`, by number: part of the definition, since kernels must repeat them.
ROWS, SAVED, GRAD_INPUT, GRAD_WEIGHT, WEIGHT, DROP, LIFTED, IMPORTANCE = range(8)

M32, M64 = (1 << 32) - 1, (1 << 64) - 1


# --- noise -----------------------------------------------------------------------------------------------------------


def mix(*words: int) -> int:
    """Chained splitmix64: add the golden ratio and the word, then the published finaliser."""
    h = 0
    for word in words:
        h = (h + word % 2**64 + 0x9E3779B97F4A7C15) % 2**64
        h = (h ^ h // 2**30) * 0xBF58476D1CE4E5B9 % 2**64
        h = (h ^ h // 2**27) * 0x94D049BB133111EB % 2**64
        h = h ^ h // 2**31
    return h


def hash_one(index: int, key: int, stream: int) -> int:
    """One 32-bit hash in Python's integers."""
    word = mix(key, stream)
    h = (index + (word & M32)) & M32
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & M32
    h = (((h ^ (h >> 15)) ^ (word >> 32)) * 0x846CA68B) & M32
    return h ^ (h >> 16)


def hashes(count: int, key: int, stream: int, start: int = 0) -> np.ndarray:
    """`hash_one` for many indices, in uint64 reduced to 32 bits after every product."""
    word = mix(key, stream)
    mask, low, high = np.uint64(M32), np.uint64(word & M32), np.uint64(word >> 32)
    h = (np.arange(start, start + count, dtype=np.uint64) + low) & mask
    h = ((h ^ (h >> np.uint64(16))) * np.uint64(0x7FEB352D)) & mask
    h = ((h ^ (h >> np.uint64(15)) ^ high) * np.uint64(0x846CA68B)) & mask
    return h ^ (h >> np.uint64(16))


def noise(count: int, key: int, stream: int) -> np.ndarray:
    """Signed 16-bit noise: the low half of hash i is for entry 2i, the high half entry 2i + 1."""
    h = hashes(-(-count // 2), key, stream)
    halves = np.stack((h & np.uint64(0xFFFF), h >> np.uint64(16)), 1).reshape(-1)[:count].astype(np.int64)
    return np.where(halves >= 2**15, halves - 2**16, halves)


def uniform(shape: tuple[int, ...], key: int, stream: int) -> Tensor:
    """The noise as float64 in (0, 1): (n + ½)/2¹⁶ + ½."""
    n = noise(math.prod(shape), key, stream)
    return torch.from_numpy((n + 0.5) / 2**16 + 0.5).view(shape)


# --- transforms ------------------------------------------------------------------------------------------------------


def hadamard(n: int) -> Tensor:
    """H_n of ±1 by Sylvester's construction, float64."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < n:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h


def sign_changes(row: Tensor) -> int:
    return sum(int(a != b) for a, b in itertools.pairwise(row.tolist()))


def row_order(n: int, kind: str) -> list[int]:
    """Natural rows of H_n from low to high: by sign changes, or by those of the rows seen as √n × √n pictures."""
    h = hadamard(n)
    if kind == "sequency":
        return sorted(range(n), key=lambda i: sign_changes(h[i]))
    side = math.isqrt(n)

    def rank(i: int) -> tuple[int, int, int]:
        picture = h[i].view(side, side)
        down, across = sign_changes(picture[:, 0]), sign_changes(picture[0])
        return down + across, max(down, across), sign_changes(h[i])

    return sorted(range(n), key=rank)


def block_hadamard(size: int, n: int = 16) -> Tensor:
    """The orthonormal block-diagonal H of order ⌈size/n⌉·n."""
    return torch.block_diag(*[hadamard(n) / math.sqrt(n)] * -(-size // n))


def drawn_rows(tiles: int, rest: list[int], sampled: int, key: int) -> list[list[int]]:
    """Which of `rest` every tile draws: neighbours go through one shuffled copy until it is used up evenly."""
    m = len(rest)
    size = m // math.gcd(m, sampled)  # tiles of a group
    chosen: list[list[int]] = []
    for group in range(-(-tiles // size)):
        h = hashes(m, key, ROWS, start=group * m).astype(np.uint32).view(np.int32).tolist()
        shuffled = [rest[i] for i in sorted(range(m), key=lambda i: h[i])]
        chosen += [[shuffled[(tile * sampled + j) % m] for j in range(sampled)] for tile in range(size)]
    return chosen[:tiles]


def projection(lay: Any, key: int) -> Tensor:
    """P as one dense matrix, (`lay`.rows, samples·tokens), float64, read off a Layout's slots.

    Rows: for every sample its tiles' kept rows, then, after all samples, the dense tokens of each.
    """
    tile, rank = lay.lines.tile, lay.lines.rank
    p = torch.zeros(lay.rows, lay.samples * lay.tokens, dtype=torch.float64)
    if tile == 1:
        return torch.eye(lay.samples * lay.tokens, dtype=torch.float64)
    h = hadamard(tile) / math.sqrt(tile)
    fixed, sampled = rank - lay.lines.sampled, lay.lines.sampled
    rows = {"square": row_order(tile, lay.squares.kind), "line": row_order(tile, lay.lines.kind)}
    counts = {"square": lay.square, "line": lay.line}
    keys = {"square": mix(key, 1), "line": key}
    drawn = {
        kind: drawn_rows(lay.samples * counts[kind], rows[kind][fixed:], sampled, keys[kind]) if sampled else []
        for kind in rows
    }
    gain = math.sqrt((tile - fixed) / sampled) if sampled else 1.0
    out, slots = 0, lay.slots.tolist()
    for sample in range(lay.samples):
        for t in range(lay.tiles):
            kind, at = ("square", t) if t < lay.square else ("line", t - lay.square)
            picks = [(i, 1.0) for i in rows[kind][:fixed]]
            if sampled:
                picks += [(i, gain) for i in drawn[kind][sample * counts[kind] + at]]
            for i, factor in picks:
                for j, token in enumerate(slots[t * tile : (t + 1) * tile]):
                    if token >= 0:
                        p[out, sample * lay.tokens + token] = factor * h[i, j]
                out += 1
    for sample in range(lay.samples):
        for token in slots[lay.tiles * tile :]:
            p[out, sample * lay.tokens + token] = 1.0
            out += 1
    assert out == lay.rows
    return p


# --- quantizers ------------------------------------------------------------------------------------------------------


def round_pseudo(v: float) -> int:
    """The corrected pseudo-stochastic rule, bit by bit (docs/maths.md), on one float32 value."""
    a = abs(float(np.float32(v)))
    i = math.floor(a)
    f = math.floor((a - i) * 2**22)
    return int(math.copysign(i + ((f >> 11) > (f & 0x7FF)), v))


FP8 = {"e4m3": (4, 3, 126), "e5m2": (5, 2, 123)}  # bits of exponent and mantissa, the largest finite code's bits


def fp8_grid(number: str) -> list[float]:
    """The numbers from 0 to the largest, in the order of their bits, so that the even ones have an even last bit."""
    exponent_bits, mantissa_bits, last = FP8[number]
    bias, ones = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    return [
        (c % ones) / ones * 2.0 ** (1 - bias) if c < ones else (1 + (c % ones) / ones) * 2.0 ** (c // ones - bias)
        for c in range(last + 1)
    ]


def fp8(t: Tensor, number: str) -> tuple[Tensor, Tensor]:
    """fp8 codes (float64) and scale: the smallest power of two, from 2⁻¹²⁶ on, that brings finite entries in range."""
    grid, flat = fp8_grid(number), t.flatten().tolist()
    largest, exponent = max((abs(v) for v in flat if math.isfinite(v)), default=0.0), -126
    while grid[-1] * 2.0**exponent < largest:
        exponent += 1
    out = []
    for value in flat:
        v = abs(float(np.float32(value / 2.0**exponent)))
        above = min(bisect.bisect_left(grid, v), len(grid) - 1)
        candidates = sorted((max(above - 1, 0), above), key=lambda c: (abs(grid[c] - v), c % 2))
        out.append(math.copysign(grid[candidates[0]], value) if math.isfinite(value) else math.nan)
    return torch.tensor(out, dtype=torch.float64).view(t.shape), torch.tensor(2.0**exponent, dtype=torch.float64)


def partner(number: str) -> str:
    """Beside either fp8 the other operand is e4m3."""
    return "e4m3" if number in FP8 else "int"


def codes(
    t: Tensor, bits: int, axis: str, rounding: str, key: int = 0, stream: int = SAVED, number: str = "int"
) -> tuple[Tensor, Tensor]:
    """Codes (float64) and scale of a float64 matrix: of integers scale = max|t| over the axis / (2^(b−1) − 1)."""
    if number in FP8:
        return fp8(t, number)
    top = 2 ** (bits - 1) - 1
    size = {
        "tensor": lambda: t.abs().max() if t.numel() else t.new_zeros(()),
        "token": lambda: t.abs().amax(1, keepdim=True),
        "column": lambda: t.abs().amax(0, keepdim=True),
    }[axis]()
    scale = (size / top).clamp(min=torch.finfo(torch.float64).tiny)
    v = t / scale
    if rounding == "stochastic":
        v = torch.floor(v + uniform(tuple(t.shape), key, stream))
    elif rounding == "pseudo":
        v = torch.tensor([round_pseudo(x) for x in v.flatten().tolist()], dtype=torch.float64).view(t.shape)
    else:
        v = torch.round(v)
    return v.clamp(-top, top), scale


def sawb(t: Tensor) -> tuple[Tensor, Tensor]:
    """SAWB int4: clip = 12.1·rms − 12.2·mean|t|, at most max|t| and max|t| where it is not positive."""
    magnitude = t.abs()
    clip = 12.1 * math.sqrt(float((t**2).mean())) - 12.2 * float(magnitude.mean())
    largest = float(magnitude.max())
    step = torch.tensor((clip if 0 < clip < largest else largest) / 7, dtype=torch.float64)
    return torch.round(t / step).clamp(-7, 7), step


def luq(t: Tensor, key: int, stream: int) -> tuple[Tensor, Tensor]:
    """Signed powers of two 2⁰..2⁷ and zero, by an exact Bernoulli draw between neighbours; alpha = max|t|/128."""
    alpha = t.abs().max() / 128
    levels = [0.0, *(2.0**k for k in range(8))]
    u = uniform(tuple(t.shape), key, stream).flatten().tolist()
    out = []
    for value, draw in zip((t / alpha).flatten().tolist(), u, strict=True):
        y = abs(value)
        below = max(level for level in levels if level <= y)
        above = min((level for level in levels if level > y), default=below)
        up = above > below and draw < (y - below) / (above - below)
        out.append(math.copysign(above if up else below, value))
    return torch.tensor(out, dtype=torch.float64).view(t.shape), alpha


# --- the two gradients of a matrix product ---------------------------------------------------------------------------


def rotated(t: Tensor, dim: int, on: bool) -> Tensor:
    """Zero-pad that axis to whole blocks of 16 and multiply by the block-diagonal H."""
    if not on:
        return t
    t = t.transpose(0, dim)
    h = block_hadamard(t.shape[0])
    padded = torch.cat((t, t.new_zeros(len(h) - len(t), t.shape[1])))
    return (h @ padded).transpose(0, dim)


def grad_input(g_y: Tensor, w: Tensor, method: Any, key: int, p: Tensor | None = None) -> Tensor:
    """g_x of tokens × channels."""
    path = method.grad_input
    if path.transform == "lowpass":
        assert p is not None
        return p.T @ p @ g_y @ w
    if path.bits is None:
        return g_y @ w
    if path.number == "luq":
        grad, alpha = luq(g_y, key, GRAD_INPUT)
        weight, step = sawb(w)
        return grad @ weight * (alpha * step)
    on = path.transform == "hadamard"
    axis = "token" if path.scale in ("token", "auto") else "tensor"
    grad, s_g = codes(rotated(g_y, 1, on), path.bits, axis, path.rounding, key, GRAD_INPUT, path.number)
    number = partner(path.number)
    weight, s_w = codes(rotated(w, 0, on), path.bits, path.weight_scale, path.weight_rounding, key, WEIGHT, number)
    return grad @ weight * s_g * s_w


def keep(x: Tensor, p: Tensor, method: Any, key: int) -> tuple[Tensor, Tensor | None]:
    """(codes, scale) of P x as forward keeps it, or (P x, None) where it is not quantized."""
    rows, spec = p @ x, method.saved
    if spec.bits is None:
        return rows, None
    if spec.number == "sawb":
        return sawb(rows)
    return codes(rows, spec.bits, "token" if spec.scale == "row" else "tensor", spec.rounding, key, SAVED, spec.number)


def dropped(g_y: Tensor, share: float, key: int) -> Tensor:
    n = torch.from_numpy(noise(g_y.numel(), key, DROP)).view(g_y.shape)
    return torch.where(n + 2**15 < round(share * 2**16), 0.0, g_y)


def importance(sizes: list[float], share: float, key: int) -> tuple[list[int], list[float]]:
    """Systematic sampling: row r is picked once for each of u, u + 1, … in its interval, whose length is p_r."""
    count = math.ceil(share * len(sizes))
    sizes = [max(size, 1e-12 * max(sizes)) for size in sizes]
    sizes = sizes if sum(sizes) else [1.0] * len(sizes)
    p = [count * size / sum(sizes) for size in sizes]
    for _ in range(6):  # what is above 1 is cut off, and shared out among the others
        full = sum(v >= 1 for v in p)
        rest = sum(v for v in p if v < 1)
        p = [1.0 if v >= 1 else v * (count - full) / rest for v in p]
    p = [v * count / sum(p) for v in p]
    u = (((hash_one(0, key, IMPORTANCE) + 2**31) & M32) + 0.5) / 2**32
    picked, start = [], 0.0
    for row, length in enumerate(p):
        picked += [row] * (math.floor(start + length - u) - math.floor(start - u))
        start += length
    return picked, [1 / p[row] for row in picked]


def grad_weight(g_y: Tensor, kept: tuple[Tensor, Tensor | None], p: Tensor, method: Any, key: int) -> Tensor:
    """g_w of tokens × channels and of what was kept."""
    path, (rows, scale) = method.grad_weight, kept
    if path.drop:
        g_y = dropped(g_y, path.drop, key)
    g = p @ g_y
    if path.share < 1:
        values = rows if scale is None else rows * scale
        picked, weights = importance([float(n) for n in g.norm(dim=1) * values.norm(dim=1)], path.share, key)
        g = g[picked] * torch.tensor(weights, dtype=g.dtype)[:, None]
        rows, scale = rows[picked], scale[picked] if scale is not None and scale.dim() == 2 else scale
    if path.bits is None:
        return g.T @ (rows if scale is None else rows * scale)
    if path.number == "luq":
        grad, alpha = luq(g, key, GRAD_WEIGHT)
        return grad.T @ (rows if scale is None else rows * scale) * alpha
    if scale is None:
        rows, scale = codes(rows, path.bits, "tensor", path.rounding, key, SAVED, partner(path.number))
    if scale.dim() == 2:  # a per-row scale of x is folded into the same row of g before that is rounded
        g, scale = g * scale, torch.ones((), dtype=torch.float64)
    grad, s_g = codes(g, path.bits, path.scale, path.rounding, key, GRAD_WEIGHT, path.number)
    return s_g.reshape(-1, 1) * (grad.T @ rows) * scale


# --- convolutions ----------------------------------------------------------------------------------------------------


def pads(geometry: Any) -> tuple[int, int]:
    """(top, left) of the padding; what is at the bottom and right follows from the output's size."""
    if geometry.padding == "valid":
        return 0, 0
    if geometry.padding == "same":
        return tuple(d * (k - 1) // 2 for d, k in zip(geometry.dilation, geometry.kernel, strict=True))  # type: ignore
    return geometry.padding


def source(position: int, size: int, mode: str) -> int:
    """The pixel that a position of the padded axis shows; −1 for a zero."""
    if 0 <= position < size:
        return position
    if mode == "zeros":
        return -1
    if mode == "replicate":
        return min(max(position, 0), size - 1)
    if mode == "circular":
        return position % size
    return -position if position < 0 else 2 * (size - 1) - position  # reflect


def unfolding(geometry: Any, height: int, width: int, out: tuple[int, int]) -> Tensor:
    """The pixel under each entry of each patch: (out positions, kernel entries), −1 for a zero of the padding."""
    (top, left), (kh, kw) = pads(geometry), geometry.kernel
    (sh, sw), (dh, dw) = geometry.stride, geometry.dilation
    table = []
    for oy, ox in itertools.product(range(out[0]), range(out[1])):
        row = []
        for ky, kx in itertools.product(range(kh), range(kw)):
            y = source(oy * sh + ky * dh - top, height, geometry.padding_mode)
            x = source(ox * sw + kx * dw - left, width, geometry.padding_mode)
            row.append(-1 if y < 0 or x < 0 else y * width + x)
        table.append(row)
    return torch.tensor(table)


def unfold(x: Tensor, table: Tensor, groups: int) -> Tensor:
    """x (B, C, pixels) to (groups, B·positions, C/groups·kernel entries)."""
    batch, channels, _ = x.shape
    padded = torch.cat((x, x.new_zeros(batch, channels, 1)), 2)  # index −1 is the zero
    windows = padded[:, :, table].view(batch, groups, channels // groups, *table.shape)
    return windows.permute(1, 0, 3, 2, 4).reshape(groups, batch * len(table), -1)


def fold(columns: Tensor, table: Tensor, groups: int, shape: tuple[int, ...]) -> Tensor:
    """The transpose of `unfold`: every entry is added to its pixel. Returns (B, C, pixels)."""
    batch, channels, height, width = shape
    windows = columns.view(groups, batch, len(table), channels // groups, table.shape[1])
    windows = windows.permute(1, 0, 3, 2, 4).reshape(batch, channels, -1)
    out = columns.new_zeros(batch, channels, height * width + 1)
    index = torch.where(table < 0, height * width, table).flatten()
    return out.index_add(2, index, windows)[:, :, :-1]


def conv_gradients(
    x: Tensor, w: Tensor, g_y: Tensor, geometry: Any, method: Any, key: int, p_in: Tensor, p_out: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor | None], float]:
    """(g_x, g_w, kept, slack) of a convolution.

    p_in: P of x's positions.  p_out: of y's (of the patches where they do not overlap).
    slack: by how much an entry of g_w may differ since a lifted value is on a tie of the nearest rounding (lifted
    codes are small fractions, so that ties do occur) and may fall to either side; 0 where there is none.
    """
    shape, groups, (batch, outputs) = tuple(x.shape), geometry.groups, g_y.shape[:2]
    table = unfolding(geometry, shape[2], shape[3], (g_y.shape[2], g_y.shape[3]))
    tokens = g_y.permute(0, 2, 3, 1).reshape(-1, outputs)
    flat = w.flatten(1)
    if groups == 1 and pads(geometry) == (0, 0) and geometry.padding != "same" and is_patches(geometry):
        patches = unfold(x.flatten(2), table, 1)[0]
        kept = keep(patches, p_out, method, key)
        g_w = grad_weight(tokens, kept, p_out, method, key).view(w.shape)
        g_x = fold(grad_input(tokens, flat, method, key, p_out)[None], table, 1, shape)
        return g_x.view(shape), g_w, kept, 0.0

    small = groups > 1 and outputs // groups < 16 and method.grad_input.transform == "hadamard"
    pixels = x.permute(0, 2, 3, 1).reshape(-1, shape[1])
    kept = keep(pixels, p_in, method, key)

    # g_x: columns of every group, then folded.
    path, split = method.grad_input, list(tokens.view(-1, groups, outputs // groups).unbind(1))
    by_group = flat.view(groups, outputs // groups, -1).unbind(0)
    if path.transform == "lowpass":
        split = [p_out.T @ p_out @ g for g in split]
    if path.number == "luq":
        grad, alpha = luq(g_y, key, GRAD_INPUT)
        weight, step = sawb(flat)
        halves = grad.permute(0, 2, 3, 1).reshape(-1, groups, outputs // groups).unbind(1)
        columns = [g @ v * (alpha * step) for g, v in zip(halves, weight.view(groups, -1, flat.shape[1]), strict=True)]
    elif path.bits is None or small:
        columns = [g @ v for g, v in zip(split, by_group, strict=True)]
    else:
        # One scale for all groups. Codes of the kernel are stored tap by tap, channels last: the noise of an entry is
        # that of its place there.
        on, axis = path.transform == "hadamard", "token" if path.scale in ("token", "auto") else "tensor"
        number = partner(path.number)
        taps_first = w.permute(0, 2, 3, 1).reshape(groups, outputs // groups, -1)
        blocks = [torch.cat([rotated(g, 1, on) for g in split], 1), torch.cat([rotated(v, 0, on) for v in taps_first])]
        grad, s_g = codes(blocks[0], path.bits, axis, path.rounding, key, GRAD_INPUT, path.number)
        weight, s_w = codes(blocks[1], path.bits, path.weight_scale, path.weight_rounding, key, WEIGHT, number)
        columns = [g @ v * s_g * s_w for g, v in zip(grad.chunk(groups, 1), weight.chunk(groups), strict=True)]
        columns = [c.unflatten(1, (table.shape[1], -1)).transpose(1, 2).flatten(1) for c in columns]
    g_x = fold(torch.stack(columns), table, groups, shape).view(shape)

    # g_w: the kept rows lifted to an image, unfolded, and multiplied with g_y.
    path, (rows, scale) = method.grad_weight, kept
    image = p_in.T @ (rows if scale is None else rows * scale)
    if path.drop:
        g_y = dropped(g_y, path.drop, key)
    s_x: Tensor | float = 1.0
    ties = 0.0
    coded = path.bits is not None and path.number != "luq" and not small
    if path.bits is not None and path.number == "luq":
        g_y, s_x = luq(g_y, key, GRAD_WEIGHT)
    elif coded and path.tile == 1 and scale is not None and scale.dim() == 0:
        image, s_x = rows, scale  # x itself was kept in codes: no second rounding
    elif coded:
        lifted = image
        number, rounding = partner(path.number), method.saved.rounding
        image, s_x = codes(lifted, max(8, path.bits), "tensor", rounding, key, LIFTED, number)
        if rounding == "nearest" and number == "int":  # scaled by a power of two, ties of fp8 are exact ties
            ties = float((((lifted / s_x).frac().abs() - 0.5).abs() < 1e-9).sum() * s_x)
    g = g_y.permute(0, 2, 3, 1).reshape(-1, outputs)
    unfolded = unfold(image.view(batch, -1, shape[1]).transpose(1, 2), table, groups)
    if path.share < 1 and not small and g_y.shape[2] >= 8:  # of the lines of the output
        wide = g_y.shape[3]
        sizes = g.view(-1, wide * outputs).norm(dim=1)
        of_x = unfolded.transpose(0, 1).reshape(len(sizes), -1).norm(dim=1)
        sizes = sizes * torch.maximum(of_x, of_x.mean() / 4)
        picked, weights = importance([float(n) for n in sizes], path.share, key)
        positions = [line * wide + column for line in picked for column in range(wide)]
        g = g[positions] * torch.tensor(weights, dtype=g.dtype).repeat_interleave(wide)[:, None]
        unfolded = unfolded[:, positions]
    s_g = torch.ones((), dtype=torch.float64)
    if coded:
        g, s_g = codes(g, path.bits, path.scale, path.rounding, key, GRAD_WEIGHT, path.number)
    halves = g.view(-1, groups, outputs // groups).unbind(1)
    g_w = torch.cat([part.T @ u for part, u in zip(halves, unfolded, strict=True)])
    g_w = s_g.reshape(-1, 1) * g_w * s_x
    slack = ties * float((g.abs() * s_g).max()) * table.shape[1]
    return g_x, g_w.view(w.shape), kept, slack


def is_patches(geometry: Any) -> bool:
    """Every pixel in one patch at most: 1×1 kernels, and kernels as large as their stride."""
    return geometry.kernel == (1, 1) or (geometry.kernel == geometry.stride and geometry.dilation == (1, 1))


# --- how large an error may be ---------------------------------------------------------------------------------------


def sqnr_db(value: Tensor, reference: Tensor) -> float:
    """Signal to quantization noise ratio, dB."""
    value, reference = value.double(), reference.double()
    error = (value - reference).square().sum()
    return float("inf") if error == 0 else float(10 * torch.log10(reference.square().sum() / error))
