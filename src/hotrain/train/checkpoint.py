"""Checkpoints: written atomically with a checksum, read without executing code, refused early when they do not fit.

A file is what ``torch.save`` writes, followed by one line with the SHA-256 of all bytes before it. ``torch.load`` reads
such a file too. Nothing of it is unpickled before the checksum is verified.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hotrain.train.run import TrainRun

FORMAT = 2  # 1 had no checksum
FILE = "checkpoint.pt"

_MARK = b"\nhotrain checkpoint, sha256 of all before this line: "
_TAIL = len(_MARK) + 64 + 1

# Fields that may differ between a checkpoint and the run that continues it: they do not change what is computed.
_FREE = {
    "name", "out_dir", "checkpoint_every", "num_workers", "eval_batch_size", "device", "data_dir", "compile", "audit",
    "channels_last",
}  # fmt: skip


class _Hashed:
    """A file that hashes what is written, and remembers an error that PyTorch's writer replaces by one of its own."""

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
    """Write ``state`` so that ``path`` is at every moment either the old checkpoint or the new one, complete.

    Raises:
        OSError: it cannot be written, for instance because the disk is full. The old checkpoint stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            hashed = _Hashed(file)
            try:
                torch.save({"format": FORMAT, **state}, hashed)  # type: ignore[arg-type]
            except RuntimeError as error:
                raise (hashed.error or error) from None
            file.write(_MARK + hashed.sha.hexdigest().encode() + b"\n")
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


def remove_temporaries(folder: Path) -> None:
    """Remove what writers that were killed left in a run's folder. Only for the process that holds its lock."""
    for left in folder.glob(f"{FILE}.*.tmp"):
        left.unlink(missing_ok=True)


def find(path: str | Path) -> Path:
    """The checkpoint's file, of a file or the folder of a run.

    Raises:
        ValueError: there is none.
    """
    file = Path(path)
    if file.is_dir():
        file = file / FILE
    if not file.is_file():
        raise ValueError(f"resume: no checkpoint at {str(path)!r} (a {FILE} file or the folder of a run is accepted)")
    return file


def load(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU. ``path`` is the file or the run's folder.

    Raises:
        ValueError: no such file, one that is truncated or changed in a single bit, one of another program or format,
            one whose fields are missing or of another type, or whose run_id is not a plain name.
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
                # Its bytes are as they were written, so another program wrote them. PyTorch's message would advise
                # to load the file without protection.
                raise ValueError(f"resume: {file} is not a checkpoint of hotrain's trainer") from None
    except OSError as error:
        raise ValueError(f"resume: {file} cannot be read ({error.strerror})") from error
    if not isinstance(state, dict) or "format" not in state:
        raise ValueError(f"resume: {file} is not a checkpoint of hotrain's trainer")
    if state["format"] != FORMAT:
        raise ValueError(f"resume: {file} has format {state['format']!r}, this version reads {FORMAT}")
    _check_fields(state, file)
    return state


def _verify(stream: BinaryIO, file: Path) -> None:
    """Compare the checksum; leave ``stream`` at its beginning.

    Raises:
        ValueError: it is absent or another.
    """
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


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_history(rows: object) -> bool:
    if not isinstance(rows, list):
        return False
    numbers = ("epoch", "update", "accuracy")
    if not all(isinstance(row, dict) and all(_is_number(row.get(name)) for name in numbers) for row in rows):
        return False
    try:
        json.dumps(rows, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _is_a(*kinds: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, kinds) and not isinstance(value, bool)


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "run": _is_a(dict),
    "run_id": is_plain_name,
    "update": lambda value: type(value) is int and value >= 0,
    "model": _is_a(dict),
    "optimizer": _is_a(dict),
    "schedule": _is_a(dict),
    "scaler": lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
    "ema": _is_a(dict, type(None)),
    "grokfast": _is_a(dict, type(None)),
    "calibration": _is_a(dict, type(None)),
    "draws": lambda value: isinstance(value, dict) and all(type(v) is int for v in value.values()),
    "rng": lambda value: isinstance(value, list) and all(isinstance(v, dict) for v in value),
    "loss": lambda value: isinstance(value, list) and len(value) == 2 and all(map(_is_number, value)),
    "history": _is_history,
    "measured": lambda value: (
        isinstance(value, list) and len(value) == 2 and all(v is None or _is_number(v) for v in value)
    ),
    "step_ms": lambda value: isinstance(value, list) and all(map(_is_number, value)),
    "seconds": _is_number,
}


def _check_fields(state: dict[str, Any], file: Path) -> None:
    """Refuse a state with a field missing or of a form that the trainer never writes.

    Raises:
        ValueError: naming the field.
    """
    missing = [name for name in _FIELDS if name not in state]
    if missing:
        raise ValueError(f"resume: {file} is not a complete checkpoint: it has no {', '.join(missing)}")
    for name, accepts in _FIELDS.items():
        if not accepts(state[name]):
            shown = repr(state[name])
            shown = shown if len(shown) <= 80 else f"{shown[:80]}…"
            extra = ", accepted is a plain folder name" if name == "run_id" else ""
            raise ValueError(f"resume: {file}: {name} is {shown}, which the trainer never writes{extra}")


@contextlib.contextmanager
def restoring(part: str) -> Iterator[None]:
    """Turn whatever a ``part`` of another form raises while it is restored into one line.

    Raises:
        ValueError: naming the part.
    """
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split()[:40]) or type(error).__name__
        raise ValueError(f"resume: the checkpoint's {part!r} cannot be restored ({reason})") from error


