"""The cost against counts by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_models import ConvNet, TokenNet, assert_as_found, found
from torch import nn

import hotrain
from hotrain.analysis.cost import DEQUANTIZE, QUANTIZE, QUANTIZE_LUQ, cost

T, O, I = 64, 48, 32  # tokens in whole tiles, channels in whole blocks
FP = 32 * 32
LG = 4  # additions an entry of a transform of order 16


def _linear() -> nn.Linear:
    return nn.Linear(I, O)


def _tokens(grad: bool = True) -> torch.Tensor:
    return torch.randn(4, T // 4, I, requires_grad=grad)


def test_exact_linear() -> None:
    answer = cost(_linear(), _tokens())
    for path in (answer.forward, answer.grad_input, answer.grad_weight):
        assert (path.flops, path.bit_ops) == (2 * T * O * I, T * O * I * FP)
    assert answer.overhead.bit_ops == 0
    assert answer.flops_total == 6 * T * O * I
    assert answer.bit_ops_total == 3 * T * O * I * FP
    assert "T×O×I" in str(answer)


def test_what_nobody_asks_for_costs_nothing() -> None:
    assert cost(_linear(), _tokens(grad=False)).grad_input.flops == 0  # the first layer of a model
    frozen = _linear()
    frozen.weight.requires_grad_(False)
    assert cost(frozen, _tokens()).grad_weight.flops == 0
    with torch.no_grad():  # the question is about training, wherever it is asked
        assert cost(_linear(), _tokens()).grad_input.flops == 2 * T * O * I


def test_float_bits() -> None:
    assert cost(_linear(), _tokens(), float_bits=16).bit_ops_total == 3 * T * O * I * 256


@pytest.mark.parametrize(
    ("options", "macs"),
    [
        ({"kernel_size": 3, "padding": 1}, 2 * 64 * 32 * 32 * 9),
        ({"kernel_size": 3, "padding": 1, "groups": 4}, 2 * 64 * 32 * 8 * 9),
        ({"kernel_size": 3, "padding": 1, "groups": 32}, 2 * 64 * 32 * 9),
        ({"kernel_size": 1, "stride": 2}, 2 * 16 * 32 * 32),
        ({"kernel_size": 3, "dilation": 2, "padding": "same"}, 2 * 64 * 32 * 32 * 9),
    ],
    ids=["3x3", "groups", "depthwise", "strided", "dilated"],
)
def test_convolutions(options: dict, macs: int) -> None:
    answer = cost(nn.Conv2d(32, 32, **options), torch.randn(2, 32, 8, 8, requires_grad=True))
    assert [answer.forward.flops, answer.grad_input.flops, answer.grad_weight.flops] == [2 * macs] * 3


def _everything(module: nn.Module, name: str) -> bool:
    return True


def _converted(layer: nn.Module, method: str) -> nn.Module:
    model = nn.Sequential(layer)
    hotrain.convert(model, method, filter_fn=_everything)
    return model


def test_hot_linear_by_hand() -> None:
    answer = cost(_converted(_linear(), "hot"), _tokens())
    rotate_quantize = (T * O + O * I) * (LG + QUANTIZE)
    floats = rotate_quantize + T * I * DEQUANTIZE
    assert answer.grad_input.flops == 2 * T * O * I + floats
    assert answer.grad_input.bit_ops == T * O * I * 16 + floats * FP
    project, kept = T * (O + I) * LG, T // 2
    floats = project + kept * (O + I) * QUANTIZE + O * I * DEQUANTIZE
    assert answer.grad_weight.flops == T * O * I + floats
    assert answer.grad_weight.bit_ops == kept * O * I * 64 + floats * FP
    assert answer.forward.bit_ops == T * O * I * FP


@pytest.mark.parametrize("unfolds", [False, True], ids=["linear", "3x3"])
def test_fp8_counts_eight_bits_an_operand(unfolds: bool) -> None:
    """hq in e4m3 costs what hq with int8 on both paths costs, less the rotation of g_x, which fp8 goes without."""
    layer = nn.Conv2d(I, O, 3, padding=1) if unfolds else _linear()
    x = torch.randn(2, I, 8, 8, requires_grad=True) if unfolds else _tokens()
    fp8, int8 = hotrain.preset("hq", number="e4m3"), hotrain.preset("hq", grad_input_bits=8)
    int8 = replace(int8, grad_input=replace(int8.grad_input, transform=None, scale="tensor"))
    got, want = cost(_converted(layer, "hq"), x, method=fp8), cost(_converted(layer, "hq"), x, method=int8)
    for path in ("grad_input", "grad_weight", "overhead"):
        assert getattr(got, path) == getattr(want, path)
    assert got.grad_weight.bit_ops < cost(layer, x, method="exact").grad_weight.bit_ops


@pytest.mark.parametrize(
    ("method", "grad_input", "grad_weight"),
    [
        ("hla", T * O * I * FP, T // 2 * O * I * FP + T * (O + I) * LG * FP),
        # int8 codes of g_y, int4 codes of x, whose row scales are folded into P g_y
        ("hq4", None, T * O * I * 32 + FP * (T * (O + I) * (LG + QUANTIZE) + T * O + O * I * DEQUANTIZE)),
        (
            "int4",
            T * O * I * 16 + FP * ((T * O + O * I) * QUANTIZE + T * I * DEQUANTIZE),
            T * O * I * 16 + FP * (T * (O + I) * QUANTIZE + O * I * DEQUANTIZE),
        ),
        (
            "luq",
            T * O * I * 16 + FP * (T * O * QUANTIZE_LUQ + O * I * QUANTIZE + T * I * DEQUANTIZE),
            T * O * I * 16 + FP * (T * O * QUANTIZE_LUQ + T * I * QUANTIZE + O * I * DEQUANTIZE),
        ),
        ("dropout", T * O * I * FP, T * O * I * FP + T * O * FP),
        # 64 tokens are one tile, of which 21 rows are kept; 6 additions an entry
        ("lbp-wht", 21 * O * I * FP + T * (O + I) * 6 * FP, 21 * O * I * FP + T * (O + I) * 6 * FP),
    ],
)
def test_presets_by_hand(method: str, grad_input: int | None, grad_weight: int) -> None:
    x = torch.randn(1, T, I, requires_grad=True)
    answer = cost(_converted(_linear(), method), x)
    if grad_input is not None:
        assert answer.grad_input.bit_ops == grad_input
    assert answer.grad_weight.bit_ops == grad_weight


def test_padding_is_counted() -> None:
    # 10 output channels are rotated as one block of 16.
    answer = cost(_converted(nn.Linear(I, 10), "hot"), _tokens())
    floats = (T * 16 + 16 * I) * (LG + QUANTIZE) + T * I * DEQUANTIZE
    assert answer.grad_input.bit_ops == T * 16 * I * 16 + floats * FP


def test_unfolding_convolution_by_hand() -> None:
    # x is kept on its own grid and lifted back, so the product has all positions; x̂ gets codes of its own.
    model = _converted(nn.Conv2d(32, 32, 3, padding=1), "hot")
    answer = cost(model, torch.randn(1, 32, 8, 8, requires_grad=True))
    positions, channels, columns = 64, 32, 32 * 9
    floats = 2 * positions * channels * LG  # project x, lift it
    floats += positions // 2 * channels * (QUANTIZE + DEQUANTIZE) + positions * channels * QUANTIZE  # keep, restore, x̂
    floats += positions * 32 * QUANTIZE + 32 * columns * DEQUANTIZE  # g_y, g_w
    assert answer.grad_weight.bit_ops == positions * 32 * columns * 64 + floats * FP


def test_small_groups_stay_in_floats() -> None:
    answer = cost(_converted(nn.Conv2d(32, 32, 3, padding=1, groups=32), "hot"), torch.randn(1, 32, 8, 8))
    assert answer.rows[0]["grad_weight_bit_ops"] - answer.rows[0]["overhead_bit_ops"] == 64 * 32 * 9 * FP


@pytest.mark.parametrize("method", hotrain.presets())
@pytest.mark.parametrize("model", [TokenNet(), ConvNet()], ids=["tokens", "convolutions"])
def test_asking_equals_converting(model: nn.Module, method: str) -> None:
    x = torch.randn(2, 3, 16, 16) if isinstance(model, TokenNet) else torch.randn(2, 32, 8, 8)
    before = found(model)
    asked = cost(model, x, method=method)
    assert_as_found(model, before)
    hotrain.convert(model, method)
    converted = cost(model, x)
    assert cost(model, x, method="exact").bit_ops_total == cost_of_exact(model, x)
    hotrain.revert(model)
    assert asked.rows == converted.rows


def cost_of_exact(model: nn.Module, x: torch.Tensor) -> int:
    hotrain.revert(model)
    return cost(model, x).bit_ops_total


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(64, 64), (64, 64)), (nn.Linear(64, 64), (64, 1, 64)), (nn.Conv2d(64, 64, 1), (64, 64, 1, 1))],
    ids=["2-D input", "one token a sample", "1×1 image"],
)
def test_samples_are_not_mixed(layer: nn.Module, shape: tuple[int, ...]) -> None:
    # A low-rank step would mix samples, so a layer that was not chosen by name runs exact.
    model = nn.Sequential(layer)
    hotrain.convert(model, "hla")
    x = torch.randn(shape, requires_grad=True)
    row = cost(model, x).rows[0]
    model(x).sum().backward()
    assert model[0]._hotrain.fallback is not None  # the layer says the same
    assert row["method"] == "exact"
    assert row["grad_weight_bit_ops"] == 64**3 * FP


def test_conv1d_of_transformers() -> None:
    from transformers.pytorch_utils import Conv1D

    layer = Conv1D(O, I)
    row = cost(layer, _tokens()).rows[0]
    assert (row["kind"], row["tokens"], row["outputs"], row["inputs"]) == ("Conv1D", T, O, I)


def test_meta_device() -> None:
    with torch.device("meta"):
        model, x = TokenNet(), torch.empty(2, 3, 16, 16)
    hotrain.convert(model, "hot")
    on_meta = cost(model, x)
    real = TokenNet()
    hotrain.convert(real, "hot")
    assert on_meta.rows == cost(real, torch.randn(2, 3, 16, 16)).rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"float_bits": 0}, "float_bits=0"),
        ({"method": "hott"}, "unknown preset"),
    ],
)
def test_bad_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cost(_linear(), _tokens(), **arguments)


def test_nothing_to_count() -> None:
    with pytest.raises(ValueError, match=r"no nn\.Linear"):
        cost(nn.ReLU(), torch.ones(2, 2))
