"""What lives between forward and backward: exactly the format's bytes, the key, and the weight where it is needed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from oracle import keep, projection
from torch import Tensor

import hotrain
from hotrain import functional
from hotrain.layer import Config
from hotrain.method import Saved
from hotrain.saved import Bits, Format, Grouped, Levels, dither, group_size, pack_parts, unpack_parts, values

NAMES = hotrain.presets()
KEY = 0xFEED
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

FORMATS = [
    Saved(),
    Saved(8),
    Saved(8, scale="row", rounding="stochastic"),
    Saved(4, scale="row", rounding="stochastic"),
    Saved(4),
    Saved(4, number="sawb"),
    Saved(8, rounding="pseudo"),
    Saved(8, "e4m3"),
]


@pytest.mark.parametrize("spec", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (6, 5), (7, 32)], ids=str)
def test_a_format_keeps_the_bytes_it_says(spec: Saved, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Also for odd columns (a half-filled byte a row) and for no rows."""
    form = Format(spec, shape[1], dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows = torch.randn(shape, dtype=dtype if spec.bits is None else wide)
    kept = form.keep(rows, KEY)
    assert sum(t.nbytes for t in kept) == form.nbytes(shape[0])
    back = values(form.restore(kept), wide)
    assert back.shape == shape
    if shape[0]:
        steps = {None: 0.0, 8: 1 / 127, 4: 1 / 7}[spec.bits] if spec.number != "e4m3" else 2**-4
        bound = rows.double().abs().max() * (1 if spec.number == "sawb" else steps)  # SAWB clips
        assert ((back.double() - rows.double()).abs() <= bound * (1 + 1e-3)).all()


def saved_by(x: Tensor, w: Tensor, method: hotrain.Method, **options: Any) -> list[Tensor]:
    """Everything that one forward gives to save_for_backward."""
    held: list[Tensor] = []

    def hold(t: Tensor) -> Tensor:
        held.append(t)
        return t

    run: Any = functional.linear if w.dim() == 2 else functional.conv2d
    with torch.autograd.graph.saved_tensors_hooks(hold, lambda t: t):
        run(x, w, None, method=method, key=KEY, **options)
    return held


def nbytes(held: list[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("lead", [(2, 197), (3, 7, 7), (5,)], ids=str)
def test_a_linear_layer_keeps_what_its_format_says(name: str, dtype: torch.dtype, lead: tuple[int, ...]) -> None:
    method = hotrain.preset(name)
    x, w = torch.randn(*lead, 48).to(dtype).requires_grad_(), torch.randn(32, 48).to(dtype).requires_grad_()
    lay = Config(method).layout(lead)
    key = 8 if method.draws else 0
    assert nbytes(saved_by(x, w, method)) == Format(method.saved, 48, dtype).nbytes(lay.rows) + key + w.nbytes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("kernel", "options"), [(3, {"padding": 1}), (1, {}), (2, {"stride": 2})], ids=str)
def test_a_convolution_keeps_what_its_format_says(name: str, kernel: int, options: dict) -> None:
    """Never the unfolded matrix: for k×k kernels P x on x's own grid."""
    method = hotrain.preset(name)
    x, w = torch.randn(2, 16, 8, 8, requires_grad=True), torch.randn(32, 16, kernel, kernel, requires_grad=True)
    lead, columns = ((2, 4, 4), 64) if kernel == 2 else ((2, 8, 8), 16)
    lay = Config(method).layout(lead)
    key = 8 if method.draws else 0
    want = Format(method.saved, columns, torch.float32).nbytes(lay.rows) + key + w.nbytes
    assert nbytes(saved_by(x, w, method, **options)) == want


@pytest.mark.parametrize("name", NAMES)
def test_a_frozen_weight_saves_no_x(name: str) -> None:
    """PEFT's base layers: only what g_x needs, the weight itself (no copy)."""
    method = hotrain.preset(name)
    for x, w in (
        (torch.randn(2, 197, 64, requires_grad=True), torch.randn(32, 64)),
        (torch.randn(2, 16, 8, 8, requires_grad=True), torch.randn(32, 16, 3, 3)),
    ):
        held = saved_by(x, w, method)
        assert [t.data_ptr() for t in held if t.numel() > 1] == [w.data_ptr()]
        assert nbytes(held) == w.nbytes + (8 if method.draws else 0)


@pytest.mark.parametrize("name", NAMES)
def test_an_input_without_gradient_saves_no_weight(name: str) -> None:
    """A model's first layer."""
    method = hotrain.preset(name)
    x, w = torch.randn(2, 32, 64), torch.randn(32, 64, requires_grad=True)
    assert all(t.data_ptr() != w.data_ptr() for t in saved_by(x, w, method))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_kept_where_nothing_is_asked(name: str) -> None:
    assert saved_by(torch.randn(2, 32, 64), torch.randn(32, 64), hotrain.preset(name)) == []
    with torch.no_grad():
        assert saved_by(torch.randn(2, 32, 64), torch.randn(32, 64, requires_grad=True), hotrain.preset(name)) == []


HALF = ("hot", "hot-unbiased", "hq4", "hot-unbiased:e4m3")


def named(text: str) -> hotrain.Method:
    """A preset, or a preset in fp8."""
    name, _, number = text.partition(":")
    return hotrain.preset(name, number=number) if number else hotrain.preset(name)


@pytest.mark.parametrize("name", HALF)
def test_linear_layers_keep_at_most_27_percent_of_bf16(name: str) -> None:
    """The issue's bound for a ViT-S block, 197 tokens, without and with the class token dense."""
    for grid in (None, hotrain.Grid(14, 14, 1)):
        x = torch.randn(8, 197, 384).bfloat16()
        w = torch.randn(64, 384, requires_grad=True)
        held = nbytes(saved_by(x, w.bfloat16(), named(name), grid=grid))
        assert held <= 0.27 * x.nbytes


@pytest.mark.parametrize("name", HALF)
@pytest.mark.parametrize("size", [56, 14, 7])
def test_3x3_convolutions_keep_at_most_55_percent_of_bf16(name: str, size: int) -> None:
    """Of the bf16 input, also on the 7×7 maps of a last stage."""
    x = torch.randn(4, 64, size, size).bfloat16()
    w = torch.randn(16, 64, 3, 3).bfloat16().requires_grad_()
    assert nbytes(saved_by(x, w, named(name), padding=1)) <= 0.55 * x.nbytes


@pytest.mark.parametrize("name", [*NAMES, "hot:e4m3", "hot-unbiased:e5m2", "hq:e4m3"])
@pytest.mark.parametrize("lead", [(2, 197), (2, 7, 7), (3, 50)], ids=str)
def test_what_is_kept_is_the_definition(name: str, lead: tuple[int, ...]) -> None:
    """Codes and scale, recomputed from the same noise with dense matrices."""
    method = named(name)
    x = torch.randn(*lead, 12, dtype=torch.float64)
    w = torch.randn(8, 12, dtype=torch.float64, requires_grad=True)
    held = saved_by(x, w, method)
    kept = tuple(held[1:] if method.draws else held)  # the key comes first
    rows, scale = keep(x.view(-1, 12), projection(Config(method).layout(lead), KEY), method, KEY)
    assert len(kept) == (1 if scale is None else 2)
    if scale is None:
        torch.testing.assert_close(kept[0], rows, rtol=0, atol=1e-13)
    else:
        back = Format(method.saved, 12, torch.float64).restore(kept)
        assert torch.equal(back.codes.double(), rows)  # type: ignore[union-attr]
        torch.testing.assert_close(kept[1].view(scale.shape), scale, rtol=1e-14, atol=0)


# ---- tensors of any shape: `Grouped`, `Levels`, `Bits` ----

SHAPES = [(1,), (3, 1), (2, 3), (2, 7, 48), (1, 197, 100), (4, 49), (2, 3, 5, 130), (0, 16), (5, 768)]
GROUPED = [Grouped(8), Grouped(4, dithered=True), Grouped(2, dithered=True), Grouped(4, dithered=True, whole=True)]
LEVELS = [Levels(4, first=-2, per_one=11), Levels(4, first=-4, per_one=7)]


def steps(form: Grouped, t: Tensor) -> Tensor:
    """What one step of the codes of each entry's group is at most, shaped as t (float64).

    The scale is rounded to bfloat16, 8 bits, from (1 + 2⁻⁸) of the quotient: at most (1 + 2⁻⁸)² of it.
    """
    size = group_size(t.shape[-1], form.whole)
    padded = torch.nn.functional.pad(t.double().abs(), (0, -t.shape[-1] % size)).unflatten(-1, (-1, size))
    step = padded.amax(-1, keepdim=True) * (1 + 2.0**-8) ** 2 / form.top
    return step.expand_as(padded).flatten(-2)[..., : t.shape[-1]]


@pytest.mark.parametrize("form", GROUPED, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups_come_back_to_half_a_step_in_the_bytes_they_say(
    form: Grouped, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """To a whole step where codes are dithered; and to the rounding of the dtype that is asked for."""
    t = torch.randn(shape).to(dtype)
    kept = form.keep(t)
    assert sum(part.nbytes for part in kept) == form.nbytes(shape)
    assert {part.dtype for part in kept} == {torch.uint8, torch.bfloat16}
    back = form.restore(kept, shape, dtype)
    assert (back.shape, back.dtype) == (shape, dtype)
    bound = steps(form, t) * (1.0 if form.dithered else 0.5) + torch.finfo(dtype).eps * t.double().abs() + 1e-12
    assert ((back.double() - t.double()).abs() <= bound * (1 + 1e-5)).all()


@pytest.mark.parametrize("form", GROUPED, ids=str)
def test_groups_of_views_and_of_zeros(form: Grouped) -> None:
    """A transposed tensor is what its copy is; zeros stay zeros, among others too; the sign of a code is kept."""
    for t in (torch.randn(6, 32, 5).mT, torch.randn(48, 7).T, torch.randn(1, 16, 3, 5).movedim(1, -1)):
        for a, b in zip(form.keep(t), form.keep(t.contiguous()), strict=True):
            assert torch.equal(a, b)
            assert a.is_contiguous(), "kernels read codes in this order"
    t = torch.randn(4, 64)
    t[1], t[2, ::2] = 0, 0
    back = form.restore(form.keep(t), t.shape, t.dtype)
    assert (back[1] == 0).all()
    assert (back[2, ::2] == 0).all()
    if not form.dithered:
        assert torch.equal(form.restore(form.keep(-t), t.shape, t.dtype), -back)


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e30, 1e38])
@pytest.mark.parametrize("form", GROUPED, ids=str)
def test_groups_at_the_ends_of_float32(form: Grouped, scale: float) -> None:
    """bfloat16 has float32's exponents; below their smallest normal number its scales are 2⁻¹³³ apart."""
    t = torch.randn(8, 64).clamp(-3, 3) * scale
    back = form.restore(form.keep(t), t.shape, t.dtype)
    assert back.isfinite().all()
    assert ((back.double() - t.double()).abs() <= steps(form, t) * (1 + 1e-5) + form.top * 2.0**-134).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("form", GROUPED, ids=str)
def test_the_number_of_masks_stays_finite(form: Grouped, dtype: torch.dtype) -> None:
    """finfo(dtype).min, which `masked_fill` is often given: times a derivative of 0 an infinity would be NaN."""
    lowest = torch.finfo(dtype).min
    for each in (lowest, -lowest, lowest * (1 - 2.0**-7)):
        t = torch.full((2, 64), each, dtype=dtype)
        t[1, ::3] = 0
        back = form.restore(form.keep(t), t.shape, dtype)
        assert back.isfinite().all()
        assert (back[1, ::3] == 0).all()
        below = 0.011  # a scale is one step of bfloat16 lower at most, rounding another one
        assert ((back.double() / t.double() - 1).abs()[t != 0] <= below + form.dithered / form.top).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("form", GROUPED, ids=str)
def test_what_is_not_finite_spoils_its_group_alone(form: Grouped, bad: float) -> None:
    t = torch.randn(3, 128)
    clean = form.restore(form.keep(t), t.shape, t.dtype)
    t[1, 70] = bad
    back = form.restore(form.keep(t), t.shape, t.dtype)
    size = group_size(128, form.whole)
    first = 70 // size * size
    assert not back[1, first : first + size].isfinite().any()
    back[1, first : first + size] = clean[1, first : first + size]
    assert torch.equal(back, clean)


def test_thresholds_are_equally_distributed() -> None:
    """Along rows, along columns and over all: of n numbers a share p ± 4/n·log n is below p (a lattice's discrepancy;
    random ones would miss by 1/√n), and a value on a level stays on it."""
    t = dither(1024, 768, torch.device("cpu"))
    assert t.min() >= 0
    assert t.max() < 1
    for axis, count in ((0, 1024), (1, 768)):
        for p in (0.1, 0.25, 0.5, 0.9):
            share = (t < p).double().mean(axis)
            assert (share - p).abs().max() <= 4 * math.log(count) / count
    levels = torch.arange(16.0)[:, None]
    assert torch.equal((levels + t[:16]).floor(), levels.expand(16, 768))


@pytest.mark.parametrize("form", [form for form in GROUPED if form.dithered], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_dithered_codes_have_no_bias_along_either_axis(form: Grouped, axis: int) -> None:
    """A sum along rows, as in g_γ, and one along channels, as in the means of a norm: the mean of n errors of equal
    values is of the order of a step · log n / n, where rounding to nearest could leave half a step."""
    values = torch.rand(16) * 2 - 1
    t = (values[None, :].repeat(1024, 1) if axis == 0 else values[:, None].repeat(1, 1024)).clone()
    step = steps(form, t).max()
    error = (form.restore(form.keep(t), t.shape, t.dtype) - t).double().mean(axis)
    assert (error.abs() <= step * 4 * math.log(1024) / 1024).all()


@pytest.mark.parametrize("form", LEVELS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_levels_come_back_to_a_step_in_the_bytes_they_say(
    form: Levels, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Zero and one exactly; the mean of a slope over positions without bias."""
    lowest, highest = form.first / form.per_one, (form.first + 2**form.bits - 1) / form.per_one
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    slopes = torch.rand(shape, dtype=wide) * (highest - lowest) + lowest
    slopes.view(-1)[::3] = 1.0
    slopes.view(-1)[1::3] = 0.0
    kept = form.keep(slopes)
    assert sum(part.nbytes for part in kept) == form.nbytes(shape)
    back = form.restore(kept, shape, dtype)
    assert (back.shape, back.dtype) == (shape, dtype)
    assert ((back.double() - slopes).abs() <= 1 / form.per_one + 2 * torch.finfo(dtype).eps).all()
    assert torch.equal(back[(slopes == 0) | (slopes == 1)].double(), slopes[(slopes == 0) | (slopes == 1)].double())


@pytest.mark.parametrize("form", LEVELS, ids=str)
def test_levels_have_no_bias_and_end_where_they_end(form: Levels) -> None:
    """As `test_dithered_codes…`. Beyond the last level is the last level; a NaN passes whole."""
    slopes = torch.rand(16)[:, None].repeat(1, 4096)
    error = (form.restore(form.keep(slopes), slopes.shape, torch.float32) - slopes).double().mean(1)
    assert (error.abs() <= 4 * math.log(4096) / 4096 / form.per_one).all()
    beyond = torch.tensor([[-9.0, 9.0, float("inf"), float("nan")]])
    back = form.restore(form.keep(beyond), beyond.shape, torch.float32)
    last = (form.first + 2**form.bits - 1) / form.per_one
    torch.testing.assert_close(back, torch.tensor([[form.first / form.per_one, last, last, 1.0]]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_come_back(shape: tuple[int, ...]) -> None:
    flags = torch.rand(shape) < 0.5
    kept = Bits().keep(flags)
    assert sum(part.nbytes for part in kept) == Bits().nbytes(shape)
    assert torch.equal(Bits().restore(kept, shape), flags)


@pytest.mark.parametrize("shape", [(1, 8), (2, 3, 72), *(s for s in SHAPES if s[-1] % 8 == 0)], ids=str)
def test_bits_of_neighbours_come_back(shape: tuple[int, ...]) -> None:
    """A byte holds eight of a row, the first lowest, so that a kernel that holds some rows has whole bytes of them.

    Of a row whose halves are no multiples of eight it holds four of each half.
    """
    form, flags = Bits(neighbours=True), torch.rand(shape) < 0.5
    (packed,) = kept = form.keep(flags)
    assert packed.shape == (*shape[:-1], shape[-1] // 8)
    assert packed.nbytes == form.nbytes(shape)
    each, half = (8, 0) if shape[-1] % 16 == 0 else (4, shape[-1] // 2)
    first = torch.arange(shape[-1] // 8) * each
    by_hand = torch.stack([flags[..., first + i % each + i // each * half].long() << i for i in range(8)]).sum(0)
    assert torch.equal(packed.long(), by_hand)
    assert torch.equal(form.restore(kept, shape), flags)
    if len(flags):
        assert torch.equal(form.restore(form.keep(flags[-1:]), (1, *shape[1:])), flags[-1:])


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_packed_codes_are_neighbours_still(bits: int) -> None:
    """The first piece of a row is the lowest bits of its bytes, the next one the bits above."""
    each = 8 // bits
    codes = torch.randint(0, 2**bits, (5, 12 * each))
    packed = pack_parts(codes.chunk(each, -1), bits)
    assert packed.shape == (5, 12)
    assert torch.equal(unpack_parts(packed, bits).flatten(-2).long(), codes)
    by_hand = sum(codes[:, 12 * i : 12 * (i + 1)] << (bits * i) for i in range(each))
    assert torch.equal(packed.long(), by_hand)


def test_a_groups_size_divides_the_channels_of_real_models() -> None:
    """No padding from 16 channels on where a divisor will do; whole rows where they are asked for."""
    sizes = {3: 4, 7: 8, 16: 16, 48: 48, 96: 96, 100: 100, 192: 96, 197: 64, 384: 128, 768: 128, 1000: 100, 4096: 128}
    assert {columns: group_size(columns) for columns in sizes} == sizes
    assert group_size(768, whole=True) == 768


def test_whole_rows_are_padded_as_those_of_products_are() -> None:
    """To 16 bytes of 16-bit numbers, where they are padded at all: a softmax of 49 tokens, or of 197."""
    sizes = {10: 12, 49: 56, 50: 56, 196: 196, 197: 200, 577: 584}
    assert {columns: group_size(columns, whole=True) for columns in sizes} == sizes
