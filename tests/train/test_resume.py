"""A resumed run equals the uninterrupted one, bit for bit; one that does not fit is refused early."""

import errno
import importlib
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hotrain.train import (
    Diverged,
    Interrupted,
    NotSaved,
    Progress,
    Result,
    TrainRun,
    replace,
    saved_run,
    silent,
    train,
)
from hotrain.train import checkpoint as checkpoints
from hotrain.train.distributed import processes
from hotrain.train.record import read

loop = importlib.import_module("hotrain.train.loop")
Make = Callable[..., TrainRun]
TIMES = ("seconds", "step_ms")


def weights(result: Result) -> dict[str, torch.Tensor]:
    assert result.model is not None
    return result.model.state_dict()


def assert_same_outcome(one: Result, other: Result) -> None:
    """Weights, buffers and every recorded metric are equal; times are not compared."""
    states = weights(one), weights(other)
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
    kept = [[{k: v for k, v in row.items() if k not in TIMES} for row in r.history] for r in (one, other)]
    assert kept[0] == kept[1]


# (fields, updates before the stop, why). An epoch has 5 updates of 32 images.
RESUMED: list[tuple[str, dict[str, Any], int]] = [
    ("exact-mid-epoch", {"method": "exact"}, 3),
    ("drawn-rows-mid-epoch", {"method": "hot-unbiased"}, 7),  # the layers' draws go on, not start anew
    ("epoch-end", {"method": "hot"}, 5),  # the next epoch starts with nothing left of the last one
    ("generators", {"mixup": 0.8, "cutmix": 1.0, "random_erase": 0.5, "model_args.drop_path_rate": 0.3}, 4),
    ("averages", {"ema": 0.9, "clip": 0.5, "smoothing": 0.1}, 6),
    ("multistep-accumulated", {"schedule": "multistep", "batch_size": 16, "accumulation": 3, "warmup_epochs": 1.0}, 4),
    ("bf16", {"amp": "bf16"}, 3),
    ("calibrated-then-4-bit", {"calibrate_batches": 1, "calibrate_at": 1, "bit_warmup_epochs": 1}, 6),
    ("not-yet-calibrated", {"calibrate_batches": 1, "calibrate_at": 1, "bit_warmup_epochs": 1}, 4),
    ("recomputed", {"grad_checkpointing": True}, 3),
]


@pytest.mark.parametrize(("fields", "stop"), [case[1:] for case in RESUMED], ids=[case[0] for case in RESUMED])
def test_a_resumed_run_is_the_uninterrupted_one(tiny: Make, fields: dict[str, Any], stop: int) -> None:
    fields = dict(fields)
    run = tiny()
    if "model_args.drop_path_rate" in fields:
        rate = fields.pop("model_args.drop_path_rate")
        fields["model_args"] = {**run.model_args, "drop_path_rate": rate}
    run = replace(run, **fields)
    whole = train(run, on_progress=silent)
    part = train(run, stop_after=stop, on_progress=silent)
    assert not part.finished
    torch.rand(7)  # whatever else the process draws in between must not matter
    resumed = train(run, resume=part.checkpoint_path, on_progress=silent)
    assert resumed.finished
    assert_same_outcome(resumed, whole)
    assert resumed.run_id == part.run_id
    rows = read(resumed.checkpoint_path.with_name("metrics.jsonl"))
    assert rows == resumed.history


def test_the_method_changes_what_is_trained(tiny: Make) -> None:
    """Guards the equalities above against a trainer that ignores the method."""
    results = [train(tiny(method=m, epochs=1), on_progress=silent) for m in ("exact", "hot", "hot-unbiased")]
    weights = [r.model.state_dict()["blocks.0.mlp.fc1.weight"] for r in results]  # type: ignore[union-attr]
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])


