"""FLOPs and bit operations of a training step's matrix products: forward and both gradient paths.

Conventions, those of the papers where they have one: a multiply-accumulate is 2 FLOPs, and a·b bit operations
between operands of a and b bits; any other operation on floats is 1 FLOP and float_bits² bit operations. A
Walsh–Hadamard transform of order n is log₂ n additions per element, a quantization 2 operations per element (magnitude,
scaling; 3 for LUQ's logarithm), a dequantization 1. ``float_bits=32`` counts every float as float32, so that an
exact product costs 1024 per multiply-accumulate; give 16 for training in bf16.

What is computed is counted, which the papers' own formulas do not always do: groups divide a convolution's products;
both of LBP-WHT's products are counted; so is padding to whole tiles; quantizing P x costs I·r/n·T, not I·r/n·O; a
gradient that is not needed (of the first layer's input, of a frozen weight) costs nothing. Convolutions are counted as
hotrain computes them: where patches overlap, x is transformed back and its codes are convolved, so the rank reduces the
saved bytes and not the product.

Not counted: the products between activations (q kᵀ and the like), normalizations and other element-wise layers,
and projections whose weight is used without calling a layer (inside `nn.MultiheadAttention`).
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..conversion import convert, revert
from ..convolution import LEAST_LINES
from ..functional import as_method, check_model
from ..layer import Config
from ..method import Method
from ..nn.state import REVERTED, LayerState, layer_states
from ..presets import preset
from ..tables import count_text, table
from ..transform.hadamard import TILE
from ..transform.tokens import Grid, Layout
from .shapes import LayerShape, layer_shapes

QUANTIZE, QUANTIZE_LUQ, DEQUANTIZE = 2, 3, 1


@dataclass(frozen=True)
class Operations:
    """FLOPs and bit operations."""

    flops: int = 0
    bit_ops: int = 0

    def __add__(self, other: Operations) -> Operations:
        return Operations(self.flops + other.flops, self.bit_ops + other.bit_ops)


@dataclass(frozen=True)
class Cost:
    """The cost of one training step's products.

    Attributes:
        rows: one dict per layer call: name, kind, method, tokens, outputs, inputs, groups, and for each of forward,
            grad_input, grad_weight and overhead its ``…_flops`` and ``…_bit_ops``.
    """

    rows: list[dict[str, Any]]

    def _sum(self, path: str) -> Operations:
        return Operations(sum(r[f"{path}_flops"] for r in self.rows), sum(r[f"{path}_bit_ops"] for r in self.rows))

    @property
    def forward(self) -> Operations:
        """Of all layers' forward products."""
        return self._sum("forward")

    @property
    def grad_input(self) -> Operations:
        """Of all layers' g_x."""
        return self._sum("grad_input")

    @property
    def grad_weight(self) -> Operations:
        """Of all layers' g_w, with the compression of x in forward."""
        return self._sum("grad_weight")

    @property
    def overhead(self) -> Operations:
        """The part of both gradient paths that is no product: transforms, quantization, dequantization."""
        return self._sum("overhead")

    @property
    def backward(self) -> Operations:
        return self.grad_input + self.grad_weight

    @property
    def flops_total(self) -> int:
        return (self.forward + self.backward).flops

    @property
    def bit_ops_total(self) -> int:
        return (self.forward + self.backward).bit_ops

    def __str__(self) -> str:
        body = [
            [r["name"] or "(model)", f"{r['tokens']}×{r['outputs']}×{r['inputs']}", r["method"]]
            + [count_text(r[f"{path}_bit_ops"]) for path in ("forward", "grad_input", "grad_weight")]
            for r in self.rows
        ]
        totals = [self.forward, self.grad_input, self.grad_weight]
        body.append(["total", "", "", *(count_text(t.bit_ops) for t in totals)])
        body.append(["total FLOPs", "", "", *(count_text(t.flops) for t in totals)])
        title = (
            f"bit operations: {count_text(self.bit_ops_total)} per step, "
            f"of these {count_text(self.overhead.bit_ops)} transforms and quantization"
        )
        return title + "\n" + table(["layer", "T×O×I", "method", "forward", "g_x", "g_w"], body)


