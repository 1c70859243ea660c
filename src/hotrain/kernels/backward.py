"""The gradients of a layer on the kernels: the codes of g_y, read once for both, and the products of codes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..layer_record import AmaxHistory
from ..method import Method
from ..transform.tokens import Layout
from . import dispatch, row_scales
from .dispatch import Grads, Needs
from .formats import COPY, DTYPES, NOTHING, Coded, Joined, padded, whole
from .operands import given_key, product, tilings
from .support import module, unsupported_device


def prepare_codes(lay: Layout, dtype: torch.dtype, device: torch.device, trained: bool) -> None:
    """Allocate what `gradients` needs for a g_y that is given by codes, before a capture.

    Args:
        lay: of the tokens.
        dtype: of g_y.
        device: of the kernels.
        trained: whether g_w is needed.
    """
    if unsupported_device(device) is None:
        tokens = lay if trained else whole(lay.samples * lay.tokens, False)
        module("quantize_kernels").index_of(tokens, tilings(dtype, False).coded, device)


def grad_codes(
    g_y: Tensor | Coded | Joined,
    kept: tuple[Tensor | None, ...],
    method: Method,
    lay: Layout,
    key: Tensor | None,
    history: AmaxHistory | None,
    needs: Needs,
) -> tuple[Tensor | None, ...]:
    """Read g_y once and compute all that the gradients need of it.

    Args:
        g_y: (T, O), or codes that it is made of, or its parts.
        kept: of `keep`, for the rows of P, where the weight requires a gradient.
        method: of the layer.
        lay: of the tokens.
        key: as in `keep`.
        history: as in `keep`.
        needs: which of x, w and b require gradients.

    Returns:
        (codes of g_y H, their scale, codes of P g_y, their scale, column sums), None where not needed.
    """
    _, rotated, projected = dispatch._written(method)
    rotated = rotated if needs[0] else NOTHING
    projected = projected if needs[1] else NOTHING
    if rotated is NOTHING and projected is NOTHING:
        return None, None, None, None, None
    key, rotates = given_key(key, g_y.device), method.grad_input.transform == "hadamard"
    # Without P the order of the tokens does not matter.
    tokens, side = (lay, kept[1]) if needs[1] else (whole(g_y.shape[0], False), None)
    if needs[1] and row_scales.applies(method):
        side = dispatch._filled_side(lay, key)
    fp8 = rotated.is_fp8 or projected.is_fp8
    tiling = tilings(g_y.dtype, dispatch._few_rows(lay, fp8), fp8)
    name, own = ("gradients from codes", tiling.coded) if isinstance(g_y, Coded) else ("gradients", tiling.g_y)
    if isinstance(g_y, Joined):
        name += " of parts"
    return dispatch.compressed(
        name, g_y, tokens, key, rotated, projected, side=side, rotate=rotates, sums=needs[2],
        history=history or dispatch._without_layer(g_y.device), tiling=own,
    )  # fmt: skip


def reads_codes_alone(method: Method, needs: Needs) -> bool:
    """Whether the gradients read no more of g_y than its codes; else g_x is exact, or a sum is all that is needed."""
    return any(needs[:2]) and not (needs[0] and dispatch._written(method)[1] is NOTHING)


def grad_shapes(
    outputs: int, lay: Layout, method: Method, dtype: torch.dtype, needs: Needs
) -> list[tuple[tuple[int, ...], torch.dtype] | None]:
    """Shape and dtype of what `grad_codes` returns for a g_y of (T, outputs) in `dtype`."""
    tokens = lay.samples * lay.tokens
    _, rotated, projected = dispatch._written(method)
    rotated, projected = (o if need else NOTHING for o, need in zip((rotated, projected), needs, strict=False))
    found: list[tuple[tuple[int, ...], torch.dtype] | None] = [None] * 4
    if rotated.number:
        found[0] = (tokens, padded(outputs)), rotated.dtype or DTYPES[rotated.number]
        found[1] = (tokens,) if rotated.each else (), torch.float32
    if projected.number:
        found[2] = (padded(outputs), padded(lay.rows)), projected.dtype or DTYPES.get(projected.number, dtype)
        found[3] = None if projected.number == COPY else ((outputs,) if projected.each else (), torch.float32)
    return [*found, ((outputs,), dtype) if needs[2] else None]


def gradients(
    g_y: Tensor,
    w: Tensor | None,
    kept: tuple[Tensor, ...],
    method: Method,
    lay: Layout,
    key: Tensor | None,
    history: AmaxHistory | None,
    needs: Needs,
    transposed: bool = False,
    dtype: torch.dtype | None = None,
    columns: int | None = None,
) -> Grads:
    """The gradients of a layer.

    Args:
        g_y: (T, O).
        w: (O, I), or (I, O) when `transposed`, any float dtype; needed for g_x only.
        kept: of `keep`.
        method: of the layer.
        lay: of the tokens.
        key: as in `keep`.
        history: as in `keep`.
        needs: which of x, w and b require gradients.
        transposed: whether w is (I, O).
        dtype: of g_w; None is g_y's.
        columns: I; None: that of w, or of kept codes without scales of rows.

    Returns:
        (g_x, g_w, g_b), None where not needed: (T, I) in g_y's dtype, as w in `dtype`, and (O,) in g_y's dtype.
    """
    g_y = dispatch._contiguous_rows(g_y)
    if columns is None:
        codes = kept[0] if needs[1] else None
        columns = w.shape[0 if transposed else 1] if w is not None else codes.shape[0] if codes is not None else 0
    found = grad_codes(g_y, kept, method, lay, key, history, needs)
    shape, dtypes = (g_y.shape[1], columns), (g_y.dtype, dtype or g_y.dtype)
    g_x, g_w, g_b = products(found, w, kept, method, lay, key, history, needs, shape, dtypes, transposed)
    if needs[2] and g_b is None:
        g_b = g_y.sum(0)
    if needs[0] and g_x is None:
        assert w is not None
        g_x = g_y @ (w.T if transposed else w).to(g_y.dtype)
    return g_x, g_w, g_b


def products(
    found: Sequence[Tensor | None],
    w: Tensor | None,
    kept: tuple[Tensor | None, ...],
    method: Method,
    lay: Layout,
    key: Tensor | None,
    history: AmaxHistory | None,
    needs: Needs,
    shape: tuple[int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    transposed: bool,
) -> Grads:
    """The gradients that need no more of g_y than its codes.

    Args:
        found: of `grad_codes`.
        w: as in `gradients`.
        kept: of `keep`.
        method: of the layer.
        lay: of the tokens.
        key: as in `keep`.
        history: as in `keep`.
        needs: which of x, w and b require gradients.
        shape: (O, I).
        dtypes: of g_x, and of g_w.
        transposed: whether w is (I, O).

    Returns:
        As of `gradients`; None, too, for a g_x of g_y itself, and for a g_b that was not summed.
    """
    (rot, rot_scale, proj, proj_scale, g_b), (outputs, columns) = found, shape
    g_x = g_w = None
    if needs[0] and rot is not None:
        assert w is not None
        g_x = product(
            rot, *dispatch.weight_codes(w.T if transposed else w, method, key, history), rot_scale, dtypes[0], columns
        )
    if needs[1]:
        codes, side = kept
        assert proj is not None
        assert codes is not None
        assert side is not None
        if row_scales.applies(method):
            share, output, key = method.grad_weight.share, dispatch._outputs(method)[2], given_key(key, proj.device)
            own = (codes, side)
            g_w = row_scales.grad_weight(proj, own, share, output, lay, key, (outputs, columns), dtypes[1], transposed)
        elif proj_scale is None:
            a, b = (codes[:columns], proj[:outputs]) if transposed else (proj[:outputs], codes[:columns])
            g_w = (a @ b.T).to(dtypes[1])
        elif transposed:
            g_w = product(codes[:columns], proj, proj_scale, side[0], dtypes[1], outputs)
        else:
            g_w = product(proj[:outputs], codes, side[0], proj_scale, dtypes[1], columns)
    return g_x, g_w, g_b
