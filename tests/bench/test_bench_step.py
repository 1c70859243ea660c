"""bench/step.py and tasks.py on tiny subjects: every variant alone, no times of a wrong one, failures on record."""

from __future__ import annotations

import copy
import dataclasses
import fcntl
import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hotrain_bench import side_by_side, step, tasks
from hotrain_bench.others import OTHERS
from hotrain_bench.step import Bounds, FirstStep, Variant
from torch import nn

import hotrain
from hotrain import planning
from hotrain.compress import offload

CPU = torch.device("cpu")
VIT, LLAMA = "vit_base_patch16_224/b128", "llama8b-4blocks/t8192"
RESNET, FORMER, BERT = "resnet50/b256", "efficientformer_l1/b256", "bert_base/b64x512"
HUB = list(tasks.HUB)
ALL = [VIT, RESNET, FORMER, BERT, LLAMA, *HUB]


@pytest.fixture(autouse=True)
def _without_compiled_code() -> Iterator[None]:
    yield
    step.clean_up(CPU)


@pytest.mark.parametrize("subject", ALL)
def test_the_same_subject_has_the_same_weights_and_batches(subject: str) -> None:
    """Variants are compared by their first step: it must start from one place."""
    one, two = (FirstStep.of(tasks.build(subject, CPU, tiny=True)) for _ in range(2))
    assert one.loss == two.loss
    assert all(torch.equal(a, b) for a, b in zip(one.gradients, two.gradients, strict=True))
    assert any(g.count_nonzero() for g in one.gradients)


def test_precisions_are_those_of_the_subjects() -> None:
    vit, llama = (tasks.build(subject, CPU, tiny=True) for subject in (VIT, LLAMA))
    assert {p.dtype for p in vit.model.parameters()} == {torch.float32}
    assert {p.dtype for p in llama.model.parameters()} == {torch.bfloat16}
    assert llama.batches[0].requires_grad, "within a model, the first block has a g_x too"
    assert torch.get_default_dtype() == torch.float32
    assert isinstance(vit.optimizer(), torch.optim.AdamW)
    assert llama.optimizer() is None
    resnet = tasks.build(RESNET, CPU, tiny=True)
    convolutions = [m for m in resnet.model.modules() if isinstance(m, nn.Conv2d)]
    assert all(m.weight.is_contiguous(memory_format=torch.channels_last) for m in convolutions)
    assert resnet.batches[0][0].is_contiguous(memory_format=torch.channels_last)
    assert [vit.kept_exact("head"), vit.kept_exact("blocks.0.mlp.fc1"), llama.kept_exact("layers.0.mlp.up_proj")] == [
        True,
        False,
        False,
    ]


def test_heads_are_kept_exact_in_every_subject() -> None:
    kept = {
        RESNET: ["fc"],
        FORMER: ["head", "head_dist"],
        BERT: ["bert.pooler.dense", "classifier"],
    }
    for subject, names in kept.items():
        task = tasks.build(subject, CPU, tiny=True)
        linear = [name for name, module in task.model.named_modules() if isinstance(module, nn.Linear)]
        assert [name for name in linear if task.kept_exact(name)] == names


BLOCKS = {
    VIT: 2,
    RESNET: 4,
    FORMER: 5,
    BERT: 2,
    LLAMA: 2,
    "gpt2/b8x1024": 2,
    "qwen2/b4x2048": 2,
    "opt_350m/b8x1024": 2,
    "t5_small/b16x512": 4,  # two of the encoder, two of the decoder
    "segformer_b0/b16x512": 8 + 4,  # and what its head projects the stages with
    "densenet121/b8": 58,  # each appends to a list, which goes on growing after it
    "regnety_032/b8": 21,
}


