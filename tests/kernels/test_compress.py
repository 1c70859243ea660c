"""The codes that the kernels write are those of `hotrain.backward` and `hotrain.saved`, shape by shape."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import KEY, ON_GPU, cases, few, gpu_only, key_on, layout_of
from torch import Tensor

pytest.importorskip("triton")

from hotrain import draws
from hotrain.kernels import quantize_kernels as C
from hotrain.kernels.reference import kept_rows
from hotrain.layer_record import AmaxHistory
from hotrain.method import GradInput
from hotrain.quantize.integer import quantize
from hotrain.transform.hadamard import rotate
from hotrain.transform.tokens import project

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CHANNELS = [48, *gpu_only(3, 100, 768, 1000, 3072)]
# float32 sums of 16 products in another order differ by a few 2⁻²⁴ of the operands; a code moves when that crosses a
# boundary, about one entry in 2²⁴/(largest code · 16). An int8 code may so move by one.
MOVED = 1e-4


FP8_NAN = pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter casts NaN to a finite fp8 code")


def matrix(tokens: int, channels: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random data with outlier channels, as gradients have them."""
    t = torch.randn(tokens, channels, device=device)
    t[:, :: max(1, channels // 3)] *= 20
    return t.to(dtype)


def fp8(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The definition in float64: codes and their power-of-two scale."""
    top = torch.finfo(dtype).max
    finite = t[torch.isfinite(t)].abs()
    largest = finite.max().double() if finite.numel() else torch.zeros((), dtype=torch.float64, device=t.device)
    mantissa, exponent = torch.frexp(largest / top)
    scale = torch.ldexp(torch.ones_like(largest), exponent - (mantissa == 0.5).to(exponent.dtype))
    return (t.double() / scale).float().to(dtype), scale


def assert_sums(sums: Tensor, t: Tensor) -> None:
    """The sums over tokens: float32's, with one rounding to t's precision, which the interpreter truncates to."""
    assert sums.dtype == t.dtype
    exact, widest = t.double().sum(0), torch.finfo(t.dtype)
    error = 2**-21 * t.double().abs().sum(0).max() + (t.dtype != torch.float32) * widest.eps * exact.abs()
    assert ((sums.double() - exact).abs() <= error)[exact.abs() < widest.max].all()


@pytest.mark.parametrize(("lead", "grid", "rank", "sampled"), cases())
@pytest.mark.parametrize("tiling", [C.Tiling(1, 16, 1), C.Tiling(4, 16, 4), C.Tiling(8, 16, 4, 1)], ids=str)
@pytest.mark.usefixtures("poison")
def test_drawn_rows_are_those_of_the_layout(lead, grid, rank, sampled, tiling, device):
    """Also with several programs for a tile, which must draw alike, and where the last block has fewer tiles."""
    lay = layout_of(lead, grid, rank, sampled)
    t = torch.randn(lay.samples * lay.tokens, 80, device=device)
    for key in (0, 5, KEY) if tiling.tiles == 1 or ON_GPU else (KEY,):
        word, output = key_on(device, key), C.Output(C.COPY)
        want = kept_rows(lay, word)
        rows = torch.full_like(want, 255)
        drawn = C.compress(t, lay, rows, word, projected=output, draw=True, tiling=tiling)[2]
        assert torch.equal(rows, want)
        assert torch.equal(drawn, C.compress(t, lay, want, word, projected=output, tiling=tiling)[2])


@pytest.mark.parametrize("projected", [C.INT, C.E4M3], ids=["int8", "e4m3"])
@pytest.mark.parametrize("rotated", [C.NONE, C.INT, C.E4M3], ids=["alone", "int8", "e4m3"])
@pytest.mark.usefixtures("poison")
def test_rows_are_drawn_in_whichever_pass_is_first(rotated, projected, device):
    """One pass in fp8, two for integers, of which the first may be of the other output alone (`forward="int8"`)."""
    lay = layout_of((2, 50), None, 8, 4)
    t, key = torch.randn(100, 48, device=device), key_on(device)
    want = kept_rows(lay, key)
    rows = torch.full_like(want, 255)
    limits = {C.NONE: 0.0, C.INT: 127.0, C.E4M3: 448.0}
    outputs = C.Output(rotated, limits[rotated], each=rotated == C.INT), C.Output(projected, limits[projected])
    drawn = C.compress(t, lay, rows, key, *outputs, draw=True, history=AmaxHistory.on(device))
    given = C.compress(t, lay, want, key, *outputs, history=AmaxHistory.on(device))
    assert torch.equal(rows, want)
    for a, b in zip(drawn, given, strict=True):
        assert (a is None and b is None) or torch.equal(a.float(), b.float())


@pytest.mark.parametrize("scale", ["each", "tensor"])
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize(("lead", "grid", "rank", "sampled"), cases())
@pytest.mark.usefixtures("poison")
def test_integer_codes_are_the_definitions(lead, grid, rank, sampled, channels, dtype, rounding, scale, device):
    """int4 of g_y H, with a scale or one of each token, and int8 of P g_y, with a scale or one of each channel; noise
    included: the same numbers, not similar ones."""
    each = scale == "each"
    lay = layout_of(lead, grid, rank, sampled)
    t = matrix(lay.samples * lay.tokens, channels, dtype, device)
    key = key_on(device)
    noisy = rounding == "stochastic"
    rows = torch.empty_like(kept_rows(lay, key))
    rot, rot_scale, proj, proj_scale, sums = C.compress(
        t, lay, rows, key,
        C.Output(C.INT, 7.0, noisy, draws.GRAD_INPUT, each), C.Output(C.INT, 127.0, noisy, draws.GRAD_WEIGHT, each),
        sums=True, draw=True,
    )  # fmt: skip
    assert torch.equal(rows, kept_rows(lay, key))
    want = quantize(rotate(t.float()), 4, "token" if each else "tensor", rounding, KEY, draws.GRAD_INPUT)
    axis, projected = "column" if each else "tensor", project(t.float().view(*lead, channels), lay, KEY)
    kept = quantize(projected, 8, axis, rounding, KEY, draws.GRAD_WEIGHT)
    torch.testing.assert_close(rot_scale.view(-1), want.scale.view(-1), rtol=2**-20, atol=0)
    torch.testing.assert_close(proj_scale.view(-1), kept.scale.view(-1), rtol=2**-20, atol=0)
    moved = (rot.int() - want.codes.int()).abs()
    assert moved.max() <= 1
    if noisy:
        # Three channels in a block of 16 have four sums, each of which is in four entries.
        assert few(moved > 0, MOVED, 16 // min(16, 1 << (channels - 1).bit_length()))
    else:
        # Sums of a few bfloat16 numbers are halfway between two codes more often than that (three: 6 in 10,000), so
        # each entry that moved is asked whether it does, within what float32 may err: four additions of 2⁻²⁴ of
        # Σ|t|/4 ≤ 28 scales each, twice, and two divisions of 7.
        exact = rotate(t.double()) / want.scale.double()
        assert ((exact - exact.floor() - 0.5).abs()[moved > 0] <= 2**-15).all()
    moved = (proj[:channels, : lay.rows].t().int() - kept.codes.int()).abs()
    assert moved.max() <= 1
    assert few(moved > 0, MOVED * 16)
    assert not proj[:, lay.rows :].any(), "the padding of the contraction must be zero"
    assert_sums(sums, t)


@pytest.mark.parametrize("number", [C.E4M3, C.E5M2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize(("lead", "grid", "rank", "sampled"), cases())
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")  # numpy's, of sums in float16
@pytest.mark.usefixtures("poison")
def test_fp8_codes_are_the_definitions_whatever_was_guessed(lead, grid, rank, sampled, channels, dtype, number, device):
    """Without a guess, with a right one, after a sudden growth and after a sudden fall of the gradient.

    e5m2 reaches 2⁻³² of its largest number, below what float32 leaves of a sum that cancels: four additions in two
    orders, each 2⁻²⁴ of Σ|t|/4 ≤ 4 max|t|, are 2⁻¹⁹ of the largest entry that was mixed.
    """
    lay = layout_of(lead, grid, rank, sampled)
    key, history = key_on(device), AmaxHistory.on(device)
    rows = kept_rows(lay, key)
    dtype8 = C.DTYPES[number]
    output = C.Output(number, torch.finfo(dtype8).max)
    step = torch.finfo(dtype8).smallest_normal * torch.finfo(dtype8).eps
    base = matrix(lay.samples * lay.tokens, channels, dtype, device)
    for growth in (1.0, 1.0, 200.0, 2.0**-8):
        t = (base.float() * growth).to(dtype)
        rot, rot_scale, proj, proj_scale, sums = C.compress(
            t, lay, rows, key, output, output, sums=True, history=history
        )
        tokenwise, channelwise = (t.double().abs().amax(axis, keepdim=True) for axis in (1, 0))
        for codes, scale, exact, mixed in (
            (rot, rot_scale, rotate(t.float()), tokenwise),
            (
                proj[:channels, : lay.rows].t(),
                proj_scale,
                project(t.float().view(*lead, channels), lay, KEY),
                channelwise,
            ),
        ):
            want, want_scale = fp8(exact, dtype8)
            assert torch.frexp(scale.double())[0] == 0.5, "a power of two"
            assert want_scale <= scale.double() <= want_scale * 2**5
            error = (codes.double() * scale.double() - want.double() * want_scale).abs()
            # Equal but for underflow below the kernel's scale, and a few neighbours where float32 sums differ.
            near = error <= 0.5 * step * scale.double() * 1.001
            neighbour = 2 * torch.finfo(dtype8).eps * exact.double().abs() + step * scale.double() + 2**-19 * mixed
            assert (error <= neighbour).all()
            assert few(~near, 16 * MOVED)
        assert not proj[:, lay.rows :].float().any()
        assert not proj[channels:].float().any()
        assert_sums(sums, t)
        assert not any(row[1:].any() for row in history.rows), "tickets and bins are cleared for the next step"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("number", [C.INT, *(pytest.param(n, marks=FP8_NAN) for n in (C.E4M3, C.E5M2))])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, in the interpreter
def test_a_non_finite_entry_is_passed_on(number, bad, device):
    """Its token's codes (fp8) or all under its scale (integers) come back non-finite, and the next step is clean."""
    lay = layout_of((2, 32), None, 8, 4)
    key, history = key_on(device), AmaxHistory.on(device)
    rows = kept_rows(lay, key)
    limit = {C.INT: 127.0, C.E4M3: 448.0, C.E5M2: 57344.0}[number]
    good = torch.randn(64, 32, device=device)
    t = good.clone()
    t[5, 7] = bad
    for data, clean in ((good, True), (t, False), (good, True)):
        rot, rot_scale, proj, proj_scale, sums = C.compress(
            data, lay, rows, key, C.Output(number, limit), C.Output(number, limit), sums=True, history=history
        )
        assert bool((rot.float() * rot_scale).isfinite().all()) is clean
        assert bool((proj.float() * proj_scale).isfinite().all()) is clean
        assert bool(sums.isfinite().all()) is clean
        if not clean and number != C.INT:
            assert not (rot[5].float() * rot_scale)[:16].isfinite().any(), (
                "the block of 16 channels that it was rotated into"
            )
            # A NaN is a code of its own; an infinity, which the cast saturates, makes the scale NaN and all with it.
            assert bool((rot[6].float() * rot_scale).isfinite().all()) is (bad != bad)


@pytest.mark.parametrize("number", [C.INT, C.E4M3])
def test_zeros_and_denormals(number, device):
    lay = layout_of((2, 32), None, 8, 0)
    key, history = key_on(device), AmaxHistory.on(device)
    rows = kept_rows(lay, key)
    limit = 127.0 if number == C.INT else 448.0
    for value in (0.0, 1e-41):
        t = torch.full((64, 32), value, device=device)
        rot, rot_scale, proj, proj_scale, _ = C.compress(
            t, lay, rows, key, C.Output(number, limit), C.Output(number, limit), history=history
        )
        assert (rot.float() * rot_scale).abs().max() <= 16 * value
        assert (proj.float() * proj_scale).abs().max() <= 16 * value
        assert rot_scale.isfinite().all()
        assert proj_scale > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_numbers_the_projection_itself_is_written(dtype, device):
    """HLA: P t in t's precision, transposed."""
    lay = layout_of((2, 50), None, 8, 4)
    key = key_on(device)
    t = matrix(100, 48, dtype, device)
    _, _, proj, scale, _ = C.compress(t, lay, kept_rows(lay, key), key, projected=C.Output(C.COPY))
    assert scale is None
    want = project(t.double().view(2, 50, 48), lay, KEY)
    error = (proj[:48, : lay.rows].t().double() - want).abs()
    # One rounding to t's precision, and 16 float32 roundings of the sums.
    assert (error <= torch.finfo(dtype).eps * want.abs() + 2**-20 * t.double().abs().max()).all()


def test_strided_rows_are_read_where_they_lie(device):
    lay = layout_of((2, 32), None, 8, 0)
    key = key_on(device)
    rows = kept_rows(lay, key)
    wide = torch.randn(64, 100, device=device)
    part = wide[:, 20:68]
    outputs = C.Output(C.INT, 7.0, each=True), C.Output(C.INT, 127.0)
    a = C.compress(part, lay, rows, key, *outputs, sums=True)
    b = C.compress(part.contiguous(), lay, rows, key, *outputs, sums=True)
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    "tiling", [C.Tiling(2, 64, 4), C.Tiling(8, 64, 4, 1), C.Tiling(4, 32, 2, 2), C.Tiling(1, 16, 1)], ids=str
)
def test_the_tiling_changes_nothing(tiling, device):
    lay = layout_of((2, 50), None, 8, 4)
    key = key_on(device)
    rows = kept_rows(lay, key)
    t = torch.randn(100, 48, device=device)
    outputs = C.Output(C.INT, 7.0, True, draws.GRAD_INPUT, True), C.Output(C.INT, 127.0, True, draws.GRAD_WEIGHT)
    for x, y in zip(
        C.compress(t, lay, rows, key, *outputs, tiling=tiling), C.compress(t, lay, rows, key, *outputs), strict=True
    ):
        assert (x is None and y is None) or torch.allclose(
            x.float(), y.float(), rtol=2**-20, atol=1.0 if x.dtype == torch.int8 else 0
        )


@pytest.mark.parametrize(("outputs", "inputs"), [(48, 100), (100, 3), (7, 32), *gpu_only((1000, 768))])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("scale", "rounding"), [("tensor", "nearest"), ("column", "stochastic")])
def test_weight_codes_are_the_definitions(outputs, inputs, dtype, scale, rounding, device):
    from hotrain.backward import rotated_weight

    w = torch.randn(outputs, inputs, device=device).to(dtype)
    path = GradInput("hadamard", bits=4, weight_scale=scale, weight_rounding=rounding)
    want = rotated_weight(w.float(), path, KEY)
    output = C.Output(C.INT, 7.0, rounding == "stochastic", draws.WEIGHT, scale == "column")
    codes, found = C.compress_weight(w, key_on(device), output, None)
    torch.testing.assert_close(found.view(-1), want.scale.view(-1), rtol=2**-20, atol=0)
    moved = (codes[: w.shape[1], : want.codes.shape[0]].t().int() - want.codes.int()).abs()
    assert moved.max() <= 1
    assert few(moved > 0, MOVED)


def test_a_matrix_beyond_the_indices_is_refused(device):
    """Said before anything is launched; an expanded row takes no memory."""
    t = torch.zeros(1, 16, device=device).expand(1 << 31, 16)
    with pytest.raises(ValueError, match="2147483648 tokens"):
        C.compress(t, layout_of((1, 16), None, 8, 0), None, key_on(device), C.Output(C.INT, 7.0))
