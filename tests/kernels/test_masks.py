"""The masks of dropout in compiled graphs: the kernel's bits, and how they are distributed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hotrain
from hotrain.compress.formats import BITS
from hotrain.draws import hash_bits
from hotrain.kernels import dropout

pytestmark = pytest.mark.usefixtures("poison")


# a byte alone, less than a program has, exactly one, more than one; thresholds on both sides of a signed number's limit
@pytest.mark.parametrize("run", [1, 300, 512, 1500])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_bits_are_hashes_of_the_definition(run: int, p: float, device: torch.device) -> None:
    limit = min(round(p * 2**32), 2**32 - 1)
    word = int(torch.randint(1 << 62, ()))
    got = dropout.mask(torch.tensor(word, device=device), run, 0, limit).cpu()
    hashes = hash_bits(8 * run, word, 0, torch.device("cpu")).long() & 0xFFFFFFFF
    assert torch.equal(got, BITS.keep(hashes >= limit)[0])


def drawn(p: float, elements: int) -> Tensor:
    """Which elements one draw keeps, from the operator that compiled graphs have."""
    bits = torch.ops.hotrain.drawn_mask(torch.randint(1 << 62, ()), elements // 8, p)
    return BITS.restore((bits,), (elements,))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_draws_are_independent(p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of neighbours, of elements a byte's bits apart, of elements of a power of two apart, and of two draws.

    A mean of n products of two independent centered bits has the standard deviation p (1 − p) / √n; of some 80 means
    none is five of them off.
    """
    monkeypatch.setattr("hotrain.autograd.KERNELS", {})
    elements = 1 << 20
    one, other = (drawn(p, elements).double() - (1 - p) for _ in range(2))
    allowed = 5 * p * (1 - p)
    assert abs(one.mean()) < 5 * (p * (1 - p) / elements) ** 0.5
    assert abs((one * other).mean()) < allowed / elements**0.5
    for apart in (*range(1, 33), *(1 << n for n in range(6, 20)), elements // 8, elements // 4):
        products = one[apart:] * one[:-apart]
        assert abs(products.mean()) < allowed / len(products) ** 0.5, apart


def test_a_seed_gives_the_same_step_and_another_one_others(device: torch.device) -> None:
    """Compiled, PyTorch's generator gives the key: forward keeps 1 − p of the elements, scaled; backward the same."""
    model = nn.Sequential(nn.Dropout(0.3), nn.Linear(96, 96, bias=False).requires_grad_(False)).to(device)
    nn.init.eye_(model[1].weight)  # type: ignore[arg-type]
    hotrain.convert(model, "exact", memory="block")
    run = torch.compile(model, backend="aot_eager")
    x = torch.randn(4, 64, 96, device=device, requires_grad=True)

    def step(seed: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        x.grad = None
        y = run(x)
        y.sum().backward()
        assert x.grad is not None
        return y.detach(), x.grad

    with torch.profiler.profile(acc_events=True) as profile:
        y, g = step(1)
    assert "hotrain::drawn_mask" in {event.name for event in profile.events() or ()}
    again, g_again = step(1)
    assert torch.equal(y, again)
    assert torch.equal(g, g_again)
    assert not torch.equal(y, step(2)[0])
    kept = g != 0
    assert torch.equal(y, torch.where(kept, x.detach() * (1 / 0.7), 0.0))
    assert torch.equal(g, kept * torch.tensor(1 / 0.7))
    deviation = (0.3 * 0.7 / x.numel()) ** 0.5
    assert abs(kept.double().mean() - 0.7) < 5 * deviation