@pytest.mark.parametrize(("subject", "count"), BLOCKS.items())
def test_checkpointing_recomputes_every_block_and_changes_no_gradient(subject: str, count: int) -> None:
    """In eager mode the recomputed forward runs the same operators, with the same dropout: equal to the bit."""
    plain, task = (tasks.build(subject, CPU, tiny=True) for _ in range(2))
    calls: list[nn.Module] = []
    tasks.with_checkpoints(task)
    for module in task.model.modules():
        if isinstance(module, tasks.Checkpointed):
            module.block.register_forward_pre_hook(lambda module, args: calls.append(module))
    losses = []
    for each in (plain, task):
        torch.manual_seed(1)
        losses.append(step.first_loss(each, each.model))
    assert len(calls) == 2 * count
    assert losses[0] == losses[1]
    pairs = zip(plain.model.parameters(), task.model.parameters(), strict=True)
    assert all((a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad) for a, b in pairs)


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


@pytest.mark.parametrize(
    ("subject", "variant"),
    [
        (RESNET, "exact+compile+checkpoint"),  # blocks of convolutions
        (FORMER, "hotrain"),  # convolutions and attention
        (BERT, "exact+compile+checkpoint"),  # dropout that is drawn again
        (LLAMA, "hotrain"),  # bfloat16 weights, an input with a gradient
    ],
)
def test_the_other_subjects_take_the_variants_too(subject: str, variant: str) -> None:
    (row,) = step.run([subject], [variant], CPU, 1, True)
    assert (row["variant"], row["error"], row.get("graph_breaks")) == (variant, None, 0)


@pytest.mark.parametrize("subject", HUB)
def test_models_of_transformers_are_converted(subject: str) -> None:
    """Dropout in modules and functions, a loss of the model's own, an encoder with a decoder."""
    (row,) = step.run([subject], ["hotrain-default-eager"], CPU, 1, tiny=True)
    assert row["error"] is None
    assert row["agreement"]["gradient_cosine"] < 0.9999, "a method's gradients are not the exact ones"
    assert (row["noise"]["gradient_cosine"] > 0.999) == (subject == "qwen2/b4x2048"), "the others have dropout"


def test_a_subject_may_be_any_model_of_timm() -> None:
    """Models that convolve are trained in channels_last, as are their images, unless asked; others as they are."""
    names = ("test_resnet/b8", "test_vit/b8", "test_resnet/b8/nchw")
    convolves, attends, nchw = (tasks.build(name, CPU, tiny=True) for name in names)
    assert nchw.batches[0][0].is_contiguous()
    assert all(p.is_contiguous() for p in nchw.model.parameters())
    weights = [m.weight for m in convolves.model.modules() if isinstance(m, nn.Conv2d)]
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)
    assert not convolves.batches[0][0].is_contiguous()
    assert attends.batches[0][0].is_contiguous()
    for name in (
        "test_vit",
        "test_vit/b0",
        "test_vit/bx",
        "test_vit/b8/nhwc",
        "no_vit/b8",
        "torchvision.no_vit/b8",
        "torchvision.vit_b_16",
    ):
        with pytest.raises(ValueError, match=rf"got '{name}', subjects are .* and NAME/bN of a timm model"):
            tasks.build(name, CPU, tiny=True)


def test_a_subject_may_be_trained_in_bf16_or_fp16() -> None:
    """By default float32 weights under bf16 autocast; the noise of a step tells whether its loss was scaled."""
    weights, scaled = (
        tasks.build("test_vit/b8/bf16", CPU, tiny=True),
        tasks.build("test_resnet/b8/nchw/fp16", CPU, True),
    )
    assert {p.dtype for p in weights.model.parameters()} == {weights.batches[0][0].dtype} == {torch.bfloat16}
    assert {p.dtype for p in scaled.model.parameters()} == {scaled.batches[0][0].dtype} == {torch.float32}
    dtypes = []
    scaled.model.fc.register_forward_hook(lambda module, args, y: dtypes.append(y.dtype))
    loss = scaled.loss(scaled.model, scaled.batches[0])
    assert dtypes == [torch.float16]
    assert scaled.scaler.scale(loss) / loss > 1000
    for subject in ("test_vit/b8/bf16", "test_vit/b8/fp16", "gpt2/b8x1024/bf16"):
        (row,) = step.run([subject], ["hotrain-default-eager"], CPU, 2, tiny=True)
        assert (row["subject"], row["error"]) == (subject, None)
    for name in ("test_vit/b8/fp16/bf16", "gpt2/b8x1024/nchw", f"{tasks.LLAMA}/fp16", "test_vit/fp16"):
        with pytest.raises(ValueError, match=rf"got '{name}', subjects are .* /bf16"):
            tasks.build(name, CPU, tiny=True)


