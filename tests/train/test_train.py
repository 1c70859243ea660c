"""What a run does besides resuming: it learns, obeys its settings, reports, and leaves a complete record."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import nn

import hotrain
from hotrain.train import (
    Lora,
    Progress,
    Result,
    TrainRun,
    build,
    progress_bar,
    replace,
    silent,
    train,
    training_batches,
)
from hotrain.train.distributed import Processes
from hotrain.train.record import read
from hotrain.train.training import Training

Make = Callable[..., TrainRun]


def weights(result: Result) -> dict[str, torch.Tensor]:
    assert result.model is not None
    return result.model.state_dict()


def updates(run: TrainRun, count: int = 0) -> Training:
    """The state of ``run`` after ``count`` updates, without checkpoints or records."""
    training = Training(build(run), Processes())
    training.start_epoch(0)
    for batches in list(training.setup.feed.updates(0))[:count]:
        training.step(batches)
    return training


@pytest.mark.parametrize("method", ["exact", "hot-unbiased"])
def test_it_learns_real_digits(tiny: Make, method: str) -> None:
    run = tiny(model="demo_resnet", model_args={}, data="digits", method=method, epochs=1, batch_size=16)
    result = train(run, on_progress=silent)
    # 360 test images of ten classes: chance is 10 % with a standard deviation of 1.6 points.
    assert result.accuracy is not None
    assert result.accuracy > 50


def test_steps_replace_epochs(tiny: Make) -> None:
    result = train(tiny(steps=7), on_progress=silent)
    assert [row["update"] for row in result.history] == [5, 7]
    assert result.accuracy == result.history[-1]["accuracy"]
    assert result.best_accuracy == max(row["accuracy"] for row in result.history)


def test_accumulation_is_the_mean_over_the_larger_batch(tiny: Make) -> None:
    """In eval-free layers (no batch statistics) two batches of 16 give the gradient of one of 32, to rounding."""
    args = {"method": "exact", "optimizer": "momentum", "lr": 1.0, "crop_padding": 0, "schedule": "constant"}
    one, two = updates(tiny(**args), 1), updates(tiny(**args, batch_size=16, accumulation=2), 1)
    for (name, a), b in zip(one.model.named_parameters(), two.model.parameters(), strict=True):
        # float32 sums in another order; gradients here are below 1.
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5, msg=name)


def test_clip_bounds_the_step(tiny: Make) -> None:
    run = tiny(method="exact", optimizer="momentum", momentum=0.0, lr=1.0, weight_decay=0.0, schedule="constant")
    start = [p.detach().clone() for p in build(run).model.parameters()]
    length = {}
    for clip in (None, 1e-3):
        end = list(updates(replace(run, clip=clip), 1).model.parameters())
        length[clip] = torch.cat([(a - b).flatten() for a, b in zip(end, start, strict=True)]).norm().item()
    assert length[None] > 1e-2
    assert length[1e-3] == pytest.approx(1e-3, rel=1e-2)  # clip_grad_norm_ adds 1e-6 to the norm; float32 weights


SCHEDULES = [
    # (fields, relative rates before updates 0, 1, …, 9), by the formulas of the schedules
    ({"schedule": "constant"}, [1] * 10),
    ({"schedule": "constant", "warmup_epochs": 0.4, "warmup_lr": 0.0}, [0, 0.5] + [1] * 8),
    ({"schedule": "multistep", "milestones": (0.5, 0.8)}, [1] * 5 + [0.1] * 3 + [0.01] * 2),
    ({"schedule": "cosine"}, [(1 + torch.cos(torch.tensor(torch.pi * t / 10)).item()) / 2 for t in range(10)]),
]


@pytest.mark.parametrize(("fields", "rates"), SCHEDULES)
def test_schedules(tiny: Make, fields: dict[str, Any], rates: list[float]) -> None:
    got: list[float] = []
    training = updates(tiny(method="exact", lr=0.01, **fields))
    for epoch in range(2):
        for batches in training.setup.feed.updates(epoch):
            got.append(training.optimizer.param_groups[0]["lr"] / 0.01)
            training.step(batches)
    assert got == pytest.approx(rates, abs=1e-6)


def test_the_average_is_what_is_evaluated(tiny: Make) -> None:
    result = train(tiny(epochs=1, ema=0.99), on_progress=silent)
    assert {"accuracy", "raw_accuracy"} <= result.history[0].keys()


def test_bit_warm_up_and_calibration_reach_the_layers(tiny: Make) -> None:
    run = tiny(method="hot", bit_warmup_epochs=1, calibrate_batches=1, calibrate_at=1)
    training = updates(run)
    layers = [state for _, _, state in hotrain.converted_layers(training.model)]
    assert {(s.method.grad_input.bits, s.method.grad_input.scale) for s in layers} == {(8, "auto")}
    training.start_epoch(1)
    assert {s.method.grad_input.bits for s in layers} == {4}
    assert {s.method.grad_input.scale for s in layers} <= {"tensor", "token"}
    assert training.calibration is not None
    assert set(training.calibration.layers) == {name for name, _, _ in hotrain.converted_layers(training.model)}


def test_a_calibration_file(tiny: Make, tmp_path: Path) -> None:
    run = tiny(method="hot", steps=1)
    setup = build(run)
    found = hotrain.calibrate(setup.model, training_batches(setup, 1), setup.loss)
    found.save(tmp_path / "lqs.json")
    result = train(replace(run, calibration_file=str(tmp_path / "lqs.json")), on_progress=silent)
    assert result.model is not None
    for name, _, state in hotrain.converted_layers(result.model):
        assert state.method.grad_input.scale == found.layers[name].choice


def test_methods_with_nothing_to_calibrate_or_schedule_train(tiny: Make) -> None:
    """``compare`` gives every method the recipe's settings."""
    for method in ("exact", "hla", "luq"):
        train(tiny(method=method, steps=1, calibrate_batches=1, bit_warmup_epochs=1), on_progress=silent)


