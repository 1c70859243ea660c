"""The callback of transformers' Trainer: when it converts, what it refuses, what it says."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hotrain.train  # lets transformers load beside a CPU-only PyTorch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState  # noqa: E402

from hotrain.integrations import transformers as ours  # noqa: E402
from hotrain.integrations.transformers import HadamardCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:(?!hotrain)")


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def vit() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.ViTConfig(image_size=64, patch_size=8, num_labels=5, **sizes)
    return transformers.ViTForImageClassification(config)


def trainer(folder: Path, model: nn.Module | None = None, **options: Any) -> Any:
    arguments = {"bf16": options.pop("bf16", False), "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    arguments |= {"max_steps": 1, "logging_steps": 1, "per_device_train_batch_size": 4, "report_to": "none"}
    arguments |= options.pop("arguments", {})
    examples = [{"pixel_values": torch.randn(3, 64, 64), "labels": torch.tensor(1)} for _ in range(8)]
    args = transformers.TrainingArguments(str(folder), **arguments)
    return transformers.Trainer(model, args, train_dataset=examples, **options)


def test_it_converts_before_there_is_an_optimizer_and_before_autocast_replaces_forward(tmp_path: Path) -> None:
    model, callback = vit(), HadamardCallback()
    made = trainer(tmp_path, model, callbacks=[callback], bf16=True)
    assert made.optimizer is None
    assert "forward" not in model.__dict__
    assert len(list(hotrain.converted_layers(model))) == 7
    made.train()
    assert "forward" in model.__dict__, "what the docstring says of accelerate is not so any more"
    assert callback.report is not None
    assert "shared: norm" in str(callback.report)
    now, exact = callback.report.totals() or (None, None)
    assert now is not None
    assert exact is not None
    assert now < 0.5 * exact


def test_options_are_those_of_convert_and_checkpoints_resume(tmp_path: Path) -> None:
    torch.manual_seed(0)
    callback = HadamardCallback("hot-unbiased", memory="linear", plan="memory")
    options = {"save_strategy": "steps", "save_steps": 1}
    trainer(tmp_path, vit(), callbacks=[callback], arguments=options).train()
    assert callback.report is not None
    assert {row.method.name for row in callback.report.converted} == {"hot-unbiased"}
    again = trainer(tmp_path, vit(), callbacks=[HadamardCallback()], arguments=options | {"max_steps": 2})
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2
    exact = trainer(tmp_path, vit(), arguments=options | {"max_steps": 3})
    exact.train(resume_from_checkpoint=True)  # converted and exact checkpoints are the same
    assert exact.state.global_step == 3


def test_a_resumed_run_goes_on_with_its_draws(tmp_path: Path) -> None:
    """The same parameters, to the bit, as a run that was not interrupted; where other layers are converted it warns.

    Of BERT: transformers writes the names of a ViT's parameters otherwise than its Trainer reads them again.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=100, num_labels=3, **sizes)
    torch.manual_seed(0)
    start = transformers.BertForSequenceClassification(config).state_dict()
    rows = [{"input_ids": torch.randint(5, 100, (32,)), "labels": torch.tensor(n % 3)} for n in range(8)]
    options: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 4,
        "seed": 3,
        "report_to": "none",
    }

    def run(resume: str | None = None, out: str = "run", **convert: Any) -> list[torch.Tensor]:
        args = transformers.TrainingArguments(str(tmp_path / out), use_cpu=True, disable_tqdm=True, **options)
        hotrain.manual_seed(5)
        model = transformers.BertForSequenceClassification(config)
        model.load_state_dict(start)
        callback = HadamardCallback("hot-unbiased", **convert)
        transformers.Trainer(model, args, train_dataset=rows, callbacks=[callback]).train(resume_from_checkpoint=resume)
        return [p.detach().clone() for p in model.parameters()]

    whole, second = run(), tmp_path / "run" / "checkpoint-2"
    assert all(map(torch.equal, whole, run(str(second))))
    moved = shutil.move(second, tmp_path / "best")
    assert all(map(torch.equal, whole, run(str(moved), "other"))), "a checkpoint somewhere else"
    file = Path(moved) / "trainer_state.json"
    state = json.loads(file.read_text())
    assert state["stateful_callbacks"].pop("hotrain_draws")
    file.write_text(json.dumps(state))
    assert not all(map(torch.equal, whole, run(str(moved), "other"))), "the draws change nothing here"
    with pytest.warns(UserWarning, match="does not go on with the checkpoint's draws"):
        run(str(tmp_path / "run" / "checkpoint-4"), filter_fn=lambda module, name: "query" in name)


