"""The examples run as they are, at toy size, and train what they say; docs/integrations.md shows each of them."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import hotrain
import hotrain.train

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:(?!hotrain)")


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def _fresh_accelerate() -> Iterator[None]:
    """accelerate's state is the process's: the precision of one test would be that of the next."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def same_after_revert(model: nn.Module, inputs: dict[str, Any] | torch.Tensor) -> None:
    """Inference of the converted model is the exact one's, to the bit."""

    def logits() -> torch.Tensor:
        with torch.no_grad():
            out = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        return out if isinstance(out, torch.Tensor) else out.logits

    assert any(True for _ in hotrain.converted_layers(model))
    model.eval()
    before = logits()
    hotrain.revert(model)
    assert torch.equal(logits(), before)


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_short_and_in_the_document_and_run_as_scripts(path: Path, tmp_path: Path) -> None:
    """Each in a process of its own, where nothing was imported before it, and as the document says."""
    text = path.read_text(encoding="utf-8")
    for library in re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed: pip install {library}")
    with_torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    words = [*with_torchrun, path, "ddp"] if path.stem == "distributed" else [path]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"\d", done.stdout), "it shows what came of it"
    if path.stem == "distributed":  # by one rank
        shown = re.fullmatch(r"loss \d\.\d\d; (\d+) KiB kept for backward, exact (\d+)\n", done.stdout)
        assert shown is not None, done.stdout
        assert int(shown[1]) < 0.3 * int(shown[2])
    assert len(text.splitlines()) <= 40
    document = (ROOT / "docs/integrations.md").read_text(encoding="utf-8")
    assert f"<!-- generated: example {path.name} -->" in document
    tests = [Path(__file__), ROOT / "tests/test_distributed_whole.py"]
    assert any(f'example("{path.stem}")' in test.read_text(encoding="utf-8") for test in tests)


@pytest.mark.parametrize(
    ("name", "words", "accepted"),
    [
        ("transformers_lora", ("FOLDER", "bogus"), "the order is 'bogus'; accepted are before, after and full"),
        ("transformers_images", ("FOLDER", "bogus"), "the model is 'bogus'; accepted are vit and segformer"),
        ("distributed", (), r"are \[''\]; accepted are ddp or fsdp, and --compile"),  # nothing said
        ("distributed", ("bogus",), r"are \['bogus'\]; accepted are ddp or fsdp, and --compile"),
        ("distributed", ("fsdp", "--compil"), r"'--compil'\]; accepted are ddp or fsdp, and --compile"),
    ],
)
def test_other_arguments_are_refused_with_those_that_are_accepted(
    name: str, words: tuple[str, ...], accepted: str, tmp_path: Path
) -> None:
    pytest.importorskip("peft" if name == "transformers_lora" else "transformers")
    with pytest.raises(ValueError, match=accepted):
        example(name).main(*(str(tmp_path) if word == "FOLDER" else word for word in words))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "path", [path for path in EXAMPLES if "sys.argv" in path.read_text(encoding="utf-8")], ids=lambda path: path.stem
)
def test_help_shows_the_usage_and_trains_nothing(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft" if path.stem == "transformers_lora" else "transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as exit:
        assert not exit.code  # noqa: PT017
    assert capsys.readouterr().out == f"{example(path.stem).__doc__}\n"
    assert not list(tmp_path.iterdir())


def test_python_of_the_document_is_generated_from_examples() -> None:
    document = (ROOT / "docs/integrations.md").read_text(encoding="utf-8")
    assert len(EXAMPLES) >= 7
    assert len(re.findall("<!-- generated: example ", document)) == len(EXAMPLES)
    by_hand = document.count("no extra -->\n```python")  # of a library that no extra brings: torchtitan
    assert document.count("```python") == len(EXAMPLES) + by_hand


@pytest.mark.usefixtures("_fresh_accelerate")
def test_a_bert_of_the_trainer(tmp_path: Path) -> None:
    """It learns its two sentences; both entries of the log have the memory, the checkpoint loads into an exact BERT."""
    pytest.importorskip("transformers")
    from transformers import AutoModelForSequenceClassification

    trainer = example("transformers_text").main(str(tmp_path))
    first, *_, last = trainer.state.log_history
    assert first["hotrain/converted"] == 13
    for log in (first, last):
        assert 0 < log["hotrain/kept_mib"] < 0.7 * log["hotrain/kept_exact_mib"]
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint-4").eval()
    assert not list(hotrain.converted_layers(saved))
    inputs = {"input_ids": torch.randint(256, (3, 20))}
    trainer.model.eval()
    with torch.no_grad():
        assert torch.equal(saved(**inputs).logits, trainer.model(**inputs).logits)
    same_after_revert(trainer.model, inputs)


@pytest.mark.usefixtures("_fresh_accelerate")
def test_a_bert_of_a_file_as_glue_has_it(tmp_path: Path) -> None:
    """A quote in it is text: read as CSV, the first one would take all lines up to the next."""
    pytest.importorskip("transformers")
    lines = ["it 's \" great \t1", "a dull film \t0", 'no joy " \t0', "warm and funny \t1"]
    (tmp_path / "train.tsv").write_text("\n".join(["sentence\tlabel", *lines, ""]), encoding="utf-8")
    trainer = example("transformers_text").main(str(tmp_path / "runs"), str(tmp_path / "train.tsv"))
    rows = trainer.train_dataset
    assert [row["labels"] for row in rows] == [1, 0, 0, 1]
    assert bytes(rows[0]["input_ids"]).rstrip(b"\0 ") == b"it 's \" great"
    assert {len(row["input_ids"]) for row in rows} == {64}
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])
    assert trainer.state.log_history[-1]["hotrain/converted"] == 13


