"""The calls of a layer, each by kernels or the reference: in forward `keep` and `forward`, and the codes of weights."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import draws
from ..layer_record import AmaxHistory
from ..method import FP8, PARTNER, Method
from ..private import version_of
from ..quantize import floating
from ..quantize.integer import largest_code
from ..transform.tokens import Layout
from . import reference as plain
from . import row_scales
from .formats import (
    COPY,
    DTYPES,
    E4M3,
    FORWARD,
    INT,
    NOTHING,
    NUMBERS,
    ROTATED,
    WEIGHT,
    Coded,
    Joined,
    Output,
    X,
    padded,
    whole,
)
from .operands import given_key, no_key, product, tilings
from .support import module, or_reference, unsupported_device

Needs = Sequence[bool]  # of x, w, b
Grads = tuple[Tensor | None, Tensor | None, Tensor | None]

_ROWS_AT = 4  # words of `side` before the rows: the scale, and module to the next boundary of 16 bytes


@functools.cache
def _without_layer(device: torch.device) -> AmaxHistory:
    """The amax history of calls of `hotrain.functional`, which have no layer."""
    return AmaxHistory.on(device)


def prepare(device: torch.device) -> None:
    """Allocate what all layers share, before anything is captured into a CUDA graph."""
    if unsupported_device(device) is None:
        _without_layer(device)
        no_key(device)


@functools.lru_cache(maxsize=1024)
def _outputs(method: Method) -> tuple[Output, Output, Output, Output]:
    """The output formats of x, g_y H, P g_y and Hᵀ w."""

    def output(number: str, bits: int | None, rounding: str, stream: int, each: bool = False) -> Output:
        if bits is None:
            return Output(COPY)
        limit = floating.largest_code(number) if number in FP8 else float(largest_code(bits))
        return Output(NUMBERS[number], limit, rounding == "stochastic", stream, each)

    g_x, g_w, saved = method.grad_input, method.grad_weight, method.saved
    x = output(saved.number, saved.bits, saved.rounding, draws.SAVED, row_scales.applies(method))
    projected = output(g_w.number, g_w.bits, g_w.rounding, draws.GRAD_WEIGHT, g_w.scale == "column")
    if g_x.bits is None:
        return x, NOTHING, projected, NOTHING
    rotated = output(g_x.number, g_x.bits, g_x.rounding, draws.GRAD_INPUT, g_x.scale_axis == "token")
    weight = output(PARTNER[g_x.number], g_x.bits, g_x.weight_rounding, draws.WEIGHT, g_x.weight_scale == "column")
    return x, rotated, projected, weight


@functools.lru_cache(maxsize=1024)
def _written(method: Method) -> tuple[Output, Output, Output]:
    """What the kernel that reads x, and g_y, writes of P x, g_y H and P g_y; rows with scales are rounded after it."""
    x, rotated, projected, _ = _outputs(method)
    if row_scales.applies(method):
        x = projected = Output(COPY, dtype=torch.float32)  # rounded from float32, as in the definition
    return x, rotated, projected


def _row_words(lay: Layout) -> int:
    """float32 words that the rows of a layout take."""
    return -(-lay.samples * lay.tiles * lay.lines.rank // 4)


def kept_shapes(
    columns: int, lay: Layout, method: Method, dtype: torch.dtype
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of the tensors that `keep` returns.

    Args:
        columns: of x.
        lay: of x's tokens.
        method: of the layer.
        dtype: of x.
    """
    if row_scales.applies(method):
        return row_scales.kept_shapes(columns, lay, method)
    codes = ((padded(columns), padded(lay.rows)), DTYPES.get(_outputs(method)[0].number, dtype))
    return [codes, ((_ROWS_AT + _row_words(lay),), torch.float32)]


def _rows(side: Tensor) -> Tensor:
    """The kept rows of every tile, uint8, stored after the scale in `side`."""
    return side[_ROWS_AT:].view(torch.uint8)


def _new_side(lay: Layout, device: torch.device, output: Output) -> Tensor:
    """A buffer for a scale and the rows; the scale is 1.0 where `output` has no codes."""
    side = torch.empty(_ROWS_AT + _row_words(lay), dtype=torch.float32, device=device)
    if output.number == COPY:
        side[:1].fill_(1.0)
    return side


def _filled_side(lay: Layout, key: Tensor) -> Tensor:
    """A buffer with the rows, for a method that saves none."""
    side = _new_side(lay, key.device, Output(COPY))
    _fill_side(lay, key, side, None)
    return side


def _fill_side(lay: Layout, key: Tensor, side: Tensor, scale: Tensor | None) -> None:
    """Fill `side` with the rows and the scale (None for none) of the reference."""
    _rows(side)[: lay.samples * lay.tiles * lay.lines.rank] = plain.kept_rows(lay, key).flatten()
    if scale is not None:
        side[:1] = scale