def test_lora_trains_adapters_and_head_only(tiny: Make) -> None:
    training = updates(tiny(lora=Lora(rank=4, targets=("qkv", "fc1"))))
    model = training.model
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name or "head.modules_to_save" in name for name in trained)
    assert not any("patch_embed" in name for name in trained)  # whose convolution is named proj
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    for batches in training.setup.feed.updates(0):
        training.step(batches)
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters() if n in before)
    converted = {row.name for row in training.setup.report.converted}
    assert any(name.endswith("qkv.base_layer") for name in converted)
    assert not any("lora_" in name for name in converted)


@pytest.mark.parametrize(("where", "count"), [("frozen", 8), ("adapters", 4), ("both", 12)])
def test_lora_converts_frozen_layers_adapters_or_both(
    tiny: Make, where: Literal["frozen", "adapters", "both"], count: int
) -> None:
    """Two blocks: four linear layers each, and two matrices beside each qkv."""
    report = build(tiny(lora=Lora(rank=16, convert=where), method="hot")).report
    assert report is not None
    assert len(report.converted) == count


def test_lora_targets_that_do_not_exist(tiny: Make) -> None:
    with pytest.raises(ValueError, match=r"lora.targets: got \('query',\), linear layers here are named fc1, fc2"):
        build(tiny(lora=Lora(targets=("query",))))


def test_a_folder_of_images_trains(folder: Path, tmp_path: Path) -> None:
    run = TrainRun(
        model="demo_resnet", data=str(folder), image_size=32, method="hot", epochs=2, batch_size=6, num_workers=0,
        device="cpu", lr=3e-3, auto_augment="rand-m9-mstd0.5-inc1", random_erase=0.25, mixup=0.2, audit=False,
        out_dir=str(tmp_path),
    )  # fmt: skip
    whole = train(run, on_progress=silent)
    part = train(run, stop_after=3, on_progress=silent)
    resumed = train(run, resume=part.checkpoint_path, on_progress=silent)
    assert all(torch.equal(v, weights(resumed)[name]) for name, v in weights(whole).items())


