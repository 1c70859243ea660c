"""The published figures: the formulas of HOT's released calculator and of its supplement, repeated with their defects.

Sources: sungonuni/HOT @ 460db09 `utils/analysis_calculator.py` (bit operations :141-165, memory :11-132) and HOT's
supplement, Table 5 (FLOPs). docs/hot.md says which published figures they reproduce. L is the number of tokens, O
and I the channels of y and x. Defects kept on purpose: convolutions are counted without their groups; LBP-WHT has one
product instead of two, and always 8 of 16 rows; I·(r/n)·O stands where the quantization of P x would be I·(r/n)·L;
memory is a formula over the layers' outputs, with every name that contains ``qkv`` counted three times as a
parameter and four times as an activation. `hotrain.cost` counts what is computed.
"""

from __future__ import annotations

from torch import Tensor, nn

from hotrain.analysis.shapes import LayerShape, layer_shapes
from hotrain.functional import as_method
from hotrain.method import Method

FLOAT = 1024  # a multiply-accumulate, or any other operation, on float32
STAGES = 4  # log2 of the tile of 16
PUBLISHED = ("exact", "lbp-wht", "luq", "hot", "hot-unbiased", "hq")


def bit_operations(model: nn.Module, images: Tensor, method: str | Method = "exact") -> tuple[int, int]:
    """Bit operations of forward and backward of one batch, with every layer converted.

    Raises:
        ValueError: a method without a published formula.
    """
    method = as_method(method)
    shapes = layer_shapes(model, images)
    forward = sum(shape.products * shape.groups for shape in shapes) * FLOAT  # the calculator ignores groups
    return forward, sum(_backward(shape, method) for shape in shapes)


def _backward(shape: LayerShape, method: Method) -> int:
    """Of one layer call.

    A layer whose weight is frozen has the calculator's branch for a LoRA base: no g_w for HOT, while the exact
    backward still counts both products.
    """
    L, O, I = shape.tokens, shape.outputs, shape.columns
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
        raise ValueError(f"there is no published formula for {method.name!r}; there is for {', '.join(PUBLISHED)}")
    return sum(round(floats * FLOAT + macs * bits) for floats, macs, bits in (g_x, g_w))


def flop_overhead(tokens: int, outputs: int, inputs: int, rank: int = 8, tile: int = 16) -> tuple[int, float]:
    """HOT, Table 5: FLOPs of the exact backward of a layer (L tokens, O outputs, I inputs), and what HOT adds.

    The table's 11.5 M for (L, O, I) = (49, 448, 1792) come out only with O and I exchanged.
    """
    L, O, I, share = tokens, outputs, inputs, rank / tile
    grad_input = 2 * L * O * STAGES + 2 * I * O * STAGES + 2 * L * O + 2 * I * O
    grad_weight = 2 * L * I * STAGES + 2 * L * O * STAGES + 2 * I * L * share + 2 * O * L * share
    dequantize = 2 * I * O + 2 * L * I
    return 4 * L * I * O, grad_input + grad_weight + dequantize


def memory(model: nn.Module, batch: int, images: Tensor, method: str | Method = "exact") -> int:
    """Bytes of a training run with `batch` samples; `images` are one batch of any size, to learn shapes from.

    Four copies of the parameters (gradients, AdamW's two moments), and as activations the outputs of all layers in
    float32; with HOT their share r/16 in codes of `Saved.bits`. `hotrain.saved_bytes` measures.
    """
    method = as_method(method)
    parameters = sum((3 if "qkv" in name else 1) * p.numel() for name, p in model.named_parameters())
    outputs = sum(
        (4 if "qkv" in shape.name else 1) * shape.tokens * shape.outputs // shape.lead[0]
        for shape in layer_shapes(model, images)
    )
    share = method.grad_weight.rank / method.grad_weight.tile
    return 4 * 4 * parameters + int(outputs * batch * share * (method.saved.bits or 32) / 8)
