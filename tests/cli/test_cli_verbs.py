"""Every verb on the smallest run that it does its work on."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

import hotrain
from hotrain.cli.main import app
from hotrain.plotting.records import ROW_FIELDS
from hotrain.presets import DEFAULT

VERBS = (
    *("train", "compare", "study", "prepare", "demo", "calibrate", "memory", "frontier", "cost", "fidelity"),
    *("recipes", "presets", "report"),
)
# One block of width 32 and eight images: what is tested is the path from the words to the library.
SMALL = ["--set", 'model_args={"depth": 1, "embed_dim": 32}', "--set", "batch_size=8", "--device", "cpu"]
ONE_STEP = [*SMALL, "--set", "steps=1"]


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, f"{result.stderr}\n{result.exception!r}"
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", result.output), "control characters where there is no terminal"
    return result


def answer(*arguments: str | Path) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


def test_help_names_every_verb_and_version_is_the_library_s() -> None:
    text = run("--help").stdout
    assert [verb for verb in VERBS if verb not in text] == []
    assert run("--version").stdout == f"hotrain {hotrain.__version__}\n"


def plain(text: str) -> str:
    """Without the frames and line breaks of a help page."""
    return " ".join(text.replace("│", " ").split())


def commands() -> dict[tuple[str, ...], Any]:
    """Every command by its words, also those of `hotrain bench`."""
    found: dict[tuple[str, ...], Any] = {}
    groups: list[tuple[tuple[str, ...], Any]] = [((), typer.main.get_command(app))]
    for path, group in groups:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                groups.append(((*path, name), command))
            else:
                found[*path, name] = command
    return found


def test_every_command_has_help_examples_and_json() -> None:
    """An example is a whole command, whose recipe, methods, models and fields exist."""
    import hotrain_recipes
    import timm
    from hotrain_bench import step, tasks

    from hotrain.cli.prepare import labels

    known = commands()
    assert {path[0] for path in known} == {*VERBS, "bench"}
    exact = hotrain_recipes.load_recipe("demo_vit")
    for path, command in known.items():
        assert command.help, path
        assert [line for line in command.help.split("\n") if line.startswith(" ")] == [], "wrapped by hand"
        assert any("--json" in param.opts for param in command.params), path
        examples = re.findall(r"hotrain (.+)$", command.epilog or "", re.MULTILINE)
        assert examples, path
        for words in map(shlex.split, examples):
            of = next(other for other in known if tuple(words[: len(other)]) == other)
            options = known[of].make_context(of[-1], words[len(of) :]).params
            for text in (options.get("methods") or options.get("method") or "exact").split(","):
                labels(exact, [text])
            recipe = options.get("recipe") or (of == ("recipes",) and options["name"])
            assert not recipe or recipe in hotrain_recipes.all()
            model = options.get("model")
            assert model is None or model in hotrain_recipes.all() or timm.is_model(model)
            if path[0] == "bench":
                for subject in [*(options.get("subjects") or ()), *(options.get("models") or "").split(",")]:
                    assert subject in ("", "vit_b", "llama") or tasks.check(subject) is None
                for variant in (options.get("variants") or "exact").split(","):
                    assert step.variant_of(variant)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("tra", ["train"]),
        ("train demo_", ["demo_vit", "demo_resnet"]),
        ("train demo_vit --method hot", ["hot", "hot-unbiased", "hot-importance"]),
        ("compare demo_vit -m exact,hot", ["exact,hot", "exact,hot-unbiased", "exact,hot-importance"]),
        ("memory vit_huge_patch14_224", ["vit_huge_patch14_224"]),
        ("cost demo_vit --set epo", ["epochs="]),
        ("fidelity demo_vit --data cifar", ["cifar10", "cifar100"]),
        ("memory demo_vit --amp b", ["bf16"]),
        ("presets lu", ["luq"]),
    ],
)
def test_shells_complete_commands_and_values(line: str, found: list[str]) -> None:
    words = f"hotrain {line}"
    shell = {"_HOTRAIN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = CliRunner().invoke(app, [], env=shell, prog_name="hotrain")
    assert done.stdout.split() == found


def test_models_are_completed_in_a_process_that_has_imported_nothing() -> None:
    """As a shell calls it: timm has to load where torchvision does not fit PyTorch."""
    code = "import sys, hotrain.cli.completion as c; print(*c.model_names(sys.argv[1]))"
    for before, found in (("", ["resnet10t"]), ("import sys; sys.modules['timm'] = None; ", [])):
        done = subprocess.run([sys.executable, "-c", before + code, "resnet10t"], capture_output=True, text=True)
        assert [name for name in done.stdout.split() if name.startswith("resnet10t")] == found, done.stderr
        assert (done.returncode, "demo_vit" in done.stdout.split()) == (0, True), done.stderr


def test_the_command_line_itself_imports_nothing_heavy() -> None:
    """`hotrain --help` must not wait for timm, scikit-learn or matplotlib; pytest has them loaded, so ask anew."""
    heavy = ("timm", "torchvision", "sklearn", "matplotlib", "transformers", "peft", "hotrain_recipes", "hotrain.train")
    code = f"import sys, hotrain.cli.main; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_presets_lists_and_describes() -> None:
    listed = answer("presets")
    assert set(listed) == set(hotrain.presets())
    assert [name for name, entry in listed.items() if entry["default"]] == [DEFAULT]
    shown = run("presets").stdout
    assert f"{DEFAULT} (default)" in shown
    assert all(entry["what"] in shown for entry in listed.values())
    assert answer("presets", "hot")["method"] == str(hotrain.preset("hot"))
    text = run("presets", "hot").stdout
    assert str(hotrain.preset("hot")) in text
    assert "CVPR 2025" in text


def test_recipes_are_those_of_the_package() -> None:
    import hotrain_recipes

    listed = answer("recipes")
    assert [entry["name"] for entry in listed] == list(hotrain_recipes.all())
    assert "demo_vit" in run("recipes").stdout


def test_recipes_are_shown_by_family_and_pattern_with_their_methods() -> None:
    import hotrain_recipes

    text = run("recipes").stdout
    found = hotrain_recipes.all().values()
    assert [family for family in {recipe.family for recipe in found} if family not in text.splitlines()] == []
    assert "{cifar10, cifar100}" in text
    assert {recipe.run().method_label for recipe in found} == {DEFAULT}
    assert f"train with {DEFAULT}, the library's default" in text


def test_a_recipe_lists_the_fields_of_set() -> None:
    from hotrain.train import TrainRun

    text = run("recipes", "demo_vit").stdout
    fields = [field.name for field in dataclasses.fields(TrainRun)]
    assert [name for name in fields if f"  {name} " not in text] == []
    assert answer("recipes", "demo_vit")["run"]["model"] == "demo_vit"
    assert "hotrain recipes RECIPE" in plain(run("train", "--help").stdout)


@pytest.mark.parametrize("verb", [("train",), ("bench", "step")])
def test_help_shows_no_type_behind_a_flag(verb: tuple[str, ...]) -> None:
    assert "<bool>" not in run(*verb, "--help").stdout
    assert "<bool>" not in run("--help").stdout


def test_train_writes_a_record_and_resumes(tmp_path: Path) -> None:
    arguments = ["train", "demo_vit", "--method", "hot:rank=4", *SMALL, "--set", "epochs=1", "--out", tmp_path, "-q"]
    first = answer(*arguments)
    assert first["method"] == "hot:rank=4"
    assert 0 <= first["accuracy"] <= 100
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 1
    again = run(*arguments, "--resume", tmp_path / first["run_id"]).stdout
    assert f"{first['accuracy']:.2f} %" in again, "a finished run, resumed, has the same accuracy"
    assert "checkpoint" in again


def test_train_says_what_it_will_do_what_it_converted_and_where_it_stored(tmp_path: Path) -> None:
    """Of two updates: for one timm says on stderr that its schedule does nothing."""
    done = run("train", "demo_vit", "-m", "hot", *SMALL, "--set", "steps=2", "-o", tmp_path, "-q")
    planned, built = done.stderr.splitlines()
    assert planned == "demo_vit: demo_vit on digits, method hot, 2 updates, batches of 8, fp32, seed 0, device cpu"
    assert built.startswith("demo_vit: 1,437 images, 10 classes, on cpu; 4 layers converted to hot, 2 kept exact")
    (folder,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    for said in (
        "layers      4 layers: g_x",
        "kept ",
        "step ",
        f"checkpoint  {folder / 'checkpoint.pt'}",
        f"record      {tmp_path / 'runs.jsonl'}",
    ):
        assert said in done.stdout


def test_a_run_goes_on_by_its_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted, the command says a whole command; that command ends where an uninterrupted run ends."""
    words = ["train", "demo_vit", "-m", "hot", *SMALL, "--set", "steps=4"]
    whole = answer(*words, "-o", tmp_path / "whole", "-q")

    class Stops:
        """A bar that presses Ctrl-C after the second update."""

        def __enter__(self) -> Callable[[Any], None]:
            return lambda progress: signal.raise_signal(signal.SIGINT) if progress.update == 2 else None

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr("hotrain.train.loop.progress_bar", lambda title: Stops())
    stopped = CliRunner().invoke(app, [*words, "-o", str(tmp_path / "parts")])
    assert stopped.exit_code == 130
    command = stopped.stderr.splitlines()[-1].partition("with hotrain ")[2].split()
    assert command[:2] == ["train", "--resume"]
    rest = answer(*command, "-q")
    assert {**rest, "seconds": 0, "step_ms": 0, "run_id": 0} == {**whole, "seconds": 0, "step_ms": 0, "run_id": 0}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (None, 130)])
