"""What Inductor writes for a GPU compiles there: index arithmetic outside of int32, for one, does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

PARTS = 4
BESIDE = Path(__file__).parent


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_inductor_compiles_it compiles and runs them")
@pytest.mark.skipif(torch.__version__ < "2.13", reason="Inductor compiles backward later, when forward has run")
@pytest.mark.parametrize("part", range(PARTS))
def test_inductors_kernels_compile_for_a_gpu(part: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(BESIDE), *filter(None, [environment.get("PYTHONPATH")])])
    script = BESIDE / "inductors_kernels.py"
    run = subprocess.run(
        [sys.executable, str(script), str(part), str(PARTS)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    lines = [line.split("\t") for line in run.stdout.splitlines()]
    assert len({name for name, _ in lines}) >= 12, "nearly every case"
    assert len(lines) >= 100, "forward and backward"