def test_a_subject_may_be_any_classifier_of_torchvision() -> None:
    task = tasks.build("torchvision.mobilenet_v3_small/b8", CPU, tiny=True)
    assert type(task.model).__module__ == "torchvision.models.mobilenetv3"
    assert torch.isfinite(task.loss(task.model, task.batches[0]))


@pytest.mark.parametrize("name", OTHERS)
def test_a_subject_may_be_of_another_kind(name: str) -> None:
    """In the layout of its convolutions; the gradients of everything compressed are near the exact ones."""
    task = tasks.build(f"{name}/b8", CPU, tiny=True)
    images = task.batches[0][0]
    assert (images.dim() == 4) == (not images.is_contiguous())
    exact = copy.deepcopy(task)
    assert task.loss(task.model, task.batches[0]).isfinite()
    hotrain.convert(task.model, "exact", memory="block")
    for each in (exact, task):
        each.model.apply(lambda m: m.eval() if isinstance(m, nn.Dropout) else None)
        each.model(*(t.clone() for t in each.batches[0])).square().mean().backward()  # in float32
    got, want = (torch.cat([p.grad.flatten() for p in each.model.parameters()]) for each in (task, exact))
    assert (got - want).norm() < 0.3 * want.norm()


def test_a_subject_may_be_any_model_type_of_transformers() -> None:
    """The head that a type has, fewer layers, and positions for the length that is asked: two more, for RoBERTa."""
    pytest.importorskip("transformers")
    task = tasks.build("electra@1/b2x600", CPU, tiny=True)
    assert type(task.model).__name__ == "ElectraForMaskedLM"
    assert task.model.config.num_hidden_layers == 1
    assert task.model.config.max_position_embeddings == 602
    assert task.loss(task.model, task.batches[0]).isfinite()
    for name in ("electra/b2", "electra@0/b2x8", "electra/b0x8", "electro/b2x8", "dpr/b2x8"):
        with pytest.raises(ValueError, match=rf"got '{name}', subjects are .* TYPE/bNxL"):
            tasks.build(name, CPU, tiny=True)


def test_everything_compressed_is_a_variant() -> None:
    """The exact forward, and gradients that differ from those of compressed layers alone: something was compressed."""
    rows = list(step.run([VIT], ["hotrain-default-linear-eager", "hotrain-default-eager"], CPU, 1, tiny=True))
    assert [row["error"] for row in rows] == [None] * 2
    layers, everything = (row["agreement"] for row in rows)
    assert everything["loss_difference"] == layers["loss_difference"]
    assert everything["gradient_cosine"] != layers["gradient_cosine"]


def test_the_budget_holds_while_a_variant_compiles_and_runs_and_not_after() -> None:
    """A setting of the process: the next variant must not inherit it."""
    config = importlib.import_module("torch._functorch.config")
    before = config.activation_memory_budget
    seen = []
    variant = step.VARIANTS["exact+compile+budget"]

    def watched(task: tasks.Task) -> None:
        inner = task.loss

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            seen.append(config.activation_memory_budget)
            return inner(model, batch)

        task.loss = loss

    truth = FirstStep.of(tasks.build(VIT, CPU, tiny=True))
    step.measure(VIT, dataclasses.replace(variant, change=watched), truth, CPU, 1, tiny=True)
    assert set(seen) == {step.BUDGET} != {before}
    assert config.activation_memory_budget == before


