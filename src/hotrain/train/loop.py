"""The training loop: updates, evaluation, checkpoints and resume of a run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hotrain.train import checkpoint, record, trackers
from hotrain.train.contexts import deterministic, interrupts, without_cudnn_attention
from hotrain.train.distributed import processes
from hotrain.train.outcome import Interrupted, Result
from hotrain.train.progress import OnProgress, progress_bar, silent
from hotrain.train.run import TrainRun
from hotrain.train.setup import Setup, build
from hotrain.train.training import Training


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
        if run.deterministic:
            stack.enter_context(deterministic())
        stack.enter_context(without_cudnn_attention())
        setup = build(run, ranks)
        if on_start is not None and ranks.is_main:
            on_start(setup)
        training = Training(setup, ranks, state)
        report = on_progress
        if file is not None and state is not None:
            training.folder = checkpoint.folder_of(run, state, file)
            training.run_id = training.folder.name
            training.good = file
            if training.update == training.updates and (found := _finished_record(training.run_id, file)) is not None:
                if ranks.is_main and report is not silent:
                    done = f"{training.run_id} is finished: nothing to train; it is in {file.parent}"
                    print(done, file=sys.stderr, flush=True)
                return replace(training.result(True), record_path=found, checkpoint_path=file)
        if ranks.is_main:
            busy = f"{training.folder}: another process is training this run; wait for it, or stop it first"
            stack.enter_context(record.held(training.folder / record.LOCK, busy))
            if file is not None and file.stat().st_mtime_ns != read_at:
                raise ValueError(f"resume: another process wrote {file} meanwhile; resume it again")
            record.rewrite(training.folder / record.METRICS, training.history)  # may be ahead of the checkpoint
            training.track = stack.enter_context(trackers.tracker(run, training.folder, training.update))
        if report is None and ranks.is_main:
            report = stack.enter_context(progress_bar(f"{run.model} {run.method_label}"))
        interrupted = stack.enter_context(interrupts(ranks))
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
