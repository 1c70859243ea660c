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


pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_inductor_compiles_it compiles and runs them"),
    pytest.mark.skipif(torch.__version__ < "2.13", reason="Inductor compiles backward later, when forward has run"),
]


def _lines(*arguments: str) -> list[list[str]]:
    """What the script prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(BESIDE), *filter(None, [environment.get("PYTHONPATH")])])
    script = BESIDE / "inductors_kernels.py"
    run = subprocess.run(
        [sys.executable, str(script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return [line.split("\t") for line in run.stdout.splitlines()]


@pytest.mark.parametrize("part", range(PARTS))
def test_inductors_kernels_compile_for_a_gpu(part: int) -> None:
    lines = _lines(str(part), str(PARTS))
    assert len({name for name, _ in lines}) >= 12, "nearly every case"
    assert len(lines) >= 100, "forward and backward"


def test_what_kernels_in_a_graph_read_is_written_once() -> None:
    """A norm's two kernels have ten arguments that are x, also for what is absent: each was a copy of its own."""
    lines = _lines()
    names = [name for kind, name, *_ in lines if kind == "kernel"]
    assert [n for n in names if n.startswith("_channels")]
    assert [n for n in names if n.startswith("_forward")]
    assert lines.count(["copy", "8192", "64"]) <= 1


def test_kernels_in_a_graph_read_the_strides_that_they_were_traced_with() -> None:
    """Strides are numbers of a kernel's launch. Inductor pads those of what it writes and saves for backward, on a GPU
    alone: the gradient of a layer's weight was that of other rows."""
    lines = [(line[1], *"\t".join(line[2:]).split("\tstrides\t")) for line in _lines("padded")]
    assert ("x", "32\t64\t1100", "70400\t1100\t1") in lines
    for name, sizes, strides in lines:
        shape = [int(n) for n in sizes.split("\t")]
        assert strides == "\t".join(map(str, torch.empty(shape, device="meta").stride())), name
