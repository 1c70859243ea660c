"""Errors of gradients against projections written out, biases against their noise, energies against known signals."""

from __future__ import annotations

import pytest
import torch
from small_models import ConvNet, TokenNet, assert_as_found, found
from torch import Tensor, nn
from torch.nn import functional as F

import hotrain
from hotrain.analysis.fidelity import energy_by_sequency, fidelity
from hotrain.audit.unchanged import as_found
from hotrain.layer_gradients import exact_calls
from hotrain.transform.hadamard import TILE, matrix
from hotrain.transform.rows import Rows


def _batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, 16, 16, generator=generator), torch.tensor([0, 1, 2, 3])


def _given(*gradients: Tensor):
    """A loss whose gradient with respect to the model's outputs is given."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        outputs = model(x)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return sum((y * g).sum() for y, g in zip(outputs, gradients, strict=True))  # type: ignore[return-value]

    return loss


def _everything(module: nn.Module, name: str) -> bool:
    return True


def test_full_rank_in_floats_has_no_error() -> None:
    model = TokenNet()
    hotrain.convert(model, hotrain.preset("hla", rank=16))
    for row in fidelity(model, _batch(), draws=2).rows:
        # The same sums in another order: a few float32 roundings of terms of mixed sign.
        assert row["grad_weight_error"] < 1e-5, row["layer"]
        assert row["grad_weight_cosine"] == pytest.approx(1, abs=1e-9)
        assert row["grad_input_error"] in (None, 0.0)  # exact by construction: hla leaves g_x alone


@pytest.mark.parametrize("rank", [8, 4, 1])
def test_low_rank_error_is_that_of_the_projection(rank: int) -> None:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(32, 32))
    hotrain.convert(model, hotrain.preset("hla", rank=rank))
    x, g_y = torch.randn(2, 32, 32), torch.randn(2, 32, 32)
    row = fidelity(model, x, _given(g_y), draws=2).rows[0]
    P = matrix(TILE, torch.float64, torch.device("cpu"))[
        Rows(TILE, rank, 0, "sequency").fixed_rows(torch.device("cpu"))
    ]
    blocks = x.double().view(-1, TILE, 32), g_y.double().view(-1, TILE, 32)
    projected = torch.einsum("rt,bti,rs,bso->oi", P, blocks[0], P, blocks[1])
    exact = torch.einsum("bti,bto->oi", *blocks)
    want = float((projected - exact).norm() / exact.norm())
    assert row["grad_weight_error"] == pytest.approx(want, rel=1e-5)
    assert row["grad_weight_bias"] == pytest.approx(want, rel=1e-5)  # nothing is drawn: all of the error is bias
    assert row["grad_weight_noise"] < 1e-5
    cosine = float(F.cosine_similarity(projected.flatten(), exact.flatten(), dim=0))
    assert row["grad_weight_cosine"] == pytest.approx(cosine, abs=1e-5)


def test_bias_and_noise_tell_an_unbiased_method() -> None:
    torch.manual_seed(0)
    hotrain.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64))
    x, loss = torch.randn(4, 64, 64), _given(torch.randn(4, 64, 64))

    def row(method: hotrain.Method) -> dict:
        hotrain.convert(model, method)
        return fidelity(model, x, loss, draws=16).rows[0]

    fixed, drawn = row(hotrain.preset("hla")), row(hotrain.preset("hot-unbiased"))
    # White tokens: half of the rows hold half of the energy of the product.
    assert fixed["grad_weight_bias"] > 0.3
    assert fixed["grad_weight_bias"] > 100 * fixed["grad_weight_noise"]
    # An unbiased gradient's mean is off by its noise alone. 4096 entries: their sum of squares varies by 3 %.
    for path in ("grad_input", "grad_weight"):
        if drawn[f"{path}_bias"] is not None:
            assert drawn[f"{path}_bias"] == pytest.approx(drawn[f"{path}_noise"], rel=0.15)
    assert drawn["grad_weight_error"] > drawn["grad_weight_bias"]


def test_each_layer_is_measured_alone() -> None:
    """The error of `a` is the same whatever `b` does."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    x, loss = torch.randn(2, 32, 32), _given(torch.randn(2, 32, 32))
    hotrain.convert(model, "hla", filter_fn=lambda m, name: name == "0")
    alone = fidelity(model, x, loss, draws=2).rows[0]
    hotrain.convert(model, "int4", filter_fn=lambda m, name: name == "1")
    assert fidelity(model, x, loss, draws=2).rows[0] == alone


def test_exact_calls_see_exact_gradients() -> None:
    torch.manual_seed(2)
    model = ConvNet()
    x = torch.randn(2, 32, 8, 8)
    heard: dict[str, Tensor] = {}
    handles = [
        getattr(model, name).register_forward_hook(
            lambda m, a, y, name=name: y.register_hook(lambda g: heard.__setitem__(name, g)) and None
        )
        for name in ("conv", "point")
    ]
    torch.manual_seed(3)
    F.cross_entropy(model(x), torch.tensor([0, 1])).backward()
    for handle in handles:
        handle.remove()
    hotrain.convert(model, "int4", filter_fn=lambda m, name: name in ("conv", "point"))
    torch.manual_seed(3)  # the same dropout
    model.norm.reset_running_stats()
    with as_found(model):
        calls = exact_calls(model, (x, torch.tensor([0, 1])), None)
    assert {call.name for call in calls} == {"conv", "point"}
    for call in calls:
        assert torch.equal(call.grad_output, heard[call.name])


