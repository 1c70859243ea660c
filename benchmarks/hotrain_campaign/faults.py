"""Faults of machines and of numbers: killed while a checkpoint is written, a full disk, a rank that dies, NaN bursts.

What must be after each: a checkpoint is whole or absent, a resumed run is the uninterrupted one to the bit, whoever is
left ends with an error in bounded time, and a clean step behind a burst of NaN has the gradients it has without one.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hotrain
from hotrain.train import TrainRun, checkpoint, record, replace, silent, train
from hotrain_campaign.cases import Finding, Tally, ended, in_child
from hotrain_campaign.equality import same

SECONDS = 90.0  # until a process that should have ended counts as hanging
TIMES = {"seconds", "step_ms", "measured"}  # of a checkpoint: they differ from run to run
Say = Callable[[str], None]


def _run(npz: Path, out: Path, **fields: Any) -> TrainRun:
    """A run of 30 updates with a checkpoint of 5 MB after each."""
    return TrainRun(
        model="demo_vit", model_args={"patch_size": 4, "embed_dim": 128, "depth": 2, "num_heads": 2}, data=str(npz),
        method="hot-unbiased", epochs=1, steps=30, batch_size=8, checkpoint_every=1, ema=0.9, audit=False,
        device="cpu", out_dir=str(out), **fields,
    )  # fmt: skip


def _state(folder: Path) -> dict[str, Any]:
    """The state of a run's checkpoint without names and times."""
    state = checkpoint.load(folder)
    state["history"] = [{k: v for k, v in row.items() if k not in TIMES} for row in state["history"]]
    state["run"] = {k: v for k, v in state["run"].items() if k != "out_dir"}
    return {name: value for name, value in state.items() if name not in {*TIMES, "run_id"}}


def _folder(out: Path) -> Path | None:
    """The run's folder in ``out`` with a checkpoint, if there is one."""
    return next((file.parent for file in sorted(out.glob("*/checkpoint.pt"))), None)


def _go_on(run: TrainRun, out: Path) -> None:
    """Train the run, or what is left of it."""
    torch.set_num_threads(1)
    train(run, resume=_folder(out), on_progress=silent)


def _whole(run: TrainRun, out: Path, log: Path) -> dict[str, Any]:
    """The end of the uninterrupted run."""
    code = ended(in_child(partial(_go_on, replace(run, out_dir=str(out)), out), log), 300)
    folder = _folder(out)
    if code != 0 or folder is None:
        raise RuntimeError(f"the uninterrupted run ended with {code}: {log.read_text()[-500:]}")
    return _state(folder)


def _check_files(out: Path) -> None:
    """Checkpoints load, records are whole, and nothing else is left (Finding)."""
    for file in out.glob("*/checkpoint.pt"):
        try:
            checkpoint.load(file)
        except ValueError as error:
            raise Finding(f"a checkpoint that cannot be read: {error}") from error
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for file in (*out.glob("runs.jsonl"), *out.glob("*/metrics.jsonl")):
            try:
                record.read(file)
            except UserWarning as warning:
                raise Finding(f"a record that is torn: {warning}") from warning


# ---- killed ----


def killed(npz: Path, folder: Path, count: int, draw: random.Random, say: Say) -> Tally:
    """SIGKILL while a run writes its checkpoints; it is resumed, and killed, until it is through, again and again."""
    tally = Tally()
    run = _run(npz, folder / "out")
    want = _whole(run, folder / "whole", folder / "log")
    life = 0
    while tally.cases < count:
        life += 1
        out = folder / f"out{life}"
        run = replace(run, out_dir=str(out))
        while True:
            child = in_child(partial(_go_on, run, out), folder / "log")
            how = _kill(child, out, draw) if tally.cases < count else None
            code = ended(child, SECONDS)
            if code == -signal.SIGKILL and how is not None:
                tally.cases += 1
                tally.outcomes[how] += 1
                try:
                    _check_files(out)
                except Finding as finding:
                    _found(tally, f"life {life}, killed {how}: {finding}", say)
                continue
            if code != 0:
                _found(tally, f"life {life}: ended with {code}: {_last(folder / 'log')}", say)
            break
        where = _folder(out)
        if where is None or not same(_state(where), want):
            _found(tally, f"life {life}: the resumed run is not the uninterrupted one", say)
        if where is not None and list(where.glob("*.draft")):
            _found(tally, f"life {life}: temporary files are left", say)
        shutil.rmtree(out)
    return tally


def _kill(child: int, out: Path, draw: random.Random) -> str | None:
    """Kill after a random time, or while the next checkpoint but some is written; None where the process was faster."""
    mid = draw.random() < 0.75
    until = time.monotonic() + draw.uniform(0.3, 1.5)
    skip = draw.randrange(6)
    seen: set[tuple[str, int]] = set()
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        drafts = _drafts(out) if mid else set()
        seen |= drafts
        if (mid and drafts and len(seen) > skip) or (not mid and time.monotonic() > until):
            time.sleep(draw.uniform(0, 0.02) if mid else 0)
            os.kill(child, signal.SIGKILL)
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
            return "in the middle of a checkpoint" if _drafts(out) else "between checkpoints"
        time.sleep(0.0005)
    return None


