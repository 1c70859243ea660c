"""tools/records.py: measured results are printed from records, ratios within one run only."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

TOOLS = str(Path(__file__).resolve().parents[1] / "tools")


@pytest.fixture(scope="module")
def records() -> Iterator[ModuleType]:
    sys.path.insert(0, TOOLS)
    try:
        yield importlib.import_module("records")
    finally:
        sys.path.remove(TOOLS)


def measurement(variant: str, run_id: str, median_ms: float, activation_bytes: int) -> dict[str, Any]:
    return {
        "subject": "vit/fc1",
        "variant": variant,
        "run_id": run_id,
        "median_ms": median_ms,
        "spread_ms": 0.5,
        "peak_bytes": None,
        "activation_bytes": activation_bytes,
        "device": "a device",
        "torch": "2.13.0",
        "commit": "0123456789abcdef",
        "command": "make bench",
    }


def write(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_without_records_the_command_that_makes_them_is_named(records: ModuleType, tmp_path: Path) -> None:
    assert "`make bench`" in records.layers(folder=tmp_path)
    assert "`make demo`" in records.accuracy(tmp_path)


def test_ratios_are_formed_within_one_run(records: ModuleType, tmp_path: Path) -> None:
    write(
        tmp_path / "a.jsonl",
        measurement("exact", "one", 10.0, 1000),
        measurement("hot", "one", 8.0, 250),
        measurement("hot", "two", 5.0, 250),  # another run: no exact beside it, so no ratio
    )
    text = records.layers(folder=tmp_path)
    assert "| vit/fc1 | exact | 10 ± 0.5 |  | – |  | 1,000 |  |" in text
    assert "| vit/fc1 | hot | 5 ± 0.5 |  | – |  | 250 |  |" in text
    assert "8 ± 0.5" not in text, "of a subject and a variant the latest record alone"
    assert text.count("a device, PyTorch 2.13.0, commit 0123456789: `make bench`") == 2


def test_the_latest_record_is_that_of_the_last_date_and_ending(records: ModuleType, tmp_path: Path) -> None:
    """Names sort otherwise: `z_` of the day before, and a second record of one day."""
    write(tmp_path / "z_2026-11-21.jsonl", measurement("exact", "one", 3.0, 1000))
    write(
        tmp_path / "a_2026-11-22b.jsonl", measurement("exact", "three", 10.0, 1000), measurement("hot", "three", 8.0, 9)
    )
    write(tmp_path / "b_2026-11-22.jsonl", measurement("exact", "two", 5.0, 1000))
    text = records.layers(folder=tmp_path)
    assert "| vit/fc1 | exact | 10 ± 0.5 |" in text
    assert "| vit/fc1 | hot | 8 ± 0.5 | 0.80 |" in text
    assert text.count("| exact |") == 1


def test_a_part_of_the_subjects(records: ModuleType, tmp_path: Path) -> None:
    sums = {**measurement("exact", "one", 40.0, 4000), "subject": "vit/all", "forward_ms": 20.0}
    write(tmp_path / "a.jsonl", measurement("exact", "one", 10.0, 1000), sums)
    text = records.layers("all", folder=tmp_path)
    assert "| vit/all | exact | 40 ± 0.5 |  | 20 |  | 4,000 |  |" in text
    assert "fc1" not in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"a\.jsonl:1 is not JSON"),  # a run that was cut off
        ('{"subject": "fc1"}', r"a\.jsonl:1 lacks variant, run_id"),  # a ratio could not be traced
    ],
)
def test_bad_records_are_refused(records: ModuleType, tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        records.layers(folder=tmp_path)


def test_gaps_are_paired_by_seed(records: ModuleType, tmp_path: Path) -> None:
    def row(method: str, seed: int, accuracy: float | None) -> dict[str, Any]:
        return {"model": "vit", "method": method, "seed": seed, "accuracy": accuracy} | dict.fromkeys(
            ("saved_bytes", "bit_ops", "step_ms"), 2048
        )

    rows = [row("exact", 0, 80.0), row("exact", 1, 90.0), row("hot", 0, 79.0), row("hot", 1, 88.0)]
    rows.append(row("luq", 0, None))  # a failed cell has no accuracy and no line
    meta = {"device": "a device", "versions": {"torch": "2.13.0"}, "commit": "abc", "command": "hotrain compare"}
    (tmp_path / "vit.json").write_text(json.dumps({"rows": rows, **meta}), encoding="utf-8")
    text = records.accuracy(tmp_path)
    # mean of (79−80, 88−90) = −1.5, standard deviation of (−1, −2) = 0.71
    assert "| vit | hot | 83.50 ± 6.36 | -1.50 ± 0.71 | 2 | 2,048 | 2.05e+03 | 2048.0 ± 0.0 |" in text
    assert "luq" not in text
    assert "PyTorch 2.13.0, commit abc: `hotrain compare`" in text


def comparison(folder: Path, name: str, method: str, *pairs: tuple[int, float, float], **more: Any) -> None:
    """A summary of one model: (seed, exact's accuracy, the method's)."""
    empty = dict.fromkeys(("saved_bytes", "bit_ops", "step_ms"))
    rows = []
    for seed, exact, other in pairs:
        rows.append({"model": "small_vit", "method": "exact", "seed": seed, "accuracy": exact} | empty)
        rows.append({"model": "small_vit", "method": method, "seed": seed, "accuracy": other} | empty | more)
    meta = {"device": "NVIDIA H200", "versions": {"torch": "2.13.0"}, "commit": name, "command": "hotrain compare"}
    (folder / f"{name}.json").write_text(json.dumps({"rows": rows, **meta}), encoding="utf-8")


def test_accuracy_is_of_the_latest_comparison_of_each_method(records: ModuleType, tmp_path: Path) -> None:
    comparison(tmp_path, "a_2026-11-22", "hq8", (0, 80.0, 79.0))
    comparison(tmp_path, "b_2026-11-21", "hq8", (0, 70.0, 60.0))
    comparison(tmp_path, "c_2026-11-21", "hla", (0, 75.0, 71.0))
    text = records.accuracy(tmp_path)
    assert "| small_vit | hq8 | 79.00 | -1.00 | 1 |" in text
    assert "| small_vit | hla | 71.00 | -4.00 | 1 |" in text
    assert "| small_vit | exact | 75.00 |  | 1 |" in text, "exact of the comparison that is shown"
    assert "70.00" not in text
    assert text.index("hla") < text.index("hq8"), "the oldest first"


def test_what_ran_is_printed_below_the_accuracy(records: ModuleType, tmp_path: Path) -> None:
    layers = [{"layers": 49, "g_x": "e4m3", "g_w": "H16·e4m3", "x": "shared: norm (int4)"}]
    comparison(tmp_path, "a_2026-11-22", "hq8", (0, 80.0, 79.0), layers=layers)
    said = "* ran small_vit, `hq8`: 49 layers: g_x e4m3, g_w H16·e4m3, x shared: norm (int4)"
    assert said in records.accuracy(tmp_path)


def bench(kind: str, subject: str, variant: str, ms: float | None, **more: Any) -> dict[str, Any]:
    row = {**measurement(variant, "one", 0.0, 1000), "bench": kind, "subject": subject, "median_ms": ms}
    return {**row, "eager_ms": ms, "role": "baseline", "bias": False, "error": None, "round": 1, **more}


def test_speed_ups_of_layers_are_over_cublas_of_the_same_run(records: ModuleType, tmp_path: Path) -> None:
    assert "`hotrain bench layers --out" in records.gpu_layers(tmp_path)
    write(
        tmp_path / "layers.jsonl",
        bench("layers", "vit_b/qkv", "bf16", 0.3),
        bench("layers", "vit_b/qkv", "bf16 with bias", 0.4, bias=True),
        bench("layers", "vit_b/qkv", "tf32", 1.2),
        bench("layers", "vit_b/qkv", "hot", 0.2, role="method"),
        bench("layers", "vit_b/qkv", "hot with bias", 0.25, role="method", bias=True),
        bench("layers", "vit_b/qkv", "hot/keep", 0.05, role="part"),
        bench("layers", "vit_b/qkv", "hot/g_y", 0.07, role="part"),
        bench("layers", "vit_b/fc1", "hot/g_y", 0.09, role="part"),
        bench("layers", "vit_b/qkv", "hot", 0.01, role="method", tiny=True),  # measures nothing
    )
    text = records.gpu_layers(tmp_path)
    assert "| vit_b/qkv | hot | 200.0 ± 500.0 | 200.0 | 1.50 | 6.00 |  | 1,000 |" in text
    assert "| vit_b/qkv | hot with bias | 250.0 ± 500.0 | 250.0 | 1.60 |  |  | 1,000 |" in text
    assert "| layer | µs of the parts | keep | g_y |" in text
    assert "| vit_b/qkv | hot | 50.0 | 70.0 |" in text
    assert "| vit_b/fc1 | hot |  | 90.0 |" in text, "a part that was not measured leaves its place empty"
    assert "10.0 ±" not in text
    assert "make bench" in records.layers(folder=tmp_path / "none"), "the CPU's layers are another table"


def test_steps_are_over_the_mean_of_both_rounds_of_the_baseline(records: ModuleType, tmp_path: Path) -> None:
    assert "`hotrain bench step --out" in records.steps(tmp_path)
    write(
        tmp_path / "step.jsonl",
        bench("step", "vit", "exact+compile", 39.0, peak_bytes=2 << 30, reserved_bytes=3 << 30),
        bench("step", "vit", "hotrain", 30.0),
        bench("step", "vit", "torchao", None, error="ModuleNotFoundError: a|b"),
        bench("step", "vit", "exact+compile", 41.0, round=2),
    )
    text = records.steps(tmp_path)
    end = " | 0123456789, a |"
    assert "| vit | exact+compile | 40.00 ± 0.50 |  | 2.00 | 3.00 | 0.00 | –" + end in text, "the mean of its rounds"
    assert "| vit | hotrain | 30.00 ± 0.50 | 0.750 | – | – | 0.00 | –" + end in text, (
        "a record from before these fields"
    )
    assert "| vit | torchao | ModuleNotFoundError: a\\|b |  |  |  |  | " + end in text
    folded = text[text.index("\n\n<details>\n<summary>") :]
    assert folded.endswith("\n\n* a device, PyTorch 2.13.0, commit 0123456789: `make bench`\n\n</details>")


def test_steps_are_the_latest_of_each_variant_over_the_baseline_of_its_run(records: ModuleType, tmp_path: Path) -> None:
    write(
        tmp_path / "step_2026-11-21.jsonl",
        bench("step", "vit", "exact+compile", 40.0, run_id="old"),
        bench("step", "vit", "hotrain", 20.0, run_id="old"),
        bench("step", "vit", "hotrain-memory", 30.0, run_id="old"),
    )
    write(
        tmp_path / "step_2026-11-22.jsonl",
        bench("step", "vit", "exact+compile", 50.0, run_id="new"),
        bench("step", "vit", "hotrain", 45.0, run_id="new"),
        bench("step", "vit", "hotrain-memory", None, run_id="new", error="OutOfMemoryError"),
    )
    lines = [line.split(" | ")[1:4] for line in records.steps(tmp_path).splitlines() if line.startswith("| vit |")]
    assert lines == [
        ["exact+compile", "50.00 ± 0.50", ""],
        ["hotrain-memory", "30.00 ± 0.50", "0.750"],  # what failed later keeps its last measurement
        ["hotrain", "45.00 ± 0.50", "0.900"],
    ]


def test_a_note_is_below_its_table(records: ModuleType, tmp_path: Path) -> None:
    """A step that hotrain left exact must not pass for one that it made as fast."""
    subject = "vit_base_patch16_224/b128"
    write(
        tmp_path / "step.jsonl",
        bench("step", subject, "exact+compile", 100.0),
        bench("step", subject, "hotrain", 100.4, note="every layer was left exact"),
    )
    assert f"\n* {subject}, `hotrain`: every layer was left exact.\n" in records.steps(tmp_path)


def test_kernels_are_printed_with_what_they_reach(records: ModuleType, tmp_path: Path) -> None:
    assert "`hotrain bench ops --out" in records.kernels(tmp_path)
    rates = {"tb_s": 3.9, "tflop_s": 0.0, "operations": 0, "ceiling": "copy", "share": 0.921}
    write(tmp_path / "ops.jsonl", bench("ops", "vit_b/qkv/keep", "hot", 0.02, **rates))
    assert "| vit_b/qkv/keep | hot | 20.0 ± 500.0 | 3.90 |  | 92% of copy |" in records.kernels(tmp_path)


def targets_of(records: ModuleType, folder: Path) -> dict[tuple[str, str], list[str]]:
    """The cells of the table of targets by (work, baseline)."""
    lines = [line.strip("| ").split(" | ") for line in records.targets(folder).splitlines()[2:]]
    return {(cells[0], cells[1]): [cell.strip(" |") for cell in cells[2:]] for cells in lines}


def test_targets_without_records_are_open(records: ModuleType, tmp_path: Path) -> None:
    """Seven lines, as asked for; none may look reached."""
    rows = targets_of(records, tmp_path)
    assert len(rows) == 7
    assert {cells[2] for cells in rows.values()} == {"not recorded yet"}


def test_targets_are_met_by_the_latest_run_that_measured_them(records: ModuleType, tmp_path: Path) -> None:
    llama, layers = "llama8b-4blocks/t8192", "backward + save, ViT-B layers, batch 128"
    write(
        tmp_path / "layers.jsonl",
        # ratios 2.0 and 1.4, mean 1.7 (of the sums it would be 1.55); the other method's mean is 1.0
        *(bench("layers", f"vit_b/{n}", "bf16", ms) for n, ms in (("qkv", 2.0), ("fc1", 4.2))),
        *(bench("layers", f"vit_b/{n}", "hot", ms, role="method") for n, ms in (("qkv", 1.0), ("fc1", 3.0))),
        *(bench("layers", f"vit_b/{n}", "hq", ms, role="method") for n, ms in (("qkv", 2.0), ("fc1", 4.2))),
        bench("layers", "vit_b/qkv", "hot with bias", 0.1, role="method", bias=True),
        bench("layers", "vit_b/qkv", "hot/keep", 0.1, role="part"),
    )
    write(
        tmp_path / "old_step.jsonl",
        bench("step", llama, "torchao-float8-tensorwise", 50.0, run_id="old"),
        bench("step", llama, "hotrain-fp8fwd", 40.0, run_id="old"),
    )
    write(
        tmp_path / "step.jsonl",
        bench("step", llama, "exact+compile", 70.0),
        bench("step", llama, "hotrain", 30.0),  # another forward: not the same target
        bench("step", llama, "torchao-float8-tensorwise", 50.0),
        bench("step", llama, "hotrain-fp8fwd", 45.0),
    )
    shares = {"x": 0.93, "y": 0.86}
    common = {"tb_s": 1.0, "tflop_s": 0.0, "operations": 0, "ceiling": "copy"}
    write(
        tmp_path / "z_ops.jsonl", *(bench("ops", f"{n}/keep", "hot", 1.0, share=s, **common) for n, s in shares.items())
    )
    rows = targets_of(records, tmp_path)
    assert rows[layers, "bf16 cuBLAS, both products"] == ["≥ 1.50×", "≥ 1.80×", "1.70× (hot)", "met", "0123456789"]
    assert rows[layers, "TF32"][2] == "not recorded yet"
    assert rows["x kernel", "copy bandwidth"] == ["≥ 85%", "≥ 92%", "86% (hot, slowest layer)", "met", "0123456789"]
    fp8 = rows[f"step, {llama}, forward in fp8", "torchao float8 tensorwise, compiled"]
    assert fp8 == ["≤ 0.92", "≤ 0.85", "0.90 (hotrain-fp8fwd)", "met", "0123456789"]


def test_the_floor_is_of_the_rates_that_the_same_commit_measured(records: ModuleType, tmp_path: Path) -> None:
    """qkv by hand: 2·(25216 + 12928)·2304·768 operations at 1000 TFLOP/s are 135 µs, its bytes at 4 TB/s 64.5."""
    assert "Nothing is recorded yet" in records.floor(tmp_path)
    method, subject = "hot-unbiased:number=e4m3", "vit_b/qkv/b128"
    parts = {"keep": 0.02, "g_y": 0.06, "w": 0.01, "g_x and g_w": 0.07 + 0.15}
    write(
        tmp_path / "layers.jsonl",
        bench("layers", subject, "bf16", 0.3),
        bench("layers", subject, method, 0.25, role="method"),
        *(bench("layers", subject, f"{method}/{name}", ms, role="part") for name, ms in parts.items()),
    )
    assert "Nothing is recorded yet" in records.floor(tmp_path), "no rates of this commit"
    rates = {"copy": (4.0, 0.0), "fp8": (0.3, 1000.0), "fp8 fast": (0.3, 900.0)}
    write(
        tmp_path / "ops.jsonl",
        *(
            bench("ops", name, "ceiling", 1.0, tb_s=tb, tflop_s=tflop, ceiling=None, share=None)
            for name, (tb, tflop) in rates.items()
        ),
    )
    text = records.floor(tmp_path)
    line = next(line for line in text.splitlines() if line.startswith("| vit_b/qkv"))
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    # The layer's own products ran at 900 TFLOP/s: 150 µs, and nothing of them is above the floor.
    assert cells[1:7] == ["150.0", "51.0", "12.2", "1.3", "215", "250"]
    assert cells[7] == "0, 9, 8, 9"
    assert cells[8:] == ["300", "1.50", "1.40", "1.20"]
    assert "1.5 for vit_b is 107% of the floor's speed-up, 100% of the square's" in text


def step_targets_of(records: ModuleType, folder: Path) -> dict[str, list[str]]:
    """The cells of the table of whole steps by model."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in records.step_targets(folder).splitlines()]
    return {cells[0]: cells[1:] for cells in lines[2:]}


