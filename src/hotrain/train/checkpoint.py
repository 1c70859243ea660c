"""Checkpoints: written atomically with a checksum, read with ``weights_only=True``, checked against the run.

A file is the output of ``torch.save``, followed by one line with the SHA-256 of all bytes before it. ``torch.load``
reads such a file too. Nothing is unpickled before the checksum is verified.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hotrain import files
from hotrain.train.run import TrainRun

FORMAT = 2  # 1 had no checksum
FILE = "checkpoint.pt"

FIELDS = (
    "run", "run_id", "update", "model", "optimizer", "scaler", "ema", "calibration", "draws", "rng", "loss", "history",
    "measured", "step_ms", "seconds",
)  # fmt: skip

_MARK = b"\nhotrain checkpoint, sha256 of all before this line: "
_TAIL = len(_MARK) + 64 + 1

# Fields that may differ between a checkpoint and the run that continues it: they do not change what is computed.
_FREE = {
    "name", "out_dir", "init", "checkpoint_every", "evaluate_every", "num_workers", "eval_batch_size", "device",
    "data_dir", "compile", "audit", "channels_last", "log",
}  # fmt: skip


class _Hashed:
    """File that hashes what is written, and keeps the OSError that PyTorch's writer replaces by a RuntimeError."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.sha = file, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            count = self.file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self.sha.update(data)
        return count

    def flush(self) -> None:
        self.file.flush()


def save(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint atomically: ``path`` is always either the old checkpoint or the new one, complete.

    Args:
        state: what :func:`load` returns again: tensors and plain values.
        path: the file; its folder is created.

    Raises:
        OSError: the file cannot be written, for instance because the disk is full. The old checkpoint stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as file:
        hashed = _Hashed(file)
        try:
            torch.save({"format": FORMAT, **state}, hashed)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise (hashed.error or error) from None
        file.write(_MARK + hashed.sha.hexdigest().encode() + b"\n")


def find(path: str | Path) -> Path:
    """Resolve a checkpoint file, or the folder of a run, to the checkpoint file.

    Raises:
        ValueError: no such file.
    """
    file = Path(path)
    if file.is_dir():
        file = file / FILE
    if not file.is_file():
        raise ValueError(f"resume: no checkpoint at {str(path)!r} (a {FILE} file or the folder of a run is accepted)")
    return file


def load(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint, a file or the folder of its run, onto the CPU.

    Returns:
        The ``state`` that :func:`save` wrote, with its ``format``.

    Raises:
        ValueError: no such file; a file that is truncated, damaged, or of another program or format; fields that are
            missing; a run_id that is not a plain name.
    """
    file = find(path)
    try:
        with open(file, "rb") as stream:
            _verify(stream, file)
            try:
                state = torch.load(stream, map_location="cpu", weights_only=True)
            except MemoryError:
                raise
            except Exception:
                # The checksum is right, so another program wrote the file. PyTorch's message would advise to load it
                # with weights_only=False.
                raise ValueError(f"resume: {file} is not a checkpoint of hotrain's trainer") from None
    except OSError as error:
        raise ValueError(f"resume: {file} cannot be read ({error.strerror})") from error
    if not isinstance(state, dict) or "format" not in state:
        raise ValueError(f"resume: {file} is not a checkpoint of hotrain's trainer")
    if state["format"] != FORMAT:
        raise ValueError(f"resume: {file} has format {state['format']!r}, this version reads {FORMAT}")
    # With a right checksum the fields are the trainer's own, but a run_id may be no name of a folder.
    if missing := [name for name in FIELDS if name not in state]:
        raise ValueError(f"resume: {file} is not a complete checkpoint: it has no {', '.join(missing)}")
    if not is_plain_name(state["run_id"]):
        raise ValueError(f"resume: {file}: run_id is {str(state['run_id'])[:80]!r}, accepted is a plain folder name")
    return state


def _verify(stream: BinaryIO, file: Path) -> None:
    """Verify the checksum (ValueError if it is missing or wrong) and rewind ``stream``."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - _TAIL))
    tail = stream.read()
    if len(tail) < _TAIL or not tail.startswith(_MARK):
        raise ValueError(
            f"resume: {file} has no checksum at its end: it is truncated, not a checkpoint of hotrain's trainer, or of "
            f"format 1, which this version does not read (it reads {FORMAT})"
        )
    stream.seek(0)
    sha, left = hashlib.sha256(), size - _TAIL
    while left and (block := stream.read(min(left, 1 << 20))):
        sha.update(block)
        left -= len(block)
    if tail != _MARK + sha.hexdigest().encode() + b"\n":
        raise ValueError(
            f"resume: {file} is damaged: its contents do not have the checksum that was written with them. "
            "Use another checkpoint, or start the run anew"
        )
    stream.seek(0)


def is_plain_name(name: object) -> bool:
    """Whether ``name`` can be a run's folder: one path component of letters, digits, ``.``, ``_`` and ``-``."""
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9._-]{1,255}", name) is not None and name.strip(".") != ""


@contextlib.contextmanager
def restoring(part: str) -> Iterator[None]:
    """Context in which one part of a checkpoint is restored: its errors become one ValueError.

    Raises:
        ValueError: the part cannot be restored.
    """
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split()[:40]) or type(error).__name__
        raise ValueError(f"resume: the checkpoint's {part!r} cannot be restored ({reason})") from error


