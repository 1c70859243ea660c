"""The gradients of convolutions whose patches overlap: kernels make the codes, PyTorch's convolutions multiply them."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import draws
from ..convolution import (
    as_image,
    as_kernel,
    padded_grad,
    padded_weight,
    picked_lines,
    product_for_input,
    product_for_weight,
    share_of_lines,
    stays_float,
)
from ..geometry import Geometry, Shape, channels_last
from ..layer_record import AmaxHistory
from ..method import FP8, PARTNER, Method
from ..products import of_products
from ..quantize import floating
from ..quantize.integer import largest_code
from ..transform.tokens import Layout
from . import dispatch, row_scales
from .dispatch import Grads, Needs
from .formats import COPY, FORWARD, INT, NOTHING, NUMBERS, PROJECTED, ROTATED, Output, X, whole
from .operands import device_key, given_key, tilings
from .support import run


def conv2d_gradients(
    g_y: Tensor,
    w: Tensor | None,
    kept: tuple[Tensor, ...],
    method: Method,
    lay: Layout,
    key: Tensor | None,
    history: AmaxHistory | None,
    needs: Needs,
    shape: Shape,
    geometry: Geometry,
) -> Grads:
    """The gradients of a convolution, as `hotrain.convolution` defines them.

    Args:
        g_y: (B, O, H', W').
        w: (O, C/groups, kh, kw), any float dtype; needed for g_x only.
        kept: of `keep`, of x's positions.
        method: of the layer.
        lay: of x's positions.
        key: as in `keep`.
        history: as in `keep`.
        needs: which of x, w and b require gradients.
        shape: of x, (B, C, H, W).
        geometry: of the convolution.

    Returns:
        (g_x, g_w, g_b), None where not needed: as x in g_y's dtype, as w in float32 after a product of codes and else
        in g_y's dtype, and (O,) in g_y's dtype.
    """
    outputs, dtype, path = g_y.shape[1], of_products(g_y), method.grad_input
    call, rotates = _Codes(key, history, g_y), path.transform == "hadamard"
    floats = stays_float(method, outputs, geometry)
    _, rotated, projected, _ = dispatch._outputs(method)
    rotated = NOTHING if floats or not needs[0] else rotated
    projected = NOTHING if floats or not needs[1] or projected.number == COPY else projected
    g_x = g_w = g_b = sums = once = None
    if rotated is not NOTHING:
        assert w is not None
        matrix = dispatch._contiguous_rows(padded_grad(g_y, path, geometry.groups))
        once, scale, sums = call.of(matrix, rotated._replace(dtype=dtype), ROTATED, rotates, needs[2])
        k = call.of_kernel(w, method, geometry, dtype, None if rotated.each else scale)
        # A rotation has filled the padding of its last block; without one it is zeros, behind all groups.
        g = as_image(once, g_y.shape)[:, : len(k)]
        g_x = product_for_input(g, k, shape, geometry).to(g_y.dtype)
    elif needs[0]:
        assert w is not None
        g_x = product_for_input(g_y, w.to(g_y.dtype), shape, geometry)
    if needs[1]:
        if row_scales.applies(method):
            kept = row_scales.restored(kept, shape[1], g_y.dtype), dispatch._filled_side(lay, call.key)
        codes, side = kept
        x = call.lifted(codes, side, lay, shape[1], g_y.dtype)
        size = (outputs, shape[1] // geometry.groups, *geometry.kernel)
        share = share_of_lines(method, outputs, geometry, g_y.shape[2])
        if projected is NOTHING:
            g_w = product_for_weight(g_y, as_image(x, shape), size, geometry)
        else:
            codes, x_scale = call.of_lifted(x, method, dtype)
            g, image = g_y, as_image(codes, shape)[:, : shape[1]]
            if share < 1:
                g, image, geometry = picked_lines(g, image, geometry, share, device_key(call.key))
            if share < 1 or once is None or rotates or not rotated.is_fp8 or rotated.number != projected.number:
                matrix = dispatch._contiguous_rows(channels_last(g).reshape(-1, outputs))
                output = projected._replace(dtype=dtype, across=projected.each)
                once, scale, own = call.of(matrix, output, PROJECTED, False, needs[2] and share == 1)
                sums = own if share == 1 else sums
            found = product_for_weight(as_image(once, g.shape)[:, :outputs], image, size, geometry)
            g_w = found.float() * (scale.reshape(-1, 1, 1, 1) * x_scale)
    if needs[2]:
        g_b = g_y.sum((0, 2, 3)) if sums is None or len(sums) != outputs else sums
    return g_x, g_w, g_b


class _Codes:
    """Codes with the draws and the amax history of one backward pass of a layer."""

    def __init__(self, key: Tensor | None, history: AmaxHistory | None, g_y: Tensor) -> None:
        self.key = given_key(key, g_y.device)
        self.history = history or dispatch._without_layer(g_y.device)

    def of(
        self, t: Tensor, output: Output, quantity: int, rotate: bool, sums: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes of t or of t H, (T, C'), their scale, and the column sums of t."""
        codes, scale, _, _, total = dispatch.compressed(
            "gradients", t, whole(len(t), False), self.key, output, rotate=rotate, sums=sums, history=self.history,
            quantities=(quantity, X), tiling=tilings(t.dtype, output.is_fp8).g_y,
        )  # fmt: skip
        assert codes is not None
        assert scale is not None
        return codes, scale, total

    def of_kernel(
        self, w: Tensor, method: Method, geometry: Geometry, dtype: torch.dtype, scale: Tensor | None
    ) -> Tensor:
        """The codes of Hᵀ w times all scales but those of tokens: (O', C/groups, kh, kw); `scale`: of g_y's codes."""
        matrix = padded_weight(w, method.grad_input, geometry.groups)
        # Not `weight_codes`: a copy in this layout has no version by which a change of w would show.
        codes, own = dispatch._weight_codes(matrix, method, self.key, self.history)
        own = own if scale is None else own * scale
        k = codes[: matrix.shape[1]].to(torch.float32) * (own[:, None] if own.dim() else own)
        rows = len(matrix) if method.grad_input.transform is None else k.shape[1]
        return as_kernel(k.T[:rows].to(dtype).contiguous(), w.shape)

    def of_lifted(self, x: Tensor, method: Method, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Codes of x̂, (T, C'), and their scale."""
        number = PARTNER[method.grad_weight.number]
        limit = floating.largest_code(number) if number in FP8 else float(largest_code(8))
        kind = NUMBERS[number]
        rounds = method.saved.rounding == "stochastic" and kind == INT
        # The forward of a convolution has no codes, so that the history's place for them is free.
        codes, scale, _ = self.of(x, Output(kind, limit, rounds, draws.LIFTED, dtype=dtype), FORWARD, False)
        return codes, scale

    def lifted(self, codes: Tensor, side: Tensor, lay: Layout, columns: int, dtype: torch.dtype) -> Tensor:
        """x̂, (T, C)."""

        def reference() -> Tensor:
            from .reference import lift

            return lift(codes, side, lay, self.key, columns, dtype)

        rows = dispatch._rows(side)
        return run("lift.lift", reference, codes, side[:1], rows, lay, columns, dtype)  # type: ignore[no-any-return]
