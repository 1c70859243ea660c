"""A study runs what its records lack, several cells at a time, and continues from its records and checkpoints alone."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hotrain_study import cli as study
from hotrain_study import process
from hotrain_study.cells import Cell, Study, beside, grid, lines, located, mean_text, read_rows
from hotrain_study.studies import studies
from typer.testing import CliRunner

from hotrain.cli.main import app
from hotrain.train import TrainRun, build, checkpoint, load_data, record, replace
from hotrain.train.data import ArrayData

SMALL = [
    "--set",
    'model_args={"depth": 1, "embed_dim": 32}',
    "--set",
    "batch_size=8",
    "--set",
    "audit=false",
    "--device",
    "cpu",
]
ARGUMENTS = ["study", "demo_vit", "--methods", "exact,hq8", "--seeds", "0,1", *SMALL, "--set", "steps=2"]


class InThisProcess:
    """Runs the cell at once and here, instead of in a process that would import PyTorch first."""

    pid = 0

    def __init__(self, command: list[str], **_: Any) -> None:
        self.stdin, self.returncode = io.BytesIO(), 0
        folder = Path(command[-1])
        row = process.run_cell(json.loads((folder / process.JOB).read_text()), folder)
        if row is not None:
            (folder / process.ROW).write_text(json.dumps(row))

    def poll(self) -> int:
        return 0

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def send_signal(self, number: int) -> None:
        raise AssertionError("it has ended")


def invoke(*words: str | Path) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_without_a_name_the_studies_are_listed() -> None:
    listed = json.loads(invoke("study", "--json").stdout)
    assert {name: entry["cells"] for name, entry in listed.items()} == {k: len(s.cells) for k, s in studies().items()}
    assert [line.split()[0] for line in invoke("study").stdout.splitlines()] == list(listed)


def test_a_study_goes_on_where_its_records_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study.subprocess, "Popen", InThisProcess)
    file = tmp_path / "a" / "records.jsonl"
    where = ["--records", file, "--work", tmp_path / "work", "--at-once", "2"]
    done = invoke(*ARGUMENTS, *where, "--cells", "*-s0")
    assert done.exit_code == 0, f"{done.stderr}\n{done.exception!r}"
    rows = read_rows([file])
    assert [(row["method"], row["seed"], row["status"]) for row in rows] == [
        ("exact", 0, "finished"),
        ("hq8", 0, "finished"),
    ]
    assert all(row["step_ms"] is None for row in rows), "two shared the processor"
    assert {row["train_images"] for row in rows} == {1437}
    assert str(tmp_path) not in file.read_text(), "a record names no folder of its machine"
    assert rows[0]["command"].startswith("hotrain study demo_vit --methods exact,hq8")
    assert rows[1]["layers"]
    done = invoke(*ARGUMENTS, *where)  # on another machine: no checkpoints, these records
    assert "demo_vit: 2 of 4 cells to run" in done.stderr
    assert [(row["method"], row["seed"]) for row in read_rows([file])[2:]] == [("exact", 1), ("hq8", 1)]
    assert "of 2 runs" not in done.stdout
    done = invoke(*ARGUMENTS, *where, "--set", "lr=1e-2", "--list")
    assert done.stdout.count("not run") == 2, "with other settings nothing is done"
    assert list((tmp_path / "work").glob("*/")) == [], "nothing is left of finished cells"
    first = str(rows[0]["accuracy"])
    other = first.replace(first[0], "1" if first[0] == "2" else "2", 1)
    file.write_text(file.read_text().replace(first, other, 1))
    with pytest.warns(UserWarning, match="line 1 is damaged"):
        left = read_rows([file])
    assert [row["method"] for row in left] == ["hq8", "exact", "hq8"], "a flipped digit is no result"


def test_a_run_that_diverged_is_a_result_and_one_that_failed_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study.subprocess, "Popen", InThisProcess)
    where = ["--records", tmp_path / "r.jsonl", "--work", tmp_path / "work"]
    words = ["study", "demo_vit", "--methods", "exact", *SMALL, "--set", "steps=4", "--set", "optimizer=sgd", *where]
    done = invoke(*words, "--set", "lr=1e30")
    row = read_rows([tmp_path / "r.jsonl"])[0]
    assert (done.exit_code, row["status"], row["accuracy"]) == (0, "diverged", None)
    assert row["error"].startswith("the training loss is")
    assert "1 diverged" in done.stdout
    assert "0 of 1 cells to run" in invoke(*words, "--set", "lr=1e30").stderr

    def breaks(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"no memory for {tmp_path}/work")

    monkeypatch.setattr(process, "_train", breaks)
    done = invoke(*words)
    row = read_rows([tmp_path / "r.jsonl"])[-1]
    assert (done.exit_code, row["status"]) == (1, "failed")
    assert row["error"].startswith("RuntimeError: no memory")
    assert "1 of 1 cells to run" in invoke(*words, "--list").stdout + invoke(*words).stderr


# Processes that are run in the place of a run: they import nothing.
SLEEPS = "import time, sys; time.sleep(60)"
DIES = "import sys; sys.exit('killed by the kernel')"


def sleeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> list[study._Running]:
    made: list[study._Running] = []
    real = study.subprocess.Popen

    def popen(command: list[str], **options: Any) -> Any:
        return real([sys.executable, "-S", "-c", code], **options)

    monkeypatch.setattr(study.subprocess, "Popen", popen)
    start = study._Running._start
    monkeypatch.setattr(study._Running, "_start", lambda self, cell: (made.append(self), start(self, cell))[1])
    return made


def test_the_time_limit_stops_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = sleeping(tmp_path, monkeypatch, SLEEPS)
    monkeypatch.setattr(study, "GRACE", 0.3)
    began = time.monotonic()
    done = invoke(*ARGUMENTS, "--work", tmp_path, "--at-once", "2", "--minutes", "0.01")
    assert time.monotonic() - began < 30
    assert len(made) == 2, "as many as --at-once"
    assert done.stderr.count("stopped, without a checkpoint") == 2
    assert "4 of 4 cells are missing" in done.stderr
    assert made[0].running == []


def test_a_process_that_dies_is_a_failed_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeping(tmp_path, monkeypatch, DIES)
    done = invoke(*ARGUMENTS, "--work", tmp_path, "--cells", "exact-s0")
    row = read_rows([tmp_path / "records.jsonl"])[0]
    assert (done.exit_code, row["status"]) == (1, "failed")
    assert row["error"] == "the process ended with status 1: killed by the kernel"


def test_cells_are_chosen_by_several_patterns(tmp_path: Path) -> None:
    """A part of a name, or a pattern of all of it."""
    shown = invoke(*ARGUMENTS, "--work", tmp_path, "--list", "--json", "--cells", "exact-s0, *-s1")
    missing = json.loads(shown.stdout)["missing"]
    assert len(missing) == 3
    assert all(name.endswith("exact-s0") or name.endswith("-s1") for name in missing)


def test_two_studies_do_not_write_one_file(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    with record.held(file.with_suffix(".lock"), "taken"):
        done = invoke(*ARGUMENTS, "--records", file)
    assert done.exit_code == 2
    assert "another study is writing it" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["study", "pretrainin"], "is no study (pretraining"),
        (["study", "pretraining", "--methods", "hot"], "names its own"),
        (["study", "pretraining", "--cells", "VGG"], "no cell of pretraining matches"),
        (["study", "pretraining", "--data", "."], "`hotrain prepare cifar10 --out .` downloads it"),
        (["study", "language", "--data", "."], "`hotrain prepare sst2 --texts FOLDER --out .` makes it of texts"),
    ],
)
def test_bad_input(words: list[str], message: str, tmp_path: Path) -> None:
    done = invoke(*words, "--records", tmp_path / "r.jsonl")
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
    assert not (tmp_path / "r.jsonl").exists()


def test_prepare_writes_what_a_study_reads(tmp_path: Path) -> None:
    done = invoke("prepare", "digits", "--out", tmp_path)
    assert done.exit_code == 0, done.stderr
    (tmp_path / "digits.npz").rename(tmp_path / "figures.npz")
    found = load_data(located(TrainRun(data="figures"), tmp_path).data)
    assert isinstance(found, ArrayData)
    assert (found.train_size, len(found.classes)) == (1437, 10)


TEXTS = {
    "sst2": ("short_bert_sst2", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}),
    "text": ("short_gpt_text", {"n_embd": 32, "n_layer": 1, "n_head": 2}),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_prepared_and_a_study_trains_on_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test sizes are in sequences: 4 phrases, and 2 windows of 256 bytes in the last tenth of 6,000."""
    monkeypatch.setattr(study.subprocess, "Popen", InThisProcess)
    for folder in ("sst2", "lm"):
        (tmp_path / folder).mkdir()
    for file, count in (("train", 40), ("dev", 4)):
        lines = ["sentence\tlabel", *(f"a {'good' if i % 2 else 'bad'} film\t{i % 2}" for i in range(count))]
        (tmp_path / "sst2" / f"{file}.tsv").write_text("\n".join(lines))
    (tmp_path / "lm" / "a.txt").write_bytes(b"abcdef" * 1000)
    assert "--texts FOLDER (or a .tar.gz) must say" in " ".join(invoke("prepare", name).stderr.split())
    assert "digits needs none" in invoke("prepare", "digits", "--texts", tmp_path).stderr
    done = invoke("prepare", name, "--texts", tmp_path, "--out", tmp_path / "data", "--json")
    count = json.loads(done.stdout)["train_texts"]
    assert count == {"sst2": 40, "text": 21}[name]

    recipe, sizes = TEXTS[name]
    words = ["study", recipe, "--methods", "exact,hq8", "--seeds", "0", "--data", tmp_path / "data", "--device", "cpu"]
    sets = [f"model_args={json.dumps(sizes)}", "batch_size=8", "steps=3", "amp=none", "plan=memory"]
    done = invoke(
        *words, *(w for s in sets for w in ("--set", s)), "--records", tmp_path / "r.jsonl", "--work", tmp_path
    )
    assert done.exit_code == 0, f"{done.stderr}\n{done.exception!r}"
    rows = read_rows([tmp_path / "r.jsonl"])
    assert [(row["method"], row["status"], row["updates"]) for row in rows] == [
        ("exact", "finished", 3),
        ("hq8", "finished", 3),
    ]
    assert {(row["train_images"], row["test_images"]) for row in rows} == {(count, {"sst2": 4, "text": 2}[name])}
    assert rows[1]["saved_bytes"] < rows[0]["saved_bytes"]
    converted = sum(group["layers"] for group in rows[1]["layers"] if group["method"] == "hq8")
    assert converted == {"sst2": 7, "text": 4}[name], "every layer of the block, and BERT's pooler"
    assert ("Bits per byte" in done.stdout) == (name == "text")


