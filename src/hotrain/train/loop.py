"""The training loop: one function, one state object, from the first update to the record.

What makes a resumed run equal to an uninterrupted one, bit for bit: batches are functions of (seed, epoch, batch);
everything else that changes is in :meth:`Training.state_dict`; and a checkpoint is only taken between updates.
On CUDA add ``deterministic=True``, since some of its kernels add in a varying order otherwise.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import statistics
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hotrain
from hotrain import draws
from hotrain.calibration import LayerChoice
from hotrain.optim import GrokfastEMA
from hotrain.train import checkpoint, record
from hotrain.train.distributed import Processes, processes
from hotrain.train.feed import Batch
from hotrain.train.optimization import Schedule, create_optimizer
from hotrain.train.progress import OnProgress, Progress, progress_bar, silent
from hotrain.train.rng import rng_state, set_rng_state
from hotrain.train.run import TrainRun
from hotrain.train.setup import Setup, autocast, build, training_batches


class Interrupted(KeyboardInterrupt):
    """Ctrl-C (or SIGTERM) during a run: the update was finished and ``checkpoint`` written. Says how to resume."""

    def __init__(self, update: int, path: Path) -> None:
        super().__init__(f"interrupted after update {update}; nothing is lost. Continue with --resume {path}")
        self.checkpoint = path


class Diverged(RuntimeError):
    """The loss became NaN or infinite."""


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Args:
        history: a row an epoch: epoch, update, train_loss, test_loss, accuracy, lr, seconds, …
        accuracy, best_accuracy: percent of the test images, of the last epoch and the best one. With ``ema`` of the
            averaged weights. None if no epoch was finished.
        saved_bytes: kept by autograd between forward and backward for one batch (``audit``).
        bit_ops: bit operations of one forward and backward of one batch (``audit``).
        step_ms: median milliseconds of an update, from its batches on the device to the optimizer's step.
        peak_bytes: PyTorch's peak on a CUDA device, else None.
        finished: False after ``stop_after``.
        record_path: the ``runs.jsonl`` that holds the run's record.
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
    model: nn.Module | None = field(default=None, repr=False, compare=False)


def train(
    run: TrainRun,
    *,
    resume: str | Path | None = None,
    stop_after: int | None = None,
    on_progress: OnProgress | None = None,
    on_start: Callable[[Setup], None] | None = None,
) -> Result:
    """Train as ``run`` describes; write checkpoints and a history to ``<out_dir>/<run_id>/``, a record beside it.

    Args:
        resume: a checkpoint or the folder of an earlier run, continued bit for bit.
        stop_after: stop after so many updates of the run, as if interrupted, but return.
        on_progress: called on process 0 after every update, which waits for the device to have done it; None shows a
            progress bar. `silent` is not called, and nothing waits.
        on_start: called on process 0 with the parts of the run, when they are built.

    Raises:
        ValueError, RuntimeError: a checkpoint that does not fit (before anything else), or whatever
            :func:`hotrain.train.setup.build` refuses.
        Diverged: the loss is not finite; the last checkpoint is from before.
        Interrupted: Ctrl-C, after a checkpoint was written. A second Ctrl-C stops at once.
    """
    saved = None
    if resume is not None:
        saved = checkpoint.load(resume)
        checkpoint.check_same_run(run, saved["run"])
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(processes(run.device))
        stack.enter_context(_deterministic(run.deterministic))
        stack.enter_context(_without_cudnn_attention())
        interrupted = stack.enter_context(_interrupts(ranks))
        setup = build(run, ranks)
        if on_start is not None and ranks.is_main:
            on_start(setup)
        training = Training(run, setup, ranks, saved)
        report = on_progress
        if report is None and ranks.is_main:
            report = stack.enter_context(progress_bar(f"{run.model} {run.method_label}"))
        status, error = "failed", None
        try:
            shown = ranks.is_main and report is not silent
            finished = _epochs(training, interrupted, stop_after, report if shown else None)
            status = "finished" if finished else "stopped"
        except Interrupted:
            status = "interrupted"
            raise
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            if training.between_updates and training.update > training.saved_at and not isinstance(failure, Diverged):
                training.save()
            raise
        finally:
            training.write_record(status, error)
        return training.result(finished)


def _epochs(
    training: Training, interrupted: Callable[[], bool], stop_after: int | None, report: OnProgress | None
) -> bool:
    """Run updates until the run is complete (True) or ``stop_after`` is reached (False)."""
    run, per_epoch = training.run, training.updates_per_epoch
    while training.update < training.updates:
        epoch, first = divmod(training.update, per_epoch)
        training.start_epoch(epoch)
        for batches in training.setup.feed.updates(epoch, first):
            training.step(batches)
            if report is not None:
                report(training.progress())
            complete = training.update == training.updates
            if complete or training.update % per_epoch == 0:
                training.finish_epoch(epoch)
                if report is not None:
                    report(training.progress(training.history[-1]["accuracy"]))
                training.save()
            elif run.checkpoint_every and training.update % run.checkpoint_every == 0:
                training.save()
            if complete:
                break
            if interrupted():
                training.save()
                raise Interrupted(training.update, training.checkpoint_path)
            if stop_after is not None and training.update >= stop_after:
                training.save()
                return False
    return True


class Training:
    """Everything that changes while a run trains."""

    def __init__(self, run: TrainRun, setup: Setup, ranks: Processes, saved: dict[str, Any] | None) -> None:
        from timm.data import Mixup
        from timm.data.random_erasing import RandomErasing
        from timm.utils import ModelEmaV3

        self.run, self.setup, self.ranks = run, setup, ranks
        self.model, self.device = setup.model, setup.device
        self.updates_per_epoch = setup.feed.updates_per_epoch
        self.updates = run.steps if run.steps is not None else run.epochs * self.updates_per_epoch
        if saved is not None:
            checkpoint.check_same_keys(self.model, saved["model"])

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
        self.between_updates, self.saved_at = True, 0
        self.run_id = ranks.first(record.new_run_id(run.name, run.method_label, run.seed))
        if saved is not None:
            self.load_state_dict(saved)
        self.folder = Path(run.out_dir) / self.run_id
        self.saved_at = self.update
        if ranks.is_main:
            record.rewrite(self.folder / record.METRICS, self.history)
        if run.audit and self.saved_bytes is None:
            self._audit()

        self.net: nn.Module = self.model
        if run.compile:
            self.net = torch.compile(self.model)  # type: ignore[assignment]
        if ranks.world > 1:
            self.net = nn.parallel.DistributedDataParallel(self.net)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.started, self.started_at = time.perf_counter(), self.update

    @property
    def checkpoint_path(self) -> Path:
        return self.folder / checkpoint.FILE

    def start_epoch(self, epoch: int) -> None:
        """Bits and scales of the epoch; also on entering an epoch in its middle after a resume."""
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
        """One update: forward and backward of each batch, then filter, clip, optimizer, schedule, average."""
        run = self.run
        self.between_updates = False
        self.timer.start()
        with hotrain.accumulation() if len(batches) > 1 else contextlib.nullcontext():
            for i, (x, y) in enumerate(batches):
                x, target = self._augment(x, y)
                wait = isinstance(self.net, nn.parallel.DistributedDataParallel) and i + 1 < len(batches)
                with self.net.no_sync() if wait else contextlib.nullcontext():  # type: ignore[operator]
                    with self._autocast():
                        loss = self.loss_function(self.net(x).float(), target)
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
        """The mean training loss of this epoch so far.

        Raises:
            Diverged: it is not finite (fp16 skips single such updates, so only bf16 and fp32 stop here).
        """
        loss = float(self.loss_sum) / max(1, self.loss_count)
        if not math.isfinite(loss) and self.run.amp != "fp16":
            raise Diverged(
                f"the training loss is {loss} by update {self.update} of {self.updates} "
                f"(method {self.run.method_label}, lr {self.optimizer.param_groups[0]['lr']:g}): "
                "lower the rate, add warm-up or clip"
            )
        return loss

    def finish_epoch(self, epoch: int) -> None:
        """Evaluate and add a row to the history, in memory and on disk."""
        totals = self.ranks.total(
            torch.tensor([float(self.loss_sum), self.loss_count], dtype=torch.float64, device=self._sum_device)
        )
        self.mean_loss()
        model = self.model if self.ema is None else self.ema.module
        row: dict[str, Any] = {"epoch": epoch + 1, "update": self.update}
        row["train_loss"] = _finite(float(totals[0] / totals[1]))
        row["test_loss"], row["accuracy"] = self.evaluate(model)
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

    @property
    def _sum_device(self) -> torch.device:
        return self.device

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> tuple[float | None, float]:
        """Mean cross-entropy and accuracy in percent over the test images of all processes."""
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

    def seconds(self) -> float:
        """Wall time of the run over all its parts."""
        return self.seconds_before + time.perf_counter() - self.started

    def progress(self, accuracy: float | None = None) -> Progress:
        """The state as reported; reads the loss from the device."""
        loss = self.mean_loss() if accuracy is None else self.history[-1]["train_loss"] or math.nan
        elapsed = time.perf_counter() - self.started
        done = self.update - self.started_at
        images = done * self.run.batch_size * self.run.accumulation * self.ranks.world
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
        """Write the checkpoint (process 0, with every process's generators).

        Raises:
            Diverged: the loss is not finite; the checkpoint before stays.
        """
        self.mean_loss()
        state = self.state_dict()
        if self.ranks.is_main:
            checkpoint.save(state, self.checkpoint_path)
        self.ranks.wait()  # no process may look for a file that is still being written
        self.saved_at = self.update

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on, as tensors and plain values."""
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
            "loss": [float(self.loss_sum), self.loss_count],
            "history": self.history,
            "measured": [self.saved_bytes, self.bit_ops],
            "step_ms": self.timer.all_ms(),
            "seconds": self.seconds(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken.

        Raises:
            ValueError: a checkpoint written by another number of processes.
        """
        if len(state["rng"]) != self.ranks.world:
            raise ValueError(f"resume: the checkpoint is of {len(state['rng'])} processes, here are {self.ranks.world}")
        self.update, self.run_id, self.history = state["update"], state["run_id"], state["history"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"], self.update)
        self.scaler.load_state_dict(state["scaler"])
        if self.ema is not None:
            self.ema.module.load_state_dict(state["ema"])
        if self.grokfast is not None:
            self.grokfast.load_state_dict(state["grokfast"])
        if state["calibration"] is not None:
            fields = dict(state["calibration"])
            layers = {name: LayerChoice(**choice) for name, choice in fields.pop("layers").items()}
            self.calibration = hotrain.Calibration(layers, **fields)
            self.calibration.apply(self.model)
        self.loss_sum = torch.tensor(state["loss"][0], dtype=torch.float32, device=self.device)
        self.loss_count = state["loss"][1]
        self.saved_bytes, self.bit_ops = state["measured"]
        self.timer.done_ms = list(state["step_ms"])
        self.seconds_before = state["seconds"]
        draws.load_state_dict(self.model, state["draws"])
        set_rng_state(state["rng"][self.ranks.rank])

    def result(self, finished: bool) -> Result:
        accuracies = [row["accuracy"] for row in self.history]
        step_ms = self.timer.median_ms()
        images = self.run.batch_size * self.run.accumulation * self.ranks.world
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
            model=self.model,
        )

    def write_record(self, status: str, error: str | None) -> None:
        """Append this part of the run to ``runs.jsonl``, whatever became of it."""
        if not self.ranks.is_main:
            return
        result = self.result(status == "finished")
        row = {
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
            "seconds": result.seconds,
            "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            **record.conditions(self.device),
            "config": self.run.to_dict(),
            "calibration": _plain(self.calibration),
            "history": self.history,
        }
        record.append(result.record_path, row)


class _StepTimer:
    """Milliseconds of every update: CUDA events, read when asked for, or the processor's clock."""

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
    """``value``, or None where JSON has no word for it."""
    return value if math.isfinite(value) else None


@contextlib.contextmanager
def _without_cudnn_attention() -> Iterator[None]:
    """Attention by PyTorch's other kernels.

    cuDNN's backward gave a NaN in dq for finite bf16 inputs with a logit range of 365 within a row, where the flash,
    memory-efficient and plain ones are finite (seen with torch 2.11 on an H200; docs/limitations.md).
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
    # cuBLAS adds in a fixed order only with a workspace of fixed size, which it reads when first used.
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
def _interrupts(ranks: Processes) -> Iterator[Callable[[], bool]]:
    """Turn the first SIGINT or SIGTERM into an answer of the yielded function; the second has its usual effect."""
    seen = threading.Event()
    previous: dict[signal.Signals, Any] = {}

    def note(number: int, frame: types.FrameType | None) -> None:
        seen.set()
        _restore(previous)

    def asked() -> bool:
        if ranks.world == 1:
            return seen.is_set()
        # Signals reach processes at different updates; all must stop at the same one.
        return bool(ranks.total(torch.tensor([int(seen.is_set())], device=ranks.device)).item())

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