def cost(
    model: nn.Module, *inputs: Any, method: str | Method | None = None, float_bits: int = 32, **kwargs: Any
) -> Cost:
    """Count the products of one training step on the batch ``model(*inputs, **kwargs)``, layer by layer.

    Args:
        model: on any device, also on meta.
        *inputs: of ``model(*inputs, **kwargs)``.
        method: None counts every layer as it is: converted layers with their own method, the others exact. A method or
            its name counts the model as if converted: the converted layers of a converted model, the layers that
            `hotrain.convert` would choose of an exact one.
        float_bits: bits of a float in a bit operation (the papers' is 32).
        **kwargs: of the model.

    Raises:
        TypeError: it is no model.
        ValueError: the method is unknown, or the model calls no layer.
    """
    check_model("cost", model)
    if type(float_bits) is not int or float_bits < 1:
        raise ValueError(f"cost: float_bits={float_bits!r} is not a positive integer (32 for float32, 16 for bf16)")
    asked = None if method is None else as_method(method)
    shapes = layer_shapes(model, *inputs, **kwargs)
    found = dict(layer_states(model))
    exact = preset("exact")
    if asked is not None:
        found = {name: copy.copy(state) for name, state in (found or _if_converted(model, asked)).items()}
        for state in found.values():
            state.method = asked
    return Cost([_row(s, _in_force(s, found.get(s.name), exact), found.get(s.name), float_bits) for s in shapes])


def _if_converted(model: nn.Module, method: Method) -> dict[str, LayerState]:
    """The layer states that `hotrain.convert` gives an exact model, which is reverted."""
    if method.is_exact:
        return {}
    convert(model, method)
    try:
        return dict(layer_states(model))
    finally:
        revert(model)


def _in_force(shape: LayerShape, state: LayerState | None, exact: Method) -> Method:
    """The method that a call follows: a low-rank one does not mix samples (`LayerState`)."""
    if state is None or state.fallback not in (None, REVERTED):
        return exact
    by_tokens = state.method.grad_weight.is_low_rank and shape.needs_grad_weight and not state.chosen
    return exact if shape.samples_only and by_tokens else state.running


def _row(shape: LayerShape, method: Method, state: LayerState | None, float_bits: int) -> dict[str, Any]:
    grid = state.grid if state else None
    none = (Operations(), 0)
    grad_input, input_floats = _grad_input(shape, method, grid, float_bits) if shape.needs_grad_input else none
    grad_weight, weight_floats = _grad_weight(shape, method, grid, float_bits) if shape.needs_grad_weight else none
    paths = {
        "forward": _product(shape.products, float_bits, float_bits),
        "grad_input": grad_input + _on_floats(input_floats, float_bits),
        "grad_weight": grad_weight + _on_floats(weight_floats, float_bits),
        "overhead": _on_floats(input_floats + weight_floats, float_bits),
    }
    return {
        "name": shape.name,
        "kind": shape.kind,
        "method": method.name,
        "tokens": shape.tokens,
        "outputs": shape.outputs,
        "inputs": shape.inputs,
        "groups": shape.groups,
    } | {
        f"{path}_{unit}": getattr(operations, unit)
        for path, operations in paths.items()
        for unit in ("flops", "bit_ops")
    }


def _product(macs: int, bits_a: int, bits_b: int) -> Operations:
    return Operations(2 * macs, macs * bits_a * bits_b)


def _on_floats(count: int, bits: int) -> Operations:
    return Operations(count, count * bits**2)


def _additions(lay: Layout) -> int:
    """Additions for each column that a fast transform along the tokens needs."""
    tile = lay.lines.tile
    return lay.samples * lay.tiles * tile * (tile.bit_length() - 1)


