"""bench/timing.py and conditions.py: what is timed when, and what a record says of its conditions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hotrain_bench import conditions, timing


class Ticks:
    """A clock that a work moves itself."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waited = 0

    def mark(self) -> float:
        return self.now

    def wait(self) -> None:
        self.waited += 1

    def ms(self, begin: float, end: float) -> float:
        return end - begin


def test_variants_take_turns_and_the_first_round_does_not_count() -> None:
    """Medians of a drifting machine must be taken side by side; a share of a work is its part of the time."""
    clock, calls = Ticks(), []
    durations = {"a": iter([900.0, 10.0, 30.0, 20.0]), "b": iter([900.0, 4.0, 6.0, 5.0])}

    def work(name: str) -> timing.Work:
        def run() -> None:
            calls.append(name)
            clock.now += next(durations[name])

        return run

    times = timing.interleaved({n: work(n) for n in "ab"}, 3, clock, share=2, halfway=lambda: calls.append("half"))
    assert calls == ["a", "b", "a", "b", "half", "a", "b", "a", "b"]
    assert clock.waited == 1
    assert times["a"].median_ms == 10.0
    assert times["b"].median_ms == 2.5


def test_the_spread_leaves_out_a_fifth_on_either_side() -> None:
    times = timing.Times.of([1.0, 2.0, 3.0, 4.0, 5.0, 1000.0])
    assert times == timing.Times(3.5, 5.0 - 2.0)


def test_inputs_exceed_the_cache_on_a_gpu_and_are_few() -> None:
    """A set that was used has left a cache of `L2_BYTES` when its turn comes again."""
    gpu = torch.device("cuda")
    for nbytes in (1 << 20, 20 << 20, 65 << 20, 1 << 30):
        sets = timing.sets_past_cache(nbytes, gpu)
        assert (sets - 1) * nbytes >= timing.L2_BYTES or sets == timing.MOST_SETS
        assert sets >= 2
    assert timing.sets_past_cache(1 << 20, torch.device("cpu")) == 1


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (
            ["a/bin/hotrain", "bench", "ops", "--out", "b/x.jsonl", "--repeats", "5"],
            "hotrain bench ops --repeats 5",
        ),
        (["a/cli/__main__.py", "bench", "step", "--out=b/x", "v b"], "hotrain bench step 'v b'"),
        (["benchmarks/curves.py", "-o", "x", "--data", "/d/c.npz"], "python benchmarks/curves.py --data c.npz"),
        (["/r/benchmarks/curves.py", "--commit", "abc", "--data=/d/c.npz"], "python benchmarks/curves.py --data=c.npz"),
    ],
)
def test_a_recorded_command_names_neither_its_output_nor_folders(argv: list[str], shown: str) -> None:
    assert conditions.command(argv) == shown


def test_conditions_say_what_reproduces_a_measurement() -> None:
    found = conditions.conditions(torch.device("cpu"), ["hotrain", "bench"], commit="abc")
    assert found["commit"] == "abc"
    assert found["torch"] == torch.__version__
    assert {"python", "cuda", "triton", "timm", "transformers", "torchao"} <= set(found["versions"])
    assert found["run_id"] != conditions.conditions(torch.device("cpu"), ["hotrain"])["run_id"]


def test_clocks_of_a_gpu_are_read_and_silence_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A missing or strange nvidia-smi must not cost a measurement."""
    fake = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("P", (), {"uuid": "12"})())
    answers = {
        'echo "1980 MHz, 3201 MHz, 1980 MHz, 650.1 W, 700.0 W, 50"': "1980 MHz",
        "echo No devices were found": None,
    }
    for script, sm in answers.items():
        fake.write_text(f"#!/bin/sh\n{script}\n")
        fake.chmod(0o755)
        read = conditions.Clocks(torch.device("cuda")).read()
        assert (read or {}).get("clocks.sm") == sm
    assert conditions.Clocks(torch.device("cpu")).read() is None


def test_without_a_gpu_the_error_says_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device here; --device cpu --tiny"):
        conditions.device_named(None)
    with pytest.raises(ValueError, match="accepted are cuda, cuda:N and cpu"):
        conditions.device_named("meta")
    assert conditions.device_named("cpu") == torch.device("cpu")


def test_a_record_is_on_disk_at_once(tmp_path: Path) -> None:
    """A run that is cut off keeps what it had measured."""
    out = tmp_path / "new" / "step.jsonl"
    conditions.write(out, {"a": 1})
    conditions.write(out, {"a": 2})
    conditions.write(None, {"a": 3})
    assert [json.loads(line) for line in out.read_text().splitlines()] == [{"a": 1}, {"a": 2}]


def test_an_error_on_record_names_no_folder_of_the_machine(tmp_path: Path) -> None:
    """Of an absolute path the file alone is left; quotients and addresses are none."""
    out = tmp_path / "rows.jsonl"
    text = 'File "/usr/lib/python3/site-packages/torch/nn/conv.py", line 5: 3/4 of src/a.py, /dev/shm/x: full'
    conditions.write(out, {"error": text})
    conditions.write(out, {"error": None})
    assert [json.loads(line)["error"] for line in out.read_text().splitlines()] == [
        'File "conv.py", line 5: 3/4 of src/a.py, x: full',
        None,
    ]