def _contiguous_rows(t: Tensor) -> Tensor:
    """t, or a copy of it, with unit stride along rows that do not overlap."""
    return t if t.stride(1) == 1 and t.stride(0) >= t.shape[1] else t.contiguous()


def compressed(
    name: str,
    t: Tensor | Coded | Joined,
    lay: Layout,
    key: Tensor,
    *outputs: Output,
    side: Tensor | None = None,
    draw: bool = False,
    rotate: bool = True,
    sums: bool = False,
    **launch: Any,
) -> tuple[Tensor | None, ...]:
    """What `quantize_kernels.compress` returns, by the kernel or by the reference.

    Args:
        name: of the call, for the warning where the kernel does not compile.
        t: (T, C), or its codes, or its parts.
        lay: of the tokens.
        key: of the draws.
        *outputs: formats of t H, and of P t.
        side: with the rows of P; None where P is not needed.
        draw: whether `side` is written: the rows, and the scale of P t.
        rotate: False leaves out H.
        sums: whether to compute the column sums.
        **launch: what else the kernel takes.
    """

    def kernel() -> tuple[Tensor | None, ...]:
        rows, scale_to = None if side is None else _rows(side), side if draw else None
        return module("quantize_kernels").compress(  # type: ignore[no-any-return]
            t, lay, rows, key, *outputs, rotate=rotate, sums=sums, draw=draw, scale_to=scale_to, **launch
        )  # fmt: skip

    def reference() -> tuple[Tensor | None, ...]:
        found = plain.compress(_decoded(t), lay, key, *outputs, rotate=rotate, sums=sums)
        if draw and side is not None:
            _fill_side(lay, key, side, found[3])
        return found

    return or_reference(name, kernel, reference)


def _decoded(t: Tensor | Coded | Joined) -> Tensor:
    """The matrix, made of its codes, or of its parts."""
    if isinstance(t, Joined):
        return torch.cat(t.parts, 1)
    if not isinstance(t, Coded):
        return t
    if t.g is not None:
        return module("codes").gradient(t.g.contiguous(), t.codes, t.scale, t.name, t.bits)[0]  # type: ignore[no-any-return]
    return module("codes").make([t[:7]], t.dtype)  # type: ignore[no-any-return]


def keep(
    x: Tensor | Coded, method: Method, lay: Layout, key: Tensor | None, history: AmaxHistory | None
) -> tuple[Tensor, ...]:
    """The tensors that forward saves for g_w: the codes of P x, transposed, with their scale and the rows of P.

    Args:
        x: (T, I), tokens as in `lay`; or codes that it is made of, in backward.
        method: of the layer.
        lay: of the tokens.
        key: int64 on x's device; None for a method that draws nothing.
        history: of the layer; None where there is no layer.

    Returns:
        Codes (I', R'), and float32 words: the scale (1.0 without codes), then the natural rows that each tile keeps,
        as bytes. I' and R' are I and `lay.rows` padded with zeros to a multiple of 16. With a scale for each row: what
        `row_scales.packed` returns.
    """
    x = x if isinstance(x, Coded) else _contiguous_rows(x)
    output, key = _written(method)[0], given_key(key, x.device)
    side = _new_side(lay, x.device, output)
    codes = compressed(
        "keep from codes" if isinstance(x, Coded) else "keep", x, lay, key, NOTHING, output, side=side, draw=True,
        history=history or _without_layer(x.device), quantities=(ROTATED, X),
        tiling=tilings(x.dtype, _few_rows(lay, output.is_fp8), output.is_fp8).x,
    )[2]  # fmt: skip
    assert codes is not None
    if row_scales.applies(method):
        return row_scales.packed(codes, x.shape[1], lay, _outputs(method)[0], method, key)
    return codes, side


