"""The figures that docs/hot.md lists as reproducible come out of the published formulas."""

from __future__ import annotations

import functools

import pytest
import torch
from hotrain_study.published import bit_operations, flop_overhead, memory
from small_models import timm_model
from torch import nn

import hotrain

# Giga bit operations at 224 px, 100 classes, batch 1: forward, then the backward of exact, lbp-wht, luq, and of hot at
# r = 16, 8, 4, 2, 1.
# Table 2 of HOT names its 1383.54 EfficientFormer-L1; it is L7's.
GBOPS = {
    "vit_base_patch16_224": (17252.16, 34504.31, 8746.30, 1733.87, 2196.12, 1604.72, 1309.02, 1161.17, 1087.25),
    "vit_small_patch16_224": (4342.65, 8685.31, 2231.75, 469.22, 611.60, 460.63, 385.14, 347.40, 328.53),
    "resnet50": (4185.4, 8370.87, 2227.60, 575.14, 722.09, 573.49, 499.19, 462.04, 443.46),
    "efficientformer_l1": (1318.3, 2636.61, 707.97, 209.02, 273.81, 223.98, 199.06, 186.60, 180.37),
    "efficientformer_l7": (10335.6, 20671.20, 5369.76, 1370.72, 1760.03, 1383.54, 1195.29, 1101.17, 1054.11),
}
RANKS = (16, 8, 4, 2, 1)


@functools.cache
def _on_meta(name: str) -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        return timm_model(name, num_classes=100), torch.empty(1, 3, 224, 224)


@pytest.mark.parametrize("name", GBOPS)
def test_giga_bit_operations(name: str) -> None:
    model, image = _on_meta(name)
    forward, exact, lbp, luq, *hot = GBOPS[name]

    def backward(method: str | hotrain.Method) -> float:
        return bit_operations(model, image, method)[1] / 1e9

    # The published figures have two decimals, two of the forwards one.
    assert bit_operations(model, image)[0] / 1e9 == pytest.approx(forward, abs=0.051)
    assert backward("exact") == pytest.approx(exact, abs=0.00501)
    assert backward("lbp-wht") == pytest.approx(lbp, abs=0.00501)
    assert backward("luq") == pytest.approx(luq, abs=0.00501)
    for rank, published in zip(RANKS, hot, strict=True):
        assert backward(hotrain.preset("hot", rank=rank)) == pytest.approx(published, abs=0.00501), rank


@pytest.mark.parametrize(
    ("method", "total"), [("exact", 51756.47), ("lbp-wht", 25998.46), ("luq", 18986.02), ("hot", 18856.88)]
)
def test_totals_of_vit_base(method: str, total: float) -> None:
    model, image = _on_meta("vit_base_patch16_224")
    # a sum of two rounded figures
    assert sum(bit_operations(model, image, method)) / 1e9 == pytest.approx(total, abs=0.0101)


def test_frozen_base_of_lora() -> None:
    # The calculator's branch: (LO lg + OI lg + LO + OI + LI)·1024 + LOI·16, and both products for exact.
    layer = nn.Linear(32, 48)
    layer.weight.requires_grad_(False)
    L, O, I = 64, 48, 32
    x = torch.randn(4, 16, 32, requires_grad=True)
    assert bit_operations(layer, x, "hot")[1] == (5 * L * O + 5 * O * I + L * I) * 1024 + L * O * I * 16
    assert bit_operations(layer, x)[1] == 2 * L * O * I * 1024
    with pytest.raises(ValueError, match="no published formula for 'hla'"):
        bit_operations(layer, x, "hla")


# GiB of training ViT-B with 100 classes: exact, HOT.
VIT_BASE = {
    64: (9.741, 2.892),
    128: (17.568, 3.870),
    256: (33.223, 5.827),
    512: (64.53, 9.74),
    1024: (127.15, 17.57),
}
# The others at batch 128.
AT_128 = {
    "resnet50": (5.653, 1.016),
    "efficientformer_l7": (13.742, 3.018),
    "vit_small_patch16_224": (8.309, 1.460),
}
MEMORY = [("vit_base_patch16_224", batch, *figures) for batch, figures in VIT_BASE.items()]
MEMORY += [(name, 128, *figures) for name, figures in AT_128.items()]


@pytest.mark.parametrize(("name", "batch", "exact", "hot"), MEMORY)
def test_memory(name: str, batch: int, exact: float, hot: float) -> None:
    model, image = _on_meta(name)
    digits = 0.00501 if batch > 256 else 0.000501
    assert memory(model, batch, image) / 2**30 == pytest.approx(exact, abs=digits)
    assert memory(model, batch, image, "hot") / 2**30 == pytest.approx(hot, abs=digits)


def test_memory_worked_example() -> None:
    model, image = _on_meta("vit_base_patch16_224")
    activations = 32_830_564 * 128 * 4
    assert (memory(model, 128, image) - activations) / 4 / 2**30 == pytest.approx(0.478, abs=0.000501)


def test_memory_does_not_depend_on_the_batch_shown() -> None:
    model, _ = _on_meta("vit_small_patch16_224")
    shown = [memory(model, 128, torch.empty(size, 3, 224, 224, device="meta")) for size in (1, 3)]
    assert shown[0] == shown[1]


def test_flop_overhead_of_table_5() -> None:
    vanilla, overhead = flop_overhead(49, 448, 1792)
    assert vanilla / 1e6 == pytest.approx(157.35, abs=0.00501)  # the paper prints 137.3
    assert overhead / 1e6 == pytest.approx(11.02, abs=0.00501)
    vanilla, swapped = flop_overhead(49, 1792, 448)
    assert swapped / 1e6 == pytest.approx(11.54, abs=0.00501)  # the paper's 11.5, with O and I exchanged
    assert swapped / vanilla == pytest.approx(0.073, abs=0.000501)
    vanilla, overhead = flop_overhead(197, 2304, 768)
    assert overhead / vanilla == pytest.approx(0.0226, abs=0.0000501)