@pytest.mark.parametrize("subject", [RESNET, LLAMA])
def test_offloading_changes_no_gradient(subject: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALLEST", 1)
    plain, task = (tasks.build(subject, CPU, tiny=True) for _ in range(2))
    step.VARIANTS["exact+compile+offload"].change(task)
    found, truth = FirstStep.of(task), FirstStep.of(plain)
    assert found.loss == truth.loss
    assert all(torch.equal(a, b) for a, b in zip(found.gradients, truth.gradients, strict=True))


@pytest.mark.parametrize(
    ("kept", "travels"),
    [
        (torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last), True),  # convolutional networks
        (torch.randn(2, 17, 3, 64)[:, :, 1], True),  # k, cut out of qkv: compiled backwards ask for its strides
        (torch.randn(1, 4).expand(3, 4), False),  # a copy with these strides cannot be written
        (torch.randn(()), False),
    ],
    ids=("channels_last", "slice", "expanded", "small"),
)
def test_offloaded_activations_come_back_as_they_were(
    kept: torch.Tensor, travels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "SMALLEST", 5)
    w = torch.ones_like(kept).requires_grad_()
    model = nn.ParameterList([w])
    found = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        product = w * kept
        found.append(product.grad_fn._saved_other)
        found.append((kept.clone().requires_grad_() * w).grad_fn._saved_other)
        return product.sum()

    task = tasks.Task(model, [None], loss, lambda name: False, trains=False)
    step.VARIANTS["exact+compile+offload"].change(task)
    task.loss(model, None)
    saved, weight = found
    assert torch.equal(saved, kept)
    assert saved.stride() == kept.stride()
    assert (saved.data_ptr() != kept.data_ptr()) == travels
    assert weight.data_ptr() == w.data_ptr(), "parameters do not travel"


def test_what_a_task_takes_beside_activations() -> None:
    """BERT has all parts: float32 parameters, gradients and two moments, a step count each, and tokens of int64."""
    task = tasks.build(BERT, CPU, tiny=True)
    step.first_loss(task, task.model)
    optimizer = task.optimizer()
    assert optimizer is not None
    optimizer.step()
    parameters = list(task.model.parameters())
    entries = sum(p.numel() for p in parameters)
    batches = 2 * (4 * 64 + 4) * 8
    assert step.standing_bytes(task, optimizer) == 4 * entries * 4 + 4 * len(parameters) + batches
    assert step.standing_bytes(task, None) == 2 * entries * 4 + batches


def test_an_8_bit_optimizer_is_a_variant(adamw8bit: list[Any]) -> None:
    """Of exact and of compressed models, with their own gradients; where no optimizer is timed, that is said."""
    names = ["exact+compile+adamw8bit", "hotrain-memory+adamw8bit"]
    rows = list(step.run([VIT, LLAMA], names, CPU, 1, tiny=True, again=False))
    errors = [None, None, *["ValueError: the subject is timed without an optimizer"] * 2]
    assert [row["error"] for row in rows] == errors
    assert len(adamw8bit) == 2
    exact, compressed = (row["agreement"]["gradient_cosine"] for row in rows[:2])
    assert exact > 0.999 > compressed > 0.4