def forward(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    method: Method,
    lay: Layout,
    key: Tensor | None,
    history: AmaxHistory | None,
    keeps: bool,
    transposed: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The forward product of codes, and the tensors of `keep`, with x read once for both.

    Args:
        x: (T, I).
        w: (O, I), or (I, O) when `transposed`, any float dtype.
        b: (O,) or None.
        method: of the layer.
        lay: of the tokens.
        key: as in `keep`.
        history: as in `keep`.
        keeps: whether g_w needs x.
        transposed: whether w is (I, O).

    Returns:
        y, (T, O), in x's dtype, and what `keep` returns, or nothing.
    """
    x, w, key = _contiguous_rows(x), _contiguous_rows(w.T if transposed else w), given_key(key, x.device)
    fp8 = method.forward == "fp8"
    operand = Output(E4M3, floating.largest_code("e4m3")) if fp8 else Output(INT, float(largest_code(8)), each=True)
    output = _outputs(method)[0] if keeps else NOTHING
    history, outputs = history or _without_layer(x.device), w.shape[0]
    side = _new_side(lay, x.device, output) if keeps else None
    codes, scale, kept, _, _ = compressed(
        "forward", x, lay if keeps else whole(len(x), False), key, operand, output, side=side, draw=keeps, rotate=False,
        history=history, quantities=(FORWARD, X), tiling=tilings(x.dtype, _few_rows(lay, fp8)).g_y,
    )  # fmt: skip
    weight, weight_scale, *_ = compressed(
        "weight", w, whole(outputs, False), key, operand, rotate=False, history=history, quantities=(WEIGHT, X),
        tiling=tilings(w.dtype, fp8).g_y,
    )  # fmt: skip
    assert codes is not None
    assert scale is not None
    assert weight is not None
    assert weight_scale is not None
    pad = -outputs % 16 if fp8 else 0
    if pad:
        weight = torch.nn.functional.pad(weight.view(torch.int8), (0, 0, 0, pad)).view(weight.dtype)
    y = product(codes, weight, weight_scale, scale, x.dtype, outputs)
    y = y if b is None else y.add_(b)
    return y, () if side is None or kept is None else (kept, side)


def _few_rows(lay: Layout, fp8: bool) -> bool:
    """The argument `few_rows` of `tilings`; `fp8`: whether an output is."""
    return fp8 and 2 * lay.lines.rank <= lay.lines.tile


# Codes of the weights of the step that is accumulated, by layer; None outside of `accumulation`.
_weights: dict[object, tuple[object, tuple[Tensor, Tensor]]] | None = None


@contextlib.contextmanager
def accumulation() -> Iterator[None]:
    """A context for the micro-batches of one optimizer step: each weight is quantized once, not once per micro-batch.

    The optimizer must not run inside it. A weight that is changed in place there is detected by its version and
    quantized again, a change through ``.data`` is not. The codes take 1 byte per parameter until the context ends. In
    a captured CUDA graph, and with stochastic rounding of w (its codes change with the key), nothing is shared.
    """
    global _weights
    before, _weights = _weights, {}
    try:
        yield
    finally:
        _weights = before


def weight_codes(w: Tensor, method: Method, key: Tensor | None, history: AmaxHistory | None) -> tuple[Tensor, Tensor]:
    """Codes of Hᵀ w, transposed, and their scale.

    Args:
        w: (O, I), any strides.
        method: of the layer.
        key: as in `keep`.
        history: as in `keep`.

    Returns:
        Codes (I', O') and float32 scales, () or (I,).
    """
    drawn = method.grad_input.weight_rounding == "stochastic"
    if _weights is None or drawn or (w.is_cuda and torch.cuda.is_current_stream_capturing()):
        return _weight_codes(w, method, key, history)
    place, state = (history, w.device, method), (w.data_ptr(), version_of(w), w.shape, w.stride())
    found = _weights.get(place)
    if found is None or found[0] != state:
        found = _weights[place] = state, _weight_codes(w, method, key, history)
    return found[1]


def _weight_codes(w: Tensor, method: Method, key: Tensor | None, history: AmaxHistory | None) -> tuple[Tensor, Tensor]:
    key, history = given_key(key, w.device), history or _without_layer(w.device)
    output, rotates = _outputs(method)[3], method.grad_input.transform == "hadamard"
    if w.stride(0) == 1 < w.stride(1) and not output.stochastic:
        return _codes_as_stored(w.T, method, output, key, history)
    w = _contiguous_rows(w)

    def kernel() -> tuple[Tensor, Tensor]:
        tiling = tilings(w.dtype, False).w
        return module("quantize_kernels").compress_weight(w, key, output, history, rotates, tiling)  # type: ignore[no-any-return]

    def reference() -> tuple[Tensor, Tensor]:
        return plain.compress_weight(w, key, output, rotates)

    return or_reference("weight", kernel, reference)


def _codes_as_stored(
    w: Tensor, method: Method, output: Output, key: Tensor, history: AmaxHistory
) -> tuple[Tensor, Tensor]:
    """Codes of a weight that is stored as (I, O), as the codes are; `compress_weight` would read a transposed copy."""
    w, rotates = _contiguous_rows(w), method.grad_input.transform == "hadamard"
    codes, scale, *_ = compressed(
        "weight", w, whole(len(w), False), key, output, rotate=rotates, history=history, quantities=(WEIGHT, X),
        tiling=tilings(w.dtype, output.is_fp8).g_y,
    )  # fmt: skip
    assert codes is not None
    assert scale is not None
    if padded(len(w)) > len(w):
        pad = (0, 0, 0, padded(len(w)) - len(w))
        codes = torch.nn.functional.pad(codes.view(torch.int8), pad).view(codes.dtype)
    return codes, scale


def next_key(counter: Tensor, moves: bool = True) -> Tensor:
    """`hotrain.draws.next_key` in one launch.

    Args:
        counter: int64 (3,), [salt, step, key], on the device.
        moves: whether the step is incremented first.
    """
    if unsupported_device(counter.device) is not None:
        return draws.next_key(counter, moves)
    return module("rows").next_key(counter, moves)  # type: ignore[no-any-return]