SCENES = {
    "short_segformer_scenes": (
        {"depths": [1] * 4, "hidden_sizes": [32] * 4, "num_attention_heads": [1] * 4, "decoder_hidden_size": 32},
        "mean IoU",
    ),
    "short_yolos_scenes": (
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1},
        "AP at IoU 0.5",
    ),
}


@pytest.mark.parametrize("recipe", SCENES)
def test_a_study_trains_on_scenes(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and tables say what their figure is, and that layers were converted."""
    monkeypatch.setattr(study.subprocess, "Popen", InThisProcess)
    sizes, metric = SCENES[recipe]
    random = np.random.default_rng(0)
    arrays = {
        f"x_{split}": random.integers(0, 256, (n, 32, 32, 3), np.uint8) for split, n in (("train", 20), ("test", 6))
    }
    labels = {f"y_{split}": np.arange(n) % 2 for split, n in (("train", 20), ("test", 6))}
    np.savez(tmp_path / "cifar10.npz", **arrays, **labels)
    words = ["study", recipe, "--methods", "exact,hq8", "--seeds", "0", "--data", tmp_path, "--device", "cpu"]
    sets = [f"model_args={json.dumps(sizes)}", "batch_size=4", "steps=2", "amp=none", "plan=memory"]
    done = invoke(
        *words, *(w for s in sets for w in ("--set", s)), "--records", tmp_path / "r.jsonl", "--work", tmp_path / "w"
    )
    assert done.exit_code == 0, f"{done.stderr}\n{done.exception!r}"
    rows = read_rows([tmp_path / "r.jsonl"])
    assert [(row["method"], row["status"], row["metric"]) for row in rows] == [
        ("exact", "finished", metric),
        ("hq8", "finished", metric),
    ]
    assert {(row["train_images"], row["test_images"]) for row in rows} == {(20, 6)}
    assert rows[1]["saved_bytes"] < rows[0]["saved_bytes"]
    assert sum(group["layers"] for group in rows[1]["layers"] if group["method"] == "hq8") >= 8
    assert metric.lower() in done.stdout.lower()
    assert ("Pixel accuracy" in done.stdout) == (metric == "mean IoU")
    assert ": Accuracy" not in done.stdout


CELLS = grid("s", "g", TrainRun(data="cifar10"), ("exact", "hot:rank=4@memory"), (0, 1))


def row_of(cell: Cell, accuracy: float | None, status: str = "finished") -> dict[str, Any]:
    return {**cell.names(), "status": status, "accuracy": accuracy, "config": cell.run.to_dict()}


def test_gaps_are_paired_and_every_cell_has_a_line() -> None:
    chosen = Study("s", "title", tuple(CELLS))
    assert [(c.method, c.run.seed, c.run.plan) for c in CELLS[:2]] == [
        ("exact", 0, "speed"),
        ("hot:rank=4@memory", 0, "memory"),
    ]
    assert [line.state for line in lines(chosen, [])] == ["not run", "not run"]
    rows = [row_of(CELLS[0], 90.0), row_of(CELLS[1], 89.0), row_of(CELLS[2], 92.0), row_of(CELLS[3], 90.0)]
    exact, hot = lines(chosen, rows)
    assert (exact.gaps, hot.gaps) == ((), (-1.0, -2.0))
    # mean of (-1, -2); their deviation is 0.707, its standard error 0.5
    assert mean_text(hot.gaps, error=True, sign="+") == "-1.50 ± 0.50"
    rows[3] = row_of(CELLS[3], None, "diverged")
    assert lines(chosen, rows)[1].state == "2 of 2, 1 diverged"
    assert lines(chosen, rows)[1].gaps == (-1.0,)


def test_what_started_from_other_weights_is_not_compared() -> None:
    """Weights that were lost are trained again, and are others: a gap needs two runs from the same ones."""
    first, exact, hot = CELLS[0], CELLS[2], CELLS[3]
    exact, hot = (dataclasses.replace(cell, needs=first.id) for cell in (exact, hot))
    chosen = Study("s", "title", (first, exact, hot))
    rows = [row_of(first, 90.0), row_of(exact, 92.0), row_of(first, 91.0), row_of(hot, 90.0)]
    assert [line.gaps for line in lines(chosen, rows)] == [(), ()]
    assert chosen.missing(rows) == [exact], "it started from the weights before"
    rows.append(row_of(exact, 92.5))
    assert lines(chosen, rows)[1].gaps == (-2.5,)
    assert chosen.missing(rows) == []


def test_a_failure_counts_until_there_is_a_result() -> None:
    chosen = Study("s", "title", tuple(CELLS))
    failed = row_of(CELLS[0], None, "failed")
    assert [c.id for c in chosen.missing([failed])] == [c.id for c in (*CELLS[1:], CELLS[0])], "what failed comes last"
    both = [row_of(CELLS[0], 90.0), failed]
    assert chosen.last(both)[CELLS[0].id]["status"] == "finished"


def test_a_cell_that_another_study_ran_is_not_run_again(tmp_path: Path) -> None:
    """Only with the same settings; a study's own record is the last that counts."""
    mine, theirs = CELLS[0], dataclasses.replace(CELLS[0], study="other")
    longer = dataclasses.replace(theirs, run=replace(theirs.run, epochs=theirs.run.epochs + 1))
    chosen = Study("s", "title", (mine,))
    assert chosen.missing([row_of(theirs, 90.0)]) == []
    assert chosen.missing([row_of(longer, 90.0)]) == [mine]
    for name, cell, accuracy in (("z", theirs, 90.0), ("a", longer, 70.0), ("s", mine, 91.0)):
        record.append(tmp_path / f"{name}.jsonl", record.signed({"record": record.VERSION, **row_of(cell, accuracy)}))
    assert chosen.last(read_rows(beside(tmp_path / "s.jsonl")))[mine.id]["accuracy"] == 91.0
    # The tables on rank and on EVMT have the exact runs of the one on pre-training.
    known = {(cell.group, cell.method, cell.run.seed): cell for cell in studies()["pretraining"].cells}
    for name, group in (
        ("rank", "ResNet-18, CIFAR-100"),
        ("rank", "small ViT, CIFAR-100"),
        ("evmt", "DeiT-Ti, CIFAR-10"),
    ):
        cell = next(c for c in studies()[name].cells if (c.group, c.method, c.run.seed) == (group, "exact", 0))
        assert cell.is_of(row_of(known[group, "exact", 0], 90.0)), group


def test_a_cell_that_ends_leaves_its_checkpoint_to_the_next_call(tmp_path: Path) -> None:
    """SIGTERM within a run: no row, and the next call continues to the same weights as one that was not stopped."""
    digits = load_data("digits")
    assert isinstance(digits, ArrayData)
    few = {f"{k}_{part}": getattr(digits, f"{k}_{part}")[:64].numpy() for k in "xy" for part in ("train", "test")}
    np.savez(tmp_path / "few.npz", **few, classes=np.arange(10))
    run = TrainRun(
        model="demo_vit", model_args={"depth": 1, "embed_dim": 32}, data=str(tmp_path / "few.npz"), batch_size=16
    )
    run = replace(run, epochs=2, audit=False, device="cpu")
    cell = Cell("s", "g", "exact", run)

    def job(folder: Path) -> dict[str, Any]:
        return process.job_of(cell, replace(run, out_dir=str(folder / "runs")), {"at_once": 1})

    whole = process.run_cell(job(tmp_path / "whole"), tmp_path / "whole")
    from hotrain.train import loop

    steps = loop.Training.step

    def stopped_at_three(self: Any, batches: Any) -> None:
        steps(self, batches)
        if self.update == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Training, "step", stopped_at_three)
        assert process.run_cell(job(tmp_path / "part"), tmp_path / "part") is None
    again = process.run_cell(job(tmp_path / "part"), tmp_path / "part")
    assert whole is not None
    assert again is not None
    assert again["updates"] == whole["updates"] == 8
    assert again["history"][-1]["train_loss"] == whole["history"][-1]["train_loss"]