def test_8_bit_state_is_counted_as_what_it_holds(adamw8bit: list[Any]) -> None:
    """Its tensors say the size of float32: codes and scales count, and small parameters' moments as they are."""
    task = tasks.build(VIT, CPU, tiny=True)
    step.VARIANTS["exact+compile+adamw8bit"].change(task)
    step.first_loss(task, task.model)
    optimizer = task.optimizer()
    assert optimizer is not None
    optimizer.step()
    parameters = [p.numel() for p in task.model.parameters()]
    large = [n for n in parameters if n >= 4096 and n % 256 == 0]
    assert 0 < len(large) < len(parameters)
    moments = 2 * (sum(large) + 4 * sum(large) // 256) + 2 * 4 * (sum(parameters) - sum(large))
    assert step.standing_bytes(task, optimizer) - step.standing_bytes(task, None) == moments


def test_dropout_widens_the_bounds_by_its_own_noise() -> None:
    """Two exact first steps with other masks differ: a variant may differ from exact as much, and no more."""
    task = tasks.build(BERT, CPU, tiny=True)
    truth = FirstStep.of(task)
    assert truth.noise.loss_difference > 0
    assert 0.3 < truth.noise.gradient_cosine < 0.999
    task.model.zero_grad()
    exact = Bounds(0.01, 0.98)
    step.compare(task, step.first_loss(task, task.model), truth, exact)
    for parameter in task.model.parameters():
        if parameter.grad is not None:
            parameter.grad = torch.randn_like(parameter.grad)
    with pytest.raises(step.Wrong, match="cosine of the first gradients with exact"):
        step.compare(task, truth.loss, truth, exact)
    with pytest.raises(step.Wrong, match="the loss of the first step"):
        step.compare(task, truth.loss * 1.2, truth, exact)


def test_the_noise_of_rounding_is_that_of_the_model() -> None:
    """LayerNorm with its residual keeps bf16's 2⁻⁹ small; many batch norms in a row, each of few values, do not: exact
    training, compiled, has a cosine of 0.88 with exact training in DenseNet-121 and is not wrong."""
    vit, dense = (tasks.build(subject, CPU, tiny=True) for subject in (VIT, "densenet121/b128"))
    before = [p.detach().clone() for p in dense.model.parameters()]
    noise = FirstStep.of(dense).noise
    assert all(torch.equal(a, b) for a, b in zip(before, dense.model.parameters(), strict=True))
    assert FirstStep.of(vit).noise.gradient_cosine > 0.999
    assert noise.gradient_cosine < 0.98, "what compiled exact training has there"
    assert noise.loss_difference > 0


def _wrong_sign(task: tasks.Task) -> None:
    for parameter in task.model.parameters():
        parameter.register_hook(torch.neg)


def _out_of_memory(task: tasks.Task) -> None:
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
    task = tasks.build(VIT, CPU, tiny=True)
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


def test_a_variant_that_is_very_slow_is_timed_for_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offloading takes seconds a step; the record has the steps that were timed."""
    monkeypatch.setattr(step, "MOST_S", 0.0)
    (row,) = step.run([VIT], ["exact"], CPU, 3, tiny=True)
    assert (row["error"], row["steps"]) == (None, 1)


def test_any_variant_can_be_checkpointed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same conversion, and every block's forward a second time."""
    calls: list[str] = []
    monkeypatch.setattr(step, "with_checkpoints", lambda task: calls.append(type(task.model).__name__))
    for name in ("hotrain-default-all+checkpoint", "hotrain:hq8:plan=memory+checkpoint"):
        variant, task = step.variant_of(name), tasks.build(VIT, CPU, tiny=True)
        variant.change(task)
        assert (variant.name, variant.graphs) == (name, True)
        assert task.report is not None, "converted"
        assert len(calls) == 1, "and then checkpointed"
        calls.clear()


def test_after_its_time_a_run_leaves_out_the_rest() -> None:
    (row,) = step.run([VIT], ["exact"], CPU, 1, tiny=True, seconds=-1.0)
    assert row["error"] == "TimeoutError: left out: -1 seconds were over"


@pytest.mark.parametrize(
    ("names", "variants", "message"),
    [
        (["vit"], None, r"got 'vit', subjects are vit_base_patch16_224/b128"),
        ([VIT], ["hotrian"], r"got 'hotrian', accepted are exact, .* and hotrain:METHOD"),
        ([VIT], ["hotrian+checkpoint"], r"got 'hotrian', accepted are exact, .*, each also with \+checkpoint"),
        ([VIT], ["hotrain:hott"], "Did you mean 'hot'"),
    ],
)
def test_unknown_names_are_refused_before_anything_runs(
    names: list[str], variants: list[str] | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "build", lambda *a: pytest.fail("something ran"))
    with pytest.raises(ValueError, match=message):
        list(step.run(names, variants, CPU, 1, tiny=True))


def test_a_plan_is_timed_alone_among_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process, which a second handle of the file is, cannot have the lock in the meantime."""
    held: list[bool] = []

    def timed(work: Any, count: int = 2) -> float:
        with (tmp_path / "alone").open("w") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(True)
        return float(count)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(planning, "timed", timed)
    step._time_plans_alone()
    assert planning.timed is timed, "nothing changes in a process of its own"
    monkeypatch.setenv(side_by_side.FOLDER, str(tmp_path))
    monkeypatch.setenv(side_by_side.ALONE, str(tmp_path / "alone"))
    step._time_plans_alone()
    assert planning.fastest([lambda: None], count=3) == (3.0,)
    assert held == [True] * 5
