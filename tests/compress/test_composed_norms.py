"""RMS norms that a model writes out by hand: which are recognized, and that forward is theirs to the bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import hotrain
from hotrain.compress.operators.composed_norm import composed

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def _normal(x: Tensor, eps: float, dim: int = -1) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """Llama's: x̂ is rounded to x's dtype, then multiplied."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(0.5 + torch.rand(size)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * _normal(x.float(), self.eps).to(x.dtype)


class MultipliedFirstRMSNorm(RMSNorm):
    """OLMo 2's and GPT-OSS's: multiplied in float32, then rounded."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * _normal(x.float(), self.eps)).to(x.dtype)


class NarrowRMSNorm(RMSNorm):
    """timm's: all in x's own dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return _normal(x, self.eps) * self.weight


class BiasedRMSNorm(RMSNorm):
    """With a bias that is zero at its start."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


class NoisyRMSNorm(RMSNorm):
    """With noise that is switched on later."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.noise


class TrainedOtherwiseRMSNorm(RMSNorm):
    """Another function in training."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if self.training else 1)


class CountingRMSNorm(RMSNorm):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class BufferedRMSNorm(RMSNorm):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class ChannelsFirstRMSNorm(RMSNorm):
    """Over axis 1, which is the last of a matrix."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.view(1, -1, *[1] * (x.dim() - 2)) * _normal(x, self.eps, 1)


class ImageRMSNorm(RMSNorm):
    """Over axis 1 of an image, over the last of a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1) if x.dim() == 4 else super().forward(x)


class OtherEpsilonRMSNorm(RMSNorm):
    """Epsilon is added to the root, which differs in small rows alone."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps * self.eps))


class DetachedRMSNorm(RMSNorm):
    """With a statistic that has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps).detach())


class FrozenRMSNorm(RMSNorm):
    """With a weight that has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.detach() * _normal(x, self.eps)


class InTrainingAloneRMSNorm(RMSNorm):
    """Another function where gradients are on."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.5 if torch.is_grad_enabled() else x)


class CleanRMSNorm(RMSNorm):
    """Without NaN."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.nan_to_num(x))


class BoundedRMSNorm(RMSNorm):
    """Within the range of float16."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-65504, 65504))


class LoggingRMSNorm(RMSNorm):
    """Writes down what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(float(x.mean()))
        return super().forward(x)


class TwoEpsilonsRMSNorm(RMSNorm):
    """Reads the second of two."""

    def __init__(self) -> None:
        super().__init__()
        self.variance_epsilon = 1e-6