def test_time_and_peak_are_those_of_the_default_in_one_run(records: ModuleType, tmp_path: Path) -> None:
    """A run without exact as CUDA graphs joins nothing, a faster variant does not replace the default, and what misses
    a goal by less than a figure shows does not look like it."""
    vit, resnet, gpt, gib = "vit_base_patch16_224/b128", "resnet50/b256", "gpt2/b8x1024", 1 << 30
    rows = step_targets_of(records, tmp_path)
    assert len(rows) == 12
    assert {cells[2] for cells in rows.values()} == {"not recorded yet"}

    def row(subject: str, variant: str, ms: float | None, gibs: tuple[float, float] = (9, 9), **more: Any) -> Any:
        sizes = {"peak_bytes": int(gibs[0] * gib), "reserved_bytes": int(gibs[1] * gib), "above_bytes": gib}
        return bench("step", subject, variant, ms, **sizes, **more)

    write(
        tmp_path / "a_step.jsonl",
        row(vit, "exact+graphs", 99.0, round=1),
        row(vit, "exact+graphs", 101.0, round=2),
        row(vit, "hotrain-default", 92.2, (3.4, 4.0)),
        row(vit, "hotrain", 50.0, (7.0, 7.0)),
        row(resnet, "exact+graphs", 40.0),
        row(resnet, "hotrain-default", 37.0, (3.1, 4.5)),
        row(gpt, "exact+graphs", 20.0),
        row(gpt, "hotrain-default", None, error="OutOfMemoryError"),
    )
    write(tmp_path / "b_step.jsonl", row(vit, "hotrain-default", 10.0, (1.0, 1.0), run_id="two"))
    rows = step_targets_of(records, tmp_path)
    assert rows[vit][:7] == ["≤ 0.92 ×", "≤ 0.85 ×", "0.922 ×", "missed", "≤ 3.4 GiB", "3.40 (4.00)", "2.40"]
    assert rows[vit][7] == "met"
    goals = "≤ 3.2 GiB, ≤ 4.0 GiB reserved"
    assert rows[resnet][2:8] == ["0.93 ×", "met, stretch too", goals, "3.10 (4.50)", "2.10", "one of two"]
    assert rows[gpt][2] == "not recorded yet"