def test_a_signal_is_its_exit_code(number: int | None, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from hotrain.train import Interrupted

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt if number is None else Interrupted("stopped, nothing is lost", None, number)

    monkeypatch.setattr("hotrain.cli.prepare.configure", stop)
    done = CliRunner().invoke(app, ["train", "demo_vit"])
    assert done.exit_code == code
    assert done.stderr == ("interrupted\n" if number is None else "stopped, nothing is lost\n")


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


def test_runs_of_several_folders_are_one_report(tmp_path: Path) -> None:
    """Runs that differ in method and seed share a table; another learning rate has one of its own."""
    from hotrain.train import record

    def trained(folder: Path, method: str, seed: int, accuracy: float, lr: str = "0.001") -> None:
        """A finished run, with the accuracy in the place of a training."""
        from hotrain.cli.prepare import configure

        config = configure("demo_vit", method=method, seed=seed, settings=[f"lr={lr}"]).to_dict()
        history = [{"epoch": epoch, "accuracy": accuracy / (3 - epoch), "train_loss": 1 / epoch} for epoch in (1, 2)]
        row = {"record": record.VERSION, "status": "finished", "run_id": f"{method}-{seed}-{lr}", "config": config}
        row |= {
            "accuracy": accuracy,
            "saved_bytes": 100,
            "bit_ops": 7,
            "step_ms": 2.0,
            "device": "CPU",
            "commit": "c",
        }
        record.append(folder / record.RUNS, record.signed({**row, "history": history}))

    for seed in (0, 1):
        trained(tmp_path / "a", "exact", seed, 90.0)
        trained(tmp_path / "b", "hot", seed, 10.0)  # trained again:
        trained(tmp_path / "b", "hot", seed, 80.0 + seed)
    trained(tmp_path / "b", "hot", 0, 50.0, lr="0.01")
    (tmp_path / "b/hot-0-0.01").mkdir()
    found = answer("report", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "both")
    cells = {(row["model"], row["method"], row["seed"]): row["accuracy"] for row in found["rows"]}
    assert cells == {
        ("demo_vit, lr=0.001", "exact", 0): 90.0,
        ("demo_vit, lr=0.001", "exact", 1): 90.0,
        ("demo_vit, lr=0.001", "hot", 0): 80.0,
        ("demo_vit, lr=0.001", "hot", 1): 81.0,
        ("demo_vit, lr=0.01", "hot", 0): 50.0,
    }
    page = Path(found["report"]).read_text()
    assert {"Learning curves", "Bytes kept and accuracy"} <= set(re.findall("<h2>(.*?)</h2>", page))
    one = run("report", tmp_path / "b/hot-0-0.01", "-o", tmp_path / "one").stdout
    assert "50.00" in one
    assert "lr=" not in one


def test_a_comparison_goes_on_by_its_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded is not trained again, and the table is that of an uninterrupted comparison."""
    from hotrain import train as library

    words = ["compare", "demo_vit", "-m", "hot,exact", *ONE_STEP]
    whole = answer(*words, "-o", tmp_path / "whole", "-q")
    trained: list[tuple[str, int]] = []
    real = library.loop.train

    def counted(cell: Any, **options: Any) -> Any:
        if len(trained) == 1:
            raise KeyboardInterrupt
        trained.append((cell.method_label, cell.seed))
        return real(cell, **options)

    monkeypatch.setattr(importlib.import_module("hotrain.train.compare"), "train", counted)
    stopped = CliRunner().invoke(app, [*words, "-o", str(tmp_path / "parts"), "-q"])
    assert stopped.exit_code == 130
    said = stopped.stderr.splitlines()[-1]
    assert said == f"1 of 2 runs are recorded. Resume with: hotrain compare --resume {tmp_path / 'parts'}"
    trained.clear()
    rest = answer(*said.partition("with: hotrain ")[2].split(), "-q")
    assert trained == [("exact", 0)]
    anew = CliRunner().invoke(app, [*words, "-o", str(tmp_path / "whole"), "-q"])
    assert f"2 of these runs are in {tmp_path / 'whole'} and are trained again" in anew.stderr

    def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**row, "step_ms": None, "step_ratio": None} for row in rows]

    assert timeless(rest["rows"]) == timeless(whole["rows"])
    assert timeless(rest["summary"]) == timeless(whole["summary"])
    curves = json.loads((tmp_path / "parts" / "records.json").read_text())["curves"]
    assert curves == json.loads((tmp_path / "whole" / "records.json").read_text())["curves"]


def test_a_comparison_of_failures_shows_every_error_whole_and_writes_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brackets are text here, not rich's markup."""

    def fails(cell: Any, **_: Any) -> None:
        raise RuntimeError("pip install 'hotrain[train]' [/x]")

    monkeypatch.setattr(importlib.import_module("hotrain.train.compare"), "train", fails)
    done = CliRunner().invoke(app, ["compare", "demo_vit", "-m", "exact,hot", *ONE_STEP, "-o", str(tmp_path / "c")])
    assert done.exit_code == 1
    assert done.stderr.count("RuntimeError: pip install 'hotrain[train]' [/x]") == 2
    assert not (tmp_path / "c").exists()


def test_memory_is_measured_by_operator_and_by_module() -> None:
    found = answer("memory", "demo_vit", *SMALL)
    exact, converted = found["audits"].values()
    assert sum(exact["by_operator"].values()) == exact["total"] > converted["total"]
    assert found["ratio"] == converted["total"] / exact["total"]
    assert "hotrain linear" in run("memory", "demo_vit", *SMALL).stdout
    assert "blocks.0.mlp.fc1" in run("memory", "demo_vit", "--modules", *SMALL).stdout


@pytest.mark.parametrize("method", ["hot", "hq8", "hot:memory=block", "exact", None])
def test_memory_promises_what_train_keeps(method: str | None, tmp_path: Path) -> None:
    """To the byte, whatever the method; its own memory unless the method says otherwise."""
    words = ["demo_vit", *ONE_STEP, *([] if method is None else ["-m", method])]
    promised = answer("memory", *words)
    kept = answer("train", *words, "-o", tmp_path, "-q")
    assert kept["method"] == promised["method"]
    assert promised["audits"][kept["method"]]["total"] == kept["saved_bytes"]


def test_memory_says_what_stays_full_and_why() -> None:
    text = run("memory", "demo_vit", *SMALL).stdout
    assert "why" in text
    reasons = {row["operator"]: row["reason"] for row in answer("memory", "demo_vit", *SMALL)["full_precision"]}
    assert reasons["convolution"] == "the batch itself"


def test_memory_of_a_timm_model_and_of_linear_layers_alone() -> None:
    """No recipe, no data: the name and a size are enough."""
    words = ("memory", "test_vit", "--set", "image_size=96", "-b", "8", "--classes", "5", "--device", "cpu")
    everything, layers = answer(*words), answer(*words, "-m", f"{DEFAULT}:memory=linear")
    assert everything["batch_size"] == 8
    assert everything["method"] == DEFAULT
    assert layers["method"] == f"{DEFAULT}:memory=linear", "a label says what differs from the preset"
    assert everything["ratio"] < layers["ratio"] < 1
    assert everything["audits"]["exact"] == layers["audits"]["exact"]


def test_memory_fits_a_budget() -> None:
    found = answer("memory", "demo_vit", "--fit", "4MB", *SMALL)
    batch = {row["variant"]: row["batch_size"] for row in found["rows"]}
    assert 0 < batch["exact"] < batch["converted"]
    assert found["budget"] == 4_000_000
    assert all(row["needs"] <= found["budget"] for row in found["rows"])
    done = run("memory", "demo_vit", "--fit", "4MB", *SMALL)
    assert "Predicted: there is no allocator" in done.stdout
    assert [f"{name}: a batch of {size}" for name, size in batch.items()] == done.stderr.splitlines()


def test_frontier_writes_figure_and_record_also_where_the_budget_cannot_be_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["frontier", "demo_vit", *SMALL, "--steps", "1", "-o", str(tmp_path)]
    done = CliRunner().invoke(app, [*words, "--budget", "1kB"])
    assert done.exit_code == 2
    assert "error: frontier: a budget of 1000 B cannot be met: the least is" in done.stderr
    names = [point.name for point in hotrain.Frontier.load(tmp_path / "frontier.jsonl").points]
    assert names[:3] == ["exact", "exact+checkpoint", "hotrain-memory"]
    assert [line.split(":")[0] for line in done.stderr.splitlines()[:-1]] == names
    drawn = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "frontier.svg").read_text())
    assert all(sum(text == name or text.startswith(f"{name},") for text in drawn) == 1 for name in names)
    find_spec = importlib.util.find_spec
    without = {"matplotlib"}  # it comes with the extra `plot`: what was measured is there without it
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: name not in without and find_spec(name, *more))
    done = run(*words[:-1], str(tmp_path / "bare"), "--budget", "1GB", "--json")
    found = json.loads(done.stdout)
    assert found["best"] in names
    assert {row["model"] for row in found["rows"]} == {"demo_vit"}
    assert "no figure: matplotlib is not installed; pip install '.[plot]' in a clone" in done.stderr
    assert [path.name for path in (tmp_path / "bare").iterdir()] == ["frontier.jsonl"]


