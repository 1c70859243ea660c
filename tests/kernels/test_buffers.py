"""The kernels of what is between the layers against `hotrain.saved`, `recipes` and the definitions of `launches`."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kernel_cases import few
from torch import Tensor

pytest.importorskip("triton")

from hotrain import autograd, kernels
from hotrain.compress import rematerialize
from hotrain.compress.codes import pack
from hotrain.compress.formats import GROUPED
from hotrain.compress.operators.image_norm import _norm_gradient, _normalize
from hotrain.compress.slopes import ACTIVATIONS
from hotrain.kernels import FUNCTIONS, activation, batch_norm, gated, rows_in_memory
from hotrain.kernels import codes as B
from hotrain.kernels.launch import is_wide
from hotrain.saved import Bits, Grouped, group_size, unpack_parts

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BITS = Bits(neighbours=True)
LEVELS = {name: ACTIVATIONS[name].levels for name in FUNCTIONS if name}
# (rows, C): one row of the fewest channels, a half that is no power of two, a tile exactly and one row more, the tokens
# of a ViT, three blocks of 32 columns and a half, many tiles of one program, the channels of a ViT, the most of ResNet.
SHAPES = [(1, 16), (7, 48), (49, 64), (197, 96), (1000, 48), (33, 224), (49, 768), (3, 2048)]
# Halves that are no multiple of 8, whose bits are packed in runs of four: one run, and more that are no power of two.
ODD_EIGHTS = [(5, 8), (19, 24), (7, 40), (33, 72), (3, 216)]
# float32 in another order, with approximate exponentials: of the magnitudes that are added, and of 1 for f's own.
CLOSE = 2.0**-20
# Called with lists of tensors, whose types no checker tells apart.
normalize: Any = batch_norm.normalize
norm_gradient: Any = batch_norm.gradient
# numpy, of which the interpreter is made, warns of infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _poisoned(poison: None) -> None:
    """No program may leave an entry unwritten."""


@pytest.fixture
def other_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is compiled here stays here: a case's name, or a plan's arguments, do not say what a test replaces."""
    monkeypatch.setattr(sys.modules["hotrain.kernels.launch"], "_compiled", {})
    forget_plans()
    yield
    forget_plans()


def forget_plans() -> None:
    for module in (B, activation):
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()


def defined(monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any], *args: Any) -> Any:
    """The call with the definition."""
    with monkeypatch.context() as patch:
        patch.setattr(autograd, "KERNELS", {})
        return call(*args)


def draw(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device) -> Tensor:
    """Random data of many sizes from row to row, whose channels have means of their own."""
    t = torch.randn(shape, device=device)
    t = t * torch.exp2(torch.arange(shape[0], device=device) % 5).view(-1, *[1] * (len(shape) - 1))
    return (t + torch.randn(shape[-1], device=device)).to(dtype)


def rounding(dtype: torch.dtype, t: Tensor) -> Tensor:
    """What a cast loses of numbers at most: half a unit; a whole one where the interpreter cuts bfloat16 off."""
    cut = t.device.type == "cpu" and dtype == torch.bfloat16
    info = torch.finfo(dtype)
    return info.eps * (1.0 if cut else 0.5) * t.abs().clamp(min=info.smallest_normal)


def numbers(codes: Tensor, bits: int) -> Tensor:
    """Codes one by one: (rows, groups, entries)."""
    return unpack_parts(codes, bits).flatten(-2).int()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def assert_codes(got: Tensor, want: Tensor, values: Tensor, scale: Tensor, bits: int, error: Tensor | float) -> None:
    """Equal where the scale is finite; one apart where the number of steps is as near to a half as its own error.

    error: of values. A kernel multiplies with the reciprocal: two roundings of 2⁻²⁴ where a division has one.
    """
    steps = torch.where(scale == 0, 1, scale).double()
    quotient = values.double().view(scale.shape[0], scale.shape[1], -1) / steps
    near = (quotient.abs() % 1 - 0.5).abs() <= quotient.abs() * 2.0**-22 + torch.as_tensor(error / steps)
    apart = (numbers(got, bits) - numbers(want, bits)).abs()
    wrong = (apart > near.int()) & scale.isfinite()
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} codes, the first at {wrong.nonzero()[0].tolist()}"


# ---- keep ----