@pytest.mark.parametrize("training", [True, False])
def test_left_as_found(training: bool) -> None:
    model = ConvNet()
    hotrain.convert(model, "hot-unbiased", filter_fn=_everything)
    batch = torch.randn(2, 32, 8, 8), torch.tensor([0, 1])
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    model.train(training)
    before = found(model)
    first = fidelity(model, batch, draws=2)
    assert_as_found(model, before)
    assert fidelity(model, batch, draws=2) == first
    assert "gradients against exact" in str(first)


def test_a_layer_that_could_not_follow_says_so() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    hotrain.convert(model, "hla")
    row = fidelity(model, torch.randn(32, 64), _given(torch.randn(32, 64)), draws=2).rows[0]
    assert row["method"].startswith("exact: 2-D input")
    assert row["grad_weight_error"] == 0


def test_gradients_that_nobody_asks_for() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    hotrain.convert(model, "hq", filter_fn=_everything)
    model[1].weight.requires_grad_(False)
    first, second = fidelity(model, torch.randn(2, 16, 32), _given(torch.randn(2, 16, 32)), draws=2).rows
    assert first["grad_input_error"] is None  # the batch requires no grad
    assert second["grad_weight_error"] is None
    assert second["grad_input_error"] > 0


def test_autocast_of_the_loss_is_repeated() -> None:
    model = TokenNet()
    hotrain.convert(model, "hq")

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(batch[0]), batch[1])

    with as_found(model):
        assert {call.autocast for call in exact_calls(model, _batch(), loss)} == {torch.bfloat16}
    assert len(fidelity(model, _batch(), loss, draws=2).rows) == 3


@pytest.mark.parametrize(
    ("tokens", "sequency"),
    [
        (torch.ones(32, 3), 0),
        (torch.tensor([1.0, -1.0]).repeat(16)[:, None], 15),
        (torch.tensor([1.0] * 8 + [-1.0] * 8).repeat(2)[:, None], 1),
    ],
    ids=["constant", "alternating", "one change of sign"],
)
def test_energy_of_walsh_functions(tokens: Tensor, sequency: int) -> None:
    energy = energy_by_sequency(tokens)
    assert energy[sequency] == pytest.approx(1)
    assert sum(energy) == pytest.approx(1)


def test_energy_of_any_length() -> None:
    assert energy_by_sequency(torch.zeros(5, 3)) == [0.0] * 16
    assert sum(energy_by_sequency(torch.randn(37, 3))) == pytest.approx(1)
    # One token fills a block with an impulse, which is spread over all sequencies alike.
    assert energy_by_sequency(torch.ones(1, 2)) == pytest.approx([1 / 16] * 16)


def test_bad_arguments() -> None:
    model = TokenNet()
    with pytest.raises(ValueError, match=r"run hotrain\.convert"):
        fidelity(model, _batch())
    hotrain.convert(model, "hot")
    with pytest.raises(ValueError, match="draws=1"):
        fidelity(model, _batch(), draws=1)
    with pytest.raises(ValueError, match="no converted layers nowhere"):
        exact_calls(model, _batch(), None, ["nowhere"])
    with pytest.raises(ValueError, match="no gradient reached"):
        fidelity(model, _batch(), lambda m, b: m.head(b[0].flatten(1)[:, :32]).sum())


@pytest.mark.parametrize(("name", "number", "lost"), [("hq", "int", 0.25), ("hq8", "int", 0.0), ("hq", "e4m3", 0.0)])
def test_outputs_whose_gradients_are_far_below_the_others_are_counted(name: str, number: str, lost: float) -> None:
    """A quarter of the outputs has a thousandth of the others' g_y: in integers with one scale it is rounded to zero,
    an error as large as the gradient and the noise of the rounding more; a scale for each output keeps it, and e4m3 has
    the range. The cosine is near 1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64))
    hotrain.convert(model, hotrain.preset(name, number=number), filter_fn=_everything)
    x, g_y = torch.randn(2, 64, 64), torch.randn(2, 64, 64)
    g_y[..., ::4] *= 1e-3
    found = fidelity(model, x, _given(g_y), draws=2)
    (row,) = found.rows
    assert row["grad_weight_cosine"] > 0.99
    assert row["grad_weight_lost"] == lost
    assert ("parts with more error than gradient, most 0.25" in str(found)) == (lost > 0)


def test_inputs_without_a_gradient_are_not_lost() -> None:
    """Features that are zero: there is nothing to lose."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64))
    hotrain.convert(model, hotrain.preset("hq8", number="int"), filter_fn=_everything)
    x = torch.randn(2, 64, 64)
    x[..., 8:] = 0
    assert fidelity(model, x, _given(torch.randn(2, 64, 64)), draws=2).rows[0]["grad_weight_lost"] == 0
