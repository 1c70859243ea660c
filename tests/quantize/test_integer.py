"""Symmetric integer codes: their complete sets, their scales, their edges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import codes, sqnr_db
from torch import Tensor

from hotrain import draws
from hotrain.quantize.integer import Quantized, largest_code, pack, quantize, scale_of, unpack

ROUNDINGS = ["nearest", "stochastic", "pseudo"]
AXES = ["tensor", "token", "column"]
TINY = torch.finfo(torch.float32).tiny


def q(t: Tensor, bits: int = 8, scale: str = "tensor", rounding: str = "nearest") -> Quantized:
    return quantize(t, bits, scale, rounding, key=7)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_the_complete_set_of_codes(bits: int, rounding: str) -> None:
    """Every code of the format is reached, none other: 15 of int4, 255 of int8, −2^(b−1) unused."""
    top = largest_code(bits)
    t = torch.linspace(-top, top, 40 * top + 1).view(1, -1)
    assert set(q(t, bits, rounding=rounding).codes.flatten().tolist()) == set(range(-top, top + 1))
    assert top == 2 ** (bits - 1) - 1


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_grid_value_is_its_own_code(bits: int, rounding: str) -> None:
    """A power of two as the scale: nothing is lost, whatever the rounding."""
    top = largest_code(bits)
    grid = torch.arange(-top, top + 1)
    got = q((grid * 0.25).view(1, -1), bits, rounding=rounding)
    assert torch.equal(got.codes.flatten().long(), grid)
    assert float(got.scale) == 0.25
    assert torch.equal(got.dequantize(), (grid * 0.25).view(1, -1))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (17, 16), (16, 33)], ids=str)
def test_codes_are_the_definitions(bits: int, axis: str, rounding: str, shape: tuple[int, int]) -> None:
    t = torch.randn(shape, dtype=torch.float64)
    got = quantize(t, bits, axis, rounding, key=123, stream=draws.WEIGHT)
    want, scale = codes(t, bits, axis, rounding, 123, draws.WEIGHT)
    torch.testing.assert_close(got.scale, scale, rtol=1e-15, atol=0)
    assert got.scale.shape == {"tensor": (), "token": (shape[0], 1), "column": (1, shape[1])}[axis]
    assert torch.equal(got.codes.double(), want)


@pytest.mark.parametrize("rows", [2, 500, 4001])
@pytest.mark.parametrize("columns", [1, 17, 300])
def test_large_tensors_are_cut_without_a_seam(rows: int, columns: int) -> None:
    """On a CPU rows are processed in blocks; codes must be those of the tensor in one piece, also at odd widths."""
    t = torch.randn(rows, columns, dtype=torch.float64)
    for axis in AXES:
        got = quantize(t, 8, axis, "stochastic", key=5)
        assert torch.equal(got.codes.double(), codes(t, 8, axis, "stochastic", 5)[0])


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("bits", [4, 8])
def test_the_error_is_bounded_by_the_step(axis: str, bits: int) -> None:
    """Half a step for nearest, one for the others; plus rounding of t/scale in float32 (127·2⁻²³ of a step)."""
    t = torch.randn(40, 24)
    for rounding, steps in (("nearest", 0.5), ("stochastic", 1.0), ("pseudo", 1.0)):
        got = quantize(t, bits, axis, rounding, key=1)
        assert ((got.dequantize() - t).abs() <= (steps + 1e-4) * got.scale).all(), rounding


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bits", [4, 8])
def test_signal_to_noise_ratio_of_uniform_values(bits: int, dtype: torch.dtype) -> None:
    """Nearest: noise s²/12, signal (top·s)²/3, so 20·log10(2·top) dB: 22.9 and 48.1. Stochastic: s²/6, 3 dB less.

    16-bit inputs are quantized as they are given, so their own rounding does not count. Within 0.3 dB at 2¹⁵ values.
    """
    t = torch.empty(128, 256, dtype=torch.float64).uniform_(-1, 1, generator=torch.Generator().manual_seed(0)).to(dtype)
    want = 20 * math.log10(2 * largest_code(bits))
    assert abs(sqnr_db(q(t, bits).dequantize(), t) - want) < 0.3
    assert abs(sqnr_db(q(t, bits, rounding="stochastic").dequantize(), t) - (want - 10 * math.log10(2))) < 0.3


def test_a_scale_a_token_survives_an_outlier() -> None:
    """One row a thousand times the others: a scale for the tensor rounds the others to zero, a per-row one does not."""
    t = torch.randn(16, 64)
    t[3] *= 1000
    rest = torch.arange(16) != 3
    assert q(t, 4, "tensor").dequantize()[rest].abs().sum() == 0
    assert sqnr_db(q(t, 4, "token").dequantize()[rest], t[rest]) > 14  # 7 steps a row of normal values


# --- edges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("axis", AXES)
def test_zeros_give_zero_codes(axis: str, rounding: str) -> None:
    got = q(torch.zeros(4, 6), 8, axis, rounding)
    assert got.codes.abs().sum() == 0
    assert torch.equal(got.dequantize(), torch.zeros(4, 6))
    assert (got.scale > 0).all()


@pytest.mark.parametrize("value", [3.7, -1e-20, 1e30])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_constant_is_the_largest_code(bits: int, value: float) -> None:
    got = q(torch.full((3, 5), value), bits)
    assert set(got.codes.flatten().tolist()) == {int(math.copysign(largest_code(bits), value))}
    torch.testing.assert_close(got.dequantize(), torch.full((3, 5), value), rtol=1e-6, atol=0)


def test_denormals_round_to_zero_and_never_divide_by_zero() -> None:
    t = torch.full((2, 3), 1e-41)
    got = q(t)
    assert float(got.scale) == TINY
    assert got.codes.abs().sum() == 0
    assert torch.isfinite(q(torch.full((2, 3), 1e-41), rounding="stochastic").dequantize()).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_one_outlier_is_kept_and_the_rest_vanishes(bits: int) -> None:
    t = torch.full((4, 8), 1e-3)
    t[1, 2] = -1e6
    got = q(t, bits)
    assert int(got.codes[1, 2]) == -largest_code(bits)
    assert int(got.codes.abs().sum()) == largest_code(bits)
    torch.testing.assert_close(got.dequantize()[1, 2], t[1, 2])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("axis", AXES)
def test_a_non_finite_entry_is_never_quantized_away(axis: str, rounding: str, bad: float) -> None:
    """All that shares its scale becomes non-finite, all of it; with a per-row or per-column scale the rest stays."""
    t = torch.randn(5, 7)
    t[2, 3] = bad
    value = q(t, 8, axis, rounding).dequantize()
    hit = torch.zeros(5, 7, dtype=torch.bool)
    rows = slice(None) if axis != "token" else slice(2, 3)
    columns = slice(None) if axis != "column" else slice(3, 4)
    hit[rows, columns] = True
    assert not torch.isfinite(value[hit]).any()
    assert torch.isfinite(value[~hit]).all()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("axis", AXES)
def test_empty(axis: str, shape: tuple[int, int]) -> None:
    got = q(torch.zeros(shape), 4, axis, "stochastic")
    assert got.codes.shape == shape
    assert got.dequantize().shape == shape
    assert unpack(pack(got.codes), shape[1]).shape == shape


@pytest.mark.parametrize("axis", AXES)
def test_views(axis: str) -> None:
    t = torch.randn(48, 30)
    for view in (t.T, t[::2], t[:, ::3]):
        got, want = (quantize(v, 8, axis, "stochastic", key=2) for v in (view, view.contiguous()))
        assert torch.equal(got.codes, want.codes)
        assert torch.equal(got.scale, want.scale)


def test_the_input_is_left_as_it_was() -> None:
    """Rounding works in place: on its own copy."""
    for dtype in (torch.float32, torch.float64):
        t = torch.randn(4, 6, dtype=dtype)
        before = t.clone()
        q(t, 8, "token", "stochastic")
        assert torch.equal(t, before)


# --- the value -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "axis", "dtype", "nbytes"),
    [
        (8, "tensor", torch.float32, 3 * 5 + 4),
        (8, "token", torch.bfloat16, 3 * 5 + 3 * 4),  # scales are float32 for 16-bit inputs
        (4, "tensor", torch.float32, 3 * 3 + 4),  # five codes take three bytes
        (4, "token", torch.float64, 3 * 3 + 3 * 8),
        (4, "column", torch.float32, 3 * 3 + 5 * 4),
    ],
)
def test_bytes(bits: int, axis: str, dtype: torch.dtype, nbytes: int) -> None:
    got = q(torch.randn(3, 5).to(dtype), bits, axis)
    assert (pack(got.codes) if bits == 4 else got.codes).nbytes + got.scale.nbytes == nbytes


def test_packing_changes_no_number() -> None:
    got = q(torch.randn(6, 9), 4, "token", "stochastic")
    assert torch.equal(unpack(pack(got.codes), 9), got.codes)


def test_dequantize_in_another_dtype() -> None:
    assert q(torch.randn(3, 4)).dequantize(torch.bfloat16).dtype == torch.bfloat16


def test_a_given_step_clamps() -> None:
    got = quantize(torch.tensor([[-100.0, -1.4, 0.6, 100.0]]), 4, step=torch.tensor(1.0))
    assert got.codes.tolist() == [[-7, -1, 1, 7]]


def test_arguments_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="needs a key"):
        quantize(torch.randn(2, 2), 8, rounding="stochastic")
    with pytest.raises(ValueError, match="'row' is not one of tensor, token, column"):
        scale_of(torch.randn(2, 2), 8, "row")
    with pytest.raises(ValueError, match="'up' is not one of"):
        quantize(torch.randn(2, 2), 8, rounding="up")


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 30),
    columns=st.integers(1, 40),
    bits=st.sampled_from([4, 8]),
    axis=st.sampled_from(AXES),
    power=st.integers(-30, 30),
)
def test_any_shape_and_magnitude(rows: int, columns: int, bits: int, axis: str, power: int) -> None:
    """Codes do not depend on the magnitude: scaling by a power of two scales the scale alone."""
    t = torch.randn(rows, columns)
    a, b = q(t, bits, axis), q(t * 2.0**power, bits, axis)
    assert torch.equal(a.codes, b.codes)
    torch.testing.assert_close(b.scale, a.scale * 2.0**power, rtol=1e-6, atol=2.0 * TINY)


@pytest.mark.parametrize("bits", [4, 8])
def test_stochastic_codes_are_unbiased_entry_by_entry(bits: int) -> None:
    """400 keys; z of every entry's mean, 256 entries, 5σ (σ from p(1−p)); nearest fails the same bound."""
    t, keys = torch.randn(16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(4)), 400
    total = sum(quantize(t, bits, "token", "stochastic", key).dequantize() for key in range(keys))
    scale = scale_of(t, bits, "token")
    p = (t / scale) - (t / scale).floor()
    sigma = (p * (1 - p) / keys).sqrt() * scale + 2**-17 * scale
    z = (total / keys - t) / sigma  # type: ignore[operator]
    inner = p * (1 - p) > 1e-6  # an integer has no noise
    assert float(z[inner].abs().max()) < 5
    biased = (quantize(t, bits, "token").dequantize() - t) / sigma
    assert float(biased[inner].abs().max()) > 5
