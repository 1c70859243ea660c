"""The int8 product is exact; the fp8 product is PyTorch's."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import gpu_only

pytest.importorskip("triton")

from hotrain.kernels.gemm import Blocks, fp8_product, int8_product

SMALL = Blocks(32, 32, 32, 4, 2)


@pytest.mark.parametrize("limit", [7, 127], ids=["int4", "int8"])
@pytest.mark.parametrize("split", [1, 3, None])
@pytest.mark.parametrize("each", [True, False])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (48, 100, 64),
        (17, 3, 300),
        (1, 40, 1000),
        *gpu_only((2304, 768, 12928), (197, 1000, 3072)),
    ],
)
@pytest.mark.usefixtures("poison")
def test_int8_product_is_exact(m, n, k, each, split, limit, device):
    """Codes over their whole range, with every sum exact in int32, then one multiplication a scale in float32."""
    a = torch.randint(-limit, limit + 1, (m, k), dtype=torch.int8, device=device)
    b = torch.randint(-limit, limit + 1, (n, k), dtype=torch.int8, device=device)
    scale_a = torch.rand(m if each else (), device=device)
    scale_b = torch.rand(n if each else (), device=device)
    blocks = Blocks() if device.type == "cuda" else SMALL
    got = int8_product(a, b, scale_a, scale_b, torch.float32, blocks, split)
    exact = (a.double() @ b.double().t()).float()
    want = exact * (scale_a[:, None] if each else scale_a) * (scale_b[None] if each else scale_b)
    assert torch.equal(got, want)


def test_fp8_product_against_float64(device):
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 units")
    a = torch.randn(64, 96, device=device).to(torch.float8_e4m3fn)
    b = torch.randn(48, 96, device=device).to(torch.float8_e4m3fn)
    got = fp8_product(a, b, torch.tensor(2.0, device=device), torch.tensor(0.25, device=device), torch.float32)
    want = 0.5 * a.double() @ b.double().t()
    # Sums of 96 products in float32, or in the tensor cores' accumulators of 14 bits or more a step of 32.
    assert (got - want).abs().max() <= 2**-12 * (a.double().abs() @ b.double().abs().t()).max()
