"""The largest batch that fits: the search, the prediction against a hand count, out of memory caught and cleared."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from small_models import TokenNet, assert_as_found, found
from torch import Tensor, nn

import hotrain
from hotrain.analysis import fit as fitting
from hotrain.analysis.fit import MEASURED, PREDICTED, RAN, VARIANTS, FitReport, FitRow, search
from hotrain.analysis.steps import Inputs, Step, as_inputs, is_out_of_memory
from hotrain.analysis.uncompressed import LAYERS_ALONE, NO_FORM, full_table, still_full


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 31, 32, 33, 1000])
def test_search_asks_few_questions(limit: int) -> None:
    asked = []
    assert search(lambda n: asked.append(n) or n <= limit) == (limit, limit + 1)  # type: ignore[func-returns-value]
    assert len(asked) == len(set(asked)) <= 2 * math.log2(limit + 1) + 2


def test_search_ends_at_its_limit() -> None:
    assert search(lambda n: True, largest=100) == (100, None)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in "ab"))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def inputs(batch: int) -> Tensor:
    return torch.randn(batch, 16, 64)


ROW = 16 * 64 * 4  # bytes of one sample between the blocks
FIXED = sum(p.numel() for p in Blocks().parameters()) * 4


def test_prediction_by_hand() -> None:
    """SGD without momentum has no state: parameters and gradients. A block keeps its input and ReLU's output, which is
    four times as wide; the first one's input is the batch. A recomputed one keeps its input until its turn comes."""
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    budget = 2 * FIXED + 100 * ROW
    model = Blocks()
    before = found(model)
    report = hotrain.fit(model, inputs, budget, variants=("exact", "checkpointed"), optimizer=sgd)
    assert_as_found(model, before)
    exact, checkpointed = report.rows
    # Input, ReLU's output, input of the second block, its ReLU's output; autograd keeps nothing of the last sum.
    assert exact.batch_size == 100 // (1 + 4 + 1 + 4)
    # Both inputs, and one block's inside: its input is counted once more.
    inside = 1 + 4
    assert 100 // (2 + inside) <= checkpointed.batch_size <= 100 // (2 + inside - 1)
    assert exact.how == MEASURED
    assert exact.needs == 2 * FIXED + exact.batch_size * 10 * ROW <= budget
    assert exact.too_large == exact.batch_size + 1
    text = str(report)
    assert "exact" in text
    assert "Predicted: there is no allocator" in text


def test_adam_s_state_counts() -> None:
    report = hotrain.fit(Blocks(), inputs, 4 * FIXED + 20 * ROW, variants=("exact",))
    assert report.rows[0].batch_size in (1, 2)  # but for a step count a parameter, room for two


def test_not_even_one() -> None:
    report = hotrain.fit(Blocks(), inputs, 1000)
    assert [row.batch_size for row in report.rows] == [0, 0, 0]
    assert "not even a batch of 1 fits" in str(report)


def test_converted_fits_more_and_large_ones_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "_AFFORDABLE", 0)
    report = hotrain.fit(Blocks(), inputs, 40_000_000)
    by = {row.variant: row for row in report.rows}
    assert tuple(by) == VARIANTS
    assert by["converted"].batch_size > 2 * by["exact"].batch_size
    assert {row.how for row in report.rows} == {PREDICTED}


def test_small_tensors_do_not_lead_the_prediction_astray() -> None:
    """Batches of two and four are kept as they are (`policy.SMALL`), larger ones in codes: a line through the small
    ones would end at a third of what fits."""
    budget = 40_000_000
    row = hotrain.fit(Blocks(), inputs, budget, variants=("converted",)).rows[0]
    assert row.how == MEASURED
    assert 0.99 * budget < row.needs <= budget


@pytest.mark.parametrize("make", [lambda n: (inputs(n),), lambda n: {"x": inputs(n)}], ids=["tuple", "mapping"])
def test_inputs_of_other_forms(make: Any) -> None:
    want = hotrain.fit(Blocks(), inputs, 3_000_000, variants=("exact",)).rows
    assert hotrain.fit(Blocks(), inputs, "3MB", variants=("exact",)).rows == want
    assert hotrain.fit(Blocks(), make, 3_000_000, variants=("exact",)).rows == want


def test_bad_calls() -> None:
    model = Blocks()
    with pytest.raises(ValueError, match="budget_bytes=0"):
        hotrain.fit(model, inputs, 0)
    for budget in (float("nan"), True, None, 1e8 + 0.5):
        with pytest.raises(ValueError, match="accepted are numbers of bytes and sizes as 24GB"):
            hotrain.fit(model, inputs, budget)  # type: ignore[arg-type]
    for variants in ("exact", []):
        with pytest.raises(ValueError, match="accepted are sequences of exact, "):
            hotrain.fit(model, inputs, 1000, variants=variants)
    with pytest.raises(ValueError, match="largest=0"):
        hotrain.fit(model, inputs, 1000, largest=0)
    with pytest.raises(ValueError, match="'fast'"):
        hotrain.fit(model, inputs, 1000, variants=("fast",))
    with pytest.raises(ValueError, match="no blocks"):
        hotrain.fit(TokenNet(), inputs, 1000, variants=("checkpointed",))
    with pytest.raises(ValueError, match="requires grad"):
        hotrain.fit(Blocks().requires_grad_(False), inputs, 1000)
    hotrain.convert(model)
    with pytest.raises(ValueError, match="revert"):
        hotrain.fit(model, inputs, 1000)


