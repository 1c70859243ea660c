"""Convolutions whose patches overlap, on kernels: the codes, the restored input and the gradients of the definition."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_cases import KEY, ON_GPU, cases, few, gpu_only, key_on, layout_of
from torch import Tensor, nn

pytest.importorskip("triton")

import hotrain
from hotrain import autograd, kernels
from hotrain.kernels import dispatch
from hotrain.kernels.lift import lift
from hotrain.kernels.quantize_kernels import E4M3, E5M2, INT, Output, compress, whole
from hotrain.layer_record import AmaxHistory
from hotrain.nn.state import layer_states
from hotrain.quantize import integer
from hotrain.transform import tokens

# PyTorch's own remark on even kernels, once a process
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")

INTEGERS, FP8 = {"number": "int"}, {"number": "e4m3"}
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("hot", {}),  # a scale for each token, rounded stochastically
    ("hot-unbiased", INTEGERS),  # drawn rows, column scales of w
    ("hot-unbiased", FP8),
    ("hq8", INTEGERS),
    ("hq8", FP8),  # as on an H200: the same codes of g_y for both gradients
    ("hla", {}),  # no codes: P x in 16 or 32 bits
    ("hq4", {}),  # int4 with a scale for each row of P x
    ("hq4", FP8),  # the same codes beside g_y in fp8
    ("hot-importance", INTEGERS),  # lines of the output that are drawn
    ("hot-importance", FP8),
]
# in, out, kernel, size, options; multiples of 16, so that noise has one numbering with the definition.
LAYERS: list[tuple[str, tuple[int, int, Any, tuple[int, int], dict[str, Any]]]] = [
    ("3x3 and a border", (32, 48, 3, (9, 8), {"padding": 1})),
    ("stride, no bias", (32, 48, 3, (8, 8), {"padding": 1, "stride": 2, "bias": False})),
    ("unequal padding", (16, 32, (2, 3), (8, 8), {"padding": "same"})),
    ("reflected", (16, 32, 5, (8, 8), {"padding": 2, "padding_mode": "reflect"})),
    ("groups of 16", (32, 32, 3, (8, 8), {"padding": 1, "groups": 2})),
    ("groups of 24: padded blocks", (16, 48, 3, (8, 8), {"padding": 1, "groups": 2})),
    ("depthwise", (32, 32, 3, (8, 8), {"padding": 1, "groups": 32})),
    *gpu_only(("large", (128, 256, 3, (28, 28), {"padding": 1}))),
]


@pytest.fixture(autouse=True)
def _kernels_here(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if device.type == "cpu":
        monkeypatch.setattr(autograd, "KERNELS", dict.fromkeys(("cpu", "cuda"), kernels))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("lead", "grid", "rank", "sampled"), cases())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("number", "bits"), [("int", 8), ("e4m3", 8), ("int", None)], ids=str)
@pytest.mark.usefixtures("poison")
def test_the_input_is_restored_from_what_was_kept(lead, grid, rank, sampled, dtype, number, bits, device):
    """x̂ = PᵀP x of the codes, in float64; 40 channels fill neither a block nor the codes' padding."""
    lay, key = layout_of(lead, grid, rank, sampled), key_on(device)
    rounding = "nearest" if number == "e4m3" else "stochastic"
    rows = hotrain.GradWeight(tile=16, rank=rank, sampled=sampled, bits=bits, number=number, rounding=rounding)
    method = hotrain.Method("of the test", hotrain.GradInput(), rows, hotrain.Saved(bits, number))
    x = torch.randn(lay.samples * lay.tokens, 40, device=device).to(dtype)
    codes, side = dispatch.keep(x, method, lay, key, None)
    found = lift(codes, side[:1], dispatch._rows(side), lay, 40, dtype)
    z = codes[:40, : lay.rows].T.double() * side[0].double()
    want = tokens.lift(z, lay, int(key) & ((1 << 64) - 1))
    # Sums of 16 exact products in float32, and the rounding of the result, which the interpreter truncates.
    bound = 2.0**-20 + (2.0 ** (-8 if ON_GPU else -7) if dtype == torch.bfloat16 else 0)
    assert found.dtype == dtype
    assert (found.double() - want).abs().max() <= bound * want.abs().max()


