"""`kernels.keep` and `kernels.gradients` together against the definition of the two gradients, method by method."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kernel_cases import KEY, gpu_only, key_on, layout_of
from torch import Tensor

pytest.importorskip("triton")

from hotrain import backward, kernels
from hotrain.layer_record import AmaxHistory
from hotrain.method import Method, Saved
from hotrain.presets import preset
from hotrain.quantize.integer import wide
from hotrain.saved import Format
from hotrain.transform.tokens import Grid, Layout, project

METHODS = {
    "hot": preset("hot"),
    "hot-tensor": preset("hot", scale="tensor"),
    "hot-unbiased": preset("hot-unbiased"),
    "hq": preset("hq"),
    "hla": preset("hla"),
    "hq4": preset("hq4"),
    "hot-importance": preset("hot-importance"),
    "hot-importance-int8": preset("hot-importance", saved_bits=8, grad_input_bits=8),
    "hq4-e4m3": preset("hq4", number="e4m3"),
    "hot-importance-e5m2": preset("hot-importance", number="e5m2"),
    "hot-e4m3": preset("hot", number="e4m3"),
    "hot-unbiased-e4m3": preset("hot-unbiased", number="e4m3"),
    "hot-unbiased-e5m2": preset("hot-unbiased", number="e5m2"),
}
SHAPES = [
    ((2, 50), Grid(7, 7, 1), 48, 80),
    ((1, 19), None, 40, 7),  # fewer columns than a product wants, tokens that leave a remainder
    *gpu_only(
        ((4, 197), Grid(14, 14, 1), 2304, 768),
        ((2, 577), None, 1000, 48),
        ((1, 1000), None, 100, 3),
    ),
]
# Integer sums are exact, so what differs is a code that moved with float32 rounding before it; fp8 products sum in the
# tensor cores' accumulators. Both are far below the rounding of the codes themselves.
TOLERANCE = {"int": 2e-3, "e4m3": 4e-3, "e5m2": 4e-3}


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def by_definition(
    x: Tensor, g_y: Tensor, w: Tensor, method: Method, lay: Layout, lead: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    kept = Format(method.saved, x.shape[1], x.dtype)
    rows = x if method.saved.bits is None else wide(x)
    kept_x = kept.restore(kept.keep(project(rows.view(*lead, -1), lay, KEY), KEY))
    return (
        backward.grad_input(g_y, w, method, KEY, lay),
        backward.grad_weight(g_y.view(*lead, -1), kept_x, lay, method, KEY),
    )


def data(
    lead: tuple[int, ...], outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    tokens = lead[0] * lead[1]
    x = torch.randn(tokens, inputs, device=device).to(dtype)
    g_y = (torch.randn(tokens, outputs, device=device) * torch.rand(tokens, 1, device=device)).to(dtype)
    return x, g_y, torch.randn(outputs, inputs, device=device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("lead", "grid", "outputs", "inputs"), SHAPES)
@pytest.mark.usefixtures("poison")
def test_gradients_are_the_definitions(lead, grid, outputs, inputs, name, dtype, device):
    method = METHODS[name]
    lay = layout_of(lead, grid, method.grad_weight.rank, method.grad_weight.sampled)
    assert kernels.reason(method, lay, dtype, device) is None
    x, g_y, w = data(lead, outputs, inputs, dtype, device)
    key = key_on(device)
    want_x, want_w = by_definition(x, g_y, w, method, lay, lead)
    tolerance = TOLERANCE[method.grad_weight.number] if method.grad_weight.bits else 4 * torch.finfo(dtype).eps
    history = AmaxHistory.on(device)
    for _ in range(2):  # without a guess of the scales, and with one
        kept = kernels.keep(x, method, lay, key, history)
        shapes = [(tuple(t.shape), t.dtype) for t in kept]
        assert shapes == kernels.kept_shapes(inputs, lay, method, dtype)
        g_x, g_w, g_b = kernels.gradients(
            g_y, w, kept, method, lay, key, history, (True, True, True), dtype=torch.float32
        )
        assert g_x.dtype == dtype
        assert g_x.shape == (lead[0] * lead[1], inputs)
        assert g_w.shape == (outputs, inputs)
        assert relative(g_x, want_x) <= tolerance + torch.finfo(dtype).eps
        assert relative(g_w, want_w) <= tolerance
        assert relative(g_b, g_y.double().sum(0)) <= torch.finfo(dtype).eps + 2**-20


@pytest.mark.parametrize("name", ["hot-unbiased", "hot-unbiased-e4m3", "hla", "hq4"])
@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, False, True), (True, False, True)]
)
def test_only_what_is_needed_is_computed(name, needs, device):
    method = METHODS[name]
    lay = layout_of((2, 32), None, method.grad_weight.rank, method.grad_weight.sampled)
    x, g_y, w = data((2, 32), 48, 32, torch.bfloat16, device)
    key = key_on(device)
    kept = kernels.keep(x, method, lay, key, None) if needs[1] else ()
    full = kernels.gradients(
        g_y, w, kernels.keep(x, method, lay, key, None), method, lay, key, None, (True, True, True)
    )
    part = kernels.gradients(g_y, w if needs[0] else None, kept, method, lay, key, None, needs)
    for need, a, b in zip(needs, part, full, strict=True):
        assert (a is not None) == need
        if need:
            assert relative(a[..., :32] if a.dim() == 2 else a, b) <= 2**-7


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("number", ["fp8", "int8"])
@pytest.mark.parametrize("name", ["hot-unbiased", "hot-unbiased-e4m3", "hla"])
@pytest.mark.parametrize(("lead", "grid", "outputs", "inputs"), SHAPES)
@pytest.mark.usefixtures("poison")
def test_the_forward_product_of_codes(lead, grid, outputs, inputs, name, number, transposed, device):
    """y is the definition's, and what is kept beside it is what `keep` keeps."""
    from hotrain import forward

    method = METHODS[name].override(forward=number)
    lay = layout_of(lead, grid, 8, method.grad_weight.sampled)
    x, _, w = data(lead, outputs, inputs, torch.bfloat16, device)
    b, key = torch.randn(outputs, device=device), key_on(device)
    given = w.T.contiguous() if transposed else w
    y, kept = kernels.forward(x, given, b, method, lay, key, None, True, transposed)
    assert y.shape == (lead[0] * lead[1], outputs)
    assert y.dtype == x.dtype
    assert relative(y, forward.product(x.float(), w, b, number)) <= 2**-8 + 4e-3
    codes, side = kernels.keep(x, method, lay, key, None)
    count = inputs, lay.rows
    a, z = (c[: count[0], : count[1]].float() * s[0] for c, s in ((kept[0], kept[1]), (codes, side)))
    assert relative(a, z) <= 1e-3, "the same values, whatever power of two the scale is"
    assert torch.equal(
        kept[1][4:].view(torch.uint8)[: lay.samples * lay.tiles * 8],
        side[4:].view(torch.uint8)[: lay.samples * lay.tiles * 8],
    )
    assert kernels.forward(x, given, b, method, lay, key, None, False, transposed)[1] == ()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 32), (40, 7)], ids=["whole blocks", "with a remainder"])