class SwitchedRMSNorm(RMSNorm):
    """Is switched off later."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = "on"

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.mode == "on" else x


PAIRS = [(F32, F32), (BF16, F32), (F16, F32), (BF16, BF16), (F16, F16)]  # of x and of the weight


@pytest.mark.parametrize(
    ("norm", "kind", "pairs"),
    [
        (RMSNorm, "rms_cast", PAIRS),
        # Of two float32 there is no rounding between, so that both formulas are the same.
        (MultipliedFirstRMSNorm, "rms_float", PAIRS[1:]),
        (NarrowRMSNorm, "rms_cast", PAIRS[:1]),
    ],
)
def test_which_formula_it_is_by_dtype(norm: type[RMSNorm], kind: str, pairs: list) -> None:
    module = norm()
    recognized = composed(module)
    assert recognized is not None
    found = {(x, w): kind for x, w, kind in recognized.kinds}
    assert {pair for pair, name in found.items() if name == kind} >= set(pairs)
    if norm is NarrowRMSNorm:
        assert set(found) == set(pairs)
    else:
        assert set(found) == set(PAIRS)
    assert composed(module.double()) == recognized  # a weight's dtype may change behind `convert`


@pytest.mark.parametrize(
    "norm",
    [
        BiasedRMSNorm, NoisyRMSNorm, TrainedOtherwiseRMSNorm, CountingRMSNorm, BufferedRMSNorm, ChannelsFirstRMSNorm,
        ImageRMSNorm, OtherEpsilonRMSNorm, DetachedRMSNorm, FrozenRMSNorm, InTrainingAloneRMSNorm, CleanRMSNorm,
        BoundedRMSNorm, LoggingRMSNorm, TwoEpsilonsRMSNorm,
    ],
)  # fmt: skip
def test_what_does_more_is_left_as_it_is(norm: type[RMSNorm]) -> None:
    """Not recognized, and not run: neither its hooks nor what it counts."""
    module, calls = norm(), []
    module.register_forward_hook(lambda *_: calls.append(1))
    state = {k: v.clone() for k, v in module.state_dict().items()}
    assert composed(module) is None
    assert not calls
    assert not getattr(module, "log", [])
    assert getattr(module, "calls", 0) == 0
    assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())


@pytest.mark.parametrize("x_dtype", [F32, BF16, F16, F64], ids=str)
@pytest.mark.parametrize("w_dtype", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize("shape", [(4, 96, 64), (400, 64), (3, 9, 11, 64), (2, 3, 9, 11, 64)], ids=str)
@pytest.mark.parametrize("norm", [RMSNorm, MultipliedFirstRMSNorm, NarrowRMSNorm, BiasedRMSNorm, NoisyRMSNorm])
def test_forward_is_the_modules_to_the_bit(
    norm: type[RMSNorm], shape: tuple[int, ...], w_dtype: torch.dtype, x_dtype: torch.dtype
) -> None:
    """Converted in float32 and moved to another dtype, with terms that were zero at conversion."""
    exact = nn.Sequential(norm())
    net = copy.deepcopy(exact)
    hotrain.convert(net, "exact", memory="block")
    for model in (exact, net):
        model.to(w_dtype)
        for name, parameter in model.named_parameters():
            parameter.data = torch.linspace(0.5, 1.5, 64).to(w_dtype) + (name == "0.bias")
        if hasattr(model[0], "noise"):
            model[0].noise = 0.5
    x = torch.randn(shape).to(x_dtype)
    want, got = exact(x), net(x)
    assert got.dtype == want.dtype
    assert torch.equal(got, want)


@pytest.mark.parametrize("norm", [RMSNorm, MultipliedFirstRMSNorm, NarrowRMSNorm])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_under_autocast(norm: type[RMSNorm], compiled: bool) -> None:
    """x in bfloat16 and the weight in float32: the dtype of the result, its bits, and gradients within int4 of x̂.

    A row of x̂ is normal: its largest of 64 is some 2.7 deviations, so that a step is 0.38 and the error 0.11 of it,
    in γ's gradient. Compiled, a compiler may leave out roundings to bfloat16.
    """
    exact = nn.Sequential(nn.Linear(64, 64), norm(), nn.Linear(64, 8))
    net = copy.deepcopy(exact)
    hotrain.convert(net, "exact", memory="block")
    run = torch.compile(net, backend="aot_eager") if compiled else net
    x, grads = torch.randn(4, 96, 64), []
    for model in (exact, run):
        with torch.autocast("cpu", BF16):
            y = model(x)
        y.float().square().sum().backward()
        grads.append((y, [p.grad for p in (exact if model is exact else net).parameters()]))
    (want, of_exact), (got, of_net) = grads
    assert got.dtype == want.dtype
    assert torch.equal(got, want)
    for g, other in zip(of_exact, of_net, strict=True):
        assert (g - other).norm() <= 0.15 * g.norm()


def test_both_formulas_keep_the_same_codes() -> None:
    """int4 with a scale of each row, and no float32: at most a third of what exact keeps in bfloat16 and float32."""
    kept, x = [], torch.randn(4, 96, 64, dtype=BF16)
    for norm in (RMSNorm, MultipliedFirstRMSNorm):
        net = nn.Sequential(norm())
        exact = hotrain.saved_bytes(net, x).total
        hotrain.convert(net, "exact", memory="block")
        kept.append(hotrain.saved_bytes(net, x).total)
        assert kept[-1] <= exact / 3
    assert kept[0] == kept[1]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_what_changes_behind_convert_counts(compiled: bool) -> None:
    exact = nn.Sequential(nn.Linear(64, 64), SwitchedRMSNorm(), nn.Linear(64, 8))
    net = copy.deepcopy(exact)
    hotrain.convert(net, "exact", memory="block")
    run, x = torch.compile(net, backend="aot_eager") if compiled else net, torch.randn(4, 96, 64)
    assert torch.equal(run(x), exact(x))
    for model in (exact, net):
        model[1].mode = "off"
    assert torch.equal(run(x), exact(x))
    for model in (exact, net):
        model[1].mode, model[1].eps = "on", 0.5
    assert torch.equal(run(x), exact(x))


class DrawingRMSNorm(RMSNorm):
    """Draws noise of no size."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.0 * torch.randn_like(x))


def test_random_numbers_stay_the_users() -> None:
    norm = DrawingRMSNorm()
    before = torch.get_rng_state()
    composed(norm)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_wrong_length_is_the_modules_own_error() -> None:
    net = nn.Sequential(RMSNorm())
    hotrain.convert(net, "exact", memory="block")
    with pytest.raises(RuntimeError, match=r"size of tensor a \(64\) must match the size of tensor b \(128\)"):
        net(torch.randn(4, 256, 128, requires_grad=True))


def test_revert_leaves_nothing() -> None:
    net = nn.Sequential(RMSNorm())
    before = set(net[0].__dict__)
    hotrain.convert(net, "exact", memory="block")
    assert set(net[0].__dict__) > before
    hotrain.revert(net)
    assert set(net[0].__dict__) == before
    assert type(net[0]) is RMSNorm
