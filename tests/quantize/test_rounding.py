"""Rounding rules: what each does to one number, and its bias."""

from __future__ import annotations

import math

import pytest
import torch
from oracle import round_pseudo, uniform

from hotrain.quantize.integer import ROUNDINGS, pseudo, quantize

N = 1 << 18


def round_(v: torch.Tensor, name: str, key: int, stream: int, start: int = 0) -> torch.Tensor:
    return ROUNDINGS[name](key, stream, v.device)(v, start)


def stochastic(v: torch.Tensor, key: int, stream: int, start: int = 0) -> torch.Tensor:
    return round_(v, "stochastic", key, stream, start)


def test_nearest_rounds_halves_to_even() -> None:
    v = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 0.49, -0.51, 126.5])
    assert round_(v, "nearest", 0, 0).tolist() == [0, 2, 2, 0, -2, 0, -1, 126]


# --- stochastic ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.5, 0.1, 2.75, -0.3, -6.999, 126.4, 1e-3])
def test_stochastic_is_unbiased(value: float, dtype: torch.dtype) -> None:
    """z = (mean − v)/√(p(1−p)/n), p the fraction; the 16-bit grid adds at most 2⁻¹⁷ (here 0.004 σ to 0.06 σ)."""
    got = stochastic(torch.full((N,), value, dtype=dtype), key=5, stream=2)
    p = value - math.floor(value)
    assert set(got.tolist()) <= {math.floor(value), math.floor(value) + 1.0}
    error = float(got.double().mean()) - value
    assert abs(error) < 5 * math.sqrt(p * (1 - p) / N) + 2**-17


def test_stochastic_over_the_whole_range() -> None:
    """Random values: the mean error is a sum of independent zero-mean ones, variance p(1−p) each."""
    v = torch.empty(N).uniform_(-7, 7, generator=torch.Generator().manual_seed(0))
    p = v - v.floor()
    error = stochastic(v.clone(), key=1, stream=2) - v
    z = float(error.double().sum() / (p * (1 - p)).double().sum().sqrt())
    assert abs(z) < 5
    assert float(error.abs().max()) < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_integers_are_left_alone(dtype: torch.dtype) -> None:
    """For every noise value: the largest code must never step over its own range."""
    v = torch.arange(-127, 128, dtype=dtype).repeat_interleave(4096)
    assert torch.equal(stochastic(v.clone(), key=3, stream=1), v)


def test_stochastic_is_floor_of_v_plus_the_documented_noise() -> None:
    v = torch.randn(37, 23, dtype=torch.float64) * 5
    assert torch.equal(stochastic(v.clone(), 11, 4), torch.floor(v + uniform((37, 23), 11, 4)))


def test_a_block_continues_the_noise() -> None:
    v = torch.randn(64, 9)
    whole = stochastic(v.clone(), 11, 4)
    assert torch.equal(stochastic(v[10:].clone(), 11, 4, start=90), whole[10:])


# --- pseudo-stochastic -----------------------------------------------------------------------------------------------

EXACT = [0.0, -0.0, 1.0, -3.0, 0.5, 0.25, 1.25, -1.75, 6.999, 2**-11, 2**-12, 2**-22, 3 * 2**-13, 127.0, 126.99999]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pseudo_follows_the_rule_bit_by_bit(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    v = torch.cat((torch.tensor(EXACT), torch.empty(5000).uniform_(-7, 7, generator=draw))).float().to(dtype)
    want = [round_pseudo(x) for x in v.tolist()]
    assert pseudo(v.clone()).tolist() == want


@pytest.mark.parametrize(
    ("low", "high", "documented"),
    [(0.0, 7.0, -0.001), (1.25, 1.5, 0.002)],
    ids=["U[0,7)", "U[1.25,1.5), where the published kernel is wrong"],
)
def test_bias_of_pseudo_on_float32(low: float, high: float, documented: float) -> None:
    """docs/maths.md: bias −0.001 and +0.002 of a step; n draws of deviation ≤ ½ know it to 3·½/√n = 0.003."""
    v = torch.empty(N).uniform_(low, high, generator=torch.Generator().manual_seed(2))
    bias = float((pseudo(v.clone()) - v).double().mean())
    assert abs(bias - documented) < 1.5 / math.sqrt(N) + 1e-3


def test_bias_of_pseudo_on_bf16_values() -> None:
    """Its limit, documented as +0.485: a bf16 value has no low bits to draw from and always rounds up."""
    v = torch.empty(N).uniform_(0, 7, generator=torch.Generator().manual_seed(3)).bfloat16().float()
    bias = float((pseudo(v.clone()) - v).double().mean())
    assert 0.45 < bias < 0.5


def test_pseudo_needs_no_key_and_repeats_itself() -> None:
    v = torch.randn(1000)
    assert torch.equal(round_(v.clone(), "pseudo", 1, 1), round_(v.clone(), "pseudo", 2, 3))


# --- by name ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stochastic", "nearest", "pseudo"])
def test_non_finite_values_stay(name: str) -> None:
    v = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    got = round_(v, name, 1, 1)
    assert math.isnan(got[0])
    assert not torch.isfinite(got[1:3]).any()
    assert got[3] == 1


@pytest.mark.parametrize("name", ["stochastic", "nearest", "pseudo"])
def test_sign_symmetry_of_zero(name: str) -> None:
    assert round_(torch.zeros(5), name, 1, 1).abs().sum() == 0


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="'floor' is not one of nearest, stochastic, pseudo"):
        quantize(torch.zeros(2, 2), 8, rounding="floor")