@pytest.mark.usefixtures("poison")
def test_a_transposed_weight(outputs, inputs, name, device):
    """transformers' Conv1D keeps w as (I, O): read as it is stored, and its gradient is written so."""
    method = METHODS[name]
    lay = layout_of((2, 32), None, method.grad_weight.rank, method.grad_weight.sampled)
    x, g_y, w = data((2, 32), outputs, inputs, torch.bfloat16, device)
    key = key_on(device)
    kept = kernels.keep(x, method, lay, key, None)
    a = kernels.gradients(g_y, w, kept, method, lay, key, None, (True, True, False))
    b = kernels.gradients(g_y, w.T.contiguous(), kept, method, lay, key, None, (True, True, False), transposed=True)
    assert b[1].shape == (inputs, outputs)
    assert b[1].is_contiguous()
    # Integer codes are the same; fp8's scale was guessed the second time, which moves only what underflows, and
    # products in floating point sum in another order.
    exact = method.grad_weight.bits is not None and method.grad_weight.number == "int"
    tolerance = 0.0 if exact else 1e-2
    assert relative(a[0], b[0]) <= tolerance
    assert relative(a[1], b[1].T) <= tolerance


def test_the_same_key_gives_the_same_bits_and_another_one_others(device):
    method = METHODS["hot-unbiased"]
    lay = layout_of((2, 32), None, 8, 4)
    x, g_y, w = data((2, 32), 48, 32, torch.bfloat16, device)

    def run(key: int) -> tuple[Tensor | None, ...]:
        codes, side = kernels.keep(x, method, lay, key_on(device, key), None)
        found = kernels.gradients(g_y, w, (codes, side), method, lay, key_on(device, key), None, (True, True, True))
        return codes, side[0], side[4:].view(torch.uint8)[:32], *found

    first, again, other = run(7), run(7), run(8)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[3], other[3])


