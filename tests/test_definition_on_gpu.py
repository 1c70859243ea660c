"""The definition on a GPU gives the CPU's numbers: the same noise to the bit, gradients to float32's rounding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hotrain
from hotrain import draws
from hotrain.products import int_matmul
from hotrain.quantize.integer import quantize

pytestmark = [
    pytest.mark.gpu,
    # What is tested here is the definition on a GPU: that a layer falls to it is said, and wanted.
    pytest.mark.filterwarnings("ignore:hotrain. no kernel:UserWarning"),
]

PRESETS = [name for name in hotrain.presets() if name != "exact"]


def test_noise_is_the_same_on_both_devices() -> None:
    cpu = draws.noise(1234567, draws.SAVED, torch.device("cpu"))(0, 10_001)
    assert torch.equal(cpu, draws.noise(1234567, draws.SAVED, torch.device("cuda"))(0, 10_001).cpu())


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "pseudo"])
def test_codes_are_the_same_on_both_devices(rounding: str) -> None:
    # Powers of two for scale and values on a fine grid: no product or quotient rounds, so codes must be equal.
    t = torch.randint(-(2**20), 2**20, (300, 77)).float() / 2**20
    t[0, 0] = 127 / 128
    step = torch.tensor(2.0**-7)
    cpu = quantize(t, 8, "tensor", rounding, key=9, step=step)
    gpu = quantize(t.cuda(), 8, "tensor", rounding, key=9, step=step.cuda())
    assert torch.equal(cpu.codes, gpu.codes.cpu())


@pytest.mark.parametrize(
    ("m", "k", "n"),
    [
        (1, 1, 1),  # below every minimum of cuBLAS
        (17, 8, 8),  # just at them
        (100, 49, 7),  # multiples of nothing
        (131072, 64, 576),  # a convolution's columns: refused by cuBLAS with a row-major second operand
        (64, 131072, 576),  # its weight gradient; 131072·127² does not fit int32
    ],
)
def test_integer_products_are_exact(m: int, k: int, n: int) -> None:
    a = torch.randint(-127, 128, (m, k), dtype=torch.int8, device="cuda")
    b = torch.randint(-127, 128, (k, n), dtype=torch.int8, device="cuda")
    rows, columns = slice(0, 512), slice(0, 64)
    want = a[rows].double() @ b[:, columns].double()  # below 2^53: exact
    assert torch.equal(int_matmul(a, b)[rows, columns].double(), want)
    assert torch.equal(int_matmul(a.t().contiguous().t(), b.t().contiguous().t())[rows, columns].double(), want)


def gradients(module: nn.Module, x: torch.Tensor, g: torch.Tensor, device: str) -> list[torch.Tensor]:
    hotrain.manual_seed(3)
    module = module.to(device)
    leaf = x.detach().to(device).requires_grad_()
    return [t.cpu() for t in torch.autograd.grad(module(leaf), (leaf, *module.parameters()), g.to(device))]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kind", ["linear", "conv", "strided", "depthwise", "patches"])
def test_gradients_are_those_of_the_cpu(preset: str, kind: str) -> None:
    module: nn.Module = {
        "linear": nn.Linear(48, 80),
        "conv": nn.Conv2d(32, 48, 3, padding=1),
        "strided": nn.Conv2d(32, 48, 3, stride=2, padding=1, padding_mode="reflect"),
        "depthwise": nn.Conv2d(32, 32, 3, padding="same", groups=32),
        "patches": nn.Conv2d(32, 48, 4, stride=4),
    }[kind].double()
    x = torch.randn(4, 49, 48) if kind == "linear" else torch.randn(4, 32, 14, 14)
    x = x.double()
    # Our own presets would take fp8 on this device and int8 on the CPU: what is compared is one number format.
    number = "int" if hotrain.preset(preset).automatic else None
    hotrain.convert(module, preset, filter_fn=lambda m, name: True, number=number, plan="memory")
    g = torch.randn_like(module(x))
    for name, cpu, gpu in zip(
        ("g_x", "g_w", "g_b"), gradients(module, x, g, "cpu"), gradients(module, x, g, "cuda"), strict=True
    ):
        # float64 carries both; a value at a rounding tie may take the other code: one code of one entry.
        assert (cpu - gpu).norm() <= 1e-3 * cpu.norm(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_trains(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).cuda()
    hotrain.convert(model, number=None, plan="memory")
    x = torch.randn(8, 197, 64, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for _ in range(30):
        with torch.autocast("cuda", dtype):
            loss = (model(x) - x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
