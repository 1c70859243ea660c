"""Draws as a user meets them: a seed fixes them, every training forward moves them on, a resumed run continues."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import hotrain
from hotrain import draws


def model(method: str = "hot-unbiased") -> nn.Sequential:
    net = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    hotrain.convert(net, method)
    return net


X = torch.randn(2, 48, 64, generator=torch.Generator().manual_seed(5))


def gradients(net: nn.Module, x: Tensor = X) -> list[Tensor]:
    return list(torch.autograd.grad(net(x).square().sum(), list(net.parameters())))


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def test_one_seed_one_sequence() -> None:
    """The whole of a run's draws follow from the seed; each training forward moves them on."""
    net = model()
    runs = []
    for seed in (1, 1, 2):
        hotrain.manual_seed(seed)
        runs.append([gradients(net) for _ in range(3)])
    assert all(same(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    assert not same(runs[0][0], runs[0][1])
    assert not same(runs[0][1], runs[0][2])
    assert not same(runs[0][0], runs[2][0])


def test_layers_draw_different_numbers() -> None:
    """Two layers alike in all but name: equal draws would make their errors add up instead of averaging out."""
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    net[1].load_state_dict(net[0].state_dict())
    hotrain.convert(net, "hot-unbiased")
    grads = [torch.autograd.grad(layer(X).square().sum(), layer.weight)[0] for layer in net]
    assert not torch.equal(*grads)


def test_evaluation_does_not_move_the_draws() -> None:
    """Validating more or less often must not change the training that follows."""
    net = model()
    outcomes = []
    for validations in (0, 3):
        hotrain.manual_seed(1)
        gradients(net)
        net.eval()
        for _ in range(validations):
            net(X)
        net.train()
        outcomes.append(gradients(net))
    assert same(*outcomes)


def test_pytorchs_generator_is_left_alone() -> None:
    """Dropout masks and shuffles of a converted run are those of the exact one."""
    net = model()
    before = torch.get_rng_state()
    gradients(net)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_resumed_run_continues() -> None:
    net = model()
    hotrain.manual_seed(11)
    for _ in range(3):
        gradients(net)
    state = draws.state_dict(net)
    assert all(type(value) is int for value in state.values())
    want = [gradients(net) for _ in range(2)]
    hotrain.manual_seed(99)
    other = model()
    other.load_state_dict(net.state_dict())
    gradients(other)
    draws.load_state_dict(other, state)
    assert all(same(a, gradients(other)) for a in want)


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1])
def test_every_seed_survives_the_state(seed: int) -> None:
    """Formats of checkpoints hold signed words of 64 bits: the seed must come back from one."""
    net = model()
    hotrain.manual_seed(seed)
    want = gradients(net)
    hotrain.manual_seed(seed)
    state = draws.state_dict(net)
    assert all(-(2**63) <= value < 2**63 for value in state.values())
    hotrain.manual_seed(5)
    draws.load_state_dict(net, state)
    assert same(gradients(net), want)


def test_the_state_of_another_model_is_refused() -> None:
    state = draws.state_dict(model())
    other = nn.Sequential(nn.Linear(64, 64))
    hotrain.convert(other)
    with pytest.raises(ValueError, match=r"other layers.*unknown \['2'\]"):
        draws.load_state_dict(other, state)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["copy", "pickle"])
def test_a_copy_draws_on_as_its_original(copied) -> None:  # type: ignore[no-untyped-def]
    """A copy takes its own step counters along: it neither disturbs nor shares those of the original."""
    net = model()
    gradients(net)
    twin = copied(net)
    assert type(twin[0]) is type(net[0])
    gradients(twin), gradients(twin)
    assert [s.draws.step for _, _, s in hotrain.converted_layers(net)] == [0, 0]
    assert [s.draws.step for _, _, s in hotrain.converted_layers(twin)] == [2, 2]
    gradients(net), gradients(net)
    assert same(gradients(net), gradients(twin))
    hotrain.revert(twin)
    assert type(twin[0]) is nn.Linear
    assert type(net[0]) is not nn.Linear


@pytest.mark.parametrize("seed", [1.5, "1", None, True])
def test_a_seed_is_an_integer(seed: object) -> None:
    with pytest.raises(ValueError, match="manual_seed: got"):
        hotrain.manual_seed(seed)  # type: ignore[arg-type]
