"""bench/step.py and subjects.py on tiny subjects: every variant alone, no times of a wrong one, failures on record."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from hotrain.bench import step, subjects
from hotrain.bench.step import Bounds, FirstStep, Variant

CPU = torch.device("cpu")
VIT, LLAMA = "vit_base_patch16_224/b128", "llama8b-4blocks/t8192"


@pytest.fixture(autouse=True)
def _without_compiled_code() -> Iterator[None]:
    yield
    step.clean_up(CPU)


@pytest.mark.parametrize("subject", [VIT, LLAMA])
def test_the_same_subject_has_the_same_weights_and_batches(subject: str) -> None:
    """Variants are compared by their first step: it must start from one place."""
    one, two = (FirstStep.of(subjects.build(subject, CPU, tiny=True)) for _ in range(2))
    assert one.loss == two.loss
    assert all(torch.equal(a, b) for a, b in zip(one.gradients, two.gradients, strict=True))
    assert any(g.count_nonzero() for g in one.gradients)


def test_precisions_are_those_of_the_subjects() -> None:
    vit, llama = (subjects.build(subject, CPU, tiny=True) for subject in (VIT, LLAMA))
    assert {p.dtype for p in vit.model.parameters()} == {torch.float32}
    assert {p.dtype for p in llama.model.parameters()} == {torch.bfloat16}
    assert llama.batches[0].requires_grad, "within a model, the first block has a g_x too"
    assert torch.get_default_dtype() == torch.float32
    assert isinstance(vit.optimizer(), torch.optim.AdamW)
    assert llama.optimizer() is None
    assert [vit.kept_exact("head"), vit.kept_exact("blocks.0.mlp.fc1"), llama.kept_exact("layers.0.mlp.up_proj")] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("subject", [VIT, LLAMA])
def test_checkpointing_recomputes_every_block_and_changes_no_gradient(subject: str) -> None:
    """In eager mode the recomputed forward runs the same operators: equal to the bit."""
    plain, task = (subjects.build(subject, CPU, tiny=True) for _ in range(2))
    calls: list[nn.Module] = []
    for block in task.blocks:
        block.register_forward_pre_hook(lambda module, args: calls.append(module))
    subjects.checkpoint_blocks(task)
    found, truth = FirstStep.of(task), FirstStep.of(plain)
    assert len(calls) == 2 * len(task.blocks)
    assert found.loss == truth.loss
    assert all(torch.equal(a, b) for a, b in zip(found.gradients, truth.gradients, strict=True))


def test_the_variants_of_a_subject_and_the_baseline_again() -> None:
    """The baseline runs first and last; each record has what the table is printed from."""
    names = ["exact", "exact+compile", "exact+compile+checkpoint", "hotrain", "hotrain:hot:rank=4"]
    rows = list(step.run([VIT], names, CPU, 2, tiny=True))
    assert [(row["variant"], row["round"]) for row in rows] == [
        ("exact+compile", 1),
        ("exact", 1),
        ("exact+compile+checkpoint", 1),
        ("hotrain", 1),
        ("hotrain:hot:rank=4", 1),
        ("exact+compile", 2),
    ]
    assert [row["error"] for row in rows] == [None] * 6
    assert all(row["median_ms"] > 0 and row["tiny"] for row in rows)
    assert all(row["agreement"]["gradient_cosine"] > 0.999 for row in rows if row["variant"].startswith("exact"))
    hotrain = rows[3]["agreement"]
    assert hotrain["loss_difference"] == 0.0, "the forward product is the exact one"
    assert 0.4 < hotrain["gradient_cosine"] < 0.999, "a method's gradients are not the exact ones"


def test_llama_blocks_take_the_variants_too() -> None:
    rows = list(step.run([LLAMA], ["exact+compile", "exact+compile+checkpoint", "hotrain"], CPU, 1, True, again=False))
    assert [(row["variant"], row["error"]) for row in rows] == [
        ("exact+compile", None),
        ("exact+compile+checkpoint", None),
        ("hotrain", None),
    ]


def _wrong_sign(task: subjects.Task) -> None:
    for parameter in task.model.parameters():
        parameter.register_hook(torch.neg)


def _out_of_memory(task: subjects.Task) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.\n Tried to allocate 9 GiB")


def test_a_variant_that_fails_or_is_wrong_has_its_error_and_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = Bounds(0.01, 0.4)
    for name, change in (("wrong", _wrong_sign), ("large", _out_of_memory)):
        monkeypatch.setitem(step.VARIANTS, name, Variant(name, change, bounds, compiled=False))
    rows = {row["variant"]: row for row in step.run([VIT], ["wrong", "large", "exact"], CPU, 1, tiny=True)}
    assert rows["wrong"]["error"].startswith("Wrong: cosine of the first gradients with exact: -1.000, at least 0.4")
    assert rows["large"]["error"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB"
    assert rows["wrong"]["median_ms"] is rows["large"]["median_ms"] is None
    assert rows["exact"]["error"] is None, "the others are measured all the same"


def test_gates_let_nothing_pass_that_is_not_a_number() -> None:
    task = subjects.build(VIT, CPU, tiny=True)
    truth = FirstStep.of(task)
    with pytest.raises(step.Wrong, match="the loss of the first step is nan"):
        step.compare(task, math.nan, truth, Bounds(0.01, 0.4))
    with pytest.raises(step.Wrong, match=r"loss of the first step is 9\.0"):
        step.compare(task, 9.0, truth, Bounds(0.01, 0.4))
    next(task.model.parameters()).grad = torch.full_like(next(task.model.parameters()), math.nan)
    with pytest.raises(step.Wrong, match="cosine of the first gradients with exact: nan"):
        step.compare(task, truth.loss, truth, Bounds(0.01, 0.4))
    task.model.zero_grad()
    with pytest.raises(step.Wrong, match="nan"):  # no gradient at all
        step.compare(task, truth.loss, truth, Bounds(0.01, 0.4))


def test_after_its_time_a_run_leaves_out_the_rest() -> None:
    (row,) = step.run([VIT], ["exact"], CPU, 1, tiny=True, seconds=-1.0)
    assert row["error"] == "TimeoutError: left out: -1 seconds were over"


@pytest.mark.parametrize(
    ("names", "variants", "message"),
    [
        (["vit"], None, r"got 'vit', subjects are vit_base_patch16_224/b128"),
        ([VIT], ["hotrian"], r"got 'hotrian', accepted are exact, .* and hotrain:METHOD"),
        ([VIT], ["hotrain:hott"], "Did you mean 'hot'"),
    ],
)
def test_unknown_names_are_refused_before_anything_runs(
    names: list[str], variants: list[str] | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "build", lambda *a: pytest.fail("something ran"))
    with pytest.raises(ValueError, match=message):
        list(step.run(names, variants, CPU, 1, tiny=True))
