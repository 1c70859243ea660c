"""How a run ends: its result, or why it stopped."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from hotrain.train.run import TrainRun

SCALE_FLOOR = 2.0**-14  # fp16's smallest normal number, below which the loss scale itself underflows

MEASURED = (
    "accuracy", "best_accuracy", "saved_bytes", "bit_ops", "step_ms", "images_per_second", "peak_bytes", "layers",
    "seconds",
)  # fmt: skip
"""The fields of a `Result` that its record has."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM during a run. The message says after which update, and how to resume.

    Args:
        message: what was saved and how to resume.
        checkpoint: the last checkpoint; None if there is none (only after a second signal, which stops at once).
        number: number of the signal, such as ``signal.SIGINT``; a program exits with 128 + number.
    """

    def __init__(self, message: str, checkpoint: Path | None, number: int) -> None:
        super().__init__(message)
        self.checkpoint, self.number = checkpoint, number


class Diverged(RuntimeError):
    """The loss or a weight became NaN or infinite, or fp16's loss scale fell below ``SCALE_FLOOR``."""


class NotSaved(OSError):
    """A checkpoint could not be written. The message gives the reason and the last good checkpoint."""


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Args:
        run: the run.
        run_id: name of its folder.
        history: one row per evaluation: epoch, update, train_loss, test_loss, accuracy, lr, seconds, …
        accuracy, best_accuracy: percent of the test images, of the last epoch and the best one. With ``ema`` of the
            averaged weights. None if no epoch was finished.
        saved_bytes: bytes that autograd saves between forward and backward for one batch (``audit``).
        bit_ops: bit operations of one forward and backward of one batch (``audit``).
        step_ms: median milliseconds of an update, from its batches on the device to the optimizer's step.
        images_per_second: training images per second at that step time.
        peak_bytes: PyTorch's peak allocation on a CUDA device, else None.
        seconds: wall time over all parts of the run.
        finished: False after ``stop_after``.
        record_path: the ``runs.jsonl`` with the run's record.
        checkpoint_path: the last checkpoint.
        layers: what the layers did in the last step (`hotrain.ConversionReport.ran`); None: exact.
        updates: optimizer updates made by this call; 0 where the resumed run was finished already.
        model: the trained model, with its converted layers.
    """

    run: TrainRun
    run_id: str
    history: list[dict[str, Any]]
    accuracy: float | None
    best_accuracy: float | None
    saved_bytes: int | None
    bit_ops: float | None
    step_ms: float | None
    images_per_second: float | None
    peak_bytes: int | None
    seconds: float
    finished: bool
    record_path: Path
    checkpoint_path: Path
    layers: list[dict[str, Any]] | None = None
    updates: int = 0
    model: nn.Module | None = field(default=None, repr=False, compare=False)