# ---- the path of a GPU, with a device that has no more than so many samples ----


def test_out_of_memory_is_caught_and_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    model, held = Blocks(), []

    def timed(step: Step, made: Callable[[], Inputs], *_: Any) -> tuple[float, int]:
        (x,), _ = made()
        step.model(x).sum().backward()
        held.append(len(x))
        if len(x) > 21:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return 1.0, 1000 * len(x)

    monkeypatch.setattr(fitting.steps, "timed", timed)
    monkeypatch.setattr(fitting, "_limited", lambda budget, device: nullcontext())
    step = Step(model, None, torch.optim.AdamW)
    row = fitting._by_running(step, lambda n: as_inputs(inputs(n)), "exact", 1, 1 << 20, torch.device("cpu"))
    assert (row.batch_size, row.too_large, row.needs, row.how) == (21, 22, 21000, RAN)
    assert held[-1] == 21, "the last step that ran is the one that is reported"
    assert all(p.grad is None for p in model.parameters()), "what a failed step left is freed"


def test_other_errors_are_not_taken_for_it() -> None:
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="multiplied"):
        hotrain.fit(Blocks(), lambda n: torch.randn(n, 3), 1000, variants=("exact",))


@pytest.mark.gpu
def test_found_by_running_under_a_limit() -> None:
    model = Blocks().cuda()
    # Far above what the libraries take for themselves.
    report = hotrain.fit(model, lambda n: torch.randn(n, 4096, 64, device="cuda"), 1 << 30, largest=4096)
    by = {row.variant: row for row in report.rows}
    assert all(row.how == RAN and 0 < row.needs <= 1 << 30 for row in report.rows)
    assert by["exact"].batch_size < by["converted"].batch_size
    assert torch.cuda.memory_allocated() < 1 << 28


# ---- what stays in full precision ----


def test_what_stays_full_says_why() -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Softplus())
    model.append(nn.Linear(64, 8))
    report = hotrain.convert(model, memory="linear", filter_fn=lambda module, name: name == "2")
    audit = hotrain.saved_bytes(model, torch.randn(32, 64, 64))
    reasons = {row.operator: row.reason for row in still_full(audit, report)}
    assert reasons["softplus"] == LAYERS_ALONE
    assert NO_FORM in {row.reason for row in still_full(audit)}
    assert "the batch itself" in {row.reason for row in still_full(audit, report)}
    head = [row for row in still_full(audit, report) if "4" in row.modules]
    assert [row.reason for row in head] == ["its layer stays exact: excluded by filter_fn"]
    assert LAYERS_ALONE in full_table(still_full(audit, report))
    assert "nothing" in full_table([])


def test_a_model_without_blocks_is_not_checkpointed_unless_asked() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64))
    rows = hotrain.fit(model, lambda n: torch.randn(n, 40, 64), "1GB", largest=4).rows
    assert [row.variant for row in rows] == ["exact", "converted"]
    with pytest.raises(ValueError, match=r"Sequential has no blocks to recompute; pass variants=\('exact',\)"):
        hotrain.fit(model, lambda n: torch.randn(n, 40, 64), "1GB", variants=("exact", "checkpointed"))


def test_where_the_search_ends_is_no_result() -> None:
    """At least that many fit, and where exact's are not known either there is nothing to compare."""

    def text(exact: int | None, converted: int | None) -> list[str]:
        rows = [FitRow("exact", 8, 100, RAN, exact), FitRow("converted", 64, 900, RAN, converted)]
        lines = str(FitReport(1000, "cpu", rows)).splitlines()
        return [" ".join(line.split()) for line in lines[3:]]

    assert text(9, 65) == ["exact 8 1.00 × 100 B training steps ran", "converted 64 8.00 × 900 B training steps ran"]
    ended = "≥: the search ends at this batch (largest=); larger ones may fit"
    assert text(9, None)[1:] == ["converted ≥ 64 ≥ 8.00 × 900 B training steps ran", ended]
    assert text(None, None)[0] == "exact ≥ 8 – 100 B training steps ran"
    with pytest.raises(TypeError, match="got make_inputs of type Tensor, accepted are functions from a batch size"):
        hotrain.fit(nn.Linear(4, 4), torch.randn(2, 4), "1GB")
    with pytest.raises(ValueError, match=r"loss= gave a tensor \(2, 4\), accepted are functions .* to a scalar tensor"):
        hotrain.fit(nn.Linear(4, 4), lambda n: torch.randn(n, 4), "1GB", loss=lambda output: output[:2])
