"""bench/zoo.py and side_by_side.py: nothing is timed beside anything else, and what dies stops nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hotrain_bench import side_by_side, tasks, zoo
from typer.testing import CliRunner, Result

from hotrain.cli.main import app

BENCHMARKS = Path(side_by_side.__file__).parents[1]
# A part that only sleeps, and writes down when it did what. Its variant says what happens to it.
PART = f"""
import json, os, signal, sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
from hotrain_bench import side_by_side

subject, variant, out = sys.argv[1], sys.argv[3], sys.argv[-1]

def note(event):
    with open(os.environ["EVENTS"], "a") as file:
        file.write(json.dumps([time.monotonic(), subject, variant, event]) + "\\n")

note("start")
with side_by_side.briefly():
    note("brief")
    time.sleep(0.1)
    note("brief end")
for _ in range(3):
    with side_by_side.alone():
        note("plan")
        time.sleep(0.02)
        note("plan end")
if variant == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if variant == "fails":
    raise RuntimeError("no such operator")
if variant == "hangs":
    time.sleep(60)
note("ready")
with side_by_side.turn() as waited:
    note("turn")
    if variant == "dies while timed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    note("turn end")
row = side_by_side.blank(subject, variant, 1, True) | {{"median_ms": 1.0, "spread_ms": 0.0, "waited": waited}}
with open(out, "w") as file:
    file.write(json.dumps(row) + "\\n")
"""

Event = tuple[float, str, str, str]


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of events; parts are `PART`."""
    (tmp_path / "part.py").write_text(PART)
    monkeypatch.setattr(side_by_side, "PROGRAM", (sys.executable, "-S", str(tmp_path / "part.py")))
    monkeypatch.setenv("EVENTS", str(tmp_path / "events"))
    return tmp_path / "events"


def read(events: Path) -> list[Event]:
    return sorted(tuple(json.loads(line)) for line in events.read_text().splitlines())


def most_at_once(events: list[Event], name: str) -> int:
    """The largest number of parts that were between an event and its end at the same time."""
    now = most = 0
    for _, _, _, event in events:
        now += (event == name) - (event == f"{name} end")
        most = max(most, now)
    return most


def test_nothing_is_timed_while_another_part_prepares_or_is_timed(events: Path) -> None:
    models = ["resnet50/b256", "gpt2/b8x1024", "t5_small/b16x512"]
    variants = ["exact", "hotrain"]
    rows = list(zoo.run(models, variants, "cpu", 1, tiny=True, jobs=5))
    assert [(row["subject"], row["variant"]) for row in rows] == [(m, v) for m in models for v in variants]
    assert all(row["waited"] and row["error"] is None for row in rows)
    found = read(events)
    assert most_at_once(found, "turn") == 1
    assert most_at_once(found, "brief") <= side_by_side.AT_ONCE
    assert most_at_once(found, "plan") == 1
    waves = [found[: 4 * 12], found[4 * 12 :]]  # two models, then one: twelve events a part
    assert [{model for _, model, _, _ in wave} for wave in waves] == [set(models[:2]), set(models[2:])]
    for wave in waves:
        names = [event for *_, event in wave]
        assert "ready" not in names[names.index("turn") :], "all are ready before the first is timed"


def test_what_dies_fails_or_hangs_does_not_stop_the_others(events: Path) -> None:
    variants = ["dies", "exact", "fails", "dies while timed", "hangs", "hotrain"]
    parts = [("resnet50/b256", variant) for variant in variants]
    rows = {row["variant"]: row for row in side_by_side.together(parts, "cpu", 1, tiny=True, seconds=3.0)}
    assert {variant: row["error"] for variant, row in rows.items()} == {
        "exact": None,
        "hotrain": None,
        "dies": "ended by SIGKILL",
        "fails": "ended with exit code 1: RuntimeError: no such operator",
        "dies while timed": "ended by SIGKILL",
        "hangs": "TimeoutError: not ready after 3 seconds",
    }
    assert {row["median_ms"] for row in rows.values() if row["error"]} == {None}
    assert all(set(side_by_side.MEASURED) <= set(row) and row["bench"] == "step" for row in rows.values())
    assert most_at_once([event for event in read(events) if event[2] in ("exact", "hotrain")], "turn") == 1