def test_a_run_is_reproducible_and_its_seed_matters(tiny: Make) -> None:
    one, again, other = (train(tiny(epochs=1, seed=s), on_progress=silent) for s in (3, 3, 4))
    assert_same_outcome(one, again)
    assert one.history != other.history


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_finishes_the_update_and_leaves_a_checkpoint(
    tiny: Make, number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tiny()
    whole = train(run, on_progress=silent)

    def interrupt(progress: Progress) -> None:
        if progress.update == 3:
            os.kill(os.getpid(), number)
            time.sleep(0)  # Python runs handlers between two of its instructions
            assert f"{number.name}: finishing this update" in capfd.readouterr().err  # at once, not at the end

    handler = signal.getsignal(number)
    with pytest.raises(Interrupted, match=rf"^stopped by {number.name} after update 3; .* --resume") as caught:
        train(run, on_progress=interrupt)
    assert isinstance(caught.value, KeyboardInterrupt)
    assert caught.value.number == number
    assert caught.value.checkpoint is not None
    assert signal.getsignal(number) is handler
    resumed = train(run, resume=caught.value.checkpoint, on_progress=silent)
    assert_same_outcome(resumed, whole)
    statuses = [row["status"] for row in read(Path(run.out_dir) / "runs.jsonl")]
    assert statuses == ["finished", "interrupted", "finished"]


def test_checkpoints_within_an_epoch_survive_a_crash(tiny: Make) -> None:
    """A crash in the middle of an update loses what came after the last checkpoint and nothing else."""
    run = tiny(checkpoint_every=2, method="exact")
    whole = train(run, on_progress=silent)

    def fail(progress: Progress) -> None:
        if progress.update == 9:
            raise OSError("disk on fire")

    with pytest.raises(OSError, match="disk on fire"):
        train(run, on_progress=fail)
    row = read(Path(run.out_dir) / "runs.jsonl")[-1]
    assert (row["status"], row["error"]) == ("failed", "OSError: disk on fire")
    assert [h["epoch"] for h in row["history"]] == [1]
    assert_same_outcome(train(run, resume=Path(run.out_dir) / row["run_id"], on_progress=silent), whole)


def test_a_diverged_run_stops_and_keeps_the_last_good_checkpoint(tiny: Make) -> None:
    run = tiny(method="exact", optimizer="momentum", lr=1e20, checkpoint_every=1)
    with pytest.raises(Diverged, match=r"training loss is (nan|inf) by update \d+ of 10 \(method exact, lr ") as caught:
        train(run, on_progress=silent)
    row = read(Path(run.out_dir) / "runs.jsonl")[-1]
    good = Path(run.out_dir) / row["run_id"] / "checkpoint.pt"
    assert re.search(rf"the checkpoint of update [1-9] is good: {good}$", str(caught.value))
    state = checkpoints.load(Path(run.out_dir) / row["run_id"])
    assert torch.isfinite(torch.tensor(state["loss"][0])).all()


@pytest.fixture
def stopped(tiny: Make) -> Result:
    return train(tiny(), stop_after=2, on_progress=silent)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "hot"}, "method is 'hot' here and 'hot-unbiased' in the checkpoint"),
        ({"method_overrides": {"rank": 4}}, "method_overrides is"),
        ({"seed": 1}, "seed is 1 here and 0"),
        ({"model": "demo_resnet", "model_args": {}}, "model is 'demo_resnet' here"),
        ({"epochs": 3}, "epochs is 3 here and 2"),
    ],
)
def test_another_run_is_refused(stopped: Result, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(replace(stopped.run, **changes), resume=stopped.checkpoint_path, on_progress=silent)


def test_what_does_not_change_the_computation_may_change(stopped: Result, tmp_path: Path) -> None:
    run = replace(stopped.run, out_dir=str(tmp_path / "elsewhere"), checkpoint_every=3, num_workers=0, name="new")
    assert train(run, resume=stopped.checkpoint_path, on_progress=silent).finished


def test_weights_of_another_model_are_refused(stopped: Result, tmp_path: Path) -> None:
    state = checkpoints.load(stopped.checkpoint_path)
    state["model"]["head.weight"] = torch.zeros(3, 32)
    checkpoints.save(state, tmp_path / "other.pt")
    with pytest.raises(
        ValueError, match=r"another model .*1 of another shape; head.weight: \(3, 32\) in the checkpoint"
    ):
        train(stopped.run, resume=tmp_path / "other.pt", on_progress=silent)


def test_the_run_can_be_read_from_its_checkpoint(stopped: Result) -> None:
    assert saved_run(stopped.checkpoint_path.parent) == stopped.run


@pytest.mark.parametrize("renamed", [False, True])
def test_a_folder_alone_is_enough(
    tiny: Make, stopped: Result, tmp_path: Path, renamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a run it goes on where the checkpoint is, also after that was moved, named relatively."""
    folder = stopped.checkpoint_path.parent
    if renamed:
        folder = folder.rename(folder.with_name("resnet50"))
    monkeypatch.chdir(folder)
    resumed = train(None, resume=".", on_progress=silent)
    assert resumed.finished
    assert resumed.run_id == folder.name
    assert resumed.checkpoint_path.samefile(folder / "checkpoint.pt")
    assert sorted(p.name for p in folder.parent.iterdir()) == [folder.name, "runs.jsonl"]
    assert_same_outcome(resumed, train(tiny(), on_progress=silent))


def test_a_copy_of_a_checkpoint_goes_on_beside_it(stopped: Result, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "best.pt"
    copy.parent.mkdir()
    copy.write_bytes(stopped.checkpoint_path.read_bytes())
    resumed = train(None, resume=copy, on_progress=silent)
    assert resumed.checkpoint_path == tmp_path / "elsewhere" / stopped.run_id / "checkpoint.pt"


def test_neither_a_run_nor_a_checkpoint() -> None:
    with pytest.raises(ValueError, match="neither a run nor a checkpoint"):
        train(None)


def test_a_finished_run_is_returned_as_it_is(tiny: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole = train(tiny(), on_progress=silent)
    for run in (None, tiny(), tiny(out_dir=str(tmp_path / "elsewhere"))):
        again = train(run, resume=whole.checkpoint_path)
        assert (again.finished, again.updates, again.accuracy) == (True, 0, whole.accuracy)
        assert again.checkpoint_path.is_file()
        assert [row["status"] for row in read(again.record_path)] == ["finished"]
        said = capfd.readouterr().err
        assert said == f"{whole.run_id} is finished: nothing to train; it is in {whole.checkpoint_path.parent}\n"
    assert not (tmp_path / "elsewhere").exists()


def test_a_finished_run_without_a_record_gets_one(tiny: Make) -> None:
    """Its process may have been killed between the last checkpoint and the record."""
    whole = train(tiny(), on_progress=silent)
    whole.record_path.unlink()
    again = train(None, resume=whole.checkpoint_path, on_progress=silent)
    assert [row["status"] for row in read(again.record_path)] == ["finished"]


def test_a_run_that_is_being_trained_is_refused(stopped: Result) -> None:
    refused: list[str] = []

    def second(progress: Progress) -> None:
        if not refused:
            with pytest.raises(ValueError, match="another process is training this run") as caught:
                train(None, resume=stopped.checkpoint_path, on_progress=silent)
            refused.append(str(caught.value))

    assert train(None, resume=stopped.checkpoint_path, on_progress=second).finished
    assert len(refused) == 1
    assert [row["status"] for row in read(stopped.record_path)] == ["stopped", "finished"]


def test_a_checkpoint_that_went_on_meanwhile_is_refused(stopped: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may have trained, and ended, between the reading of the checkpoint and the lock."""
    build = loop.build

    def slow(*args: Any) -> Any:
        os.utime(stopped.checkpoint_path)
        return build(*args)

    monkeypatch.setattr(loop, "build", slow)
    with pytest.raises(ValueError, match=r"another process wrote .* meanwhile"):
        train(None, resume=stopped.checkpoint_path, on_progress=silent)


def test_what_a_killed_writer_left_is_written_over(stopped: Result) -> None:
    folder = stopped.checkpoint_path.parent
    (folder / "checkpoint.pt.draft").write_bytes(b"half")
    train(None, resume=folder, on_progress=silent)
    assert sorted(p.name for p in folder.iterdir()) == [".lock", "checkpoint.pt", "metrics.jsonl"]


def test_a_second_interrupt_stops_at_once_and_says_what_is_kept(tiny: Make) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.update == 7:
            raise KeyboardInterrupt  # what Python's own handler does

    run = tiny(checkpoint_every=2)
    with pytest.raises(Interrupted, match=r"stopped at once, at update 7; continue after update 6 with --resume /"):
        train(run, on_progress=interrupt)
    (row,) = read(Path(run.out_dir) / "runs.jsonl")
    assert (row["status"], row["error"]) == ("interrupted", None)


def test_a_full_disk_is_named_with_the_checkpoint_that_is_good(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    saves: list[int] = []
    save = checkpoints.save

    def full(state: dict[str, Any], path: Path) -> None:
        saves.append(state["update"])
        if state["update"] == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(state, path)

    monkeypatch.setattr(checkpoints, "save", full)
    run = tiny(checkpoint_every=2)
    with pytest.raises(NotSaved) as caught:
        train(run, on_progress=silent)
    (row,) = read(Path(run.out_dir) / "runs.jsonl")
    path = Path(run.out_dir) / row["run_id"] / "checkpoint.pt"
    message = str(caught.value)
    assert f"of update 4 could not be written to {path}: the disk is full (No space left on device; " in message
    assert message.endswith(f"the checkpoint of update 2 is good: {path}")
    assert saves == [2, 4]  # not tried once more
    assert (row["status"], row["error"]) == ("failed", f"NotSaved: {message}")
    assert checkpoints.load(path)["update"] == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[pair.cc:553/gloo/] Connection closed by peer", "process 1 of 2: another process .* has ended"),
        ("mat1 and mat2 shapes cannot be multiplied", "^mat1"),
    ],
)
def test_a_process_that_is_lost_is_named(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two real processes: `benchmarks/campaign.py faults`."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name, value in (("is_initialized", True), ("get_rank", 1), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    with pytest.raises(RuntimeError, match=message), processes("cpu"):
        raise RuntimeError(text)


def test_a_record_that_cannot_be_written_does_not_hide_the_failure(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, row: dict[str, Any]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def fail(progress: Progress) -> None:
        raise RuntimeError("the failure")

    monkeypatch.setattr(loop.record, "append", full)
    with pytest.raises(RuntimeError, match="the failure") as caught:
        train(tiny(), on_progress=fail)
    assert "No space left" in caught.value.__notes__[0]


# Seen on 40 updates an epoch; `silent` means that no progress asks for the loss.
DIVERGING: list[tuple[str, dict[str, Any], str]] = [
    ("fp32", {}, r"the training loss is (nan|inf) by update \d of 80"),
    ("fp16", {"amp": "fp16", "device": "auto", "lr": 1e30}, r"fp16's loss scale fell to .* by update \d\d of 80"),
    (
        "fp16-short",
        {"amp": "fp16", "device": "auto", "lr": 1e30, "steps": 10},
        "neither the training loss nor the test",
    ),
]


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
@pytest.mark.parametrize(("fields", "message"), [case[1:] for case in DIVERGING], ids=[case[0] for case in DIVERGING])
def test_divergence_is_found_within_some_updates(
    tiny: Make, fields: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a GPU's loss is read later: test_cuda.py
    run = tiny(**{"method": "exact", "optimizer": "momentum", "lr": 1e20, "batch_size": 4, **fields})
    with pytest.raises(Diverged, match=message) as caught:
        train(run, on_progress=silent)
    assert str(caught.value).endswith("no checkpoint was written before")


def test_weights_that_are_not_finite_are_not_saved(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss tells of the weights before the update, not after it."""

    def spoil(training: Any) -> None:
        if training.update == 3:
            with torch.no_grad():
                next(training.model.parameters()).fill_(float("nan"))

    monkeypatch.setattr(loop.Training, "watch", spoil)
    with pytest.raises(Diverged, match=r"a weight is not finite .*the checkpoint of update 2 is good: "):
        train(tiny(method="exact", checkpoint_every=1), on_progress=silent)
