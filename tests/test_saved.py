"""What lives between forward and backward: exactly the format's bytes, the key, and the weight where it is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import keep, projection
from torch import Tensor

import hotrain
from hotrain import functional
from hotrain.autograd import Step
from hotrain.method import Saved
from hotrain.saved import Format, values

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
    """Everything that one forward hands to save_for_backward."""
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
    lay = Step(method, KEY).layout(lead)
    key = 8 if method.draws else 0
    assert nbytes(saved_by(x, w, method)) == Format(method.saved, 48, dtype).nbytes(lay.rows) + key + w.nbytes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("kernel", "options"), [(3, {"padding": 1}), (1, {}), (2, {"stride": 2})], ids=str)
def test_a_convolution_keeps_what_its_format_says(name: str, kernel: int, options: dict) -> None:
    """Never the unfolded matrix: for k×k kernels P x on x's own grid."""
    method = hotrain.preset(name)
    x, w = torch.randn(2, 16, 8, 8, requires_grad=True), torch.randn(32, 16, kernel, kernel, requires_grad=True)
    lead, columns = ((2, 4, 4), 64) if kernel == 2 else ((2, 8, 8), 16)
    lay = Step(method, KEY).layout(lead)
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
    rows, scale = keep(x.view(-1, 12), projection(Step(method, KEY).layout(lead), KEY), method, KEY)
    assert len(kept) == (1 if scale is None else 2)
    if scale is None:
        torch.testing.assert_close(kept[0], rows, rtol=0, atol=1e-13)
    else:
        back = Format(method.saved, 12, torch.float64).restore(kept)
        assert torch.equal(back.unpacked().double(), rows)  # type: ignore[union-attr]
        torch.testing.assert_close(kept[1].view(scale.shape), scale, rtol=1e-14, atol=0)