def _drafts(out: Path) -> set[tuple[str, int]]:
    """Path and inode of each checkpoint that is being written, without those that were renamed while we looked."""
    found = set()
    for path in out.glob("*/checkpoint.pt.draft"):
        with contextlib.suppress(FileNotFoundError):
            found.add((str(path), path.stat().st_ino))
    return found


# ---- a full disk ----


def full_disk(npz: Path, folder: Path, count: int, draw: random.Random, say: Say) -> Tally:
    """A disk of random size, on which a run, a calibration or a report does not fit, and that is enlarged then."""
    tally = Tally()
    want = _whole(_run(npz, folder / "out"), folder / "whole", folder / "log")
    size = (_folder(folder / "whole") or folder).joinpath("checkpoint.pt").stat().st_size
    for number in range(count):
        disk = folder / f"disk{number}"
        disk.mkdir()
        kib = int(
            draw.choice((draw.uniform(4, 64), draw.uniform(0.5, 4) * size / 1024, draw.uniform(1.9, 2.1) * size / 1024))
        )
        mounted = _mount(disk, f"size={kib}k")
        if not mounted:
            raise RuntimeError("mount: a file system in memory cannot be mounted here; run as root")
        try:
            tally.cases += 1
            run = _run(npz, disk)
            code = ended(in_child(partial(_go_on, run, disk), folder / "log"), SECONDS)
            said = (folder / "log").read_text()
            tally.outcomes["it fitted" if code == 0 else "refused" if code == 2 else "finding"] += 1
            if code not in (0, 2) or "Traceback" in said or (code == 2 and "No space left" not in said):
                _found(tally, f"{kib} KiB: ended with {code}: {_last(folder / 'log')}", say)
            _check_files(disk)
            left = [p.name for p in disk.glob("**/*") if p.suffix == ".draft"]
            if left:
                _found(tally, f"{kib} KiB: {left[0]} is left", say)
            _mount(disk, "remount,size=256m")
            code = ended(in_child(partial(_go_on, run, disk), folder / "log"), SECONDS)
            where = _folder(disk)
            if code != 0 or where is None or not same(_state(where), want):
                _found(
                    tally, f"{kib} KiB, then enlarged: not the run without that ({code}): {_last(folder / 'log')}", say
                )
        except Finding as finding:
            _found(tally, f"{kib} KiB: {finding}", say)
        finally:
            subprocess.run(["umount", str(disk)], check=False)
    return tally


def _mount(path: Path, options: str) -> bool:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, check=False)
    return done.returncode == 0


# ---- a rank that dies ----


def _rank(rank: int, port: int, run: TrainRun, out: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    _go_on(run, out)


def _pair(run: TrainRun, out: Path, folder: Path) -> list[int]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    return [in_child(partial(_rank, rank, port, run, out), folder / f"log{rank}") for rank in (0, 1)]


def dead_rank(npz: Path, folder: Path, count: int, draw: random.Random, say: Say) -> Tally:
    """One of two gloo processes is killed at a random moment; the other ends, and both resume."""
    tally = Tally()
    run = replace(_run(npz, folder / "whole"), steps=12)
    for rank, code in enumerate([ended(child, SECONDS) for child in _pair(run, folder / "whole", folder)]):
        if code != 0:
            raise RuntimeError(f"the uninterrupted run ended with {code}: {_last(folder / f'log{rank}')}")
    whole = _folder(folder / "whole")
    assert whole is not None
    want = _state(whole)
    slowest = 0.0
    for number in range(count):
        out = folder / f"out{number}"
        run = replace(run, out_dir=str(out))
        pair = _pair(run, out, folder)
        victim = draw.randrange(2)
        until = time.monotonic() + SECONDS
        while _folder(out) is None and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.8))
        os.kill(pair[victim], signal.SIGKILL)
        begun = time.monotonic()
        if ended(pair[victim], SECONDS) != -signal.SIGKILL:
            ended(pair[1 - victim], SECONDS)
            continue  # it had ended before
        tally.cases += 1
        code = ended(pair[1 - victim], SECONDS)
        slowest = max(slowest, time.monotonic() - begun)
        tally.outcomes[f"rank {victim} killed"] += 1
        said = (folder / f"log{1 - victim}").read_text()
        if code is None:
            _found(tally, f"rank {1 - victim} goes on waiting for {SECONDS:.0f} s", say)
        elif code not in (0, 2) or (code == 2 and "another process of this run" not in said):
            _found(tally, f"rank {1 - victim} ended with {code}: {said[-400:]}", say)
        try:
            _check_files(out)
        except Finding as finding:
            _found(tally, str(finding), say)
        if [ended(child, SECONDS) for child in _pair(run, out, folder)] != [0, 0]:
            _found(tally, f"it does not resume: {_last(folder / 'log0')}", say)
        where = _folder(out)
        if where is None or not same(_state(where), want):
            _found(tally, "the resumed run is not the uninterrupted one", say)
    tally.outcomes["seconds until the other had ended, at most"] = round(slowest)
    return tally


# ---- NaN ----