def test_an_image_that_cannot_be_read_leaves_a_checkpoint(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotrain.train import data

    monkeypatch.setattr(data, "CHECKED_FILES", 0)  # a folder too large to be checked beforehand
    run = TrainRun(model="demo_resnet", data=str(folder), image_size=32, epochs=9, batch_size=2, num_workers=0,
                   device="cpu", method="exact", audit=False, out_dir=str(tmp_path), crop_padding=0)  # fmt: skip

    def damage(progress: Progress) -> None:
        if progress.update == 2:
            for file in (folder / "train").rglob("*.png"):
                file.write_bytes(file.read_bytes()[:500])

    with pytest.raises(ValueError, match="cannot be decoded"):
        train(run, on_progress=damage)
    row = read(tmp_path / "runs.jsonl")[-1]
    state = torch.load(tmp_path / row["run_id"] / "checkpoint.pt", weights_only=True)
    assert state["update"] == row["updates"] == 2


def test_audit_measures_the_run_it_stands_in(tiny: Make) -> None:
    results = {m: train(tiny(method=m, steps=1, audit=True), on_progress=silent) for m in ("exact", "hot")}
    exact, hot = results["exact"], results["hot"]
    assert (exact.saved_bytes or 0) > (hot.saved_bytes or 0) > 0
    assert (exact.bit_ops or 0) > (hot.bit_ops or 0) > 0


def test_audit_changes_nothing(tiny: Make) -> None:
    results = [train(tiny(steps=3, audit=audit, mixup=0.5), on_progress=silent) for audit in (True, False)]
    states = [weights(r) for r in results]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_the_record_holds_what_is_needed_to_believe_and_repeat_it(tiny: Make) -> None:
    run = tiny(audit=True, method="hot", method_overrides={"rank": 4})
    result = train(run, on_progress=silent)
    (row,) = [json.loads(line) for line in result.record_path.read_text().splitlines()]
    assert TrainRun.from_dict(row["config"]) == run
    assert (row["record"], row["status"]) == (3, "finished")
    assert (row["model"], row["method"], row["seed"]) == ("demo_vit", "hot:rank=4", 0)
    assert row["history"] == result.history
    assert len(row["history"]) == 2
    assert row["versions"]["torch"] == torch.__version__
    assert all(row[key] for key in ("device", "command"))
    assert (row["saved_bytes"], row["step_ms"]) == (result.saved_bytes, result.step_ms)
    assert row["step_ms"] > 0
    assert "commit" in row  # None outside of a checkout


def test_progress_counts_updates_and_epochs(tiny: Make) -> None:
    seen: list[Progress] = []
    result = train(tiny(steps=7), on_progress=seen.append)
    per_update = [p for p in seen if p.accuracy is None]
    assert [p.update for p in per_update] == list(range(1, 8))
    assert [p.epoch for p in per_update] == [1] * 5 + [2] * 2
    assert all(p.updates == 7 and p.epochs == 2 and p.images_per_second > 0 for p in seen)
    assert per_update[-1].eta_seconds == 0
    evaluations = [p for p in seen if p.accuracy is not None]
    assert [p.accuracy for p in evaluations] == [row["accuracy"] for row in result.history]
    assert [p.loss for p in evaluations] == [row["train_loss"] for row in result.history]


def test_progress_is_a_line_an_epoch_where_there_is_no_terminal(tiny: Make, capsys: pytest.CaptureFixture[str]) -> None:
    train(tiny(steps=6))
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 2
    assert all("img/s" in line and "accuracy" in line and line.startswith("demo_vit hot-unbiased") for line in lines)


def test_a_silent_run_reads_no_loss_between_epochs(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading it would make the host wait for the device at every update."""
    read: list[int] = []
    mean_loss = Training.mean_loss
    monkeypatch.setattr(Training, "mean_loss", lambda self: (read.append(self.update), mean_loss(self))[1])
    train(tiny(steps=7), on_progress=silent)
    assert set(read) == {5, 7}


def test_channels_last_is_how_weights_lie_and_not_what_they_become(tiny: Make) -> None:
    args = {"model": "demo_resnet", "model_args": {}, "method": "exact", "optimizer": "momentum", "lr": 0.1}
    plain, last = (updates(tiny(**args, channels_last=on), 1).model for on in (False, True))
    weight = last.get_parameter("layer1.0.conv1.weight")
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()
    for (name, a), b in zip(plain.named_parameters(), last.parameters(), strict=True):
        # float32 sums in another order; an update moves an entry by less than 1.
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5, msg=name)


def test_the_bar_shows_throughput_time_left_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    import io
    import sys

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    with progress_bar("vit hot") as report:
        report(Progress(1, 3, 5, 20, 1.5, 1234.0, 75.0, 2**30))
    text = terminal.getvalue()
    for part in ("vit hot", "5/20", "1:15 left", "1,234 img/s", "loss 1.5000", "peak 1.00 GiB"):
        assert part in text


def test_a_log_gets_a_line_an_epoch_and_a_line_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of ten minutes with an update a second; a notebook's stderr is no terminal either."""
    seconds = 0.0
    monkeypatch.setattr("hotrain.train.progress.time", SimpleNamespace(monotonic=lambda: seconds))
    with progress_bar("vit hot") as report:
        for update in range(1, 601):
            seconds = float(update)
            report(Progress(1, 1, update, 600, 1.5, 1234.0, 0.0))
        report(Progress(1, 1, 600, 600, 1.5, 1234.0, 0.0, accuracy=90.0))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "vit hot · update 60/600 · epoch 1/1 · loss 1.5000 · 1,234 img/s"
    assert lines[-1] == "vit hot · epoch 1/1 · loss 1.5000 · accuracy 90.00 % · 1,234 img/s"
    assert len(lines) == 11


def test_amp_and_compile_settings_reach_the_model(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []
    training = updates(tiny(amp="bf16"))
    training.model.blocks[0].mlp.fc1.register_forward_hook(lambda m, a, y: seen.append(y.dtype))  # type: ignore[index,union-attr]
    training.step(next(iter(training.setup.feed.updates(0))))
    assert seen == [torch.bfloat16]
    compiled: list[nn.Module] = []
    monkeypatch.setattr(torch, "compile", lambda model, mode: compiled.append(model) or model)
    assert updates(tiny(compile=True)).model in compiled


def test_cuda_asked_for_and_absent(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = tiny(device="cuda")
    with pytest.raises(ValueError, match=r"device: got 'cuda', but this PyTorch .* finds no CUDA device; use cpu"):
        train(run, on_progress=silent)
    assert not Path(run.out_dir).exists()


def test_unpacked_batches_leave_the_generators_alone(tiny: Make) -> None:
    setup = build(tiny())
    before = torch.get_rng_state()
    assert len(list(training_batches(setup, 3))) == 3
    assert len(list(training_batches(setup, 99))) == 5  # an epoch has no more
    assert torch.equal(setup.example()[0], next(iter(training_batches(setup, 1)))[0])
    assert torch.equal(before, torch.get_rng_state())
