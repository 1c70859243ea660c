"""The training loop: updates, evaluation, checkpoints, resume and the record of a run.

A resumed run equals an uninterrupted one bit for bit: batches are functions of (seed, epoch, batch); all other state is
in :meth:`Training.state_dict`; and checkpoints are written only between updates. On CUDA this needs
``deterministic=True``, because some CUDA kernels sum in a varying order.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import signal
import statistics
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hotrain
from hotrain import draws
from hotrain.calibration import LayerChoice
from hotrain.optim import GrokfastEMA
from hotrain.train import checkpoint, contrastive, record, trackers
from hotrain.train.batches import Batch
from hotrain.train.distributed import Processes, processes
from hotrain.train.optimization import Schedule, check_optimizer_state, create_optimizer
from hotrain.train.progress import OnProgress, Progress, progress_bar, silent
from hotrain.train.rng import rng_state, set_rng_state
from hotrain.train.run import TrainRun
from hotrain.train.setup import Setup, autocast, build, training_batches

WATCH = 20  # updates between two checks of the loss on a GPU
SCALE_FLOOR = 2.0**-14  # fp16's smallest normal number, below which the loss scale itself underflows


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


def train(
    run: TrainRun | None,
    *,
    resume: str | Path | None = None,
    stop_after: int | None = None,
    on_progress: OnProgress | None = None,
    on_start: Callable[[Setup], None] | None = None,
) -> Result:
    """Train as ``run`` describes; write checkpoints and history to ``<out_dir>/<run_id>/``, a record to ``<out_dir>``.

    Args:
        run: what to train. None continues the checkpoint's own run, in the folder that the checkpoint is in
            (:func:`saved_run`).
        resume: a checkpoint or the folder of an earlier run, continued bit for bit. A run that is finished is
            returned as it is.
        stop_after: stop after so many updates of the run, as if interrupted, but return.
        on_progress: called on process 0 after every update, with a synchronization of the device; None shows a
            progress bar; with `silent` there is neither a call nor a synchronization.
        on_start: called on process 0 with the parts of the run, when they are built.

    Returns:
        The result of the run, on every process.

    Raises:
        ValueError, RuntimeError: a checkpoint that does not fit (before anything else), a run that another process is
            training, or whatever :func:`hotrain.train.setup.build` refuses.
        Diverged: the loss is not finite; the last checkpoint was written before.
        NotSaved: a checkpoint could not be written, for instance because the disk is full.
        Interrupted: Ctrl-C or SIGTERM, after a checkpoint was written. A second Ctrl-C stops at once.
    """
    file = state = None
    if resume is not None:
        file = checkpoint.find(resume)
        read_at = file.stat().st_mtime_ns
        state = checkpoint.load(file)
        run = checkpoint.run_of(state, file) if run is None else run
        checkpoint.check_same_run(run, state)
    if run is None:
        raise ValueError("train: got neither a run nor a checkpoint to resume")
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(processes(run.device))
        stack.enter_context(_deterministic(run.deterministic))
        stack.enter_context(_without_cudnn_attention())
        setup = build(run, ranks)
        if on_start is not None and ranks.is_main:
            on_start(setup)
        training = Training(run, setup, ranks, state)
        report = on_progress
        if file is not None and state is not None:
            training.folder = checkpoint.folder_of(run, state, file)
            training.run_id = training.folder.name
            training.good = training.update, file
            if training.update == training.updates and (found := _finished_record(training.run_id, file)) is not None:
                if ranks.is_main and report is not silent:
                    print(f"{training.run_id} is finished: nothing to train", file=sys.stderr, flush=True)
                return replace(training.result(True), record_path=found, checkpoint_path=file)
        if ranks.is_main:
            stack.enter_context(record.locked(training.folder))
            if file is not None and file.stat().st_mtime_ns != read_at:
                raise ValueError(f"resume: another process wrote {file} meanwhile; resume it again")
            training.open_folder()
            training.track = stack.enter_context(trackers.tracker(run, training.folder, training.update))
        if report is None and ranks.is_main:
            report = stack.enter_context(progress_bar(f"{run.model} {run.method_label}"))
        interrupted = stack.enter_context(_interrupts(ranks))
        shown = ranks.is_main and report is not silent
        try:
            finished = _epochs(training, interrupted, stop_after, report if shown else None)
        except KeyboardInterrupt as stop:
            training.write_record_of(stop, "interrupted")
            if isinstance(stop, Interrupted):
                raise
            raise training.stopped_at_once() from None
        except Exception as failure:
            training.rescue(failure)
            training.write_record_of(failure, "failed")
            raise
        training.write_record("finished" if finished else "stopped", None)
        return training.result(finished)


def _finished_record(run_id: str, file: Path) -> Path | None:
    """The ``runs.jsonl`` next to the folder of a checkpoint, if it has a record of this run as finished."""
    path = file.absolute().parent.parent / record.RUNS
    done = any(row.get("run_id") == run_id and row.get("status") == "finished" for row in record.read(path))
    return path if done else None


def _epochs(
    training: Training, interrupted: Callable[[], int], stop_after: int | None, report: OnProgress | None
) -> bool:
    """Run updates until the run is complete (True) or ``stop_after`` is reached (False)."""
    run, per_epoch = training.run, training.updates_per_epoch
    while training.update < training.updates:
        epoch, first = divmod(training.update, per_epoch)
        training.start_epoch(epoch)
        for batches in training.setup.feed.updates(epoch, first):
            training.step(batches)
            training.watch()
            if report is not None:
                report(training.progress())
            complete = training.update == training.updates
            ended, rest = divmod(training.update, per_epoch)
            if complete or (rest == 0 and ended % run.evaluate_every == 0):
                training.finish_epoch(epoch)
                if report is not None:
                    report(training.progress(training.history[-1]["accuracy"]))
                training.save()
            elif run.checkpoint_every and training.update % run.checkpoint_every == 0:
                training.save()
            if complete:
                break
            if number := interrupted():
                if training.update > training.saved_at:
                    training.save()
                raise training.stopped(number)
            if stop_after is not None and training.update >= stop_after:
                training.save()
                return False
    return True


class Training:
    """The mutable state of a run: model, optimizer, schedules, averages, counters and history.

    Args:
        run: what to train.
        setup: its parts.
        ranks: the processes of the run.
        saved: state of a checkpoint to continue; None: a new run.
    """

    def __init__(self, run: TrainRun, setup: Setup, ranks: Processes, saved: dict[str, Any] | None) -> None:
        from timm.data import Mixup
        from timm.data.random_erasing import RandomErasing
        from timm.utils import ModelEmaV3

        self.run, self.setup, self.ranks = run, setup, ranks
        self.model, self.device = setup.model, setup.device
        self.learner = self.model if isinstance(self.model, contrastive.TwoViews) else None
        self.updates_per_epoch = setup.feed.updates_per_epoch
        self.updates = run.steps if run.steps is not None else run.epochs * self.updates_per_epoch
        if saved is not None:
            checkpoint.check_same_weights(self.model, saved["model"])

        self.mixup: Mixup | None = None
        if run.mixup or run.cutmix:
            self.mixup = Mixup(
                mixup_alpha=run.mixup,
                cutmix_alpha=run.cutmix,
                prob=run.mix_prob,
                switch_prob=run.mix_switch_prob,
                label_smoothing=run.smoothing,
                num_classes=len(setup.data.classes),
            )
        self.erase: RandomErasing | None = None
        if run.random_erase:
            self.erase = RandomErasing(run.random_erase, mode="pixel", device=self.device)
        self.loss_function = nn.CrossEntropyLoss(label_smoothing=0.0 if self.mixup else run.smoothing)

        self.optimizer = create_optimizer(run, self.model)
        self.schedule = Schedule(run, self.optimizer, self.updates, self.updates_per_epoch)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=run.amp == "fp16")
        self.grokfast: GrokfastEMA | None = None
        if run.grokfast is not None:
            self.grokfast = GrokfastEMA(self.model.named_parameters(), run.grokfast.alpha, run.grokfast.lamb)
        self.ema: ModelEmaV3 | None = None
        if run.ema is not None:
            self.ema = ModelEmaV3(self.model, decay=run.ema, use_warmup=True)
        self.bit_schedule: hotrain.BitSchedule | None = None
        self.method = run.resolve_method()
        bits = self.method.grad_input.bits
        if run.bit_warmup_epochs and bits is not None:
            self.bit_schedule = hotrain.BitSchedule(bits, warmup=run.bit_warmup_epochs)
        # LQS has something to choose only where g_y is quantized and its scale was left open.
        self.wants_calibration = bits is not None and self.method.grad_input.scale == "auto"
        self.calibration: hotrain.Calibration | None = None
        if run.calibration_file is not None and self.wants_calibration:
            self.calibration = hotrain.Calibration.load(run.calibration_file)
            self.calibration.apply(self.model)

        self.update = 0
        self.history: list[dict[str, Any]] = []
        self.loss_sum, self.loss_count = torch.zeros((), device=self.device), 0
        self.saved_bytes: int | None = None
        self.bit_ops: float | None = None
        self.timer = _StepTimer(self.device)
        self.seconds_before = 0.0
        self.between_updates = True
        self.run_id = ranks.first(record.new_run_id(run.name, run.method_label, run.seed))
        if saved is not None:
            self.load_state_dict(saved)
        self.folder = Path(run.out_dir) / self.run_id
        self.saved_at = self.update
        self.good: tuple[int, Path] | None = None  # the last checkpoint: its update and file
        self.watched, self.watched_at = _DelayedRead(self.device), (0, 0)
        self.track: trackers.Track = trackers.untracked
        if run.audit and self.saved_bytes is None:
            self._audit()

        self.net: nn.Module = self.model
        if run.compile:
            graphs = run.plan != "speed" and self.device.type == "cuda"
            self.net = torch.compile(self.model, mode="reduce-overhead" if graphs else None)  # type: ignore[assignment]
        if ranks.world > 1:
            self.net = nn.parallel.DistributedDataParallel(self.net)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.started, self.started_at = time.perf_counter(), self.update

    @property
    def checkpoint_path(self) -> Path:
        """The checkpoint file in the run's folder."""
        return self.folder / checkpoint.FILE

    def open_folder(self) -> None:
        """Bring the files of the run's folder to this update. Only for the process that holds its lock."""
        checkpoint.remove_temporaries(self.folder)
        record.rewrite(self.folder / record.METRICS, self.history)

    def start_epoch(self, epoch: int) -> None:
        """Apply the bit schedule and calibration of the epoch; also when a resume starts within an epoch."""
        self.model.train()
        if self.bit_schedule is not None:
            self.bit_schedule.apply(self.model, epoch)
        run = self.run
        due = run.calibrate_batches and self.wants_calibration and epoch >= run.calibrate_at
        if due and self.calibration is None:
            batches = training_batches(self.setup, run.calibrate_batches)
            with self._autocast():
                found = hotrain.calibrate(self.model, batches, self.setup.loss, max_batches=run.calibrate_batches)
            self.calibration = self.ranks.first(found)
            self.calibration.apply(self.model)

    def step(self, batches: list[Batch]) -> None:
        """One update: forward and backward of each batch, Grokfast, clipping, optimizer, schedule and EMA."""
        run = self.run
        self.between_updates = False
        self.timer.start()
        with hotrain.accumulation() if len(batches) > 1 else contextlib.nullcontext():
            for i, (x, y) in enumerate(batches):
                x, target = self._augment(x, y)
                wait = isinstance(self.net, nn.parallel.DistributedDataParallel) and i + 1 < len(batches)
                with self.net.no_sync() if wait else contextlib.nullcontext():  # type: ignore[operator]
                    with self._autocast():
                        output = self.net(x).float()
                        loss = self.learner.loss(output, x) if self.learner else self.loss_function(output, target)
                    self.scaler.scale(loss / len(batches)).backward()
                self.loss_sum += loss.detach()
                self.loss_count += 1
        self.scaler.unscale_(self.optimizer)
        if self.grokfast is not None:
            self.grokfast.step()
        if run.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), run.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.update += 1
        self.schedule.step(self.update)
        if self.ema is not None:
            self.ema.update(self.model, step=self.update)
        if self.learner is not None:
            self.learner.move_target(self.update / self.updates)
        self.timer.stop()
        self.between_updates = True

    def _augment(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if self.erase is not None:
            x = self.erase(x)
        if self.mixup is not None:
            even = len(x) // 2 * 2  # a batch that lost an unreadable image may be odd
            x, y = self.mixup(x[:even], y[:even])
        return x, y

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return autocast(self.run, self.device)

    def _audit(self) -> None:
        x, _ = self.setup.example()
        with self._autocast():
            self.saved_bytes = hotrain.saved_bytes(self.model, x).total
            self.bit_ops = hotrain.cost(self.model, x).bit_ops_total

    def mean_loss(self) -> float:
        """Return the mean training loss of this epoch so far; synchronizes with the device.

        Raises:
            Diverged: it is not finite (fp16 skips such updates, so only bf16 and fp32 stop here).
        """
        loss = float(self.loss_sum) / max(1, self.loss_count)
        if not math.isfinite(loss) and self.run.amp != "fp16":
            raise self._diverged(f"the training loss is {loss}")
        return loss

    def _diverged(self, what: str) -> Diverged:
        return Diverged(
            f"{what} by update {self.update} of {self.updates} "
            f"(method {self.run.method_label}, lr {self.optimizer.param_groups[0]['lr']:g}): "
            f"lower the rate, add warm-up or clip; {self._good_checkpoint()}"
        )

    def _good_checkpoint(self) -> str:
        if self.good is None:
            return "no checkpoint was written before"
        return f"the checkpoint of update {self.good[0]} is good: {self.good[1]}"

    def watch(self) -> None:
        """Check for divergence without synchronizing with the device.

        On a CPU the loss is read at every update; on a GPU every ``WATCH`` updates, as it was at the previous check.
        Every ``WATCH`` updates it is tracked: the mean of the epoch so far.

        Raises:
            Diverged: the loss was not finite, or fp16's loss scale is below ``SCALE_FLOOR``.
        """
        if self.device.type == "cuda" and self.update % WATCH:
            return
        # The scale as a tensor: get_scale() would wait for it.
        scale = self.scaler._scale if self.scaler.is_enabled() else None
        seen = self.watched.look(self.loss_sum, self.loss_sum.new_ones(()) if scale is None else scale)
        now = self.update, self.loss_count
        (update, count), self.watched_at = (self.watched_at if self.device.type == "cuda" else now), now
        if count and update % WATCH == 0:
            self.track(update, {"loss": _finite(seen[0] / count)})
        if not math.isfinite(seen[0]) and self.run.amp != "fp16":
            raise self._diverged(f"the training loss is {seen[0]}")
        if seen[1] < SCALE_FLOOR:
            raise self._diverged(f"fp16's loss scale fell to {seen[1]:.0e}, as update after update overflows,")

    def finish_epoch(self, epoch: int) -> None:
        """Evaluate and append a row to the history, in memory and on disk.

        Raises:
            Diverged: the losses are not finite.
        """
        totals = self.ranks.total(
            torch.tensor([float(self.loss_sum), self.loss_count], dtype=torch.float64, device=self._sum_device)
        )
        self.mean_loss()
        model = self.model if self.ema is None else self.ema.module
        row: dict[str, Any] = {"epoch": epoch + 1, "update": self.update}
        row["train_loss"] = _finite(float(totals[0] / totals[1]))
        if self.learner is None:
            row["test_loss"], row["accuracy"] = self.evaluate(model)
        else:
            row["test_loss"], row["accuracy"], row["knn"] = self.probe(self.learner)
        if row["train_loss"] is None and row["test_loss"] is None:
            raise self._diverged("neither the training loss nor the test loss is finite")
        if self.ema is not None:
            _, row["raw_accuracy"] = self.evaluate(self.model)
        row["lr"] = self.optimizer.param_groups[0]["lr"]
        row["step_ms"] = self.timer.median_ms()
        row["skipped"] = self.setup.feed.skipped
        row["seconds"] = self.seconds()
        self.history.append(row)
        self.loss_sum.zero_()
        self.loss_count = 0
        if self.ranks.is_main:
            record.append(self.folder / record.METRICS, row)
            costs = {"saved_bytes": self.saved_bytes, "bit_ops": self.bit_ops, "peak_bytes": self._peak_bytes()}
            self.track(self.update, {**row, **costs})

    @property
    def _sum_device(self) -> torch.device:
        return self.device

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> tuple[float | None, float]:
        """Return mean cross-entropy and accuracy in percent over the test images of all processes."""
        was_training = model.training
        model.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        for x, y in self.setup.feed.test_batches():
            with self._autocast():
                output = model(x).float()
            sums[0] += nn.functional.cross_entropy(output, y, reduction="sum")
            sums[1] += (output.argmax(1) == y).sum()
            sums[2] += len(y)
        model.train(was_training)
        loss, correct, count = self.ranks.total(sums).tolist()
        return _finite(loss / count), 100.0 * correct / count

    @torch.no_grad()
    def probe(self, learner: contrastive.TwoViews) -> tuple[float | None, float, float]:
        """Judge the features of the backbone, on each process by its part of the images.

        Returns:
            Cross-entropy and accuracy (percent) of a linear probe, and the accuracy by 20 nearest neighbours.
        """
        feed, classes = self.setup.feed, len(self.setup.data.classes)
        was_training = learner.training
        learner.eval()
        with self._autocast():
            train, test = (
                [(learner.backbone(x).float(), y) for x, y in b] for b in (feed.train_batches(), feed.test_batches())
            )
        learner.train(was_training)
        (x, labels), (seen, truth) = ([torch.cat(part) for part in zip(*pairs, strict=True)] for pairs in (train, test))
        logits = contrastive.linear_probe(x, labels, seen, classes)
        near = contrastive.nearest_neighbours(x, labels, seen, classes)
        right = [logits.argmax(1) == truth, near == truth]
        sums = torch.stack([nn.functional.cross_entropy(logits, truth, reduction="sum"), *(r.sum() for r in right)])
        loss, probed, nearby, count = self.ranks.total(
            torch.cat((sums.double(), sums.new_tensor([len(truth)])))
        ).tolist()
        return _finite(loss / count), 100.0 * probed / count, 100.0 * nearby / count

    def seconds(self) -> float:
        """Return the wall time of the run over all its parts."""
        return self.seconds_before + time.perf_counter() - self.started

    def progress(self, accuracy: float | None = None) -> Progress:
        """Return what is reported after an update; synchronizes with the device to read the loss."""
        loss = self.mean_loss() if accuracy is None else self.history[-1]["train_loss"] or math.nan
        elapsed = time.perf_counter() - self.started
        done = self.update - self.started_at
        images = done * self.setup.feed.images_per_update
        return Progress(
            epoch=-(-self.update // self.updates_per_epoch),
            epochs=-(-self.updates // self.updates_per_epoch),
            update=self.update,
            updates=self.updates,
            loss=loss,
            lr=self.optimizer.param_groups[0]["lr"],
            images_per_second=images / elapsed,
            eta_seconds=elapsed / max(1, done) * (self.updates - self.update),
            peak_bytes=self._peak_bytes(),
            accuracy=accuracy,
        )

    def _peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None

    def save(self) -> None:
        """Write the checkpoint (on process 0, with every process's generator states).

        Raises:
            Diverged: the loss or a weight is not finite; the previous checkpoint stays.
            NotSaved: the file cannot be written; the previous checkpoint stays.
        """
        self.mean_loss()
        if not torch.stack([p.detach().isfinite().all() for p in self.model.parameters()]).all():
            raise self._diverged("a weight is not finite")
        state = self.state_dict()
        if self.ranks.is_main:
            try:
                checkpoint.save(state, self.checkpoint_path)
            except OSError as error:
                raise NotSaved(self._not_saved(error)) from error
        self.ranks.wait()  # no process may look for a file that is still being written
        self.saved_at, self.good = self.update, (self.update, self.checkpoint_path)

    def _not_saved(self, error: OSError) -> str:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(self.folder).free
            reason = f"the disk is full ({reason}; {free / 2**20:.1f} MiB are free on it)"
        return (
            f"the checkpoint of update {self.update} could not be written to {self.checkpoint_path}: {reason}; "
            f"{self._good_checkpoint()}"
        )

    def rescue(self, failure: Exception) -> None:
        """After a ``failure`` other than `Diverged` and `NotSaved`, save what was trained since the last checkpoint.

        Only in single-process runs: the other processes would not take part.
        """
        due = self.between_updates and self.update > self.saved_at and self.ranks.world == 1
        if due and not isinstance(failure, (Diverged, NotSaved)):
            try:
                self.save()
            except (Diverged, NotSaved) as second:
                failure.add_note(str(second))

    def stopped(self, number: int) -> Interrupted:
        """Make the exception for signal ``number``, after the update is finished and its checkpoint written."""
        return Interrupted(
            f"stopped by {signal.Signals(number).name} after update {self.update}; nothing is lost. "
            f"Continue with --resume {self.checkpoint_path}",
            self.checkpoint_path,
            number,
        )

    def stopped_at_once(self) -> Interrupted:
        """Make the exception for a second Ctrl-C, which may come within an update."""
        how = "nothing was kept" if self.good is None else f"continue after update {self.good[0]} with --resume"
        path = None if self.good is None else self.good[1]
        message = f"stopped at once, at update {self.update}; {how}" + (f" {path}" if path else "")
        return Interrupted(message, path, signal.SIGINT)

    def state_dict(self) -> dict[str, Any]:
        """Return all state that the rest of the run depends on, as tensors and plain values."""
        return {
            "run": self.run.to_dict(),
            "run_id": self.run_id,
            "update": self.update,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "ema": None if self.ema is None else self.ema.module.state_dict(),
            "grokfast": None if self.grokfast is None else self.grokfast.state_dict(),
            "calibration": _plain(self.calibration),
            "draws": draws.state_dict(self.model),
            "rng": self.ranks.gather(rng_state()),
            "loss": self.ranks.gather([float(self.loss_sum), self.loss_count]),
            "history": self.history,
            "measured": [self.saved_bytes, self.bit_ops],
            "step_ms": self.timer.all_ms(),
            "seconds": self.seconds(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned.

        Raises:
            ValueError: the checkpoint is of another number of processes or of an update beyond the run's last, or a
                part of it does not fit.
        """
        if state["update"] > self.updates:
            raise ValueError(f"resume: the checkpoint is of update {state['update']}, the run has {self.updates}")
        if len(state["rng"]) != self.ranks.world:
            raise ValueError(f"resume: the checkpoint is of {len(state['rng'])} processes, here are {self.ranks.world}")
        self.update, self.run_id, self.history = state["update"], state["run_id"], state["history"]
        self.model.load_state_dict(state["model"])
        restoring = checkpoint.restoring
        with restoring("optimizer"):
            begun = self.update > 0 and not self.scaler.is_enabled()  # fp16 may have skipped every update
            check_optimizer_state(self.run, self.optimizer, state["optimizer"], begun)
            self.optimizer.load_state_dict(state["optimizer"])
        with restoring("schedule"):
            self.schedule.load_state_dict(state["schedule"], self.update)
        with restoring("scaler"):
            self.scaler.load_state_dict(state["scaler"])
        if self.ema is not None:
            with restoring("ema"):
                self.ema.module.load_state_dict(state["ema"])
        if self.grokfast is not None:
            with restoring("grokfast"):
                self.grokfast.load_state_dict(state["grokfast"])
        if state["calibration"] is not None:
            with restoring("calibration"):
                fields = dict(state["calibration"])
                layers = {name: LayerChoice(**choice) for name, choice in fields.pop("layers").items()}
                self.calibration = hotrain.Calibration(layers, **fields)
                self.calibration.apply(self.model)
        loss, count = checkpoint.loss_of(state["loss"], self.ranks.rank)
        self.loss_sum, self.loss_count = torch.tensor(loss, dtype=torch.float32, device=self.device), count
        self.saved_bytes, self.bit_ops = state["measured"]
        self.timer.done_ms = list(state["step_ms"])
        self.seconds_before = state["seconds"]
        with restoring("draws"):
            draws.load_state_dict(self.model, state["draws"])
        with restoring("rng"):
            set_rng_state(state["rng"][self.ranks.rank])

    def result(self, finished: bool) -> Result:
        """Return the result as of this update."""
        accuracies = [row["accuracy"] for row in self.history]
        step_ms = self.timer.median_ms()
        images = self.setup.feed.images_per_update
        return Result(
            run=self.run,
            run_id=self.run_id,
            history=self.history,
            accuracy=accuracies[-1] if accuracies else None,
            best_accuracy=max(accuracies, default=None),
            saved_bytes=self.saved_bytes,
            bit_ops=self.bit_ops,
            step_ms=step_ms,
            images_per_second=images / step_ms * 1e3 if step_ms else None,
            peak_bytes=self._peak_bytes(),
            seconds=self.seconds(),
            finished=finished,
            record_path=Path(self.run.out_dir) / record.RUNS,
            checkpoint_path=self.checkpoint_path,
            layers=None if self.setup.report is None else self.setup.report.ran(),
            updates=self.update - self.started_at,
            model=self.model,
        )

    def write_record(self, status: str, error: str | None) -> None:
        """Append a record of this part of the run to ``runs.jsonl``.

        Args:
            status: ``finished``, ``stopped``, ``interrupted`` or ``failed``.
            error: the message of a failure.

        Raises:
            OSError: the record cannot be written.
        """
        if not self.ranks.is_main:
            return
        result = self.result(status == "finished")
        row = {
            "record": record.VERSION,
            "run_id": self.run_id,
            "status": status,
            "error": error,
            "model": self.run.model,
            "method": self.run.method_label,
            "seed": self.run.seed,
            "updates": self.update,
            "processes": self.ranks.world,
            **{
                name: getattr(result, name)
                for name in ("accuracy", "best_accuracy", "saved_bytes", "bit_ops", "step_ms", "images_per_second")
            },
            "peak_bytes": result.peak_bytes,
            "layers": result.layers,
            "seconds": result.seconds,
            "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            **record.environment(self.device),
            "config": self.run.to_dict(),
            "calibration": _plain(self.calibration),
            "history": self.history,
        }
        record.append(result.record_path, record.signed(row))

    def write_record_of(self, failure: BaseException, status: str) -> None:
        """Write the record of a run that ends with ``failure``; an OSError of it becomes a note of the failure."""
        try:
            self.write_record(status, f"{type(failure).__name__}: {failure}" if status == "failed" else None)
        except OSError as error:
            failure.add_note(str(error))


class _DelayedRead:
    """Reads two numbers from the device without synchronizing: on a GPU as they were at the previous call."""

    def __init__(self, device: torch.device) -> None:
        self.host = torch.tensor([0.0, math.inf])
        self.copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.host = self.host.pin_memory()

    def look(self, first: Tensor, second: Tensor) -> list[float]:
        """Return the numbers of the previous call, or on a CPU of this one."""
        now = torch.stack((first.float(), second.reshape(()).float()))
        if not self.host.is_pinned():
            return now.tolist()
        if self.copied is not None:
            self.copied.synchronize()
        seen: list[float] = self.host.tolist()
        self.host.copy_(now, non_blocking=True)
        self.copied = torch.cuda.Event()
        self.copied.record()
        return seen


class _StepTimer:
    """Milliseconds of every update, by CUDA events (read on demand) or the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.done_ms: list[float] = []
        self.pending: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.began: Any = None

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        self.began = self._now()

    def stop(self) -> None:
        if self.cuda:
            self.pending.append((self.began, self._now()))
        else:
            self.done_ms.append((self._now() - self.began) * 1e3)

    def all_ms(self) -> list[float]:
        for begin, end in self.pending:
            end.synchronize()
            self.done_ms.append(begin.elapsed_time(end))
        self.pending.clear()
        return self.done_ms

    def median_ms(self) -> float | None:
        times = self.all_ms()
        return statistics.median(times) if times else None


def _plain(calibration: hotrain.Calibration | None) -> dict[str, Any] | None:
    """The calibration as JSON data."""
    return None if calibration is None else asdict(calibration)


def _finite(value: float) -> float | None:
    """``value``, or None if it is not finite, which JSON cannot represent."""
    return value if math.isfinite(value) else None


@contextlib.contextmanager
def _without_cudnn_attention() -> Iterator[None]:
    """Disable cuDNN's attention.

    Its backward gave a NaN in dq for finite bf16 inputs with a logit range of 365 within a row, where the flash,
    memory-efficient and math kernels are finite (seen with torch 2.11 on an H200; docs/limitations.md).
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@contextlib.contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    # cuBLAS sums in a fixed order only with a workspace of fixed size, which it reads when first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


@contextlib.contextmanager
def _interrupts(ranks: Processes) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the number of a received SIGINT or SIGTERM, or 0; a second signal stops at once."""
    seen: list[int] = []
    previous: dict[signal.Signals, Any] = {}

    def note(number: int, frame: types.FrameType | None) -> None:
        seen.append(number)
        _restore(previous)
        if ranks.is_main:
            name = signal.Signals(number).name
            # Not print, which is not reentrant.
            with contextlib.suppress(OSError):  # stderr is closed
                os.write(2, f"\n{name}: finishing this update, then a checkpoint; again stops at once\n".encode())

    def asked() -> int:
        own = seen[0] if seen else 0
        if ranks.world == 1:
            return own
        # Signals reach processes at different updates; all must stop at the same one.
        anyone = ranks.total(torch.tensor([own], device=ranks.device)).item()
        return own or (signal.SIGTERM if anyone else 0)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, note)
    try:
        yield asked
    finally:
        _restore(previous)


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
