"""The state of a run, its updates, and how it is saved and restored.

A resumed run equals an uninterrupted one bit for bit: batches are functions of (seed, epoch, batch); all other state is
in :meth:`Training.state_dict`; and checkpoints are written only between updates. On CUDA this needs
``deterministic=True``, because some CUDA kernels sum in a varying order.
"""

from __future__ import annotations

import contextlib
import errno
import math
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hotrain
from hotrain import draws
from hotrain.analysis.steps import StepTimer
from hotrain.calibration import LayerChoice, quantizing
from hotrain.train import checkpoint, contrastive, dense, record, trackers
from hotrain.train.batches import Batch
from hotrain.train.contexts import rng_state, set_rng_state
from hotrain.train.distributed import Processes
from hotrain.train.evaluation import evaluate, evaluate_dense, probe
from hotrain.train.meters import DelayedRead, finite
from hotrain.train.optimization import create_optimizer, create_schedule
from hotrain.train.outcome import MEASURED, SCALE_FLOOR, Diverged, Interrupted, NotSaved, Result
from hotrain.train.progress import Progress
from hotrain.train.setup import Setup, training_batches

WATCH = 20  # updates between two checks of the loss on a GPU


class Training:
    """The mutable state of a run, new or of a checkpoint: model, optimizer, schedules, averages, counters, history."""

    def __init__(self, setup: Setup, ranks: Processes, saved: dict[str, Any] | None = None) -> None:
        from timm.data import Mixup
        from timm.data.random_erasing import RandomErasing
        from timm.utils import ModelEmaV3

        run = setup.run
        self.run, self.setup, self.ranks = run, setup, ranks
        self.model, self.device = setup.model, setup.device
        self.learner = self.model if isinstance(self.model, contrastive.TwoViews) else None
        self.updates_per_epoch = setup.feed.updates_per_epoch
        self.updates = run.steps if run.steps is not None else run.epochs * self.updates_per_epoch
        if saved is not None:
            checkpoint.check_same_weights(self.model, saved["model"])

        self.mixup: Mixup | None = None
        if run.mixup or run.cutmix:
            classes = len(setup.data.classes)
            self.mixup = Mixup(run.mixup, run.cutmix, label_smoothing=run.smoothing, num_classes=classes)
        self.erase = RandomErasing(run.random_erase, mode="pixel", device=self.device) if run.random_erase else None
        self.loss_function: Callable[[Tensor, Tensor], Tensor] = setup.loss
        if run.task != "detection":
            self.loss_function = nn.CrossEntropyLoss(label_smoothing=0.0 if self.mixup else run.smoothing)

        self.optimizer = create_optimizer(run, self.model)
        self.schedule = create_schedule(run, self.optimizer, self.updates, self.updates_per_epoch)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=run.amp == "fp16")
        self.ema = None if run.ema is None else ModelEmaV3(self.model, decay=run.ema, use_warmup=True)
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
        self.timer = StepTimer(self.device)
        self.seconds_before = 0.0
        self.between_updates = True
        self.run_id = ranks.gather(record.new_run_id(run.name, run.method_label, run.seed))[0]
        if saved is not None:
            self.load_state_dict(saved)
        self.folder = Path(run.out_dir) / self.run_id
        self.saved_at = self.update  # the update of the last checkpoint
        self.good: Path | None = None  # its file
        self.watched, self.watched_at = DelayedRead(self.device), (0, 0)
        self.track: trackers.Track = trackers.untracked
        if run.audit and self.saved_bytes is None:
            x, _ = setup.example()
            with setup.autocast():
                self.saved_bytes = hotrain.saved_bytes(self.model, x).total
                self.bit_ops = hotrain.cost(self.model, x).bit_ops_total

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

    def start_epoch(self, epoch: int) -> None:
        """Apply the bit schedule and calibration of the epoch; also when a resume starts within an epoch."""
        self.model.train()
        if self.bit_schedule is not None and quantizing(self.model, "grad_input_bits"):
            self.bit_schedule.apply(self.model, epoch)
        run = self.run
        due = run.calibrate_batches and self.wants_calibration and epoch >= run.calibrate_at
        if due and self.calibration is None:
            batches = training_batches(self.setup, run.calibrate_batches)
            with self.setup.autocast():
                found = hotrain.calibrate(self.model, batches, self.setup.loss, max_batches=run.calibrate_batches)
            self.calibration = self.ranks.gather(found)[0]
            self.calibration.apply(self.model)

    def step(self, batches: list[Batch]) -> None:
        """One update: forward and backward of each batch, clipping, optimizer, schedule and EMA."""
        run = self.run
        self.between_updates = False
        self.timer.start()
        with hotrain.accumulation() if len(batches) > 1 else contextlib.nullcontext():
            for i, (x, target) in enumerate(batches):
                if self.erase is not None:
                    x = self.erase(x)
                if self.mixup is not None:
                    even = len(x) // 2 * 2  # all of a small data set may be an odd number
                    x, target = self.mixup(x[:even], target[:even])
                wait = isinstance(self.net, nn.parallel.DistributedDataParallel) and i + 1 < len(batches)
                with self.net.no_sync() if wait else contextlib.nullcontext():  # type: ignore[operator]
                    with self.setup.autocast():
                        output = self.net(x).float()
                        loss = self.learner.loss(output, x) if self.learner else self.loss_function(output, target)
                    self.scaler.scale(loss / len(batches)).backward()
                self.loss_sum += loss.detach()
                self.loss_count += 1
        self.scaler.unscale_(self.optimizer)
        if run.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), run.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.update += 1
        self.schedule.step_update(self.update)
        if self.ema is not None:
            self.ema.update(self.model, step=self.update)
        if self.learner is not None:
            self.learner.move_target(self.update / self.updates)
        self.timer.stop()
        self.between_updates = True

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
        return f"the checkpoint of update {self.saved_at} is good: {self.good}"

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
            self.track(update, {"loss": finite(seen[0] / count)})
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
            torch.tensor([float(self.loss_sum), self.loss_count], dtype=torch.float64, device=self.device)
        )
        self.mean_loss()
        model = self.model if self.ema is None else self.ema.module
        row: dict[str, Any] = {"epoch": epoch + 1, "update": self.update}
        row["train_loss"] = finite(float(totals[0] / totals[1]))
        if self.run.task in dense.METRICS:
            row |= evaluate_dense(model, self.setup, self.ranks)
        elif self.learner is None:
            row["test_loss"], row["accuracy"] = evaluate(model, self.setup, self.ranks)
        else:
            row["test_loss"], row["accuracy"], row["knn"] = probe(self.learner, self.setup, self.ranks)
        if row["train_loss"] is None and row["test_loss"] is None:
            raise self._diverged("neither the training loss nor the test loss is finite")
        if self.ema is not None:
            _, row["raw_accuracy"] = evaluate(self.model, self.setup, self.ranks)
        row["lr"] = self.optimizer.param_groups[0]["lr"]
        row["step_ms"] = self.timer.median_ms()
        row["seconds"] = self.seconds()
        self.history.append(row)
        self.loss_sum.zero_()
        self.loss_count = 0
        if self.ranks.is_main:
            record.append(self.folder / record.METRICS, row)
            costs = {"saved_bytes": self.saved_bytes, "bit_ops": self.bit_ops, "peak_bytes": self._peak_bytes()}
            self.track(self.update, {**row, **costs})

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
        self.saved_at, self.good = self.update, self.checkpoint_path

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
        how = f"continue after update {self.saved_at} with --resume {self.good}" if self.good else "nothing was kept"
        return Interrupted(f"stopped at once, at update {self.update}; {how}", self.good, signal.SIGINT)

    def state_dict(self) -> dict[str, Any]:
        """Return all state that the rest of the run depends on, as tensors and plain values."""
        return {
            "run": self.run.to_dict(),
            "run_id": self.run_id,
            "update": self.update,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "ema": None if self.ema is None else self.ema.module.state_dict(),
            "calibration": self.calibration and asdict(self.calibration),
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
        if not len(state["rng"]) == len(state["loss"]) == self.ranks.world:
            raise ValueError(f"resume: the checkpoint is of {len(state['rng'])} processes, here are {self.ranks.world}")
        with checkpoint.restoring("state"):
            self.update, self.run_id, self.history = state["update"], state["run_id"], state["history"]
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.schedule.step_update(self.update)
            self.scaler.load_state_dict(state["scaler"])
            if self.ema is not None:
                self.ema.module.load_state_dict(state["ema"])
            if state["calibration"] is not None:
                fields = dict(state["calibration"])
                layers = {name: LayerChoice(**choice) for name, choice in fields.pop("layers").items()}
                self.calibration = hotrain.Calibration(layers, **fields)
                self.calibration.apply(self.model)
            loss, self.loss_count = state["loss"][self.ranks.rank]
            self.loss_sum = torch.tensor(loss, dtype=torch.float32, device=self.device)
            self.saved_bytes, self.bit_ops = state["measured"]
            self.timer.done_ms = list(state["step_ms"])
            self.seconds_before = state["seconds"]
            draws.load_state_dict(self.model, state["draws"])
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
            **{name: getattr(result, name) for name in MEASURED},
            "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            **record.environment(self.device),
            "config": self.run.to_dict(),
            "calibration": self.calibration and asdict(self.calibration),
            "history": self.history,
        }
        record.append(result.record_path, record.signed(row))

    def write_record_of(self, failure: BaseException, status: str) -> None:
        """Write the record of a run that ends with ``failure``; an OSError of it becomes a note of the failure."""
        try:
            self.write_record(status, f"{type(failure).__name__}: {failure}" if status == "failed" else None)
        except OSError as error:
            failure.add_note(str(error))
