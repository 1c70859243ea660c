"""bench/floors.py: operations and bytes counted by hand, and the floor that a record of them gives."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hotrain_bench.floors import Counting, Layer, count
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import floors
import records

T, I, H, O = 256, 64, 128, 32


def counted(forward: object, parameters: list[Tensor]) -> Counting:
    mode = Counting()
    with mode:
        loss = forward()  # type: ignore[operator]
        mode.is_forward = False
        loss.backward()
        mode.leave(p.grad for p in parameters if p.grad is not None)
    return mode


def test_a_feed_forward_block_by_hand() -> None:
    """Products once each; GELU reads its input and writes its result, in backward it reads two and writes one; the loss
    reads y and writes its gradient in one pass. What a pass makes for itself (y², its sum) is free."""
    x, w, v = torch.randn(T, I), torch.randn(I, H, requires_grad=True), torch.randn(H, O, requires_grad=True)
    counts = counted(lambda: (F.gelu(x @ w) @ v).square().sum(), [w, v]).counts
    wide, narrow = 2 * T * I * H, 2 * T * H * O
    bytes_of_wide, bytes_of_narrow = 4 * (T * I + I * H + T * H), 4 * (T * H + H * O + T * O)
    assert counts.products == {(wide, bytes_of_wide): 2, (narrow, bytes_of_narrow): 3}  # x has no gradient
    h, y = 4 * T * H, 4 * T * O
    assert counts.forward == 2 * h + y
    assert counts.backward == y + 3 * h
    assert counts.saved == h


def test_a_shortcut_is_written_and_read_again() -> None:
    """The sum in front of a product cannot wait in registers until the product is done."""
    x, w = torch.randn(T, I, requires_grad=True), torch.randn(I, I, requires_grad=True)

    def forward() -> Tensor:
        total = x * 2
        return (total @ w + total).sum()

    counts = counted(forward, [x, w]).counts
    t = 4 * T * I
    assert counts.forward == (t + t) + (t + t)  # reads x, writes the sum; reads it and the product
    # The gradient of the loss is one number: it adds the product's and writes that of x.
    assert counts.backward == pytest.approx(2 * t, abs=16)
    assert counts.saved == 0


def test_batch_norm_reads_twice_and_random_masks_cost_nothing() -> None:
    """Its statistics are of all rows; a mask is drawn again."""
    x = torch.randn(T, I, requires_grad=True)
    norm = nn.BatchNorm1d(I)
    counts = counted(lambda: norm(x).sum(), [x]).counts
    assert counts.forward == pytest.approx(2 * 4 * T * I, rel=0.05)
    x = torch.randn(T, I, requires_grad=True)
    counts = counted(lambda: F.dropout(x, 0.5).sum(), [x]).counts
    assert counts.forward == 4 * T * I
    assert counts.saved == 0


def test_a_convolution_of_groups_has_three_times_its_forward() -> None:
    x, conv = torch.randn(2, 8, 10, 10, requires_grad=True), nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
    counts = counted(lambda: conv(x).square().sum(), [x, conv.weight]).counts
    once = 2 * 2 * 8 * 100 * 9
    assert sorted(operations for operations, _ in counts.products) == [once, 2 * once]


@pytest.mark.parametrize(
    ("subject", "layers"),
    [
        ("vit_base_patch16_224/b128", {(4 * 65, 192, 64): 2, (4 * 65, 64, 64): 2}),
        ("gpt2/b8x1024", {(4 * 64, 192, 64): 2, (4 * 64, 64, 64): 2}),
        ("resnet50/b256", {}),
        ("llama8b-4blocks/t8192", {(4 * 64, 128, 64): 4}),
    ],
)
def test_models_without_a_gpu(subject: str, layers: dict[tuple[int, int, int], int]) -> None:
    """Tokens, outputs and inputs of their layers; attention is one product, with dropout too."""
    found = count(subject, tiny=True)
    assert {Layer(*shape): times for shape, times in layers.items()}.items() <= found.layers.items()
    assert found.forward
    assert found.backward > found.saved > 0
    assert bool(found.optimizer) == ("llama" not in subject)


def test_the_floor_of_a_record() -> None:
    """Of one layer: the products of backward, bound by operations, take half in fp8, and packing its bytes."""
    t, o, i = 1024, 512, 256
    once = 2 * t * o * i
    roofs = records.Roofs(copy=1e6, square=0.0, fp8=2e3, bf16=1e3)  # bytes and operations a µs
    row = {
        "products": [[once, 1, 3]],
        "forward_bytes": 3_000_000,
        "backward_bytes": 5_000_000,
        "optimizer_bytes": 1_000_000,
        "saved_bytes": 4_000_000,
        "layers": [[t, o, i, 1]],
    }
    found = floors.floor(row, roofs)
    assert found.products == pytest.approx(3 * once / 1e6)
    assert (found.between, found.optimizer) == pytest.approx((0.008, 0.001))
    packing = (4 * t * o + 3 * t * i + 3 * o * i) / 1e9
    assert found.exact - found.default == pytest.approx(once / 1e6 - packing + 0.5 * 0.004)