def test_the_report_is_logged_at_a_save_and_at_the_end(tmp_path: Path) -> None:
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("transformers.trainer")
    before = log.level
    log.addHandler(handler)
    try:
        log.setLevel(logging.INFO)
        options = {"save_strategy": "steps", "save_steps": 1}
        trainer(tmp_path, vit(), callbacks=[HadamardCallback()], arguments=options).train()
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
    assert len([text for text in seen if text.startswith("hotrain: 7 layers converted to hq8")]) == 2


def test_it_calibrates_on_the_first_batches_and_the_steps_have_the_same_data(tmp_path: Path) -> None:
    """The choices are those of `hotrain.calibrate` by hand; the sampler and all generators are as without, so that the
    loss of the first step, whose forward is exact, is the same to the bit."""
    exact, losses, scales = vit(), [], []
    for batches in (0, 2):
        model, callback = copy.deepcopy(exact), HadamardCallback("hot", calibrate=batches)
        made = trainer(tmp_path, model, callbacks=[callback])
        for label, row in enumerate(made.train_dataset):
            row |= {"pixel_values": torch.full((3, 64, 64), label / 8), "labels": torch.tensor(label % 5)}
        made.train()
        losses.append(made.state.log_history[0]["loss"])
        scales.append({state.method.grad_input.scale for _, _, state in hotrain.converted_layers(model)})
    assert losses[0] == losses[1]
    assert scales[0] == {"auto"}
    assert scales[1] <= {"tensor", "token"}
    hotrain.convert(exact, "hot")
    wanted = hotrain.calibrate(exact, [made.data_collator(made.train_dataset[i : i + 4]) for i in (0, 4)])
    assert callback.calibration == wanted
    assert {choice.batches for choice in wanted.layers.values()} == {2}
    for wrong in (-1, True, 1.5):
        with pytest.raises(ValueError, match=r"calibrate=.*accepted is a number of batches"):
            HadamardCallback(calibrate=wrong)
    with pytest.raises(ValueError, match="no layer quantizes g_y to integers"):
        trainer(tmp_path, vit(), callbacks=[HadamardCallback("luq", calibrate=1)]).train()


def test_a_model_without_a_layer_that_is_converted_is_warned_of(tmp_path: Path) -> None:
    """All of its layers are of a subclass, as where another library has put its own."""
    model = vit()
    for module in model.modules():
        if type(module) in (nn.Linear, nn.Conv2d):
            module.__class__ = type(f"My{type(module).__name__}", (type(module),), {})
    with pytest.warns(UserWarning, match="no layer of ViTForImageClassification matched:\n.*MyConv2d is a subclass"):
        trainer(tmp_path, model, callbacks=[HadamardCallback()])


