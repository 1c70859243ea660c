"""A resumed run equals the uninterrupted one, bit for bit; one that does not fit is refused early."""

import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hotrain.train import Diverged, Grokfast, Interrupted, Progress, Result, TrainRun, replace, saved_run, silent, train
from hotrain.train import checkpoint as checkpoints
from hotrain.train.record import read

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
    ("averages", {"ema": 0.9, "grokfast": Grokfast(), "clip": 0.5, "smoothing": 0.1}, 6),
    ("onecycle", {"schedule": "onecycle", "optimizer": "momentum", "lr": 0.05}, 6),  # it cycles momentum too
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
def test_an_interrupt_finishes_the_update_and_leaves_a_checkpoint(tiny: Make, number: signal.Signals) -> None:
    run = tiny()
    whole = train(run, on_progress=silent)

    def interrupt(progress: Progress) -> None:
        if progress.update == 3:
            os.kill(os.getpid(), number)

    handler = signal.getsignal(number)
    with pytest.raises(Interrupted, match=r"after update 3; .* --resume") as caught:
        train(run, on_progress=interrupt)
    assert isinstance(caught.value, KeyboardInterrupt)
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
    with pytest.raises(Diverged, match=r"training loss is (nan|inf) by update \d+ of 10 \(method exact, lr "):
        train(run, on_progress=silent)
    row = read(Path(run.out_dir) / "runs.jsonl")[-1]
    state = checkpoints.load(Path(run.out_dir) / row["run_id"])
    assert torch.isfinite(torch.tensor(state["loss"][0]))


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


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.999], ids=["empty", "a-third", "almost-all"])
def test_a_truncated_checkpoint_is_refused(stopped: Result, keep: float) -> None:
    content = stopped.checkpoint_path.read_bytes()
    stopped.checkpoint_path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(ValueError, match="truncated or not a checkpoint"):
        train(stopped.run, resume=stopped.checkpoint_path, on_progress=silent)


def test_other_files_are_refused(stopped: Result, tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("not a checkpoint")
    torch.save({"model": {}}, tmp_path / "foreign.pt")
    torch.save({"format": 99, "run": {}}, tmp_path / "future.pt")
    for name, message in [
        ("text.pt", "truncated or not a checkpoint"),
        ("foreign.pt", "not a checkpoint of hotrain"),
        ("future.pt", "has format 99, this version reads 1"),
        ("absent.pt", "no checkpoint at"),
    ]:
        with pytest.raises(ValueError, match=message):
            train(stopped.run, resume=tmp_path / name, on_progress=silent)


def test_a_checkpoint_executes_nothing(tmp_path: Path) -> None:
    """A pickle that would run code when loaded is refused without running it."""

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "executed",)

    torch.save({"format": 1, "run": {}, "x": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="truncated or not a checkpoint"):
        checkpoints.load(tmp_path / "evil.pt")
    assert not (tmp_path / "executed").exists()


def test_a_failed_write_leaves_the_old_checkpoint(stopped: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    before = stopped.checkpoint_path.read_bytes()

    def half(state: Any, file: Any) -> None:
        file.write(b"half of a")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="no space"):
        checkpoints.save({}, stopped.checkpoint_path)
    assert stopped.checkpoint_path.read_bytes() == before
    assert [p.name for p in stopped.checkpoint_path.parent.glob("*.tmp")] == []


def test_the_run_can_be_read_from_its_checkpoint(stopped: Result) -> None:
    assert saved_run(stopped.checkpoint_path.parent) == dataclasses.replace(stopped.run)
