"""Checkpoints: written atomically, read without executing code, refused early when they do not fit."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from hotrain.train.run import TrainRun

FORMAT = 1
FILE = "checkpoint.pt"

# Fields that may differ between a checkpoint and the run that continues it: they do not change what is computed.
_FREE = {
    "name", "out_dir", "checkpoint_every", "num_workers", "eval_batch_size", "device", "data_dir", "compile", "audit",
    "channels_last",
}  # fmt: skip


def save(state: dict[str, Any], path: Path) -> None:
    """Write ``state`` so that ``path`` is at every moment either the old checkpoint or the new one, complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save({"format": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    # The new name itself must reach the disk too.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU. ``path`` is the file or the run's folder.

    Raises:
        ValueError: no such file, a truncated or garbled one, or one of another program or version.
    """
    file = Path(path)
    if file.is_dir():
        file = file / FILE
    if not file.is_file():
        raise ValueError(f"resume: no checkpoint at {str(path)!r} (a {FILE} file or the folder of a run is accepted)")
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"resume: {file} is truncated or not a checkpoint ({reason})") from error
    if not isinstance(state, dict) or "run" not in state or "format" not in state:
        raise ValueError(f"resume: {file} is not a checkpoint of hotrain's trainer")
    if state["format"] != FORMAT:
        raise ValueError(f"resume: {file} has format {state['format']}, this version reads {FORMAT}")
    return state


def saved_run(path: str | Path) -> TrainRun:
    """The run that a checkpoint belongs to, for continuing it without naming its recipe.

    Raises:
        ValueError: as :func:`load`.
    """
    return TrainRun.from_dict(load(path)["run"])


def check_same_run(run: TrainRun, saved: dict[str, Any]) -> None:
    """Refuse to continue a checkpoint with a run that computes something else.

    Raises:
        ValueError: naming the first differing fields with both values.
    """
    now, then = run.to_dict(), TrainRun.from_dict(saved).to_dict()
    different = [k for k in now if k not in _FREE and now[k] != then[k]]
    if different:
        shown = "; ".join(f"{k} is {now[k]!r} here and {then[k]!r} in the checkpoint" for k in different[:3])
        raise ValueError(
            f"resume: the checkpoint is of another run: {shown}. Resume with the same settings, or start a new run"
        )


def check_same_keys(model: torch.nn.Module, saved: dict[str, Any]) -> None:
    """Refuse weights of another model.

    Raises:
        ValueError: naming a missing, an unknown or a differently shaped entry.
    """
    own = model.state_dict()
    missing = [k for k in own if k not in saved]
    unknown = [k for k in saved if k not in own]
    shapes = [k for k in own if k in saved and own[k].shape != saved[k].shape]
    if missing or unknown or shapes:
        key = (shapes or missing or unknown)[0]
        got = tuple(saved[key].shape) if key in saved else "absent"
        here = tuple(own[key].shape) if key in own else "absent"
        raise ValueError(
            f"resume: the checkpoint is of another model ({len(missing)} entries missing, {len(unknown)} unknown, "
            f"{len(shapes)} of another shape; {key}: {got} in the checkpoint, {here} here)"
        )
