"""LUQ and SAWB as published, with the published defects put right."""

from __future__ import annotations

import math

import pytest
import torch
from oracle import luq as luq_oracle
from oracle import sawb

from hotrain import draws
from hotrain.published import luq, sawb_scale

LEVELS = {0.0} | {s * 2.0**k for s in (-1, 1) for k in range(8)}


def test_the_complete_set_of_luq_codes() -> None:
    """Zero and ±2⁰..±2⁷: every one is reached over nine octaves, none other."""
    t = torch.cat([torch.logspace(-9, 0, 4000, base=2.0), -torch.logspace(-9, 0, 4000, base=2.0)]).view(80, 100)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        codes, _ = luq(t.to(dtype), 1, draws.GRAD_INPUT)
        assert {abs(c) if c == 0 else c for c in codes.flatten().tolist()} == LEVELS


def test_luq_is_the_definition() -> None:
    t = torch.randn(23, 17, dtype=torch.float64)
    codes, alpha = luq(t, 99, draws.GRAD_WEIGHT)
    want, want_alpha = luq_oracle(t, 99, draws.GRAD_WEIGHT)
    assert torch.equal(codes, want)
    assert float(alpha) == float(want_alpha)


@pytest.mark.parametrize("value", [0.3, 1.0, 1.4, 3.0, 5.9, 100.0, -0.01, -90.0])
def test_luq_is_unbiased(value: float) -> None:
    """`value` in units of alpha. z from the Bernoulli variance between the neighbouring levels; grid error 2⁻¹⁷·gap."""
    n = 1 << 17
    t = torch.full((1, n), value)
    t[0, 0] = 128.0  # sets alpha = 1
    codes, alpha = luq(t, 3, draws.GRAD_INPUT)
    assert float(alpha) == 1
    y = abs(value)
    below = 0.0 if y < 1 else 2.0 ** math.floor(math.log2(y))
    gap = 1.0 if y < 1 else below
    p = (y - below) / gap
    error = float(codes[0, 1:].double().mean()) - value
    assert abs(error) <= gap * (5 * math.sqrt(p * (1 - p) / n) + 2**-16)


def test_the_largest_magnitude_sets_alpha() -> None:
    """The published code takes the largest value: an all-negative tensor gave a negative alpha."""
    t = -torch.rand(4, 8) - 0.1
    codes, alpha = luq(t, 1, 2)
    assert float(alpha) == float(t.abs().max()) / 128
    assert (codes <= 0).all()
    t = torch.randn(64, 64)
    t[3, 3] = -100
    codes, alpha = luq(t, 1, 2)
    assert float(codes.abs().max()) == 128
    assert float(codes[3, 3] * alpha) == -100


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_luq_passes_non_finite_values_on(bad: float) -> None:
    t = torch.randn(4, 8)
    t[1, 2] = bad
    codes, alpha = luq(t, 1, 2)
    assert not torch.isfinite(codes * alpha).any()


def test_luq_of_zeros_denormals_and_nothing() -> None:
    for t in (torch.zeros(3, 4), torch.full((3, 4), 1e-44)):
        codes, alpha = luq(t, 1, 2)
        assert torch.isfinite(codes * alpha).all()
        assert float((codes * alpha).abs().sum()) < 1e-36
    assert luq(torch.zeros(0, 4), 1, 2)[0].shape == (0, 4)


def test_sawb_is_the_formula() -> None:
    t = torch.randn(30, 40, dtype=torch.float64)
    assert float(sawb_scale(t)) == pytest.approx(float(sawb(t)[1]), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "clip_over_rms"),
    # 12.1 − 12.2·E|t|/rms: √(2/π) of a normal, √3/2 of a uniform variable
    [("normal", 12.1 - 12.2 * math.sqrt(2 / math.pi)), ("uniform", 12.1 - 12.2 * math.sqrt(3) / 2)],
)
def test_sawb_clips_inside_the_largest(name: str, clip_over_rms: float) -> None:
    """n = 2²⁰: E|t| is known to 0.6/√n of itself, times 12.2: 0.01 at 1.4 σ; within 0.03."""
    draw = torch.Generator().manual_seed(0)
    t = torch.randn(1 << 20, generator=draw) if name == "normal" else torch.rand(1 << 20, generator=draw) * 2 - 1
    got = 7 * float(sawb_scale(t.view(512, -1))) / float(t.square().mean().sqrt())
    assert abs(got - clip_over_rms) < 0.03


def test_sawb_never_turns_negative_or_beyond_the_largest() -> None:
    """Equal magnitudes make the published clip negative (−0.1); one outlier would make it exceed max|t|."""
    equal = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    assert float(sawb_scale(equal)) == pytest.approx(1 / 7)
    outlier = torch.zeros(1, 100)
    outlier[0, 0] = 2.0  # rms 0.2, mean 0.02: a clip of 2.18
    assert float(sawb_scale(outlier)) == pytest.approx(2 / 7)


def test_sawb_edges() -> None:
    tiny = torch.finfo(torch.float32).tiny
    assert float(sawb_scale(torch.zeros(2, 2))) == tiny
    assert float(sawb_scale(torch.zeros(0, 2))) == tiny
    assert math.isnan(sawb_scale(torch.tensor([[1.0, math.nan]])))
    assert not math.isfinite(sawb_scale(torch.tensor([[1.0, math.inf]])))