def test_points_of_the_figure_are_of_the_latest_run_with_memory(records: ModuleType, tmp_path: Path) -> None:
    gib = 1 << 30
    write(
        tmp_path / "a_step.jsonl",
        bench("step", "vit", "exact+compile", 40.0, peak_bytes=9 * gib),
        bench("step", "vit", "exact+compile", 42.0, peak_bytes=9 * gib, round=2),
        bench("step", "vit", "hotrain-memory", 36.0, peak_bytes=3 * gib),
        bench("step", "vit", "torchao", None, peak_bytes=None, error="ModuleNotFoundError"),
        bench("step", "bert", "exact+compile", 40.0, peak_bytes=9 * gib),
        bench("step", "vit", "exact+compile", 10.0, run_id="two", peak_bytes=gib),
    )
    assert records.step_points(tmp_path) == {"vit": {"exact+compile": (9.0, 41.0), "hotrain-memory": (3.0, 36.0)}}
    # One run of exact, checkpointing, the default and more of ours is a frontier of its own.
    whole = {"exact+graphs": 9, "exact+compile+checkpoint": 2, "hotrain-default": 4, "hotrain-default-all": 3}
    rows = [bench("step", "vit", name, 40.0, run_id="three", peak_bytes=size * gib) for name, size in whole.items()]
    write(tmp_path / "b_step.jsonl", *rows[:-1])
    assert "exact+graphs" not in records.step_points(tmp_path)["vit"], "three points are a line of the sweep"
    write(tmp_path / "b_step.jsonl", *rows)
    assert records.step_points(tmp_path) == {"vit": {name: (float(size), 40.0) for name, size in whole.items()}}


