"""compare: paired cells, one table, and a cell that fails alone."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hotrain import preset
from hotrain.train import Comparison, TrainRun, compare, finished_cells, replace, silent, train
from hotrain.train.record import read, signed

Make = Callable[..., TrainRun]


def test_rows_are_paired_by_seed(tiny: Make) -> None:
    seen = []
    run = tiny(steps=2, audit=True, method="hot", method_overrides={"rank": 2})  # the run's own method is not used
    outcome = compare(
        run, ["exact", "hot:rank=4", preset("hla")], seeds=(0, 1), on_progress=silent, on_result=seen.append
    )
    assert outcome.failures == []
    assert [(r["method"], r["seed"]) for r in outcome.rows] == [
        (m, s) for s in (0, 1) for m in ("exact", "hot:rank=4", "hla")
    ]
    fields = {"model", "method", "seed", "accuracy", "saved_bytes", "bit_ops", "step_ms", "layers"}
    assert all(set(r) == fields for r in outcome.rows)
    assert len(seen) == len(outcome.results) == 6
    assert all(r.model is None for r in outcome.results)  # a comparison keeps no weights


def test_all_methods_start_from_the_same_weights_and_images(tiny: Make) -> None:
    losses: dict[str, float] = {}

    def first(result: object) -> None:
        losses[result.run.method_label] = result.history[0]["train_loss"]  # type: ignore[attr-defined]

    compare(tiny(steps=1), ["exact", "hot-unbiased", "luq"], on_progress=silent, on_result=first)
    # The loss of the first update is before any weight changed; the forward pass is exact in every method.
    assert losses["exact"] == losses["hot-unbiased"] == losses["luq"]


def test_a_cell_that_fails_does_not_lose_the_others(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    module = importlib.import_module("hotrain.train.compare")
    real = module.train

    def train(run: TrainRun, **kwargs: object) -> object:
        if run.method == "int4" and run.seed == 0:
            raise RuntimeError("out of memory")
        return real(run, **kwargs)

    monkeypatch.setattr(module, "train", train)
    outcome = compare(tiny(steps=1), ["exact", "int4"], seeds=(0, 1), on_progress=silent)
    assert [(r["method"], r["seed"]) for r in outcome.rows] == [("exact", 0), ("exact", 1), ("int4", 1)]
    assert outcome.failures == [
        {"model": "demo_vit", "method": "int4", "seed": 0, "error": "RuntimeError: out of memory"}
    ]


def test_what_every_cell_would_raise_is_raised_before_the_first(tiny: Make, tmp_path: Path) -> None:
    def never(progress: object) -> None:
        raise AssertionError("it trained")

    for fields, message in (
        ({"data": str(tmp_path / "absent.npz")}, "data: no file"),
        ({"model": "demo_vti"}, "unknown name 'demo_vti'"),
        ({"optimizer": "adamm"}, "did you mean 'adam"),
    ):
        with pytest.raises(ValueError, match=message):
            compare(tiny(**fields), ["exact", "hot"], on_progress=never)
    assert not Path(tiny().out_dir).exists()


def test_a_comparison_goes_on_where_it_was_stopped(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny(steps=2)
    whole = compare(run, ["exact", "hot:rank=4"], (0, 1), on_progress=silent)
    # Others in the same folder: of another length, another seed's, stopped, of an earlier version.
    compare(replace(run, steps=3), ["exact"], (0,), on_progress=silent)
    train(replace(run, method="hot", method_overrides={"rank": 4}, seed=1), stop_after=1, on_progress=silent)
    path = Path(run.out_dir) / "runs.jsonl"
    rows = read(path)
    with open(path, "a") as file:
        for old in rows[:1]:
            of_version_1 = {k: v for k, v in old.items() if k not in ("record", "sha256")}
            file.write(json.dumps(of_version_1 | {"accuracy": -1.0}) + "\n")

    found = finished_cells(run)
    assert sorted(found) == [("exact", 0), ("exact", 1), ("hot:rank=4", 0), ("hot:rank=4", 1)]
    del found["hot:rank=4", 1]
    trained = []
    again = compare(
        run, ["exact", "hot:rank=4"], (0, 1), finished=found, on_progress=silent,
        on_result=lambda r: trained.append((r.run.method_label, r.run.seed)),
    )  # fmt: skip
    assert trained == [("hot:rank=4", 1)]

    def shown(outcome: Comparison) -> list[tuple[object, ...]]:
        return [(r["method"], r["seed"], r["accuracy"]) for r in outcome.rows]

    assert shown(again) == shown(whole)
    assert [r.history[-1]["train_loss"] for r in again.results] == [r.history[-1]["train_loss"] for r in whole.results]
    assert again.results[0].checkpoint_path == whole.results[0].checkpoint_path


@pytest.mark.parametrize("missing", ["config", "history", "run_id"])
def test_an_incomplete_record_is_left_out(tiny: Make, missing: str) -> None:
    run = tiny(steps=2, audit=False)
    result = train(replace(run, method="exact"), on_progress=silent)
    (row,) = read(result.record_path)
    del row["sha256"], row[missing]
    result.record_path.write_text(json.dumps(signed(row)) + "\n")
    with pytest.warns(UserWarning, match="is incomplete and is left out"):
        assert finished_cells(run) == {}


def test_a_comparison_that_is_finished_reads_no_data(tiny: Make, few_digits: Path) -> None:
    run = tiny(steps=2)
    compare(run, ["exact"], (0,), on_progress=silent)
    found = finished_cells(run)
    few_digits_gone = few_digits.rename(few_digits.with_suffix(".away"))
    try:
        assert len(compare(run, ["exact"], (0,), finished=found).rows) == 1
    finally:
        few_digits_gone.rename(few_digits)


@pytest.mark.parametrize(
    ("methods", "seeds", "message"),
    [
        ([], (0,), "at least one method and one seed"),
        (["exact"], (), "at least one method and one seed"),
        (["exact", "hto"], (0,), "hto"),
        (["hot", "hot"], (0,), "method 'hot' is given twice"),
        (["hot:rank=99"], (0,), "rank"),
    ],
)
def test_a_bad_request_is_refused_before_any_training(
    tiny: Make, methods: list[str], seeds: tuple[int, ...], message: str
) -> None:
    def never(progress: object) -> None:
        raise AssertionError("it trained")

    with pytest.raises(ValueError, match=message):
        compare(tiny(steps=1), methods, seeds, on_progress=never)
