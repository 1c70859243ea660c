"""`hotrain.compile`: one line that converts and compiles, and its check that the model got no slower."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import hotrain
from hotrain import compiling
from hotrain.compiling import Check
from hotrain.nn import state
from hotrain.nn.state import layer_states


class Net(nn.Module):
    """A norm with running statistics, and layers to convert."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.BatchNorm1d(64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(self.norm(x.mT).mT)))


def checked(monkeypatch: pytest.MonkeyPatch, before: float, after: float) -> tuple[nn.Module, Any, Any]:
    """A converted model, as it is called, and its report; the times are given instead of taken."""
    model = Net()
    report = hotrain.convert(model)
    fast = torch.compile(model, backend="eager")
    times = iter([before, after])
    taken = compiling._milliseconds

    def given(*args: Any) -> float:
        taken(*args)
        return next(times)

    monkeypatch.setattr(compiling, "_milliseconds", given)
    Check(fast, model, report)
    return model, fast, report


def test_it_converts_and_compiles_and_has_the_report() -> None:
    """On a CPU the plan is `convert`'s, and nothing is timed: there are no CUDA graphs to be slower than."""
    model = Net()
    fast = hotrain.compile(model, "hot")
    assert fast._orig_mod is model
    assert {row.name for row in fast.report.converted} == {"a", "b"}
    assert fast.report.plan == "speed"
    assert fast.report.times is None
    assert fast.state_dict().keys() == {f"_orig_mod.{name}" for name in Net().state_dict()}


def test_an_argument_of_torch_compile_is_refused_with_the_way_to_give_it() -> None:
    model = Net()
    with pytest.raises(
        TypeError, match=r"got backend, fullgraph, of torch\.compile.*torch\.compile\(model, backend=…\)"
    ):
        hotrain.compile(model, fullgraph=True, backend="eager")
    assert not list(layer_states(model)), "nothing is converted before"


def test_after_a_compiled_step_the_report_prints_what_is_kept() -> None:
    """Counters and amax histories are on the device then, where a copy with fake tensors cannot read them."""
    model, x = Net(), torch.randn(16, 32, 64)
    report = hotrain.convert(model, "hot-unbiased", memory="block")
    expected = hotrain.predicted_bytes(model, x).total
    torch.compile(model, backend="aot_eager")(x).sum().backward()
    assert all(state.draws.counter is not None for _, state in layer_states(model))
    assert hotrain.predicted_bytes(model, x).total == expected
    assert "2 layers converted" in str(report)


def test_a_check_writes_both_times_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model, fast, report = checked(monkeypatch, 10.0, 8.0)
    twin = copy.deepcopy(model)
    x = torch.randn(16, 32, 64)
    for number in range(6):
        torch.manual_seed(number)
        fast(x).sum().backward()
        torch.manual_seed(number)
        twin(x).sum().backward()
    assert report.times == (10.0, 8.0)
    assert "8.0 ms, 10.0 ms before" in str(report)
    assert torch.equal(model.norm.running_mean, twin.norm.running_mean)
    assert model.norm.num_batches_tracked == 6
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert not fast._forward_pre_hooks, "it removes itself"


def test_a_slower_model_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fast, report = checked(monkeypatch, 10.0, 12.0)
    x = torch.randn(16, 32, 64)
    for _ in range(4):
        fast(x).sum().backward()
    with pytest.warns(UserWarning, match=r"take 12\.0 ms, 10\.0 ms before"):
        fast(x).sum().backward()
    fast(x).sum().backward()
    assert report.times == (10.0, 12.0)


def test_where_exact_does_not_fit_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fast, report = checked(monkeypatch, 10.0, 12.0)

    def full(*_: Any) -> float:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(compiling, "_milliseconds", full)
    for _ in range(6):
        fast(torch.randn(16, 32, 64)).sum().backward()
    assert report.times is None


def test_eager_mode_on_a_gpu_is_told_of_once_a_process() -> None:
    state.advise_compiling.cache_clear()
    with pytest.warns(UserWarning, match=r"hotrain\.compile\(model\)"):
        state.advise_compiling()
    state.advise_compiling()