def test_optimizers_are_compared_within_a_run_and_nowhere_else(records: ModuleType, tmp_path: Path) -> None:
    """Peak, what stands, what is above it, and time, of the four; no 8-bit variant in a figure or among targets."""
    assert "Not measured yet" in records.optimizer(tmp_path)
    vit, gib = "vit_base_patch16_224/b128", 1 << 30
    write(
        tmp_path / "a_step.jsonl",
        bench("step", vit, "exact+compile", 40.0, peak_bytes=9 * gib, above_bytes=7 * gib),
        bench("step", vit, "hotrain-memory", 38.0, peak_bytes=4 * gib, above_bytes=2 * gib),
    )
    assert "Not measured yet" in records.optimizer(tmp_path), "neither run has the other optimizer"
    write(
        tmp_path / "b_step.jsonl",
        bench("step", vit, "exact+compile", 39.0, run_id="two", peak_bytes=9 * gib, above_bytes=7 * gib),
        bench("step", vit, "exact+compile", 41.0, run_id="two", peak_bytes=9 * gib, above_bytes=7 * gib, round=2),
        bench("step", vit, "hotrain-memory", 38.0, run_id="two", peak_bytes=4 * gib, above_bytes=2 * gib),
        bench("step", vit, "exact+compile+adamw8bit", None, run_id="two", error="ModuleNotFoundError"),
        bench(
            "step", vit, "hotrain-memory+adamw8bit", 20.0, run_id="two", peak_bytes=int(3.5 * gib), above_bytes=2 * gib
        ),
        bench("step", "llama", "exact+compile", 70.0, run_id="two"),
    )
    lines = [line for line in records.optimizer(tmp_path).splitlines() if line.startswith(f"| {vit}")]
    assert lines == [
        f"| {vit} | `exact+compile` | 9.00 | 2.00 | 7.00 | 40.00 |",
        f"| {vit} | `exact+compile+adamw8bit` | – | – | – | – |",
        f"| {vit} | `hotrain-memory` | 4.00 | 2.00 | 2.00 | 38.00 |",
        f"| {vit} | `hotrain-memory+adamw8bit` | 3.50 | 1.50 | 2.00 | 20.00 |",
    ]
    assert "llama" not in records.optimizer(tmp_path)
    assert set(records.step_points(tmp_path)[vit]) == {"exact+compile", "hotrain-memory"}