@pytest.mark.parametrize(
    ("words", "options", "error", "message"),
    [
        (("hto",), {}, ValueError, "unknown preset 'hto'. Did you mean 'hot'"),
        ((), {"rank": 4}, TypeError, r"\(rank=…\): accepted are .*filter_fn, .*memory.*preset\(\"hot\", rank=4\)"),
    ],
)
def test_a_wrong_argument_is_named_where_the_callback_is_made(
    words: tuple[str, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Not when training begins, and not as an argument of a function that the user has not called."""
    with pytest.raises(error, match=message):
        HadamardCallback(*words, **options)


def test_a_point_is_taken_as_convert_takes_it() -> None:
    """It has a method of its own, beside which none may be given; the callback's default is none."""
    callback = HadamardCallback(plan=hotrain.Point("small", hotrain.preset("hq")))
    callback.convert(vit())
    assert callback.report is not None
    assert callback.report.method.name == "hq"


def test_model_init_converts_by_the_callback(tmp_path: Path) -> None:
    callback = HadamardCallback()
    made = trainer(tmp_path, None, model_init=lambda: callback.convert(vit()), callbacks=[callback])
    made.train()
    assert callback.converted(made.model)
    bad = trainer(tmp_path, None, model_init=vit, callbacks=[HadamardCallback()])
    with pytest.raises(RuntimeError, match=r"model_init must return callback\.convert\(model\)"):
        bad.train()


def test_a_callback_that_comes_too_late_says_so(tmp_path: Path) -> None:
    made = trainer(tmp_path, vit())
    made.add_callback(HadamardCallback())
    with pytest.raises(RuntimeError, match=r"Trainer\(\.\.\., callbacks=\[callback\]\), not by add_callback"):
        made.train()


def test_a_model_that_another_call_converted_is_refused(tmp_path: Path) -> None:
    model = vit()
    hotrain.convert(model, "hot")
    with pytest.raises(ValueError, match=r"converted already.*callback\.convert\(model\), or train without"):
        trainer(tmp_path, model, callbacks=[HadamardCallback()])
    assert {state.method.name for _, _, state in hotrain.converted_layers(model)} == {"hot"}


def test_a_compiled_model_is_refused_and_torch_compile_of_the_arguments_is_not(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"compiled already\. Convert first"):
        HadamardCallback().convert(torch.compile(vit()))
    callback = HadamardCallback()
    trainer(tmp_path, vit(), callbacks=[callback], arguments={"torch_compile_backend": "eager"}).train()
    assert callback.report is not None
    assert all(state.reached for _, state in callback.report.layers)


@pytest.mark.parametrize(
    ("n_gpu", "state", "message"),
    [
        (2, {}, r"to 2 GPUs in every step \(nn\.DataParallel\).*torchrun"),
        (1, {"kind": "DEEPSPEED"}, r"DEEPSPEED has not been tested.*FSDP2"),
        (1, {"kind": "FSDP"}, r"FSDP of version 1.*fsdp_version: 2"),
        (1, {"mixed_precision": "fp8"}, r"mixed_precision='fp8'.*bf16=True"),
    ],
)
def test_what_would_not_train_converted_is_refused(
    n_gpu: int, state: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = SimpleNamespace(name=state.get("kind", "NO"))
    fake = SimpleNamespace(distributed_type=kind, mixed_precision=state.get("mixed_precision", "no"))
    monkeypatch.setattr(ours, "AcceleratorState", lambda: fake)
    model = vit()
    with pytest.raises(ValueError, match=message):
        HadamardCallback().on_init_end(SimpleNamespace(n_gpu=n_gpu), None, None, model=model)
    assert not list(hotrain.converted_layers(model))


def test_fsdp_of_version_2_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = SimpleNamespace(fsdp_version=2)
    fake = SimpleNamespace(distributed_type=SimpleNamespace(name="FSDP"), mixed_precision="bf16", fsdp_plugin=plugin)
    monkeypatch.setattr(ours, "AcceleratorState", lambda: fake)
    callback = HadamardCallback()
    callback.on_init_end(SimpleNamespace(n_gpu=1), None, None, model=vit())
    assert callback.report is not None


def test_a_forward_that_was_replaced_after_the_conversion_is_reported(tmp_path: Path) -> None:
    """As Liger's kernels do in Trainer.train."""
    model = vit()
    made = trainer(tmp_path, model, callbacks=[HadamardCallback()])
    model.forward = transformers.ViTForImageClassification.forward.__get__(model)  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="hotrain: the first step has not called the forward of the converted model"):
        made.train()


def test_without_a_conversion_there_are_no_metrics() -> None:
    assert HadamardCallback().metrics() == {}