def saved_run(path: str | Path) -> TrainRun:
    """Return the run of a checkpoint, to resume it without naming its recipe.

    Its ``out_dir`` is where the checkpoint is now: with ``train(saved_run(path), resume=path)`` the run continues in
    the folder of its checkpoint, even if that was moved or renamed.

    Raises:
        ValueError: as :func:`load`.
    """
    return run_of(load(path), find(path))


def run_of(state: dict[str, Any], file: Path) -> TrainRun:
    """Return the run of a checkpoint that was loaded from ``file``, as :func:`saved_run`.

    Raises:
        ValueError: a run with unknown fields or bad values.
    """
    folder = file.absolute().parent
    return replace(_run(state), out_dir=str(folder.parent if file.name == FILE else folder))


def _run(state: dict[str, Any]) -> TrainRun:
    with restoring("run"):
        return TrainRun.from_dict(state["run"])


def folder_of(run: TrainRun, state: dict[str, Any], file: Path) -> Path:
    """Folder in which ``run`` continues: the checkpoint's own if that is in ``out_dir``, else one named by run_id."""
    out = Path(run.out_dir)
    if file.name == FILE and file.absolute().parent.parent.resolve() == out.resolve():
        return out / file.absolute().parent.name
    return out / state["run_id"]


def differences(run: TrainRun, other: TrainRun) -> dict[str, tuple[Any, Any]]:
    """Return the fields that differ and change what is computed, each with the values of ``run`` and ``other``."""
    now, then = run.to_dict(), other.to_dict()
    return {k: (now[k], then[k]) for k in now if k not in _FREE and now[k] != then[k]}


def check_same_run(run: TrainRun, state: dict[str, Any]) -> None:
    """Check that ``run`` computes the same as the run of the checkpoint ``state``.

    Raises:
        ValueError: they differ; the message names the first differing fields with both values.
    """
    different = list(differences(run, _run(state)).items())
    if different:
        shown = "; ".join(f"{k} is {a!r} here and {b!r} in the checkpoint" for k, (a, b) in different[:3])
        raise ValueError(
            f"resume: the checkpoint is of another run: {shown}. Resume with the same settings, or start a new run"
        )


def check_same_weights(model: torch.nn.Module, saved: dict[str, Any]) -> None:
    """Check that the state dict ``saved`` fits ``model`` and that its parameters are finite.

    Raises:
        ValueError: an entry that is missing, unknown, of another shape or dtype, or not finite.
    """
    own = model.state_dict()
    for name, value in saved.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"resume: the checkpoint's model: {name} is a {type(value).__name__}, accepted is a tensor"
            )
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
    for name, value in own.items():
        if saved[name].dtype != value.dtype:
            raise ValueError(f"resume: {name} is {saved[name].dtype} in the checkpoint, accepted is {value.dtype}")
    for name, _ in model.named_parameters():
        if name in saved and not saved[name].isfinite().all():
            raise ValueError(f"resume: {name} has entries that are NaN or infinite in the checkpoint")