def test_a_kernel_that_fails_gives_way_to_the_definition_with_one_warning(device, monkeypatch):
    from triton.compiler.errors import CompilationError

    from hotrain.kernels import quantize_kernels, support

    def fails(*_: object, **__: object) -> None:
        raise CompilationError("", None, "no such instruction")

    monkeypatch.setattr(support, "_broken", set())
    method = METHODS["hot-unbiased"]
    lay = layout_of((2, 32), None, 8, 4)
    x, g_y, w = data((2, 32), 48, 32, torch.bfloat16, device)
    key = key_on(device)
    kept = kernels.keep(x, method, lay, key, None)
    want = kernels.gradients(g_y, w, kept, method, lay, key, None, (True, True, True))
    monkeypatch.setattr(quantize_kernels, "compress", fails)

    def twice() -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        kept = kernels.keep(x, method, lay, key, None)
        found = kernels.gradients(g_y, w, kept, method, lay, key, None, (True, True, True))
        kernels.keep(x, method, lay, key, None)
        return kept, found

    with pytest.warns(UserWarning, match="no such instruction") as caught:
        kept_so, found = twice()
    assert len(caught) == 3, "keep, gradients and weight, once each"
    assert torch.equal(kept[0][:32], kept_so[0][:32])
    assert torch.equal(kept[1][:1], kept_so[1][:1])
    for a, b in zip(want, found, strict=True):
        assert relative(a, b) <= 1e-2


def test_reasons_name_what_is_unsupported(device, monkeypatch):
    from hotrain.kernels import support

    monkeypatch.setattr(support, "_warned", set())
    lay = layout_of((2, 32), None, 8, 4)
    method = METHODS["hot-unbiased"]
    assert kernels.reason(method, lay, torch.bfloat16, device) is None
    assert "float64" in kernels.reason(method, lay, torch.float64, device)
    with monkeypatch.context() as patch:  # a format of other bits is refused until its kernels are written
        patch.setattr("hotrain.method.BITS", (4, 6, 8, None))
        six = dataclasses.replace(preset("hq4"), saved=Saved(6, scale="row"))
        assert "codes of 4 and 8 bits" in kernels.reason(six, lay, torch.bfloat16, device)
    assert "tiles" in kernels.reason(preset("lbp-wht"), lay, torch.bfloat16, device)
    assert "one scale" in kernels.reason(preset("hq4").override(forward="int8"), lay, torch.bfloat16, device)
    no_codes = preset("hot-importance", saved_bits=None, grad_weight_bits=None)
    assert "integers alone" in kernels.reason(no_codes, lay, torch.bfloat16, device)
    assert "rows" in kernels.reason(preset("hq").override(share=0.5), lay, torch.bfloat16, device)
    one_scale = dataclasses.replace(preset("hq"), saved=Saved(4))
    assert "a scale for each row" in kernels.reason(one_scale, lay, torch.bfloat16, device)
    assert "drop" in kernels.reason(
        Method("d", grad_weight=preset("hot").grad_weight.__class__(tile=16, rank=8, drop=0.5)),
        lay,
        torch.bfloat16,
        device,
    )
    with kernels.disabled():
        assert "switched off" in kernels.reason(method, lay, torch.bfloat16, device)
    assert "mps" in kernels.reason(method, lay, torch.bfloat16, torch.device("mps"))
    kernels.note("the kernels are switched off", device, torch.float32)  # asked for: no warning
    with pytest.warns(UserWarning, match="bfloat16.*no such unit"):
        kernels.note("no such unit", device, torch.bfloat16)
    kernels.note("no such unit", device, torch.bfloat16)  # once


def test_the_device_key_is_the_hosts(device):
    from hotrain import draws

    salt = draws.mix(3, 0, 12345)
    counter = torch.tensor([draws.signed(salt), 4, 0], dtype=torch.int64, device=device)
    assert int(kernels.next_key(counter)) == draws.signed(draws.mix(3, 0, 12345, 5)) == int(counter[2])
    assert int(kernels.next_key(counter, False)) == draws.signed(draws.mix(3, 0, 12345, 5))
    assert counter[1] == 5
