"""A user's mistake is one line on stderr and exit code 2; a defect of ours keeps its traceback."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hotrain.cli.errors import is_mistake, one_line, wrapped
from hotrain.cli.main import app
from hotrain.train import load_data

TRAIN = ("train", "demo_vit")
MISTAKES = {
    "unknown recipe, near a known one": (("train", "demo_vti"), "did you mean demo_vit"),
    "unknown preset, near a known one": ((*TRAIN, "-m", "hot-unbaised"), "Did you mean 'hot-unbiased'?"),
    "override of another name": ((*TRAIN, "-m", "hot:ranks=4"), "rank"),
    "override out of range": ((*TRAIN, "-m", "hot:rank=17"), "17"),
    "setting without =": ((*TRAIN, "--set", "epochs"), "field=value"),
    "setting of an unknown field": ((*TRAIN, "--set", "epoch=3"), "did you mean 'epochs'?"),
    "setting of another type": ((*TRAIN, "--set", "epochs=many"), "epochs: got 'many'"),
    "setting of an unknown shape": ((*TRAIN, "--set", "model_args.num_heads=0"), "cannot be built with"),
    "setting that is nested deeper than the stack": ((*TRAIN, "--set", f"model_args={'[' * 100_000}"), "characters)"),
    "number of more digits than Python reads": ((*TRAIN, "--set", f"epochs={'9' * 5000}"), "epochs: got '999"),
    "override of the preset's name": ((*TRAIN, "-m", "hot:name=x"), "unknown override 'name'"),
    "unknown data": ((*TRAIN, "--data", "digit"), "did you mean 'digits'?"),
    "no such checkpoint": ((*TRAIN, "--resume", "nowhere"), "no checkpoint at 'nowhere'"),
    "a file for a folder": ((*TRAIN, "--out", f"{__file__}/runs"), f"--out: {__file__} is no folder"),
    "no CUDA device": ((*TRAIN, "--device", "cuda:99"), "CUDA device"),
    "no CUDA device for the demo": (("demo", "--device", "cuda"), "device: got 'cuda'"),
    "nothing to train": (("train",), "`hotrain recipes` lists them"),
    "a comparison without methods": (("compare", "demo_vit"), "--methods"),
    "a comparison of absent data": (("compare", "demo_vit", "-m", "exact,hot", "--data", "[/x].npz"), "'[/x].npz'"),
    "a comparison with an unknown model": (("compare", "demo_vit", "-m", "exact", "--set", "model=vti"), "'vti'"),
    "no comparison to go on with": (("compare", "--resume", "nowhere"), "comparison.json is missing"),
    "a resumed comparison of something else": (("compare", "demo_vit", "--resume", "nowhere"), "leave out RECIPE"),
    "precision that autocast has not": (
        ("memory", "demo_vit", "--amp", "fp8"),
        "amp: got 'fp8', accepted is 'bf16', 'fp16' or none",
    ),
    "unknown device": ((*TRAIN, "--device", "tpu"), "got 'tpu'"),
    "seeds that are no numbers": (("compare", "demo_vit", "-m", "exact", "--seeds", "0,x"), "--seeds: got 'x'"),
    "no methods": (("compare", "demo_vit", "-m", ","), "--methods"),
    "an unknown method among good ones": (("compare", "demo_vit", "-m", "exact,hott"), "Did you mean 'hot'?"),
    "an unknown method in the demo": (("demo", "-m", "exact,hott"), "Did you mean 'hot'?"),
    "unknown preset to describe": (("presets", "hat"), "unknown preset 'hat'"),
    "unknown preset, near two": (("presets", "hot8"), "Did you mean 'hot' or 'hq8'?"),
    "no model that begins so": (("frontier", "vit_basse"), "did you mean vit_base_"),
    "no model of that name": (("memory", "vit_tini_patch16_224"), "did you mean vit_tiny_patch16_224"),
    "more images than an integer counts": (("memory", "demo_vit", "--batch", f"{2**63}"), "batch size: got 9223372"),
    "the same as a setting": ((*TRAIN, "--set", f"eval_batch_size={2**63}"), "eval_batch_size: got 9223372"),
    "no size": (("memory", "demo_vit", "--fit", "24apples"), "24GB"),
    "data that are not there": (("memory", "demo_vit", "--data", "data/absent"), "give --classes N"),
    "calibration of a method without scales": (("calibrate", "demo_vit", "-m", "hla"), "no scale to choose"),
    "a look at exact layers": (("fidelity", "demo_vit", "-m", "exact"), "no converted layer"),
    "a report of nothing": (("report", "nowhere"), "nowhere: no finished run (none is recorded)"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, message = MISTAKES[case]
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1, "more than one line"
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == [], "a refused command leaves nothing behind"


def test_one_draw_is_refused_by_its_option() -> None:
    result = CliRunner().invoke(app, ["fidelity", "demo_vit", "--draws", "1"])
    assert result.exit_code == 2
    assert re.search(r"greater than or equal to 2|x>=2", result.stderr), "typer's versions name the range differently"


def test_an_unknown_verb_is_refused_with_the_nearest() -> None:
    result = CliRunner().invoke(app, ["trian"])
    assert result.exit_code == 2
    assert "train" in result.stderr


def test_traceback_on_request() -> None:
    result = CliRunner().invoke(app, ["--traceback", "train", "demo_vti"])
    assert isinstance(result.exception, ValueError)


def test_what_counts_as_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's RuntimeError is a defect to look into; ours says what to do."""
    with pytest.raises(RuntimeError) as theirs:
        torch.zeros(2, 3) @ torch.zeros(2, 3)
    assert not is_mistake(theirs.value)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(RuntimeError) as ours:
        load_data("digits")
    assert is_mistake(ours.value)
    assert not is_mistake(KeyError("a defect"))
    assert not is_mistake(BrokenPipeError()), "`hotrain recipes | head` is no mistake"


def test_too_little_memory_is_said_in_a_line() -> None:
    """PyTorch says it from wherever the tensor was to be made."""
    with pytest.raises(RuntimeError) as theirs:
        torch.nn.init.zeros_(torch.nn.Linear(1, 1).weight.data.new_empty(1 << 50))
    for error in (theirs.value, MemoryError(), torch.OutOfMemoryError("CUDA out of memory")):
        assert is_mistake(error)
        assert "take a smaller batch, image size or model" in one_line(error)


def test_a_missing_package_says_how_to_get_it() -> None:
    assert "pip install '.[train,plot]' in a clone of hotrain brings" in one_line(
        ModuleNotFoundError("No module named 'timm'")
    )
    assert one_line(ValueError()) == "ValueError"


def test_a_note_is_broken_between_words_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "word " * 30 + "/a/path-that-is/longer/than/the/terminal/is/wide/and/must/be/copied/whole/checkpoint.pt"
    assert wrapped(text, io.StringIO()) == text
    monkeypatch.setenv("COLUMNS", "40")
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    lines = wrapped(text, terminal).splitlines()
    assert max(map(len, lines[:-1])) <= 40
    assert " ".join(line.strip() for line in lines) == text


def test_a_warning_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own has the path and the line of source that warned."""
    import warnings

    from hotrain.cli import __main__, main

    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(main, "app", lambda: None)
    __main__.main()
    assert warnings.formatwarning("a class\n  is empty", UserWarning, "data.py", 7) == "warning: a class is empty\n"
