"""Two processes under torchrun: equal replicas, one writer, and a resume that is exact on both."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import hashlib, sys
import torch.distributed as dist
from hotrain.train import TrainRun, silent, train

run = TrainRun(
    model="demo_vit", model_args={{"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}}, data={data!r},
    method="hot-unbiased", batch_size=16, accumulation=2, epochs=2, lr=3e-3, mixup=0.5, calibrate_batches=1,
    device="cpu", audit=False, out_dir={out!r},
)
dist.init_process_group("gloo")
whole = train(run, on_progress=silent)
part = train(run, stop_after=3, on_progress=silent)
resumed = train(run, resume=part.checkpoint_path, on_progress=silent)
def digest(result):
    return hashlib.sha1(b"".join(p.detach().numpy().tobytes() for p in result.model.parameters())).hexdigest()
losses = [[row["train_loss"] for row in result.history] for result in (whole, resumed)]
assert losses[0] == losses[1], losses  # of an epoch that was stopped in its middle
words = [dist.get_rank(), digest(whole), digest(resumed), whole.accuracy, resumed.accuracy]
sys.stdout.write(" ".join(map(str, words)) + "\\n")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes(tmp_path: Path, few_digits: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(SCRIPT.format(data=str(few_digits), out=str(tmp_path / "runs")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = sorted(line.split() for line in done.stdout.splitlines() if line[:2] in ("0 ", "1 "))
    assert [line[0] for line in lines] == ["0", "1"]
    assert lines[0][1:] == lines[1][1:]  # the replicas and their metrics are equal
    assert (lines[0][1], lines[0][3]) == (lines[0][2], lines[0][4])  # resumed equals uninterrupted
    rows = [json.loads(line) for line in (tmp_path / "runs" / "runs.jsonl").read_text().splitlines()]
    assert [(r["status"], r["processes"], r["updates"]) for r in rows] == [
        ("finished", 2, 4),
        ("stopped", 2, 3),
        ("finished", 2, 4),
    ]