def check_keep(x: Tensor, bits: int, whole: bool) -> tuple[Tensor, Tensor]:
    group = group_size(x.shape[-1], whole)
    codes, scale = B.pack(x, group, bits)
    want, want_scale = Grouped(bits, whole=whole).keep(x)
    assert (codes.shape, codes.dtype) == (want.shape, want.dtype)
    assert same_bits(scale, want_scale)
    assert_codes(codes, want, x.reshape(-1, x.shape[-1]), scale, bits, 0.0)
    return codes, scale


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize(("bits", "whole"), [(4, True), (4, False), (8, False)], ids=["row", "groups", "int8"])
def test_codes_are_the_formats(
    rows: int, columns: int, bits: int, whole: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Scales bit for bit, in the kernel and in the definition rounded by hand and by PyTorch."""
    x = draw(rows, columns, dtype=dtype, device=device)
    x[rows // 2] = 0
    codes, scale = check_keep(x, bits, whole)
    assert (scale[rows // 2] == 0).all()
    assert (numbers(codes, bits)[rows // 2] == 2 ** (bits - 1) - 1).all()


@pytest.mark.parametrize("exponent", [-110, -60, 60, 125])
def test_codes_at_the_ends_of_float32(exponent: int, device: torch.device) -> None:
    """A scale's reciprocal is finite from 2⁻¹²⁶ on, and neither overflows below the last power of two."""
    check_keep(torch.randn(6, 64, device=device).clamp(-3, 3) * 2.0**exponent, 4, True)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_group_under_float32s_normal_numbers_comes_back_as_small(bits: int, device: torch.device) -> None:
    """The reciprocal of its scale is infinite: codes are any, so that what comes back is some eight (or 128) steps."""
    x = torch.full((2, 64), 1e-38, device=device)
    back = Grouped(bits, whole=True).restore(B.pack(x, 64, bits), x.shape, x.dtype)
    assert (back.abs() <= 1.2 * 1e-38 * 2 ** (bits - 1) / (2 ** (bits - 1) - 1)).all()


@pytest.mark.parametrize("dtype", [torch.float16, *DTYPES], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_the_number_of_masks_stays_finite(bits: int, dtype: torch.dtype, device: torch.device) -> None:
    """finfo(dtype).min, and numbers just below it, whose codes the largest scale clips."""
    lowest = torch.finfo(dtype).min
    x = torch.tensor([lowest, -lowest, lowest * (1 - 2.0**-8), lowest * (1 - 2.0**-5)], dtype=dtype, device=device)
    x = torch.stack([x[:, None].expand(4, 64), -x[:, None].expand(4, 64), x.repeat(4, 16)]).flatten(0, 1)
    x[::2, ::5] = 0
    kept, want = B.pack(x, 64, bits), Grouped(bits).keep(x)
    assert torch.equal(kept[1], want[1])
    assert torch.equal(kept[0], want[0])
    assert Grouped(bits).restore(kept, x.shape, dtype).isfinite().all()
    assert B.unpack(*kept, bits, dtype).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("most", [2.0, 50.0, 1e4])
def test_smaller_elements_are_packed_as_the_least(
    most: float, bits: int, dtype: torch.dtype, device: torch.device
) -> None:
    """In both halves of a group, -inf too; a NaN stays one. Below 0 they stay, however large the group's scale is."""
    least, x = -3.0, torch.randn(5, 48, device=device).to(dtype)
    x[0, ::5], x[1, 3], x[2, 30], x[:, 7] = -float("inf"), -1e4, float("nan"), most
    cut = min(least, -most / (2 ** (bits - 1) - 1))
    for keep in (functools.partial(B.pack, group=48, bits=bits), Grouped(bits).keep):
        kept = keep(x, least=least)
        for got, want in zip(kept, keep(x.float().clamp(min=cut)), strict=True):
            assert torch.equal(got[[0, 1, 3, 4]], want[[0, 1, 3, 4]])
        assert kept[1][2].isnan().all()
        found = Grouped(bits).restore(kept, x.shape, torch.float64)
        step = kept[1][0].double().item()
        assert (found[0, ::5] <= max(least + step / 2, -step)).all()
        assert (found[0, ::5] < 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_not_finite_spoils_its_group_alone(
    bits: int, dtype: torch.dtype, bad: float, device: torch.device
) -> None:
    """In either half of a group: 70 is in the first of the second group, 200 in the second half of the fourth."""
    x = draw(5, 256, dtype=dtype, device=device)
    clean, clean_scale = B.pack(x, 64, bits)
    x[1, 70], x[4, 200 + 32] = bad, bad
    codes, scale = B.pack(x, 64, bits)
    back = Grouped(bits).restore((codes, scale), (5, 256), torch.float32).view(5, 4, 64)
    spoiled = torch.zeros(5, 4, dtype=torch.bool, device=device)
    spoiled[1, 1] = spoiled[4, 3] = True
    assert not back[spoiled].isfinite().any()
    assert torch.equal(codes[~spoiled], clean[~spoiled])
    assert torch.equal(scale[~spoiled], clean_scale[~spoiled])


# name → (a view with C = 64, what `rows_in_memory` says of it); None is copied first
VIEWS: dict[str, tuple[Callable[[], Tensor], tuple[int, ...] | None]] = {
    "contiguous: all rows": (lambda: torch.randn(3, 5, 64), (15, 960, 1, 960)),
    "a vector: one row": (lambda: torch.randn(64), (1, 64, 1, 64)),
    "of an unbound qkv: the heads of a token": (
        lambda: torch.randn(2, 7, 3, 4, 64).unbind(2)[1],
        (4, 768, 14, 14 * 768),
    ),
    "of a split row: each alone": (lambda: torch.randn(5, 128)[:, 64:], (1, 128, 5, 640)),
    "without a class token: those of a sample": (lambda: torch.randn(3, 8, 64)[:, 1:], (7, 512, 3, 1536)),
    "the same, samples on two axes": (lambda: torch.randn(2, 3, 8, 64)[:, :, 1:], (7, 512, 6, 3072)),
    "every other row": (lambda: torch.randn(4, 6, 64)[:, ::2], (1, 128, 12, 1536)),
    "one row again and again": (lambda: torch.randn(1, 64).expand(5, 64), (1, 0, 5, 0)),
    "axes of one entry, whatever their strides": (
        lambda: torch.randn(960).as_strided((3, 1, 5, 64), (320, 7, 64, 1)),
        (15, 960, 1, 960),
    ),
    "one row of a sample, an axis of one entry before": (
        lambda: torch.randn(3, 1, 8, 64)[:, :, :1],
        (1, 512, 3, 1536),
    ),
    "channels-last, rows along channels": (
        lambda: torch.randn(2, 64, 5, 3).to(memory_format=torch.channels_last).movedim(1, -1),
        (30, 1920, 1, 1920),
    ),
    "heads before tokens, of one sample": (lambda: torch.randn(1, 7, 4, 64).transpose(1, 2), (1, 256, 7, 64)),
    "heads before tokens: three steps": (lambda: torch.randn(2, 7, 4, 64).transpose(1, 2), None),
    "tokens before samples, as in nn.MultiheadAttention": (
        lambda: torch.randn(7, 3, 4, 64).transpose(0, 1),
        (4, 768, 7, 256),
    ),
    "cut along two axes: two steps": (lambda: torch.randn(2, 4, 8, 64)[:, :3, :5], (5, 512, 3, 2048)),
    "each row again and again": (lambda: torch.randn(7, 2, 64)[:, :1].expand(7, 3, 64), (1, 0, 3, 128)),
    "channels-first, rows along channels: entries apart": (lambda: torch.randn(2, 64, 5, 3).movedim(1, -1), None),
    "transposed: entries apart": (lambda: torch.randn(64, 5).T, None),
    "every other entry: entries apart": (lambda: torch.randn(5, 128)[:, ::2], None),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_read_as_they_lie_or_copied(name: str, device: torch.device) -> None:
    build, layout = VIEWS[name]
    x = build()
    memory = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
    assert rows_in_memory(x) == layout
    if layout is not None:  # rows where it says that they are
        run, stride, many, further = layout
        row = torch.arange(x.numel() // 64)
        step = row // run
        first = step // many * further + step % many * stride + row % run * 64 + int(x.storage_offset())
        assert torch.equal(memory[first[:, None] + torch.arange(64)], x.reshape(-1, 64))
    x = memory.to(device).as_strided(x.shape, x.stride(), x.storage_offset())
    for bits, whole in ((4, True), (8, False)):
        check_keep(x, bits, whole)


@pytest.mark.parametrize("name", VIEWS)
def test_eager_mode_packs_any_layout_by_a_kernel(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The formula in plain PyTorch reads and writes the tensor some twenty times.
    x = VIEWS[name][0]().to(device)
    want = GROUPED["int8"].keep(x.contiguous())
    monkeypatch.setitem(autograd.KERNELS, device.type, kernels)
    monkeypatch.setattr(rematerialize, "keep", None)
    codes, scale = pack(x, "int8")
    assert torch.equal(scale, want[1])
    assert (codes.view(torch.int8).int() - want[0].view(torch.int8).int()).abs().max() <= 1  # halfway between two codes


# ---- restore ----


def factor(
    rows: int, columns: int, whole: bool, device: torch.device, w: bool = False, b: bool = False, normed: bool = False,
    name: str = "", params: torch.dtype = torch.float32,
) -> B.Factor:  # fmt: skip
    codes, scale = Grouped(4, whole=whole).keep(torch.randn(rows, columns, device=device) * 2)
    gamma = torch.randn(columns, device=device).to(params) if w else None
    beta = torch.randn(columns, device=device).to(params) if b else None
    return B.Factor(codes, scale, gamma, beta, normed, name)


def value(f: B.Factor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """What a factor is, (rows, C), and the magnitudes that were added for it, with 1 for f's own."""
    rows, groups, half = f.codes.shape
    shape = (rows * groups, 2 * half)
    v = Grouped(4, whole=True).restore((f.codes.view(-1, 1, half), f.scale.view(-1, 1, 1)), shape, dtype).view(rows, -1)
    v = v if f.w is None else v * f.w.to(dtype)
    size = v.abs() + 1
    if f.b is not None:
        v, size = v + f.b.to(dtype), size + f.b.to(dtype).abs()
    return (v if not f.name else ACTIVATIONS[f.name].f(v)), size


def check_restore(factors: list[B.Factor], dtype: torch.dtype, device: torch.device) -> Tensor:
    got = B.make(factors, dtype)
    want = torch.ones((), dtype=torch.float64, device=device)
    size = want
    for f in factors:
        v, own = value(f)
        want, size = want * v, size * own
    assert (got.dtype, got.shape) == (dtype, want.shape)
    assert got.is_contiguous()
    assert ((got.double() - want).abs() <= rounding(dtype, want) + len(factors) * CLOSE * size).all()
    return got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), SHAPES + ODD_EIGHTS)
@pytest.mark.parametrize("whole", [True, False], ids=["row", "groups"])
def test_a_norms_result_is_made_again(
    rows: int, columns: int, whole: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """γ x̂ + β, each channel with its own: of a group in the middle of a row too."""
    check_restore([factor(rows, columns, whole, device, True, True, True)], dtype, device)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_function_of_values_and_of_a_norm(name: str, dtype: torch.dtype, device: torch.device) -> None:
    check_restore([factor(19, 96, False, device, name=name)], dtype, device)
    check_restore([factor(19, 192, False, device, True, True, True, name)], dtype, device)


@pytest.mark.parametrize("name", ["silu", "hardswish"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), SHAPES + ODD_EIGHTS)
def test_gradients_of_a_gated_activation(
    rows: int, columns: int, dtype: torch.dtype, name: str, device: torch.device
) -> None:
    """g b f'(x) and g f(x) in float64, of the codes of x and of b."""
    gate, other = factor(rows, columns, False, device), factor(rows, columns, False, device)
    g = torch.randn(rows, columns, device=device).to(dtype)
    got = gated.gradient(g, [*gate[:2], *other[:2]], name)
    x, b, wide = value(gate)[0], value(other)[0], g.double()
    kind = ACTIVATIONS[name]
    wants = (wide * b * kind.slope(x), b.abs() + 1), (wide * kind.f(x), x.abs() + 1)
    for found, (want, size) in zip(got, wants, strict=True):
        assert (found.dtype, found.shape) == (dtype, g.shape)
        assert found.is_contiguous()
        assert ((found.double() - want).abs() <= rounding(dtype, want) + 2 * CLOSE * size * wide.abs()).all()


def test_a_gated_activation_passes_what_is_not_finite(device: torch.device) -> None:
    """Of a group's scale to both gradients of its own elements, and of g to its place alone."""
    gate, other = factor(2, 64, False, device), factor(2, 64, False, device)
    g = torch.randn(2, 64, device=device)
    g[0, 5] = math.nan
    other.scale[1] = math.inf
    g_x, g_b = gated.gradient(g, [*gate[:2], *other[:2]], "silu")
    assert g_x[0].isnan().nonzero().tolist() == g_b[0].isnan().nonzero().tolist() == [[5]]
    assert not g_x[1].isfinite().any()
    assert g_b[1].isfinite().all()


@pytest.mark.parametrize(("w", "b"), [(False, False), (True, False), (False, True)], ids=["plain", "no β", "no γ"])
@pytest.mark.parametrize("params", [torch.float32, torch.bfloat16], ids=str)
def test_norms_without_parameters_and_of_lower_ones(
    w: bool, b: bool, params: torch.dtype, device: torch.device
) -> None:
    check_restore([factor(7, 64, True, device, w, b, True, "relu", params)], torch.float32, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [48, 256], ids=["a group", "groups"])
def test_products_of_two(columns: int, dtype: torch.dtype, device: torch.device) -> None:
    """As of SwiGLU, and each factor with γ, β and f of its own: none is taken for the other's."""
    check_restore([factor(9, columns, False, device, name="silu"), factor(9, columns, False, device)], dtype, device)
    first = factor(9, columns, False, device, True, False, True, "gelu")
    second = factor(9, columns, False, device, False, True, True, "relu6")
    check_restore([first, second], dtype, device)
    check_restore([second, factor(9, columns, False, device, True, True, True)], dtype, device)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_spoiled_group_comes_back_without_a_finite_number(bad: float, device: torch.device) -> None:
    """And no other does; a NaN is one behind ReLU."""
    x = torch.randn(5, 256, device=device)
    x[2, 130] = bad
    kept = B.pack(x, 64)
    back = B.make([B.Factor(*kept)], torch.float32).view(5, 4, 64)
    spoiled = ~back.isfinite()
    assert spoiled[2, 2].all()
    assert spoiled.sum() == 64
    if bad != bad:
        assert B.make([B.Factor(*kept, name="relu")], torch.float32).view(5, 4, 64)[2, 2].isnan().all()


# ---- a function, and its slopes ----


def levels_of(name: str) -> tuple[int, int] | None:
    """As the kernels take them."""
    levels = LEVELS.get(name)
    return None if levels is None else (levels.first, levels.per_one)


def slopes(name: str, marks: Tensor, columns: int) -> Tensor:
    levels = LEVELS[name]
    assert levels is not None
    return levels.restore((marks,), (len(marks), columns), torch.float64)


def true_slope(name: str, x: Tensor) -> Tensor:
    x = x.double().requires_grad_()
    (found,) = torch.autograd.grad(ACTIVATIONS[name].f(x).sum(), x)
    return found


def assert_slopes(got: Tensor, want: Tensor, name: str) -> None:
    """Codes at most one level apart, of a function of sigmoids alone but for one in 10⁴, which the last bits move.

    The definition's slope of GELU is its tanh form's, 0.0009 away at most, a hundredth of a level: as many codes move.
    """
    apart = (numbers(got[:, None], 4) - numbers(want[:, None], 4)).abs()
    assert (apart <= 1).all()
    assert few(apart != 0, 0.01 if name == "gelu" else 1e-4)


# Rows of one group, of several, of groups that are no power of two; the channels of a ViT.
GROUPS = [(1, 16, 16), (7, 48, 48), (197, 96, 96), (33, 224, 112), (5, 768, 128)]
SMOOTH = ["gelu", "gelu_tanh", "silu", "hardswish"]


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "columns", "group"), GROUPS)
def test_a_function_and_its_arguments_codes(
    rows: int, columns: int, group: int, bits: int, name: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Values near float64's, and the codes that the packing kernel writes, to the bit."""
    x = (torch.randn(rows, columns, device=device) * 3).to(dtype)
    least = ACTIVATIONS[name].least
    y, *kept = B.activate(x, name, group, bits, least=least)
    want = ACTIVATIONS[name].f(x.double())
    assert y.dtype == dtype
    assert ((y.double() - want).abs() <= rounding(dtype, want) + CLOSE * (1 + x.double().abs())).all()
    assert all(torch.equal(got, one) for got, one in zip(kept, B.pack(x, group, bits, least), strict=True))


@pytest.mark.parametrize(
    ("dtype", "added"),
    [(torch.float32, torch.bfloat16), (torch.float16, torch.float16), (torch.bfloat16, torch.float32)],
)
@pytest.mark.parametrize(("rows", "columns", "group"), [(7, 48, 48), (97, 96, 48), (5, 768, 128)])
def test_a_function_of_a_sum_with_a_bias(
    rows: int, columns: int, group: int, dtype: torch.dtype, added: torch.dtype, device: torch.device
) -> None:
    """Which is not rounded before the function, nor before its codes."""
    x, bias = (torch.randn(rows, columns, device=device) * 3).to(dtype), torch.randn(columns, device=device).to(added)
    y, *kept = B.activate(x, "gelu", group, 8, bias, -3.0)
    total = x.float() + bias.float()
    want = ACTIVATIONS["gelu"].f(total.double())
    assert y.dtype == dtype
    assert ((y.double() - want).abs() <= rounding(dtype, want) + CLOSE * (1 + total.double().abs())).all()
    assert total.min() < -3
    assert all(torch.equal(got, one) for got, one in zip(kept, B.pack(total, group, 8, -3.0), strict=True))


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "columns", "group"), [*GROUPS, (2100, 64, 64)])
def test_a_gradient_from_an_arguments_codes(
    rows: int, columns: int, group: int, bits: int, name: str, dtype: torch.dtype, device: torch.device
) -> None:
    """g f'(x̂), of GELU's tanh form for both forms of it, and its sums by channel, of many rows as well."""
    x, g = (torch.randn(rows, columns, device=device) * 3 for _ in range(2))
    g = g.to(dtype)
    kept = B.pack(x, group, bits)
    at = B.unpack(*kept, bits, torch.float32)
    want = g.double() * true_slope("gelu_tanh" if name == "gelu" else name, at)
    got, none = B.gradient(g, *kept, name, bits)
    again, sums = B.gradient(g, *kept, name, bits, sums=True)
    allowed = 4 * CLOSE * (1 + at.double().abs() ** 3) * g.double().abs() + rounding(dtype, want)
    if name == "hardswish":  # whose derivative jumps at ±3, which a value may be a last bit away from
        allowed = torch.where((at.abs() - 3).abs() < 1e-5, g.double().abs() + 1, allowed)
    assert ((got.double() - want).abs() <= allowed).all()
    assert none.numel() == 0
    assert torch.equal(again, got)
    close = 2.0**-18 * want.abs().sum(0) + allowed.sum(0) + 1e-6
    assert ((sums.double() - want.sum(0)).abs() <= close).all()


def test_what_is_far_out_or_not_finite_in_codes_of_a_function(device: torch.device) -> None:
    """Far out nothing is passed on, or all of it; a NaN makes its group's gradients NaN, and no other's."""
    x = torch.randn(4, 64, device=device)
    x[0], x[1], x[2, 40] = -30, 30, float("nan")
    for name in SMOOTH:
        y, *kept = B.activate(x, name, 32, 8)
        g_x, _ = B.gradient(torch.ones_like(x), *kept, name, 8)
        assert (g_x[0].abs() <= 1e-6).all()
        assert (g_x[1] == 1).all()
        assert y[2, 40].isnan()
        assert g_x[2, 32:].isnan().all()
        assert g_x[2, :32].isfinite().all()
        assert g_x[3].isfinite().all()


# ---- batch norm, what is added, and the function behind ----


class Norm:
    """Operands of a batch norm over rows. Channels are as far from zero as they are wide, so that x − μ cancels."""

    def __init__(
        self, rows: int, columns: int, dtype: torch.dtype, device: torch.device, shortcut: bool, w: bool = True,
        b: bool = True, params: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        x = torch.randn(rows, columns, device=device) * 2
        self.x = (x + torch.randn(columns, device=device)).to(dtype)
        if rows > 2:
            # Channels have a mean of zero, but for x's rounding; x̂ of the middle row is zero exactly.
            self.x[rows // 2] = self.x.float().mean(0).to(dtype)
        lifted = self.x.float()
        self.mean = lifted[rows // 2].clone()
        self.r = (lifted.var(0, unbiased=False) + 1e-5).rsqrt()
        self.w = torch.randn(columns, device=device).to(params) if w else None
        self.b = torch.randn(columns, device=device).to(params) if b else None
        self.shortcut = torch.randn(rows, columns, device=device).to(dtype) if shortcut else None

    def tensors(self, dtype: torch.dtype | None = None) -> list[Tensor | None]:
        """dtype: of x and the shortcut."""
        x, shortcut = (t if t is None or dtype is None else t.to(dtype) for t in (self.x, self.shortcut))
        return [x, self.mean, self.r, self.w, self.b, shortcut]

    @property
    def size(self) -> Tensor:
        """The magnitudes that are added for what f is of."""
        gamma = torch.ones(()) if self.w is None else self.w.double().abs()
        size = (self.x.double().abs() + self.mean.double().abs()) * self.r.double() * gamma.to(self.x.device)
        return size + sum(t.double().abs() for t in (self.b, self.shortcut) if t is not None)

    @property
    def normal(self) -> Tensor:
        return (self.x.double() - self.mean.double()) * self.r.double()

    @property
    def argument(self) -> Tensor:
        """What f is of."""
        v = self.normal if self.w is None else self.normal * self.w.double()
        return v + sum(t.double() for t in (self.b, self.shortcut) if t is not None)


def image(t: Tensor | None) -> Tensor | None:
    """Rows as pixels."""
    return None if t is None else t.view(len(t), 1, 1, -1).permute(0, 3, 1, 2)


def norm_definition(monkeypatch: pytest.MonkeyPatch, norm: Norm, name: str) -> list[Tensor]:
    """The definition in float32 throughout, as the kernel computes: it would round what f is of to x's dtype."""
    x, *vectors, shortcut = norm.tensors(torch.float32)
    y, *kept = defined(monkeypatch, _normalize, image(x), *vectors, image(shortcut), name)
    return [y.permute(0, 2, 3, 1).reshape(norm.x.shape), *kept]


def check_normalize(monkeypatch: pytest.MonkeyPatch, norm: Norm, name: str) -> list[Tensor]:
    rows, columns = norm.x.shape
    y, codes, scale, marks = found = normalize(*norm.tensors(), name, levels_of(name))
    want, want_codes, want_scale, want_marks = norm_definition(monkeypatch, norm, name)
    near = CLOSE * (1 + norm.size)
    assert y.dtype == norm.x.dtype
    assert ((y.double() - want).abs() <= rounding(y.dtype, want) + near).all()
    # x r − μ r for (x − μ) r: a scale moves to the next bfloat16 where that crosses a boundary, one row in a thousand.
    assert [t.shape for t in (codes, scale)] == [t.shape for t in (want_codes, want_scale)]
    moved = scale != want_scale
    assert few(moved, 1e-3)
    assert (scale.double() - want_scale.double()).abs().le(want_scale.double() * 2.0**-7).all()
    error = ((norm.x.double().abs() + norm.mean.double().abs()) * norm.r.double() * 2.0**-22).view(rows, 1, columns)
    keep = ~moved.flatten()
    assert_codes(codes[keep], want_codes[keep], norm.normal[keep], scale[keep], 4, error[keep])
    assert marks.shape == want_marks.shape
    if name and levels_of(name) is None:
        v = norm.argument
        sure = (v.abs() > near) & ((v - 6).abs() > near)
        got, expected = (BITS.restore((t,), norm.x.shape) for t in (marks, want_marks))
        assert torch.equal(got[sure], expected[sure])
        assert few(~sure, 0.01, columns)  # and the row whose x̂ is zero
    elif name:
        assert_slopes(marks, want_marks, name)
    return list(found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(min(rows, 400), columns) for rows, columns in SHAPES + ODD_EIGHTS])
def test_a_norm_a_shortcut_and_relu(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, codes, scale, _ = check_normalize(monkeypatch, Norm(rows, columns, dtype, device, True), "relu")
    if rows > 2:  # the row whose x̂ is zero
        assert scale[rows // 2] <= 2.0**-22 * 7
        assert (
            Grouped(4, whole=True).restore((codes, scale), (rows, columns), torch.float32)[rows // 2].abs().max() < 1e-5
        )


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "shortcut"), [(96, False), (96, True), (72, True)])
def test_a_norm_and_every_function(
    name: str, columns: int, dtype: torch.dtype, shortcut: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_normalize(monkeypatch, Norm(37, columns, dtype, device, shortcut), name)


@pytest.mark.parametrize(("w", "b"), [(False, False), (True, False), (False, True)], ids=["plain", "no β", "no γ"])
@pytest.mark.parametrize("params", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_without_parameters_and_of_lower_ones(
    w: bool, b: bool, params: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_normalize(monkeypatch, Norm(19, 48, torch.float32, device, False, w, b, params), "relu")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["relu", "gelu"])
def test_a_norm_of_what_is_not_finite(
    name: str, bad: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics given, it spoils what comes back of its row, but of the result its own entry alone; a NaN passes."""
    norm = Norm(9, 64, torch.float32, device, False)
    clean = check_normalize(monkeypatch, norm, name)
    norm.x[4, 50] = bad
    y, codes, scale, marks = normalize(*norm.tensors(), name, levels_of(name))
    others = torch.ones(9, 64, dtype=torch.bool, device=device)
    others[4, 50] = False
    assert torch.equal(y[others], clean[0][others])
    assert not scale[4].isfinite().any()
    rest = torch.arange(9, device=device) != 4
    for got, want in zip((codes, scale, marks), clean[1:], strict=True):
        assert torch.equal(got[rest], want[rest])
    back = Grouped(4, whole=True).restore((codes, scale), (9, 64), torch.float32)
    assert not back[4].isfinite().any()
    if bad != bad:
        assert y[4, 50].isnan()
        passed = BITS.restore((marks,), (9, 64)) if name == "relu" else slopes(name, marks, 64)
        assert passed[4, 50] == 1


@pytest.mark.parametrize("value", [0.0, 3.0], ids=["zeros", "equal rows"])
def test_a_norm_of_equal_rows(value: float, device: torch.device) -> None:
    """x̂ is zero, its scale too, and ReLU's gradient at zero is none."""
    x = torch.full((7, 48), value, device=device)
    # Not x.mean(0): a GPU's is off by a rounding.
    mean, r = torch.full((48,), value, device=device), torch.full((48,), 1e-5, device=device).rsqrt()
    y, codes, scale, marks = normalize(x, mean, r, None, None, None, "relu", None)
    for t in (y, scale, marks):
        assert (t == 0).all()
    g_x, sums, _ = norm_gradient(torch.ones_like(x), None, codes, scale, marks, r, None, "relu", None, False)
    assert (g_x == 0).all()
    assert (sums == 0).all()


# ---- its statistics ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "channels", "tile"),
    [
        # One row and one program; parts of a tile; several programs of different numbers of rows; channels that several
        # programs share, and with a part left.
        (1, 8, {}), (7, 24, {}), (300, 64, {"entries": 256}), (1000, 16, {"entries": 64}),
        (130, 256, {"entries": 512}), (61, 200, {"entries": 1024}),
    ],
)  # fmt: skip
def test_statistics(rows: int, channels: int, tile: dict[str, int], dtype: torch.dtype, device: torch.device) -> None:
    """Of channels far from zero, against float64: float32's rounding of the sums, not of the squares of x."""
    x = (torch.randn(rows, channels, device=device) + 100 * torch.randn(channels, device=device)).to(dtype)
    mean, var = batch_norm.statistics(x, **tile)
    assert mean.dtype == var.dtype == torch.float32
    wide = x.double()
    apart = (wide - wide.mean(0)).square()
    size = apart.mean(0) + apart.amax(0)  # the terms' sizes, whose differences the variance is of, are at most twice it
    assert ((mean - wide.mean(0)).abs() <= rounding(torch.float32, wide.mean(0)) + CLOSE * size.sqrt()).all()
    assert ((var - wide.var(0, correction=0)).abs() <= CLOSE * size).all()


def test_statistics_of_one_value(device: torch.device) -> None:
    """No variance, and not less; a NaN spoils its channel alone."""
    x = torch.full((100, 16), 3.3, device=device)
    x[50, 5] = float("nan")
    mean, var = batch_norm.statistics(x, entries=64)
    others = torch.arange(16, device=device) != 5
    assert (mean[others] == x[0, 0]).all()
    assert (var[others] == 0).all()
    assert mean[5].isnan()
    assert var[5].isnan()


# ---- its gradients ----


def exact_gradient(g: Tensor, kept: list[Tensor], norm: Norm, name: str) -> tuple[list[Tensor], list[Tensor]]:
    """float64 autograd of y = f(γ n + β + shortcut) for n(x) with x̂ as restored, and what its roundings are of.

    n(x + d) = x̂ + r (d − mean(d) − x̂ mean(d x̂)) to the first order in d, and f is its slope, as restored.
    """
    codes, scale, marks = kept
    shape, double = g.shape, torch.float64
    normal = Grouped(4, whole=True).restore((codes, scale), shape, double)
    slope = torch.ones(shape, dtype=double, device=g.device)
    if name:
        slope = slopes(name, marks, shape[1]) if levels_of(name) else BITS.restore((marks,), shape).double()
    gamma = torch.ones_like(normal[0]) if norm.w is None else norm.w.double()
    d, shortcut = (torch.zeros(shape, dtype=double, device=g.device, requires_grad=True) for _ in range(2))
    w, b = gamma.clone().requires_grad_(), torch.zeros_like(gamma).requires_grad_()
    n = normal + norm.r.double() * (d - d.mean(0) - normal * (d * normal).mean(0))
    found = torch.autograd.grad(slope * (w * n + b + shortcut), (d, b, w, shortcut), g.double())
    behind = (slope * g.double()).abs()
    sums = behind.sum(0), (behind * normal.abs()).sum(0)
    size = (norm.r.double() * gamma).abs() * (behind + (sums[0] + normal.abs() * sums[1]) / len(g))
    return list(found), [size, *sums, behind]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "name", "passes_on"),
    [
        # Each function, with what it passes on and without, over the shapes of `SHAPES`.
        (1, 16, "", True), (7, 48, "relu", False), (49, 64, "relu", True), (197, 96, "gelu", False),
        (400, 48, "relu", True), (33, 224, "relu6", False), (49, 768, "silu", True), (3, 2048, "relu", True),
        (19, 64, "hardswish", False), (19, 64, "gelu_tanh", True), (49, 96, "", False), (19, 96, "gelu", True),
        # And over those of `ODD_EIGHTS`.
        (5, 8, "relu", True), (19, 24, "relu", False), (7, 40, "hardswish", True), (33, 72, "silu", False),
        (33, 72, "relu6", True), (3, 216, "", True), (5, 8, "", False), (3, 216, "relu", False),
    ],
)  # fmt: skip
def test_a_norms_gradients(
    rows: int, columns: int, name: str, dtype: torch.dtype, passes_on: bool, device: torch.device
) -> None:
    """Against float64. What comes from behind slopes is rounded to g's dtype, and of that float32 makes the rest."""
    norm = Norm(rows, columns, dtype, device, passes_on)
    _, *kept = normalize(*norm.tensors(), name, levels_of(name))
    g = torch.randn(rows, columns, device=device).to(dtype)
    g_x, sums, behind = norm_gradient(g, None, *kept, norm.r, norm.w, name, levels_of(name), passes_on)
    (want, g_b, g_w, g_shortcut), sizes = exact_gradient(g, kept, norm, name)
    assert g_x.dtype == dtype
    assert sums.dtype == torch.float32
    inner = 1.0 if levels_of(name) else 0.0
    checked = [("g_x", g_x, want), ("g_β", sums[0], g_b), ("g_γ", sums[1], g_w)]
    if passes_on:
        checked.append(("g_shortcut", behind, g_shortcut))
    else:
        assert behind.numel() == 0
    for (what, got, exact), size in zip(checked, sizes, strict=False):
        wrong = (got.double() - exact).abs() > rounding(got.dtype, exact) + inner * rounding(dtype, size) + CLOSE * size
        assert not wrong.any(), f"{what}: {int(wrong.sum())} of {wrong.numel()}"


@pytest.mark.parametrize("passes_on", [False, True], ids=["", "shortcut"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["", "relu", "silu"])
def test_a_norms_gradients_of_two_branches(
    name: str, dtype: torch.dtype, passes_on: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum in the kernel is PyTorch's sum before it, rounded to its dtype: to the bit; and the definition's.

    In bfloat16 the sums need no rounding, since Triton's interpreter truncates."""
    norm = Norm(49, 72, dtype, device, passes_on)
    _, *kept = normalize(*norm.tensors(), name, levels_of(name))
    g, other = torch.randn(2, 49, 72, device=device).to(dtype).unbind()
    if dtype == torch.bfloat16:
        g, other = torch.randint(-64, 64, (2, 49, 72), device=device).to(dtype).unbind()
    rest = (*kept, norm.r, norm.w, name, levels_of(name), passes_on)
    got, want = norm_gradient(g, other, *rest), norm_gradient(g + other, None, *rest)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    rest = (*kept, norm.r, norm.w, name, passes_on)
    got = defined(monkeypatch, _norm_gradient, image(g), image(other), *rest)
    want = defined(monkeypatch, _norm_gradient, image(g + other), None, *rest)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("name", ["", "relu", "silu"])
def test_a_norms_result_in_the_dtype_of_a_product(name: str, device: torch.device) -> None:
    """A float32 norm's y is rounded once, to 8 bits (the interpreter truncates); what backward needs is as it was."""
    norm = Norm(49, 72, torch.float32, device, False)
    want, *kept = normalize(*norm.tensors(), name, levels_of(name))
    got, *also = normalize(*norm.tensors(), name, levels_of(name), torch.bfloat16)
    assert got.dtype == torch.bfloat16
    assert ((got.double() - want).abs() <= 2.0**-7 * want.abs()).all()
    assert all(torch.equal(a, b) for a, b in zip(also, kept, strict=True))


@pytest.mark.parametrize("after", [False, True], ids=["", "a gradient behind"])
def test_a_norms_gradients_of_a_cast_gradient(
    after: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """g in bfloat16 for a float32 norm is g cast before, to the bit; what is added to g_x is rounded with it."""
    norm = Norm(49, 72, torch.float32, device, False)
    _, *kept = normalize(*norm.tensors(), "", None)
    g = torch.randn(49, 72, device=device).to(torch.bfloat16)
    behind = torch.randn(49, 72, device=device) if after else None
    given = (*kept, norm.r, norm.w, "")
    got = norm_gradient(g, None, *given, None, False, torch.float32, behind)
    want = norm_gradient(g.float(), None, *given, None, False)
    total = want[0].double() + (0.0 if behind is None else behind.double())
    assert got[0].dtype == torch.float32
    assert ((got[0] - total).abs() <= (rounding(torch.float32, total) + 2.0**-22 * want[0].abs()) * after).all()
    assert torch.equal(got[1], want[1])
    defined_so = defined(monkeypatch, _norm_gradient, image(g), None, *given, False, torch.float32, image(behind))
    _, (size, *_) = exact_gradient(g.float(), kept, norm, "")
    assert ((got[0] - defined_so[0].flatten(1)).abs() <= CLOSE * (size + total.abs())).all()


@pytest.mark.parametrize("w", [False, True], ids=["no γ", "γ in bfloat16"])
def test_a_norms_gradients_without_parameters_and_of_lower_ones(
    w: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The definition's, in float32: in another order of the sums."""
    norm = Norm(37, 48, torch.float32, device, False, w, w, torch.bfloat16)
    _, *kept = normalize(*norm.tensors(), "relu", None)
    g = torch.randn(37, 48, device=device)
    got = norm_gradient(g, None, *kept, norm.r, norm.w, "relu", None, True)
    want = defined(monkeypatch, _norm_gradient, image(g), None, *kept, norm.r, norm.w, "relu", True)
    _, (size, *sums, _) = exact_gradient(g, kept, norm, "relu")
    assert ((got[0] - want[0].flatten(1)).abs() <= CLOSE * size).all()
    assert ((got[1] - want[1]).abs() <= CLOSE * torch.stack(sums)).all()
    assert torch.equal(got[2], want[2].flatten(1))


@pytest.mark.parametrize("passes_on", [False, True], ids=["", "shortcut"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_ends_behind_a_closed_entry(bad: float, passes_on: bool, device: torch.device) -> None:
    """As in PyTorch; behind an open one it spoils its channel."""
    norm = Norm(9, 32, torch.float32, device, passes_on)
    _, *kept = normalize(*norm.tensors(), "relu", None)
    passed = BITS.restore((kept[2],), (9, 32))
    g = torch.randn(9, 32, device=device)
    clean = norm_gradient(g, None, *kept, norm.r, norm.w, "relu", None, passes_on)
    got = norm_gradient(torch.where(passed, g, bad), None, *kept, norm.r, norm.w, "relu", None, passes_on)
    assert all(torch.equal(a, b) for a, b in zip(got, clean, strict=True))
    row, channel = passed.nonzero()[0].tolist()
    g[row, channel] = bad
    g_x, sums, _ = norm_gradient(g, None, *kept, norm.r, norm.w, "relu", None, passes_on)
    others = torch.arange(32, device=device) != channel
    assert not g_x[:, channel].isfinite().any()
    assert not sums[0, channel].isfinite()
    assert torch.equal(g_x[:, others], clean[0][:, others])


# ---- past 31 bits ----


def test_wide_places_are_the_same_places(
    device: torch.device, other_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kernel with places of 64 bits, of tensors that need 31: to the bit."""
    norm = Norm(37, 96, torch.float32, device, True)
    two = [factor(37, 256, False, device, True, True, True, "silu"), factor(37, 256, False, device)]
    x = torch.randn(2, 7, 3, 4, 64, device=device).unbind(2)[1]

    def everything() -> list[Tensor]:
        found = [*B.pack(x, 64, 4), *B.pack(x, 64, 8), B.make(two, torch.float32)]
        found += B.activate(norm.x, "gelu", 96, 8)
        found += B.gradient(norm.x, *found[-2:], "gelu", 8, sums=True)
        found += [bits := activation.flags(norm.x[:32] > 0), activation.bits_gradient(norm.x[:32], bits, 2.0)]
        found += gated.gradient(torch.ones(37, 256, device=device), [*two[0][:2], *two[1][:2]], "silu")
        for name in ("relu", "silu"):
            y, *kept = normalize(*norm.tensors(), name, levels_of(name))
            gradient = norm_gradient(norm.x, norm.x, *kept, norm.r, norm.w, name, levels_of(name), True)
            found += [y, *kept, *gradient]
        return found

    asked: list[int] = []

    def always(entries: int) -> bool:
        asked.append(entries)
        return True

    narrow = everything()
    monkeypatch.setattr(sys.modules["hotrain.kernels.launch"], "_compiled", {})
    forget_plans()
    for module in (B, activation, batch_norm):
        monkeypatch.setattr(module, "is_wide", always)
    wide = everything()
    assert len(asked) >= 8  # each call asks
    assert all(torch.equal(a, b) for a, b in zip(narrow, wide, strict=True))


def test_places_are_wide_in_time() -> None:
    """Twice as far as 2³⁰ entries is past int32; a view reaches further than it has entries."""
    assert not is_wide((1 << 30) - 1)
    assert is_wide(1 << 30)