def test_the_zoo_has_a_line_for_each_of_its_models_that_was_measured(records: ModuleType, tmp_path: Path) -> None:
    """All of a line is of one run; what failed is there, last, with its error."""
    assert "`hotrain bench zoo --out" in records.zoo(tmp_path)
    gib, resnet, gpt2 = 1 << 30, "resnet50/b256", "gpt2/b8x1024"

    def row(subject: str, variant: str, ms: float | None, peak: float | None, **fields: Any) -> dict[str, Any]:
        memory = {"peak_bytes": peak and peak * gib, "reserved_bytes": peak and (peak + 1) * gib}
        return bench("step", subject, variant, ms, **memory, **fields)

    write(
        tmp_path / "step_2026-11-21.jsonl",
        row(VIT_B, "exact+graphs", 20.0, 8, run_id="one"),
        row(VIT_B, "exact+compile+checkpoint", 22.0, 3, run_id="one"),
        row(VIT_B, "hotrain-default", 24.0, 4, run_id="one"),
        row("another/b8", "exact+graphs", 20.0, 8, run_id="one"),
        row("another/b8", "hotrain-default", 20.0, 8, run_id="one"),
        row("a third/b8", "exact+graphs", 20.0, 8, run_id="one"),
        row("a third/b8", "hotrain-default", 20.0, 8, run_id="one"),
        row("a third/b8", "hotrain", 20.0, 8, run_id="one"),
    )
    write(
        tmp_path / "step_2026-11-22.jsonl",
        row(gpt2, "exact+graphs", 20.0, 8, run_id="two"),
        row(gpt2, "hotrain-default", None, None, run_id="two", error="OutOfMemoryError"),
        row(resnet, "exact+graphs", 20.0, 8, run_id="two"),
        row(resnet, "hotrain-default", 10.0, 4, run_id="two"),
        row(VIT_B, "exact+graphs", 10.0, 8, run_id="two"),  # nothing of the default beside it
        row(VIT_B, "exact+compile+checkpoint", 12.0, 2, run_id="two"),
    )
    write(
        tmp_path / "step_2026-11-23.jsonl",  # was too late for one of the two
        row(resnet, "exact+graphs", 30.0, 8, run_id="three"),
        row(resnet, "hotrain-default", None, None, run_id="three", error="TimeoutError"),
    )
    table, _, notes = records.zoo(tmp_path).partition("\n\n")
    assert table.splitlines()[2:] == [
        f"| {resnet} | 20.00 | 10.00 | 0.50 | 8.00 (9.00) | 4.00 (5.00) | 0.50 | – | – | – | 0123456789, a |",
        f"| {VIT_B} | 20.00 | 24.00 | 1.20 | 8.00 (9.00) | 4.00 (5.00) | 0.50 | 22.00 | 3.00 (4.00) "
        "| `exact+compile+checkpoint` | 0123456789, a |",
        f"| {gpt2} | 20.00 | – | – | 8.00 (9.00) | – | – | – | – | – | 0123456789, a |",
    ]
    assert notes.startswith(f"* {gpt2}, `hotrain-default`: OutOfMemoryError.\n\n<details>")
    assert "\n* a device" in notes
    shown = records.steps(tmp_path)
    assert "a third/b8" in shown, "with a variant that the sweep does not have"
    assert "another/b8" not in shown, "swept as the thirty are: `pays` has it"
    assert resnet not in shown, "a line of the zoo"


