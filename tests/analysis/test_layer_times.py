"""`hotrain.plan` with times given, and one plan really timed."""

from __future__ import annotations

import pytest
import torch
from small_models import ConvNet, TokenNet, assert_as_found, found
from torch import nn

import hotrain
from hotrain.analysis import layer_times


def _times(monkeypatch: pytest.MonkeyPatch, of: dict[int, tuple[float, float]]) -> None:
    """(exact, method) milliseconds by the layer's number of outputs, in place of the clock."""
    monkeypatch.setattr(layer_times, "_time", lambda module, shape, repeats: of[shape.outputs])


def test_layers_that_lose_stay_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    _times(monkeypatch, {64: (2.0, 1.0), 32: (1.0, 1.0)})
    model, x = TokenNet(), torch.randn(2, 3, 16, 16)
    plan = hotrain.plan(model, x, method="hot")
    assert plan.chosen == {"fc1"}
    assert (plan.exact_ms, plan.planned_ms) == (4.0, 3.0)
    assert "fc1" in str(plan)
    report = hotrain.convert(model, plan.method, filter_fn=plan.filter_fn)
    assert [row.name for row in report.converted] == ["fc1"]


def test_threshold_weighs_memory_against_time(monkeypatch: pytest.MonkeyPatch) -> None:
    _times(monkeypatch, {64: (1.0, 1.2), 32: (1.0, 1.6)})
    plan = hotrain.plan(TokenNet(), torch.randn(2, 3, 16, 16), method="hot", threshold=1.5)
    assert plan.chosen == {"fc1"}


def test_equal_shapes_are_timed_once() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), nn.Linear(64, 32))
    x = torch.randn(2, 16, 64, requires_grad=True)
    plan = hotrain.plan(model, x, method="hq", repeats=1)
    assert [row["layers"] for row in plan.rows] == [["0", "1", "2", "3"], ["4"]]
    first = hotrain.plan(model, x.detach(), method="hq", repeats=1)
    # The first layer has no g_x to compute, so it is a case of its own.
    assert [row["layers"] for row in first.rows] == [["0"], ["1", "2", "3"], ["4"]]


def test_times_and_model_are_sound() -> None:
    model = ConvNet()
    before = found(model)
    plan = hotrain.plan(model, torch.ones(2, 32, 8, 8), method="hot-unbiased", repeats=2)
    assert_as_found(model, before)
    assert {name for row in plan.rows for name in row["layers"]} == {"conv", "point"}  # the head is not a candidate
    for row in plan.rows:
        assert row["exact_ms"] > 0
        assert row["method_ms"] > 0
        assert row["ratio"] == row["method_ms"] / row["exact_ms"]
        assert row["dtype"] == "float32"


def test_autocast_is_the_dtype_at_hand() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        plan = hotrain.plan(TokenNet(), torch.randn(2, 3, 16, 16), method="hq", repeats=1)
    assert {row["dtype"] for row in plan.rows} == {"bfloat16"}


def test_a_layer_that_cannot_follow_is_not_chosen() -> None:
    # On a 2-D input a low-rank step would mix samples; chosen by name it would.
    model = nn.Sequential(nn.Linear(64, 64))
    plan = hotrain.plan(model, torch.randn(32, 64), method="hla", repeats=1, threshold=1e9)
    assert plan.chosen == frozenset()
    assert plan.rows[0]["reason"].startswith("2-D input")


def test_bad_arguments() -> None:
    model, x = TokenNet(), torch.randn(2, 3, 16, 16)
    with pytest.raises(ValueError, match="repeats=0"):
        hotrain.plan(model, x, repeats=0)
    with pytest.raises(ValueError, match="nothing to compare"):
        hotrain.plan(model, x, method="exact")
    hotrain.convert(model, "hot")
    with pytest.raises(ValueError, match="converted already"):
        hotrain.plan(model, x)


def test_an_error_in_the_forward_leaves_the_model_exact() -> None:
    model = TokenNet()
    before = found(model)
    with pytest.raises(RuntimeError):
        hotrain.plan(model, torch.ones(2, 5, 16, 16))
    assert_as_found(model, before)
