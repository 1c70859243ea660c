"""Kernels compile for GPUs that are not here, within the shared memory that a program has there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# Bytes of shared memory for one program (CUDA programming guide, technical specifications by compute capability).
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}


@pytest.mark.parametrize("capability", SHARED)
def test_kernels_compile_and_fit(capability: int) -> None:
    """To machine code; 86 and 89 have the least memory."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("ahead_of_time.py")
    run = subprocess.run(
        [sys.executable, str(script), str(capability)], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    lines = [line.split() for line in run.stdout.splitlines()]
    assert len({name for _, name, _ in lines}) >= 22, "every kernel once at least"
    assert all(int(shared) <= SHARED[capability] for _, _, shared in lines), run.stdout