def _in_floats(shape: LayerShape, method: Method) -> bool:
    """Small groups of a convolution are not quantized where the method rotates (hotrain.convolution)."""
    small = shape.groups > 1 and shape.outputs // shape.groups < TILE
    return small and method.grad_input.transform == "hadamard"


def _grad_input(shape: LayerShape, method: Method, grid: Grid | None, fb: int) -> tuple[Operations, int]:
    """The product of g_x = g_y w, and the number of other operations, on floats of `fb` bits."""
    path, tokens = method.grad_input, shape.tokens
    if path.transform == "lowpass":
        lay = Config(method, grid).layout(shape.lead)
        if shape.unfolds:  # projected and lifted back before the convolution
            return _product(shape.products, fb, fb), 2 * _additions(lay) * shape.outputs
        transforms = _additions(lay) * (shape.outputs + shape.columns)
        return _product(lay.rows * shape.outputs * shape.inputs, fb, fb), transforms
    if path.bits is None or _in_floats(shape, method):
        return _product(shape.products, fb, fb), 0
    outputs, rotation = shape.outputs, 0
    if path.transform == "hadamard":
        outputs = shape.groups * TILE * math.ceil(shape.outputs / (shape.groups * TILE))
        rotation = TILE.bit_length() - 1
    quantize = QUANTIZE_LUQ if path.number == "luq" else QUANTIZE
    # Scales multiply the product of codes; where x must be unfolded, w's codes and, scaled per token, those of g_y.
    scaled = math.prod(shape.lead) * shape.channels
    if shape.unfolds:
        scaled = outputs * shape.inputs + (tokens * outputs if path.scale_axis == "token" else 0)
    overhead = (
        tokens * outputs * (rotation + quantize) + outputs * shape.inputs * (rotation + QUANTIZE) + scaled * DEQUANTIZE
    )
    return _product(tokens * outputs * shape.inputs, path.bits, path.bits), overhead


def _grad_weight(shape: LayerShape, method: Method, grid: Grid | None, fb: int) -> tuple[Operations, int]:
    """The same of g_w = g_yᵀ x, the compression of x at forward included."""
    path, saved = method.grad_weight, method.saved
    lay = Config(method, grid).layout(shape.input_lead if shape.unfolds else shape.lead)
    kept = lay.rows * shape.channels
    # P x; and P g_y, or, where x must be unfolded, x̂ = PᵀP x
    overhead = _additions(lay) * (shape.channels + (shape.channels if shape.unfolds else shape.outputs))
    if path.drop:
        overhead += shape.tokens * shape.outputs
    if saved.bits is not None:
        overhead += kept * QUANTIZE
    rows = math.ceil(path.share * lay.rows)
    if shape.unfolds:  # whole lines of the output, or all
        few = _in_floats(shape, method) or shape.lead[1] < LEAST_LINES
        rows = shape.tokens if few else math.ceil(path.share * shape.tokens / shape.lead[2]) * shape.lead[2]
    macs = rows * shape.outputs * shape.inputs
    if path.bits is None or _in_floats(shape, method):
        if saved.bits is not None:
            overhead += kept * DEQUANTIZE
        return _product(macs, fb, fb), overhead
    overhead += rows * shape.outputs * (QUANTIZE_LUQ if path.number == "luq" else QUANTIZE)
    overhead += shape.outputs * shape.inputs * DEQUANTIZE
    bits = saved.bits or path.bits
    if not shape.unfolds:
        if saved.bits is None:  # x is kept as it is and quantized in backward
            overhead += kept * QUANTIZE
        elif saved.scale == "row":  # folded into the rows of P g_y
            overhead += rows * shape.outputs
    elif path.number != "luq" and (lay.lines.tile > 1 or saved.bits is None or saved.scale == "row"):
        bits = max(8, path.bits)  # x̂ gets codes of its own
        entries = math.prod(shape.input_lead) * shape.channels
        overhead += kept * DEQUANTIZE * (saved.bits is not None) + entries * QUANTIZE
    return _product(macs, path.bits, bits), overhead