def _nan_models() -> dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]]:
    from hotrain_campaign.soak import _llama, _resnet, _vit

    def images(seed: int) -> Tensor:
        return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(seed))

    def tokens(seed: int) -> Tensor:
        return torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(seed))

    return {"ViT": (_vit, images), "ResNet": (_resnet, images), "Llama": (_llama, tokens)}


NAN_METHODS: dict[str, dict[str, Any]] = {
    "exact": {"memory": "block"}, "hq8": {}, "hot": {}, "hot-unbiased": {"memory": "block"}, "hq4": {}, "hla": {},
    "luq": {}, "int4": {}, "lbp-wht": {}, "hot:number=e4m3": {},
}  # fmt: skip
BURSTS = ("x", "g_y", "both")


def _gradients(model: nn.Module, x: Tensor, mask: Tensor | None, value: float) -> list[Tensor]:
    """Gradients of the input and the parameters; ``mask`` has the entries of g_y that are ``value``."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    out = model(inputs_embeds=x).logits if hasattr(model, "lm_head") else model(x)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    if mask is not None:
        g = g.masked_fill(mask.reshape(-1, *[1] * (g.ndim - 1)), value)
    out.backward(g)
    assert x.grad is not None
    return [x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def _burst(build: Callable[[], nn.Module], batch: Callable[[int], Tensor], method: str, where: str, seed: int) -> None:
    """Clean, burst, clean, against clean, clean, clean (Finding)."""
    draw = random.Random(seed)
    value = draw.choice((float("nan"), float("inf"), -float("inf")))
    name, overrides = hotrain.train.parse_method(method)
    steps = []
    for bad in (True, False):
        torch.manual_seed(0)
        hotrain.manual_seed(0)
        model = build().train()
        exact = build().train()
        exact.load_state_dict(model.state_dict())
        hotrain.convert(model, name, **{**overrides, **NAN_METHODS[method]})
        _gradients(model, batch(0), None, 0.0)
        x, mask = batch(1), None
        if bad and where in ("x", "both"):
            flat = x.view(-1)
            flat[
                torch.randperm(flat.numel(), generator=torch.Generator().manual_seed(seed))[: draw.choice((1, 100))]
            ] = value
        if bad and where in ("g_y", "both"):
            mask = torch.zeros(len(x), dtype=torch.bool)
            mask[draw.randrange(len(x))] = True
        got = _gradients(model, x, mask, value)
        if bad:
            for number, (g, e) in enumerate(zip(got, _gradients(exact, x, mask, value), strict=True)):
                if (e.isnan() & g.isfinite()).any():
                    raise Finding(f"{value} in {where}: gradient {number} is finite where exact's is NaN")
        steps.append(_gradients(model, batch(2), None, 0.0))
    for number, (one, other) in enumerate(zip(*steps, strict=True)):
        if not torch.equal(one, other):
            raise Finding(f"{value} in {where}: gradient {number} of the clean step behind the burst is another")


def _bursts(seeds: list[int], out: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name, (build, batch) in _nan_models().items():
        for method in NAN_METHODS:
            for where in BURSTS:
                for seed in seeds:
                    try:
                        _burst(build, batch, method, where, seed)
                        line = "good"
                    except Finding as finding:
                        line = f"{name}, {method}, seed {seed}: {finding}"
                    with open(out, "a") as file:
                        file.write(line + "\n")


def nan_bursts(npz: Path, folder: Path, count: int, draw: random.Random, say: Say) -> Tally:
    """NaN and infinities in a batch, in the gradient of its output, or in both, and a clean step before and behind."""
    tally = Tally()
    seeds = [draw.randrange(1 << 30) for _ in range(max(1, count // 30))]
    code = ended(in_child(partial(_bursts, seeds, folder / "bursts"), folder / "log"), 1200)
    for line in (folder / "bursts").read_text().splitlines():
        tally.cases += 1
        tally.outcomes["as exact, and as before" if line == "good" else "finding"] += 1
        if line != "good":
            _found(tally, line, say)
    if code != 0:
        _found(tally, f"ended with {code}: {_last(folder / 'log')}", say)
    return tally


def _say(say: Say, name: str, text: str) -> None:
    say(f"{name}: {text}")


def _found(tally: Tally, text: str, say: Say) -> None:
    tally.findings.append(text)
    say(text)


def _last(log: Path) -> str:
    return " ".join(log.read_text(errors="replace").split())[-400:]


KINDS: dict[str, Callable[[Path, Path, int, random.Random, Say], Tally]] = {
    "killed while checkpoints are written": killed,
    "a full disk": full_disk,
    "one of two processes killed": dead_rank,
    "NaN bursts": nan_bursts,
}


def tried(
    npz: Path, folder: Path, count: int, seed: int, say: Say, names: list[str] | None = None
) -> Iterator[tuple[str, Tally]]:
    """Run the kinds of faults, about ``count`` cases each."""
    for name in names or list(KINDS):
        own = folder / name.replace(" ", "_")
        own.mkdir()
        yield name, KINDS[name](npz, own, count, random.Random(f"{name} {seed}"), partial(_say, say, name))
        sys.stdout.flush()