def test_gpus_do_not_wait_for_one_anothers_turns(events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    parts = [(subject, variant) for subject in ("resnet50/b256", "gpt2/b8x1024") for variant in ("exact", "hotrain")]
    assert len(list(side_by_side.together(parts, "cpu", 1, tiny=True, gpus=2))) == 4
    found = read(events)
    assert most_at_once(found, "turn") == 2
    for subject in ("resnet50/b256", "gpt2/b8x1024"):
        assert most_at_once([event for event in found if event[1] == subject], "turn") == 1


def test_after_its_time_no_model_is_started(events: Path) -> None:
    models = ["resnet50/b256", "gpt2/b8x1024"]
    rows = list(zoo.run(models, ["exact"], "cpu", 1, tiny=True, seconds=0.01, jobs=1))
    assert [row["error"] for row in rows] == [
        "TimeoutError: not ready after 0.01 seconds",
        "TimeoutError: left out: 0.01 seconds were over",
    ]
    assert all(subject == models[0] for _, subject, _, _ in (read(events) if events.exists() else []))


def test_thirty_models_in_waves_of_whole_models(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(set(zoo.MODELS)) == 30
    waves: list[list[tuple[str, str]]] = []
    monkeypatch.setattr(side_by_side, "together", lambda parts, *_: waves.append(list(parts)) or [])
    assert list(zoo.run(zoo.MODELS, zoo.VARIANTS, "cpu", 1, jobs=16)) == []
    assert [len(wave) for wave in waves] == [15] * 6
    assert [part for wave in waves for part in wave] == [(m, v) for m in zoo.MODELS for v in zoo.VARIANTS]
    large = {tasks.BERT, "qwen2/b4x2048", "opt_350m/b8x1024"}
    assert all(len(large & {model for model, _ in wave}) <= 1 for wave in waves)


@pytest.mark.parametrize(
    ("models", "variants", "jobs", "message"),
    [
        (["resnet50"], ["exact"], None, "got 'resnet50', subjects are"),
        (["resnet50/b256"], ["hotrian"], None, "got 'hotrian', accepted are"),
        (["resnet50/b256"], ["exact", "hotrain"], 1, "--jobs: got 1, the 2 variants of a model"),
    ],
)
def test_mistakes_are_refused_before_anything_runs(
    models: list[str], variants: list[str], jobs: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        zoo.run(models, variants, "cpu", 1, jobs=jobs)


def measured(ms: float | None, gib: float | None) -> dict[str, Any]:
    peak = None if gib is None else int(gib * 2**30)
    return {"median_ms": ms, "peak_bytes": peak, "reserved_bytes": peak and peak + 2**29}


def test_what_takes_less_time_and_less_memory_dominates() -> None:
    found = {
        zoo.EXACT: measured(20.0, 8.0),
        zoo.CHECKPOINT: measured(24.0, 3.0),
        zoo.HOTRAIN: measured(25.0, 4.0),
        "hotrain-memory": measured(1.0, 1.0),  # hotrain too
    }
    assert zoo.dominating(found) == [zoo.CHECKPOINT]
    assert zoo.cells(found) == [
        *("20.00", "25.00", "1.25", "8.00 (8.50)", "4.00 (4.50)", "0.50", "24.00", "3.00 (3.50)"),
        f"`{zoo.CHECKPOINT}`",
    ]
    found[zoo.HOTRAIN] = measured(24.0, 4.0)
    assert zoo.dominating(found) == [], "it is not slower than the checkpointed one"
    for nothing in (measured(None, None), measured(25.0, None)):
        assert zoo.dominating(found | {zoo.CHECKPOINT: nothing}) == []
        assert zoo.cells(found | {zoo.HOTRAIN: nothing})[-1] == "–"
    assert zoo.cells({}) == ["–"] * len(zoo.HEADERS)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments, "--device", "cpu", "--tiny", "--steps", "1"])


def test_the_verb_prints_a_line_a_model_and_writes_records(events: Path, tmp_path: Path) -> None:
    out = tmp_path / "step.jsonl"
    models, variants = "resnet50/b256,gpt2/b8x1024", f"{zoo.EXACT},{zoo.HOTRAIN}"
    done = invoke("zoo", "--models", models, "--variants", variants, "--out", str(out), "--commit", "abc")
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
    lines = [line.split() for line in done.stdout.splitlines() if "(tiny)" in line]
    assert lines == [[name, "(tiny)", "1.00", "1.00", "1.00", *["–"] * 6] for name in models.split(",")]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 4
    assert {(row["bench"], row["commit"], row["device"] != "") for row in rows} == {("step", "abc", True)}
    assert len({row["run_id"] for row in rows}) == 1, "ratios are formed within a run"


def test_a_subject_prepared_beside_others_may_have_variants_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(side_by_side, "together", lambda *arguments: called.append(arguments) or [])
    subjects = ["resnet50/b256=exact,hotrain:hot:rank=4", "gpt2/b8x1024"]
    assert invoke("step", *subjects, "--together", "--variants", "hotrain", "--gpus", "2").exit_code == 0
    parts = [*(("resnet50/b256", v) for v in ("exact", "hotrain:hot:rank=4")), ("gpt2/b8x1024", "hotrain")]
    assert called == [(parts, "cpu", 1, True, None, 2)]
    assert invoke("step", "resnet50/b256=hotrian", "--together").exit_code == 2
    assert len(called) == 1


@pytest.mark.slow
def test_a_model_for_real(tmp_path: Path) -> None:
    """With the processes that `hotrain bench step` is, one for each variant."""
    models, variants = "llama8b-4blocks/t8192", "exact,hotrain-default-eager"
    done = invoke("zoo", "--models", models, "--variants", variants, "--jobs", "2", "--out", str(tmp_path / "r.jsonl"))
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
    rows = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert {(row["subject"], row["variant"]) for row in rows} == {
        (model, variant) for model in models.split(",") for variant in variants.split(",")
    }
    assert all(row["median_ms"] > 0 and row["tiny"] and row["agreement"]["gradient_cosine"] > 0.4 for row in rows)