@pytest.mark.parametrize(
    "output",
    [
        Output(INT, 127.0),
        Output(INT, 7.0, True, 3, True),
        Output(INT, 127.0, True, 3, True, True),
        Output(E4M3, 448.0),
        Output(E5M2, 57344.0),
    ],
    ids=["int8", "int4 of tokens", "int8 of channels", "e4m3", "e5m2"],
)
@pytest.mark.usefixtures("poison")
def test_codes_for_a_product_in_16_bits_are_the_codes(output, device):
    """To the bit; those of tokens times their scale, rounded once (truncated by the interpreter). Not rotated."""
    t, key = torch.randn(70, 40, device=device).bfloat16(), key_on(device)
    layout = whole(len(t), False)
    codes, scale, *_ = compress(t, layout, None, key, output, rotate=False, history=AmaxHistory.on(device))
    half = output._replace(dtype=torch.bfloat16)
    wide, same, *_ = compress(t, layout, None, key, half, rotate=False, history=AmaxHistory.on(device))
    assert wide.dtype == torch.bfloat16
    assert torch.equal(scale, same)
    if output.number == INT:
        axis = "column" if output.across else "token" if output.each else "tensor"
        rounding, bits = "stochastic" if output.stochastic else "nearest", 8 if output.limit > 7 else 4
        want = integer.quantize(t.float(), bits, axis, rounding, KEY, output.stream)
        torch.testing.assert_close(scale.view(-1), want.scale.view(-1), rtol=2**-20, atol=0)
        assert few(codes[:, :40] != want.codes, 2**-10)
    if output.by_token:
        want = codes.float() * scale[:, None]
        assert ((wide.float() - want).abs() <= want.abs() * 2.0 ** (-8 if ON_GPU else -7)).all()
    else:
        assert torch.equal(wide.float(), codes.float())


def gradients(net: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    net(x).backward(g)
    found = [x.grad, *(p.grad for p in net.parameters())]
    net.zero_grad()
    return [t.clone() for t in found if t is not None]


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def built(case: tuple, name: str, options: dict, device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
    inputs, outputs, kernel, size, arguments = case
    exact = nn.Sequential(nn.Conv2d(inputs, outputs, kernel, **arguments)).to(device)
    net = copy.deepcopy(exact)
    hotrain.convert(net, name, plan="memory", memory="linear", filter_fn=lambda m, n: True, **options)
    x = torch.randn(2, inputs, *size, device=device)
    return net, x, torch.randn_like(exact(x))


@pytest.mark.parametrize("case", [case for _, case in LAYERS], ids=[name for name, _ in LAYERS])
@pytest.mark.parametrize(("name", "options"), METHODS, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["NCHW", "NHWC"])
def test_gradients_follow_the_definition(case, name, options, layout, device):
    """Same key, same draws. The scale of x̂ may differ in its last bit, which moves lifted codes that are on a tie of
    the nearest rounding by one: 2 % of g_w at most, what 8 bits err themselves."""
    net, x, g = built(case, name, options, device)
    net, x, g = net.to(memory_format=layout), x.to(memory_format=layout), g.to(memory_format=layout)
    for _ in range(2):  # the second time fp8's scales are guessed from the first
        hotrain.manual_seed(3)
        on_kernels = gradients(net, x, g)
        assert all(state.ran.kernels for _, state in layer_states(net))
        hotrain.manual_seed(3)
        with kernels.disabled():
            by_definition = gradients(net, x, g)
        tied = name == "hq8" or name == "hot"
        for at, (a, b) in enumerate(zip(on_kernels, by_definition, strict=True)):
            assert a.shape == b.shape
            assert relative(a, b) <= (0.02 if at == 1 and tied else 2e-3), at


@pytest.mark.parametrize(("name", "options"), [("hot-unbiased", INTEGERS), ("hq8", FP8), ("hla", {})], ids=str)
def test_a_compiled_layer_is_the_eager_one(name, options, device):
    """The operator takes and returns positions as tokens, so that a layout is kept."""
    net, x, g = built(LAYERS[0][1], name, options, device)
    net, x, g = (t.to(memory_format=torch.channels_last) for t in (net, x, g))
    run = torch.compile(net, backend="aot_eager", fullgraph=True)
    hotrain.manual_seed(3)
    eager = gradients(net, x, g)
    hotrain.manual_seed(3)
    compiled = gradients(run, x, g)
    for a, b in zip(compiled, eager, strict=True):
        assert relative(a, b) <= 2e-3  # fp8's scales were guessed the second time
    assert compiled[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("frozen", ["input", "weight"])
def test_only_what_is_needed_is_computed(frozen, device):
    net, x, g = built(LAYERS[0][1], "hq8", FP8, device)
    want = gradients(net, x, g)
    x.requires_grad_(frozen != "input")
    net[0].weight.requires_grad_(frozen != "weight")
    net(x).backward(g)
    assert (x.grad is None, net[0].weight.grad is None) == (frozen == "input", frozen == "weight")
    other = net[0].weight.grad if frozen == "input" else x.grad
    assert relative(other, want[1 if frozen == "input" else 0]) <= 2e-3