def test_shapes_are_looked_at_without_data(tmp_path: Path) -> None:
    """A recipe whose images are not here: the number of classes is enough."""
    found = answer("memory", "demo_vit", "--data", tmp_path / "absent", "--classes", "7", "-b", "2", *SMALL)
    assert found["batch_size"] == 2


def test_cost_is_the_sum_of_its_rows() -> None:
    small = SMALL[:-2]
    exact = answer("cost", "demo_vit", "-m", "exact", *small)
    hot = answer("cost", "demo_vit", "-m", "hot", *small)
    assert (
        exact["bit_ops"]
        > hot["bit_ops"]
        == sum(row[f"{path}_bit_ops"] for row in hot["rows"] for path in ("forward", "grad_input", "grad_weight"))
    )
    assert answer("cost", "demo_vit", "-m", "exact", "-b", "3", *small)["bit_ops"] == 3 * exact["bit_ops"]
    assert "g_w" in run("cost", "demo_vit", *small).stdout


def test_cost_and_fidelity_take_timm_models() -> None:
    words = ("test_vit", "--set", "image_size=32")
    assert answer("cost", *words)["method"] == DEFAULT
    found = answer("fidelity", *words, "--set", "batch_size=2", "--draws", "2", "-m", "hla", "--device", "cpu")
    assert "blocks.0.attn.qkv" in [row["layer"] for row in found["rows"]]