def saved_run(path: str | Path) -> TrainRun:
    """The run that a checkpoint belongs to, for continuing it without naming its recipe.

    Its ``out_dir`` is where the checkpoint is now: with ``train(saved_run(path), resume=path)`` the run goes on in the
    folder of its checkpoint, also when that was moved or renamed.

    Raises:
        ValueError: as :func:`load`.
    """
    return run_of(load(path), find(path))


def run_of(state: dict[str, Any], file: Path) -> TrainRun:
    """:func:`saved_run` of a loaded ``state`` and its ``file``.

    Raises:
        ValueError: a run with unknown fields or bad values.
    """
    folder = file.absolute().parent
    return replace(_run(state), out_dir=str(folder.parent if file.name == FILE else folder))


def _run(state: dict[str, Any]) -> TrainRun:
    with restoring("run"):
        return TrainRun.from_dict(state["run"])


def folder_of(run: TrainRun, state: dict[str, Any], file: Path) -> Path:
    """Where ``run`` goes on: in the checkpoint's own folder if that is in ``out_dir``, else in one of its run_id."""
    out = Path(run.out_dir)
    if file.name == FILE and file.absolute().parent.parent.resolve() == out.resolve():
        return out / file.absolute().parent.name
    return out / state["run_id"]


def differences(run: TrainRun, other: TrainRun) -> dict[str, tuple[Any, Any]]:
    """The fields in which two runs compute something else, with the values of both."""
    now, then = run.to_dict(), other.to_dict()
    return {k: (now[k], then[k]) for k in now if k not in _FREE and now[k] != then[k]}


def check_same_run(run: TrainRun, state: dict[str, Any]) -> None:
    """Refuse to continue a checkpoint with a run that computes something else.

    Raises:
        ValueError: naming the first differing fields with both values.
    """
    different = list(differences(run, _run(state)).items())
    if different:
        shown = "; ".join(f"{k} is {a!r} here and {b!r} in the checkpoint" for k, (a, b) in different[:3])
        raise ValueError(
            f"resume: the checkpoint is of another run: {shown}. Resume with the same settings, or start a new run"
        )


def check_same_weights(model: torch.nn.Module, saved: dict[str, Any]) -> None:
    """Refuse weights of another model, or ones that no training goes on from.

    Raises:
        ValueError: naming an entry that is missing, unknown, of another shape or dtype, or not finite.
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