@pytest.mark.usefixtures("_fresh_accelerate")
@pytest.mark.parametrize(("which", "converted"), [("vit", 13), ("segformer", 40)])
def test_images_of_the_trainer(which: str, converted: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    trainer = example("transformers_images").main(str(tmp_path), which)
    log = trainer.state.log_history[-1]
    assert log["hotrain/converted"] == converted
    assert log["hotrain/kept_mib"] < 0.5 * log["hotrain/kept_exact_mib"]
    same_after_revert(trainer.model, {"pixel_values": torch.randn(2, 3, 64, 64)})


@pytest.mark.usefixtures("_fresh_accelerate")
def test_detection_by_the_trainer(tmp_path: Path) -> None:
    """Its loss matches boxes by their values: the callback logs what it can, and bytes are measured without boxes."""
    pytest.importorskip("transformers")
    trainer = example("detection_coco").main(str(tmp_path))
    log = trainer.state.log_history[-1]
    assert math.isfinite(log["train_loss"])
    assert (log["hotrain/converted"], log["hotrain/exact"]) == (17, 2)
    assert "hotrain/kept_mib" not in log
    names = [name for name, _, state in hotrain.converted_layers(trainer.model) if state.reached]
    assert len([name for name in names if name.startswith("vit.encoder.")]) == 12
    inputs = {"pixel_values": torch.randn(8, 3, 64, 64)}
    kept = hotrain.saved_bytes(trainer.model, **inputs).total
    same_after_revert(trainer.model, inputs)
    assert kept < 0.5 * hotrain.saved_bytes(trainer.model, **inputs).total
    example("detection_coco").main(str(tmp_path / "again"), str(tmp_path / "instances.json"), str(tmp_path))


@pytest.mark.usefixtures("_fresh_accelerate")
@pytest.mark.parametrize("order", ["after", "before"])
def test_lora_of_the_trainer_in_both_orders(order: str, tmp_path: Path) -> None:
    """Bases are converted and save no input of their own; the adapters are trained, and they alone."""
    pytest.importorskip("peft")
    torch.manual_seed(0)
    trainer = example("transformers_lora").main(str(tmp_path), order)
    assert trainer.state.log_history[-1]["hotrain/converted"] == 14
    log = trainer.state.log_history[-1]
    assert log["hotrain/kept_mib"] < 0.5 * log["hotrain/kept_exact_mib"]
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    assert len(trained) == 8
    assert all(".lora_" in name for name in trained)
    assert all(p.abs().max() > 0 for name, p in trainer.model.named_parameters() if ".lora_B" in name)
    same_after_revert(trainer.model, {"input_ids": torch.randint(128, (2, 16))})


@pytest.mark.usefixtures("_fresh_accelerate")
def test_a_llama_is_fine_tuned_in_full(tmp_path: Path) -> None:
    """All of its weights are trained, and all of its layers but the output are converted."""
    pytest.importorskip("peft")
    trainer = example("transformers_lora").main(str(tmp_path), "full")
    log = trainer.state.log_history[-1]
    assert math.isfinite(log["train_loss"])
    assert (log["hotrain/converted"], log["hotrain/exact"]) == (14, 1)
    assert log["hotrain/kept_mib"] < 0.5 * log["hotrain/kept_exact_mib"]
    assert all(p.requires_grad for p in trainer.model.parameters())
    layers = list(hotrain.converted_layers(trainer.model))
    assert all(state.reached for _, _, state in layers)
    assert "lm_head" not in {name for name, _, _ in layers}
    same_after_revert(trainer.model, {"input_ids": torch.randint(128, (2, 16))})


def test_a_lightning_module(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed: pip install lightning")
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trained, loaded = example("lightning_callback").main(str(tmp_path), **options)
    assert len(list(hotrain.converted_layers(trained))) == 25
    assert not list(hotrain.converted_layers(loaded))
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(loaded.eval().net(images), trained.eval().net(images))
    same_after_revert(trained.net, images)


@pytest.mark.usefixtures("_fresh_accelerate")
def test_a_loop_of_accelerate() -> None:
    """Autocast, which replaces the model's forward, does not hide what is between the layers."""
    pytest.importorskip("accelerate")
    model, report = example("accelerate_loop").main(cpu=True)
    now, exact = report.totals()
    assert now < 0.5 * exact
    assert "shared: norm" in str(report)
    same_after_revert(model, torch.randn(2, 3, 64, 64))


def test_the_loop_of_timm() -> None:
    module = example("timm_train")
    assert module.main("test_vit", 64, img_size=64, patch_size=8) < 3.0
    ours = [line for line in (ROOT / "examples/timm_train.py").read_text().splitlines() if "hotrain" in line]
    assert len(ours) == 2, "two lines are what the document promises"


def test_the_optimizer_of_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step runs uncompiled here: compiling it takes longer than the rest of these tests."""
    pytest.importorskip("torchao", reason="torchao is not installed: pip install torchao")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    model, optimizer = example("torchao_adamw").main()
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert "OptimState8bit" in {type(value).__name__ for value in states}
    assert all(p.isfinite().all() for p in model.parameters())
    same_after_revert(model, torch.randn(2, 3, 64, 64))