def test_fidelity_has_a_row_a_layer() -> None:
    found = answer("fidelity", "demo_vit", "--method", "hla", "--draws", "2", *SMALL)
    assert [row["layer"] for row in found["rows"]] == [
        f"blocks.0.{x}" for x in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    ]
    qkv = found["rows"][0]  # the last layer's g_y is the same at every token, where a low-pass loses nothing
    assert qkv["grad_input_error"] < 1e-5 < qkv["grad_weight_error"], "hla: g_w only"
    text = run("fidelity", "demo_vit", "-m", "hla", "--draws", "2", *SMALL).stdout
    assert "blocks.0.attn.qkv" in text
    assert "g_x: error up to 0.000" in text
    assert re.search(r"g_w: error up to 0\.\d+ \(.*\); biased in \d of 4 layers", text), "the verdict"
    assert "bias: error of the mean over the draws" in text, "the columns are explained"


def test_calibration_is_written_and_used_by_a_run(tmp_path: Path) -> None:
    file = tmp_path / "lqs.json"
    out = run("calibrate", "demo_vit", "--method", "hot", "--batches", "2", "--out", file, *SMALL).stdout
    assert str(file) in out
    layers = hotrain.Calibration.load(file).layers
    assert len(layers) == 4
    assert {layer.batches for layer in layers.values()} == {2}
    again = ["calibrate", "demo_vit", "--method", "hot", "--batches", "1", "--out", str(file), *SMALL]
    refused = CliRunner().invoke(app, again)
    assert (refused.exit_code, refused.stderr) == (
        2,
        f"error: --out: {file} exists already; give another file, or --force to replace it\n",
    )
    assert {layer["batches"] for layer in answer(*again, "--force")["layers"].values()} == {1}
    run("train", "demo_vit", "-m", "hot", *ONE_STEP, "--set", f"calibration_file={file}", "-o", tmp_path, "-q")


def test_what_is_looked_at_is_what_convert_does() -> None:
    from hotrain.cli.prepare import look

    assert look("demo_vit", settings=["method=exact"]).method == DEFAULT
    assert look("demo_vit", settings=["method=exact"], method="exact").method == "exact"
    assert look("test_vit", settings=["method_overrides.memory=linear"]).method_label == f"{DEFAULT}:memory=linear"


def test_work_under_way_is_shown_on_a_terminal_alone(capsys: pytest.CaptureFixture[str]) -> None:
    from hotrain.cli.terminal import working

    with working("loading [/x]") as say:
        say("measuring")
    assert capsys.readouterr() == ("", "")
