"""The published figures: the formulas of HOT's released calculator and of its supplement, repeated with their defects.

Sources: sungonuni/HOT @ 460db09 `utils/analysis_calculator.py` (bit operations :141-165, memory :11-132) and HOT's
supplement, Table 5 (FLOPs). docs/hot.md says which published figures they reproduce. L is the number of tokens, O
and I the channels of y and x. Defects kept on purpose: convolutions are counted without their groups; LBP-WHT has one
product instead of two, and always 8 of 16 rows; I·(r/n)·O stands where the quantization of P x would be I·(r/n)·L;
memory is a formula over the layers' outputs, with every name that contains ``qkv`` counted three times as a
parameter and four times as an activation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..functional import as_method
from ..method import Method
from ..tables import bytes_text, table
from .shapes import LayerShape, described, layer_shapes

FLOAT = 1024  # a multiply-accumulate, or any other operation, on float32
STAGES = 4  # log2 of the tile of 16
PUBLISHED = ("exact", "lbp-wht", "luq", "hot", "hot-unbiased", "hq")


def row(shape: LayerShape, method: Method) -> dict[str, Any]:
    """The row of `hotrain.cost(mode="paper")` for one layer call.

    A layer whose weight is frozen has the calculator's branch for a LoRA base: no g_w for HOT, while the exact
    backward still counts both products. Raises ValueError for a method without a published formula.
    """
    L, O = shape.tokens, shape.outputs
    I = shape.inputs * shape.groups  # the calculator ignores groups
    LOI, LO, OI, LI = L * O * I, L * O, O * I, L * I
    # Per path: operations on floats, multiply-accumulates, bit operations of one of them.
    g_x: tuple[float, float, int]
    g_w: tuple[float, float, int]
    if method.is_exact:
        g_x = g_w = (0.0, LOI, FLOAT)
    elif method.name == "lbp-wht":
        g_x, g_w = (LO * STAGES + LI * STAGES, LOI / 2, FLOAT), (0.0, 0, 0)
    elif method.name == "luq":
        g_x, g_w = (3 * (LO + OI + LI), LOI, 32), (3 * (OI + LI), LOI, 32)
    elif method.name in PUBLISHED:
        share = method.grad_weight.rank / method.grad_weight.tile
        g_x = (LO * STAGES + OI * STAGES + LO + OI + LI, LOI, 16)
        g_w = (LI * STAGES + LO * STAGES + LO * share + OI * share + OI, LOI * share, 64)
        if not shape.needs_grad_weight:
            g_w = (0.0, 0, 0)
    else:
        raise ValueError(
            f"cost: mode='paper' has no published formula for {method.name!r}; it has for {', '.join(PUBLISHED)}. "
            "Use mode='corrected'"
        )
    overhead = g_x[0] + g_w[0]
    return described(shape, method) | {
        "inputs": I,
        "groups": 1,
        "forward_flops": 2 * LOI,
        "forward_bit_ops": LOI * FLOAT,
        "grad_input_flops": round(g_x[0] + 2 * g_x[1]),
        "grad_input_bit_ops": round(g_x[0] * FLOAT + g_x[1] * g_x[2]),
        "grad_weight_flops": round(g_w[0] + 2 * g_w[1]),
        "grad_weight_bit_ops": round(g_w[0] * FLOAT + g_w[1] * g_w[2]),
        "overhead_flops": round(overhead),
        "overhead_bit_ops": round(overhead * FLOAT),
    }


@dataclass(frozen=True)
class FlopOverhead:
    """HOT, supplement, Table 5: FLOPs of one layer's backward, and what HOT adds to it."""

    vanilla: int
    grad_input: float
    grad_weight: float
    dequantize: int

    @property
    def total(self) -> float:
        """All that HOT adds; the text of the supplement calls it the total cost."""
        return self.grad_input + self.grad_weight + self.dequantize


def flop_overhead(tokens: int, outputs: int, inputs: int, rank: int = 8, tile: int = 16) -> FlopOverhead:
    """Table 5's formulas for a layer of L tokens, O outputs and I inputs.

    The table's 11.5 M for (L, O, I) = (49, 448, 1792) come out only with O and I exchanged.
    """
    L, O, I, share = tokens, outputs, inputs, rank / tile
    return FlopOverhead(
        vanilla=4 * L * I * O,
        grad_input=2 * L * O * STAGES + 2 * I * O * STAGES + 2 * L * O + 2 * I * O,
        grad_weight=2 * L * I * STAGES + 2 * L * O * STAGES + 2 * I * L * share + 2 * O * L * share,
        dequantize=2 * I * O + 2 * L * I,
    )


@dataclass(frozen=True)
class PaperMemory:
    """Bytes of a training run by the published formula: four copies of the parameters, and activations."""

    parameters: int
    activations: int

    @property
    def gradients(self) -> int:
        return self.parameters

    @property
    def optimizer(self) -> int:
        """AdamW's two moments."""
        return 2 * self.parameters

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations

    def __str__(self) -> str:
        parts = ("parameters", "gradients", "optimizer", "activations", "total")
        return table(["published formula", "bytes"], [[part, bytes_text(getattr(self, part))] for part in parts])


def paper_memory(
    model: nn.Module, batch: int, *inputs: Any, method: str | Method = "exact", **kwargs: Any
) -> PaperMemory:
    """The published memory formula for `batch` samples; `inputs` are one batch of any size, to learn shapes from.

    Activations are the outputs of all layers in float32; with HOT their share r/16 in codes of `Saved.bits`. This is
    a formula, not a measurement: `hotrain.saved_bytes` measures.
    """
    method = as_method(method)
    parameters = sum((3 if "qkv" in name else 1) * p.numel() for name, p in model.named_parameters())
    outputs = sum(
        (4 if "qkv" in shape.name else 1) * shape.output_entries // shape.samples
        for shape in layer_shapes(model, *inputs, **kwargs)
    )
    share = method.grad_weight.rank / method.grad_weight.tile
    width = (method.saved.bits or 32) / 8
    return PaperMemory(4 * parameters, int(outputs * batch * share * width))
