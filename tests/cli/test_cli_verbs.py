"""Every verb on the smallest run that it does its work on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import hotrain
from hotrain.cli.main import app
from hotrain.plotting.records import ROW_FIELDS

VERBS = ("train", "compare", "demo", "calibrate", "memory", "cost", "fidelity", "recipes", "presets", "report")
# One block of width 32 and eight images: what is tested is the path from the words to the library.
SMALL = ["--set", 'model_args={"depth": 1, "embed_dim": 32}', "--set", "batch_size=8", "--device", "cpu"]
ONE_STEP = [*SMALL, "--set", "steps=1"]


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, f"{result.stderr}\n{result.exception!r}"
    return result


def answer(*arguments: str | Path) -> object:
    return json.loads(run(*arguments, "--json").stdout)


def test_help_names_every_verb_and_version_is_the_library_s() -> None:
    text = run("--help").stdout
    assert [verb for verb in VERBS if verb not in text] == []
    assert run("--version").stdout == f"hotrain {hotrain.__version__}\n"


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_starts_with_what_it_does(verb: str) -> None:
    assert "Usage:" in run(verb, "--help").stdout


def test_the_command_line_itself_imports_nothing_heavy() -> None:
    """`hotrain --help` must not wait for timm, scikit-learn or matplotlib; pytest has them loaded, so ask anew."""
    heavy = ("timm", "torchvision", "sklearn", "matplotlib", "transformers", "peft", "hotrain_recipes", "hotrain.train")
    code = f"import sys, hotrain.cli.main; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_presets_lists_and_describes() -> None:
    assert set(answer("presets")) == set(hotrain.presets())
    text = run("presets", "hot").stdout
    assert str(hotrain.preset("hot")) in text
    assert "CVPR 2025" in text


def test_recipes_are_those_of_the_package() -> None:
    import hotrain_recipes

    listed = answer("recipes")
    assert [entry["name"] for entry in listed] == list(hotrain_recipes.all())
    family = listed[0]["family"]
    assert {entry["family"] for entry in answer("recipes", "--family", family)} == {family}
    assert "demo_vit" in run("recipes").stdout


def test_train_writes_a_record_and_resumes(tmp_path: Path) -> None:
    arguments = ["train", "demo_vit", "--method", "hot:rank=4", *SMALL, "--set", "epochs=1", "--out", tmp_path, "-q"]
    first = answer(*arguments)
    assert first["method"] == "hot:rank=4"
    assert 0 <= first["accuracy"] <= 100
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 1
    again = run(*arguments, "--resume", tmp_path / first["run_id"]).stdout
    assert f"{first['accuracy']:.2f} %" in again, "a finished run, resumed, has the same accuracy"
    assert "checkpoint" in again


def test_compare_writes_summary_curves_and_report(tmp_path: Path) -> None:
    methods = "exact,hot-unbiased,hot-unbiased:rank=4"
    out = run("compare", "demo_vit", "-m", methods, "--seeds", "0,1", *ONE_STEP, "-o", tmp_path, "-q")
    assert "hot-unbiased:rank=4" in out.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [(row["method"], row["seed"]) for row in summary["rows"]] == [
        (method, seed) for seed in (0, 1) for method in methods.split(",")
    ]
    assert all(row[field] is not None for row in summary["rows"] for field in ROW_FIELDS)
    kept = {row["method"]: row["saved_bytes"] for row in summary["rows"]}
    assert kept["exact"] > kept["hot-unbiased"] > kept["hot-unbiased:rank=4"]
    assert len(json.loads((tmp_path / "records.json").read_text())["curves"]) == 6
    before = (tmp_path / "report.html").read_text()
    (tmp_path / "report.html").unlink()
    run("report", tmp_path)
    assert (tmp_path / "report.html").read_text() == before, "the report is a function of the records"


def test_memory_is_measured_by_operator_and_by_module() -> None:
    found = answer("memory", "demo_vit", *SMALL)
    exact, converted = found["audits"].values()
    assert sum(exact["by_operator"].values()) == exact["total"] > converted["total"]
    assert found["ratio"] == converted["total"] / exact["total"]
    assert "hotrain linear" in run("memory", "demo_vit", *SMALL).stdout
    assert "blocks.0.mlp.fc1" in run("memory", "demo_vit", "--modules", *SMALL).stdout


def test_memory_says_what_stays_full_and_why() -> None:
    text = run("memory", "demo_vit", *SMALL).stdout
    assert "why" in text
    reasons = {row["operator"]: row["reason"] for row in answer("memory", "demo_vit", *SMALL)["full_precision"]}
    assert reasons["convolution"] == "the batch itself"


def test_memory_of_a_timm_model_and_of_linear_layers_alone() -> None:
    """No recipe, no data: the name and a size are enough."""
    words = ("memory", "test_vit", "--image-size", "32", "-b", "2", "--classes", "5", "--device", "cpu")
    everything, layers = answer(*words), answer(*words, "--memory", "linear")
    assert everything["batch_size"] == 2
    assert layers["audits"]["hq8"]["total"] < layers["audits"]["exact"]["total"]
    assert everything["audits"]["exact"] == layers["audits"]["exact"]


def test_memory_fits_a_budget() -> None:
    found = answer("memory", "demo_vit", "--fit", "4MB", *SMALL)
    batch = {row["variant"]: row["batch_size"] for row in found["rows"]}
    assert 0 < batch["exact"] < batch["converted"]
    assert found["budget"] == 4_000_000
    assert all(row["needs"] <= found["budget"] for row in found["rows"])
    assert "Predicted, no step was run" in run("memory", "demo_vit", "--fit", "4MB", *SMALL).stdout


def test_shapes_are_looked_at_without_data(tmp_path: Path) -> None:
    """A recipe whose images are not here: the number of classes is enough."""
    found = answer("memory", "demo_vit", "--data", tmp_path / "absent", "--classes", "7", "-b", "2", *SMALL)
    assert found["batch_size"] == 2


def test_cost_in_both_modes() -> None:
    small = SMALL[:-2]
    exact = answer("cost", "demo_vit", "-m", "exact", *small)
    hot = answer("cost", "demo_vit", "-m", "hot", *small)
    assert (
        exact["bit_ops"]
        > hot["bit_ops"]
        == sum(row[f"{path}_bit_ops"] for row in hot["rows"] for path in ("forward", "grad_input", "grad_weight"))
    )
    assert answer("cost", "demo_vit", "-m", "exact", "-b", "3", *small)["bit_ops"] == 3 * exact["bit_ops"]
    assert answer("cost", "demo_vit", "-m", "hot", "--mode", "paper", *small)["bit_ops"] != hot["bit_ops"]
    assert "g_w" in run("cost", "demo_vit", *small).stdout


def test_fidelity_has_a_row_a_layer() -> None:
    found = answer("fidelity", "demo_vit", "--method", "hla", "--draws", "2", *SMALL)
    assert [row["layer"] for row in found["rows"]] == [
        f"blocks.0.{x}" for x in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    ]
    qkv = found["rows"][0]  # the last layer's g_y is the same at every token, where a low-pass loses nothing
    assert qkv["grad_input_error"] < 1e-5 < qkv["grad_weight_error"], "hla: g_w only"
    assert "blocks.0.attn.qkv" in run("fidelity", "demo_vit", "--draws", "2", *SMALL).stdout


def test_calibration_is_written_and_serves_a_run(tmp_path: Path) -> None:
    file = tmp_path / "lqs.json"
    out = run("calibrate", "demo_vit", "--method", "hot", "--batches", "2", "--out", file, *SMALL).stdout
    assert str(file) in out
    layers = hotrain.Calibration.load(file).layers
    assert len(layers) == 4
    assert {layer.batches for layer in layers.values()} == {2}
    run("train", "demo_vit", "-m", "hot", *ONE_STEP, "--set", f"calibration_file={file}", "-o", tmp_path, "-q")


def test_what_is_looked_at_is_what_convert_does() -> None:
    from hotrain.cli.workbench import shown
    from hotrain.presets import DEFAULT
    from hotrain.train import TrainRun

    run = TrainRun(model="demo_vit", data="digits", method="exact")
    assert shown(run, None).method == DEFAULT
    assert shown(run, "exact").method == "exact"