def test_checkpointing_that_a_later_run_left_out_is_the_last_ones(records: ModuleType, tmp_path: Path) -> None:
    def row(variant: str, ms: float, run: str) -> dict[str, Any]:
        return bench("step", VIT_B, variant, ms, peak_bytes=1 << 30, reserved_bytes=1 << 31, run_id=run, commit=run)

    earlier = row("exact+graphs", 20.0, "one"), row("exact+compile+checkpoint", 22.0, "one")
    write(tmp_path / "step_2026-11-21.jsonl", *earlier, row("hotrain-default", 24.0, "one"))
    write(tmp_path / "step_2026-11-22.jsonl", row("exact+graphs", 21.0, "two"), row("hotrain-default", 18.0, "two"))
    table, _, notes = records.zoo(tmp_path).partition("\n\n")
    assert table.splitlines()[2] == (
        f"| {VIT_B} | 21.00 | 18.00 | 0.86 | 1.00 (2.00) | 1.00 (2.00) | 1.00 | 22.00 | 1.00 (2.00) | – | two, a |"
    )
    assert notes.startswith(f"* Checkpointing at one, a: {VIT_B} where exact took 20.00 ms.\n")


def test_curves_say_whether_they_follow(records: ModuleType, tmp_path: Path) -> None:
    assert "`python benchmarks/curves.py" in records.curves(tmp_path)
    verdict = {"seeds": 3, "distance": 0.01, "spread": 0.02}
    write(
        tmp_path / "curves.jsonl",
        bench("curves", "small_vit", "hot", None, within=True, **verdict),
        bench("curves", "small_resnet", "hot", None, within=False, **verdict),
    )
    text = records.curves(tmp_path)
    assert "| small_vit | hot | 3 | 0.0100 | 0.0200 | follows |" in text
    assert "| small_resnet | hot | 3 | 0.0100 | 0.0200 | **does not follow** |" in text


@pytest.fixture(scope="module")
def front(records: ModuleType) -> ModuleType:
    """tools/front.py, whose folder `records` put on the path."""
    return importlib.import_module("front")


VIT_B = "vit_base_patch16_224/b128"