def test_a_run_that_does_not_compile_is_trained_in_eager_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = TrainRun(model="demo_vit", compile=True)
    job = process.job_of(Cell("s", "g", "exact", run), run, {})
    (tmp_path / process.JOB).write_text(json.dumps(job))
    again: list[list[str]] = []
    monkeypatch.setattr(process, "run_cell", lambda job, folder: {"status": "failed", "error": "no graph"})
    monkeypatch.setattr(process.threading.Thread, "start", lambda self: None)
    monkeypatch.setattr(sys, "argv", ["process", str(tmp_path)])
    monkeypatch.setattr(process.os, "execv", lambda path, words: again.append(words))
    process.main()
    assert again == [[sys.executable, "-m", "hotrain_study.process", str(tmp_path)]]
    assert json.loads((tmp_path / process.JOB).read_text())["cell"]["run"]["compile"] is False
    again.clear()
    process.main()
    assert again == []
    assert json.loads((tmp_path / process.ROW).read_text())["status"] == "failed"


def test_cells_start_from_the_weights_of_the_cell_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on another machine, where the needed cell is recorded and its weights are not: it is trained again."""
    monkeypatch.setattr(study.subprocess, "Popen", InThisProcess)
    run = TrainRun(model="demo_vit", model_args={"depth": 1, "embed_dim": 32}, steps=2, batch_size=8, audit=False)
    first = Cell("s", "first", "exact", run)
    adapted = replace(run, method="hot")
    chosen = Study("s", "t", (first, Cell("s", "then", "hot", adapted, needs=first.id)))

    def everything(work: Path) -> list[dict[str, Any]]:
        file = tmp_path / "r.jsonl"
        study._Running(chosen, file, work, 1, {"at_once": 1}, lambda cell: cell.run, "cpu", False).all(None)
        return read_rows([file])

    rows = everything(tmp_path / "a")
    assert [(row["group"], row["status"]) for row in rows] == [("first", "finished"), ("then", "finished")]
    assert rows[1]["config"]["init"] is None, "a record names no folder"
    (tmp_path / "r.jsonl").write_text(json.dumps(rows[0]) + "\n")
    again = everything(tmp_path / "b")
    assert [row["group"] for row in again] == ["first", "first", "then"]
    assert again[2]["history"][-1]["train_loss"] == rows[1]["history"][-1]["train_loss"]
    weights = tmp_path / "a" / "weights" / f"{first.id}.pt"
    begun, saved = build(replace(run, init=str(weights), seed=7)).model.state_dict(), checkpoint.load(weights)["model"]
    same = {name for name, value in saved.items() if torch.equal(begun[name], value)}
    assert set(saved) - same == {"head.weight", "head.bias"}, (
        "all but the classifier, which is drawn with the run's seed"
    )


def test_cells_that_are_named_bring_those_they_start_from() -> None:
    """Without the start's row, results from different weights would be compared."""
    shown = json.loads(invoke("study", "lora", "--list", "--json", "--cells", "CIFAR-10-CIFAR-100-exact-s1").stdout)
    assert [name for name in json.dumps(shown).split('"') if "first-CIFAR-10-" in name]
