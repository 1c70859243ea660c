"""Trackers hold what the records hold, once for each update, also of a run that was resumed."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hotrain.train import Result, TrainRun, silent, train
from hotrain.train.trackers import tracker

Make = Callable[..., TrainRun]
ROWS = ("train_loss", "test_loss", "accuracy", "lr", "step_ms", "epoch")


def missing(package: str) -> str:
    return f"{package} is not installed: it comes with the extra `dev`"


def points(result: Result, name: str) -> dict[int, float]:
    return {row["update"]: row[name] for row in result.history}


def test_tensorboard_has_each_update_once(tiny: Make) -> None:
    """Of a run whose second half ran twice, because the first time left no checkpoint."""
    pytest.importorskip("tensorboard", reason=missing("tensorboard"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tiny(epochs=2, batch_size=8, audit=True, log="tensorboard")
    half = train(run, on_progress=silent, stop_after=20)
    checkpoint = half.checkpoint_path.read_bytes()
    train(None, resume=half.checkpoint_path, on_progress=silent)
    half.checkpoint_path.write_bytes(checkpoint)
    result = train(None, resume=half.checkpoint_path, on_progress=silent)
    read = EventAccumulator(str(half.checkpoint_path.parent)).Reload()

    def tracked(name: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in read.Scalars(name)]

    for name in ROWS:
        assert len(tracked(name)) == 2
        assert dict(tracked(name)) == pytest.approx(points(result, name), rel=1e-6), name
    assert tracked("saved_bytes") == [(20, result.saved_bytes), (40, result.saved_bytes)]
    # of 20 updates an epoch the mean of the epoch so far is that of the epoch
    assert dict(tracked("loss")) == pytest.approx(points(result, "train_loss"), rel=1e-6)
    assert '"method": "hot-unbiased"' in read.Tensors("run/text_summary")[0].tensor_proto.string_val[0].decode()


def test_trackio_has_the_rows_and_prints_nothing_to_stdout(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trackio = pytest.importorskip("trackio", reason=missing("trackio"))
    from trackio.sqlite_storage import SQLiteStorage

    for module in (trackio, trackio.utils, trackio.sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio", raising=False)
    result = train(tiny(name="few", batch_size=8, steps=20, log="trackio"), on_progress=silent)
    logs = SQLiteStorage.get_logs("few", result.run_id)
    (row,) = [row for row in logs if "accuracy" in row]
    assert {name: row[name] for name in ROWS} == {name: points(result, name)[20] for name in ROWS}
    assert {each["step"] for each in logs} == {20}
    assert "loss" in {name for each in logs for name in each}
    said = capsys.readouterr()
    assert said.out == ""
    assert "few" in said.err


def test_a_tracker_is_closed_also_after_an_error(tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    fake = SimpleNamespace(
        init=lambda **options: calls.append(options),
        log=lambda values, step: calls.append((step, values)),
        finish=lambda: calls.append("finished"),
    )
    monkeypatch.setitem(sys.modules, "trackio", fake)
    with contextlib.suppress(ZeroDivisionError), tracker(tiny(log="trackio"), tmp_path / "a-run", 0) as track:
        track(3, {"update": 3, "loss": 0.5, "nothing": None, "text": "x"})
        _ = 1 / 0
    assert (calls[0]["name"], calls[0]["resume"]) == ("a-run", "allow")
    assert calls[1:] == [(3, {"loss": 0.5}), "finished"]


def test_a_missing_library_is_refused_before_anything_else(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    run = tiny(log="tensorboard")
    with pytest.raises(RuntimeError, match="log: tensorboard is not installed: pip install tensorboard"):
        train(run, on_progress=silent)
    assert not Path(run.out_dir).exists()
    with pytest.raises(ValueError, match="log: got 'wandb'"):
        tiny(log="wandb")