def test_the_headline_is_one_run_of_the_default_and_marks_what_is_not_in_it(
    front: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gib = 1 << 30
    assert "`hotrain bench step --out" in front.headline(tmp_path)
    write(
        tmp_path / "step_2026-11-21.jsonl",
        bench("step", VIT_B, "exact+compile", 40.0, peak_bytes=9 * gib),
        bench("step", VIT_B, "exact+graphs", 38.0, peak_bytes=8 * gib),
        bench("step", VIT_B, "hotrain-default", 19.0, peak_bytes=4 * gib),
        bench("step", VIT_B, "exact-block", 57.0, peak_bytes=3 * gib),
        bench("step", VIT_B, "torchao-float8-tensorwise", 76.0, peak_bytes=7 * gib),
    )
    write(
        tmp_path / "step_2026-11-22.jsonl",  # later, without the default: what only it has is marked
        bench("step", VIT_B, "exact+graphs", 10.0, run_id="two", peak_bytes=gib),
        bench("step", VIT_B, "exact+compile+checkpoint", 10.0, run_id="two", peak_bytes=gib),
    )
    text = front.headline(tmp_path)
    assert "| exact, as CUDA graphs | 38.0 | 1.00 | 8.00 |" in text
    assert "| **hotrain, the default** (`hq8`) | 19.0 | 0.50 | 4.00 |" in text
    assert "| torchao float8 (tensorwise) | 76.0 | 2.00 | 7.00 |" in text
    assert "compiled" not in text, "exact once, as the default runs"
    assert "| exact, every block checkpointed ¹ | 10.0 | 1.00 | 1.00 |" in text, "a multiple of exact in its own run"
    assert "where exact took 10.0 ms)" in text
    assert text.count("¹") == 2
    assert "not recorded yet" in text
    line = SimpleNamespace(group="small ViT, CIFAR-10", method="hq8", gaps=(-1.0, 1.0))
    monkeypatch.setattr(front, "lines", lambda study, rows: [line, SimpleNamespace(**{**vars(line), "method": "hot"})])
    text = front.headline(tmp_path)
    assert "mean ± standard error: small ViT, CIFAR-10 +0.00 ± 1.00, 2 seeds (" in text


def test_the_headline_marks_each_other_run(front: ModuleType, tmp_path: Path) -> None:
    """One mark for two runs would not tell which row is of which."""
    gib = 1 << 30
    others = {"one": ["exact-block"], "two": ["torchao-float8-tensorwise", "exact+compile+checkpoint"]}
    for number, (run, variants) in enumerate({**others, "three": ["hotrain-default"]}.items(), start=1):
        rows = [("exact+graphs", 10.0 * number), *((variant, 40.0) for variant in variants)]
        records = [bench("step", VIT_B, variant, ms, run_id=run, commit=run, peak_bytes=gib) for variant, ms in rows]
        write(tmp_path / f"step_2026-11-2{number}.jsonl", *records)
    text = front.headline(tmp_path)
    assert "| exact, every block checkpointed ¹ | 40.0 | 2.00 | 1.00 |" in text
    assert "| torchao float8 (tensorwise) ¹ | 40.0 | 2.00 | 1.00 |" in text
    assert "| exact products, compressed activations ² | 40.0 | 4.00 | 1.00 |" in text
    assert "(¹ commit two, where exact took 20.0 ms; ² commit one, where exact took 10.0 ms)" in text


def test_where_it_pays_the_fastest_is_first_and_the_slower_ones_are_there(front: ModuleType, tmp_path: Path) -> None:
    gib = 1 << 30
    write(
        tmp_path / "step.jsonl",
        bench("step", "gpt2", "exact+graphs", 20.0, peak_bytes=9 * gib),
        bench("step", "gpt2", "hotrain-default", 28.0, peak_bytes=7 * gib),
        bench("step", VIT_B, "exact+compile", 40.0, peak_bytes=9 * gib),
        bench("step", VIT_B, "hotrain-default", 30.0, peak_bytes=4 * gib),
        bench("step", "bert", "exact+compile", 40.0, peak_bytes=9 * gib),  # without the default: no line
    )
    lines = front.pays(tmp_path).splitlines()[2:]
    assert [line.split(" | ")[3] for line in lines] == ["0.75", "1.40"]
    assert lines[1].startswith("| `gpt2` | 20.0 | 28.0 | 1.40 | 9.00 | 7.00 | `exact+graphs` |")
    for number in range(8):
        rows = [
            bench("step", f"model{number}", variant, 20.0 + number, run_id=f"{number}", peak_bytes=gib)
            for variant in ("exact+graphs", "hotrain-default")
        ]
        write(tmp_path / f"step{number}.jsonl", *rows)
    lines = front.pays(tmp_path).splitlines()[2:]
    assert len(lines) == front.MOST + 1
    assert lines[4].startswith("| … 2 more: [does it pay?](docs/pays.md#models-that-were-measured) |")
    assert (lines[0].startswith(f"| `{VIT_B}` |"), lines[-1].startswith("| `gpt2` |")) == (True, True)
    everything = front.every_model(tmp_path).splitlines()[2:]
    assert len(everything) == 10
    assert everything[0].startswith(f"| `{VIT_B}` | 40.0 | 30.0 | 0.75 | 9.00 | 4.00 | 0.44 | `exact+compile` |")


def test_a_figure_is_of_the_latest_run_and_a_ratio_of_one_run(front: ModuleType, tmp_path: Path) -> None:
    write(
        tmp_path / "step_2026-11-21.jsonl",
        bench("step", "vit", "exact", 50.0, run_id="old"),
        bench("step", "vit", "hotrain", 60.0, run_id="old", peak_bytes=3 << 30),
    )
    write(tmp_path / "step_2026-11-22.jsonl", bench("step", "vit", "exact", 40.0, run_id="new"))
    assert front.figure("vit exact ms", tmp_path) == "40"
    assert front.figure("vit hotrain peak", tmp_path) == "3.0"
    assert front.figure("vit hotrain ms over exact", tmp_path) == "1.20"
    with pytest.raises(ValueError, match="figure 'vit luq ms': no record has it"):
        front.figure("vit luq ms", tmp_path)


def test_shared_inputs_are_printed_by_layer_and_variant(records: ModuleType, tmp_path: Path) -> None:
    assert "not recorded yet" in records.shared_inputs(tmp_path)
    write(
        tmp_path / "shared.jsonl",
        bench("shared-inputs", "fc1", "memory=linear", None, g_w_error=0.2331),
        bench("shared-inputs", "fc1", "memory=block", None, g_w_error=0.609),
    )
    assert "| error of g_w | memory=linear | memory=block |" in records.shared_inputs(tmp_path)
    assert "| fc1 | 0.233 | 0.609 |" in records.shared_inputs(tmp_path)


def test_a_stage_that_failed_is_printed_with_its_error(records: ModuleType, tmp_path: Path) -> None:
    assert "`python benchmarks/compatibility.py`" in records.compatibility(tmp_path)
    stages = {"convert": "", "export": "RuntimeError: no"}
    more = {"library": "timm", "stages": stages, "converted": 3, "kept": 1}
    write(
        tmp_path / "compatibility.jsonl",
        bench("compatibility", "a", "hotrain", None, kept_bytes=1, exact_bytes=4, **more),
        bench("compatibility", "b", "hotrain", None, kept_bytes=None, exact_bytes=None, **more),
    )
    text = records.compatibility(tmp_path)
    assert "| timm | `a` | 3 + 1 | 0.25 | yes | RuntimeError: no |" in text
    assert "| timm | `b` | 3 + 1 | – | yes | RuntimeError: no |" in text


def test_timms_script_is_printed_with_and_without_the_patch(records: ModuleType, tmp_path: Path) -> None:
    assert "`python benchmarks/timm_script.py" in records.timm_script(tmp_path)
    more = {"source": "abc", "versions": {"timm": "1"}, "eval_losses": [[1.0, 0.5]]}
    resumed = {"exact": [0.25], "converted": [0.75]}
    write(
        tmp_path / "timm.jsonl",
        bench("timm-script", "a", "exact", None, losses=[[9.0, 1.0], [9.0, 3.0]], resumed=resumed, **more),
        bench(
            "timm-script", "a", "converted", None, losses=[[1.0]], resumed=resumed, kept_bytes=1, exact_bytes=4, **more
        ),
    )
    text = records.timm_script(tmp_path)
    assert "| a | 2.00 ± 1.41 | 1.00 | 0.50 | 0.50 | 0.25 | 0.250, 0.750 | 0.250, 0.750 |" in text
    assert "timm's commit abc, timm 1;" in text


def test_campaigns_are_counted_by_group(records: ModuleType, tmp_path: Path) -> None:
    assert "`python benchmarks/campaign.py" in records.campaign(tmp_path)

    def row(subject: str, variant: str, findings: list[str], **outcomes: int) -> dict[str, Any]:
        more = {"cases": sum(outcomes.values()), "outcomes": outcomes, "findings": findings}
        return bench("campaign", subject, variant, None, **more)

    write(
        tmp_path / "campaign.jsonl",
        row("fuzz", "hotrain train", [], accepted=2, refused=1000),
        row("fuzz", "hotrain cost", ["a traceback"], refused=10, finding=1),
        row("soak", "ViT", [], flat=450),
        row("soak", "control: a tensor a step", [], found=450),
    )
    text = records.campaign(tmp_path)
    assert "| fuzz | command lines | 1,013 | accepted: 2, refused: 1,010, finding: 1 | 1 |" in text
    assert "| soak | training steps (1 models and methods) | 450 | flat: 450 | 0 |" in text
    assert "| soak | leaks on purpose | 450 | found: 450 | 0 |" in text
    assert "resident memory" not in text, "records without a slope"


def test_the_steepest_soak_is_printed(records: ModuleType, tmp_path: Path) -> None:
    def row(variant: str, steps: int, slope: int, *tensors: int) -> dict[str, Any]:
        readings = [{"tensors": n, "tensor_bytes": 8} for n in tensors]
        more = {"cases": steps, "outcomes": {"flat": steps}, "findings": [], "slope": slope, "bound": 1 << 20}
        return bench("campaign", "soak", variant, None, readings=readings, **more)

    rows = [row("ViT", 3000, 2048, 5, 5), row("GPT", 3000, -9, 7, 7), row("control: 2 KiB", 3000, 1 << 21, 7, 8)]
    write(tmp_path / "campaign.jsonl", *rows, row("Llama", 600, 4096, 3, 3))
    text = records.campaign(tmp_path)
    assert "Tensors and their bytes stayed as they were." in text
    assert "by at most 2 KiB (ViT) in the 2 runs of 3,000 steps, by at most 4 KiB (Llama) in the 1 runs of 600" in text
    assert text.endswith("; a finding is more than 1,024 KiB.")
    write(tmp_path / "campaign.jsonl", *rows, row("Llama", 600, 4096, 3, 4))
    assert "stayed" not in records.campaign(tmp_path)


def test_a_newcomer_is_timed_stage_by_stage(records: ModuleType, tmp_path: Path) -> None:
    assert "`python benchmarks/newcomer.py`" in records.newcomer(tmp_path)
    more = {
        "seconds": {"`git clone`": 1.2, "a step": 30.6},
        "cores": 2,
        "packages": 9,
        "local": 3,
        "local_bytes": 1 << 29,
    }
    write(tmp_path / "newcomer.jsonl", bench("newcomer", "vit", "hotrain", None, note="a busy machine", **more))
    text = records.newcomer(tmp_path)
    assert "| `git clone` | 1 |\n| a step | 31 |\n| **together** | **32** |" in text
    assert "2 cores; 3 of 9 packages were on the machine's disk (0.5 GiB" in text
    assert text.endswith("Note: a busy machine.")


def test_a_newcomer_adds_three_lines() -> None:
    import newcomer

    own = newcomer.OWN.format(model="vit_small_patch16_224").lstrip()
    lines = newcomer.changed(own).splitlines()
    assert [line for line in lines if line not in own.splitlines()] == list(newcomer.LINES.values())
    assert lines[1] == "import hotrain"
    assert lines[4:6] == [
        'model = timm.create_model("vit_small_patch16_224", num_classes=37)',
        newcomer.LINES["model = "],
    ]
    document = (Path(newcomer.__file__).parents[1] / "docs/index.md").read_text(encoding="utf-8")
    assert all(f"\n{line}" in document for line in newcomer.LINES.values())
    report = {"install": [{"download_info": {"url": url}} for url in (f"file://{__file__}", "https://a/b", "file:///")]}
    assert newcomer.wheels(report) == {"packages": 2, "local": 1, "local_bytes": Path(__file__).stat().st_size}
