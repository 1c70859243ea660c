"""Runs on texts: what `hotrain prepare` writes, an encoder on phrases, a decoder on bytes, what does not fit."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hotrain_study.texts import CLASSIFY, UNKNOWN, arrays_of

from hotrain.train import TrainRun, build, load_data, replace, train
from hotrain.train.progress import silent
from hotrain.train.tokens import PADDING, TokenData

GOOD, BAD = ["good", "fine", "great", "nice", "warm"], ["bad", "poor", "dull", "weak", "cold"]
SMALL_BERT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
SMALL_GPT = {"n_embd": 32, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as GLUE's: phrases whose words tell the label, and a text that repeats itself."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "sst2").mkdir()
    (folder / "lm").mkdir()
    random = np.random.default_rng(0)
    for name, count in (("train", 320), ("dev", 40)):
        lines = ["sentence\tlabel"]
        for i in range(count):
            words = random.choice(GOOD if i % 2 else BAD, size=random.integers(2, 9))
            lines.append(f"{' '.join(words)} {'once' * (i == 0)}\t{i % 2}")
        (folder / "sst2" / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    (folder / "lm" / "a.txt").write_bytes(b"the cat sat on the mat. " * 700)
    return folder


@pytest.fixture(scope="session")
def files(texts: Path) -> dict[str, str]:
    """The files of both data sets."""
    found = {}
    for name in ("sst2", "text"):
        np.savez(texts / f"{name}.npz", **arrays_of(name, texts))
        found[name] = str(texts / f"{name}.npz")
    return found


def run_on(files: dict[str, str], name: str, out: Path, **fields: Any) -> TrainRun:
    models = {"sst2": ("small_bert", SMALL_BERT), "text": ("small_gpt", SMALL_GPT)}
    model, args = models[name]
    common = {"data": files[name], "model": model, "model_args": args, "batch_size": 16, "lr": 3e-3, "device": "cpu"}
    return TrainRun(**{**common, "out_dir": str(out), "audit": False, "plan": "memory", **fields})


def test_phrases_are_words_that_occur_twice(texts: Path, files: dict[str, str]) -> None:
    data = load_data(files["sst2"])
    assert isinstance(data, TokenData)
    assert data.x_train.shape == (320, 64)
    assert data.vocabulary == len(GOOD + BAD) + 3
    assert data.classes == ("0", "1")
    assert (data.x_train[:, 0] == CLASSIFY).all()
    first = (texts / "sst2" / "train.tsv").read_text().splitlines()[1].split("\t")[0].split()
    assert int((data.x_train[0] == UNKNOWN).sum()) == 1, "the word that occurs once"
    assert int((data.x_train[0] != PADDING).sum()) == 1 + len(first)
    again = {}  # equal words have equal ids, in both splits
    for split, x in (("train", data.x_train), ("dev", data.x_test)):
        for line, ids in zip((texts / "sst2" / f"{split}.tsv").read_text().splitlines()[1:], x, strict=True):
            for word, number in zip(line.split("\t")[0].split(), ids[1:].tolist(), strict=False):
                assert again.setdefault(word, number) == number


def test_windows_predict_the_next_byte(files: dict[str, str]) -> None:
    data = load_data(files["text"])
    assert isinstance(data, TokenData)
    assert data.is_text_model
    assert data.x_train.shape == data.y_train.shape == ((16800 - 1680 - 1) // 256, 256)
    assert torch.equal(data.x_train[:, 1:], data.y_train[:, :-1])
    assert torch.equal(data.x_train[1:, 0], data.y_train[:-1, -1]), "windows follow one another"
    assert bytes(data.x_train[0].tolist()).startswith(b"the cat sat")


def test_an_archive_is_its_folder(texts: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "glue.tar.gz", "w:gz") as archive:
        archive.add(texts, ".")
    for name in ("sst2", "text"):
        packed, plain = arrays_of(name, tmp_path / "glue.tar.gz"), arrays_of(name, texts)
        assert packed.keys() == plain.keys()
        assert all(np.array_equal(packed[key], plain[key]) for key in plain)


@pytest.mark.parametrize("method", ["exact", "hq8", "hot-unbiased"])
@pytest.mark.parametrize("name", ["sst2", "text"])
def test_it_learns(files: dict[str, str], name: str, method: str, tmp_path: Path) -> None:
    """Words tell the label, and a repeated text its next byte: 90 % right, and half the cross-entropy of guessing."""
    result = train(run_on(files, name, tmp_path, method=method, epochs=6 if name == "sst2" else 40), on_progress=silent)
    assert result.accuracy > 90
    row = result.history[-1]
    share = torch.bincount(load_data(files[name]).y_test.flatten()).double()
    share = share[share > 0] / share.sum()
    assert row["test_loss"] < 0.5 * float(-(share * share.log()).sum())
    if method != "exact":
        assert sum(group["layers"] for group in result.layers if group["method"] == method) >= 4


@pytest.mark.parametrize("name", ["sst2", "text"])
def test_a_resumed_run_is_the_uninterrupted_one(files: dict[str, str], name: str, tmp_path: Path) -> None:
    run = run_on(files, name, tmp_path / "whole", method="hot-unbiased", steps=7)
    whole = train(run, on_progress=silent)
    part = train(replace(run, out_dir=str(tmp_path / "part")), stop_after=3, on_progress=silent)
    rest = train(None, resume=part.checkpoint_path, on_progress=silent)
    weights = [torch.load(r.checkpoint_path, weights_only=True)["model"] for r in (whole, rest)]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_a_batch_is_tokens_and_labels(files: dict[str, str], tmp_path: Path) -> None:
    """Of a text model one label each position, in the order of its logits."""
    for name, shape in (("sst2", (16,)), ("text", (16 * 256,))):
        setup = build(run_on(files, name, tmp_path))
        x, y = setup.example()
        assert x.dtype == torch.int64
        assert y.shape == shape
        assert setup.model(x).shape == (*shape, len(setup.data.classes))


@pytest.mark.parametrize(
    ("data", "fields", "message"),
    [
        (
            "sst2",
            {"model": "demo_vit", "model_args": {}},
            "demo_vit. takes images, .* are texts; accepted are small_bert",
        ),
        ("digits", {"data": "digits"}, "small_bert. takes texts, the data 'digits' are images"),
        ("sst2", {"model": "small_gpt", "model_args": SMALL_GPT}, "small_gpt. needs texts without labels"),
        ("text", {"model": "small_bert", "model_args": SMALL_BERT}, "small_bert. needs labels"),
        ("sst2", {"mixup": 0.2}, "mixup: it is not for texts"),
        ("sst2", {"task": "simclr"}, "simclr takes images in memory"),
    ],
)
def test_what_does_not_fit(
    files: dict[str, str], data: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    run = run_on({"digits": "digits", **files}, "sst2" if data == "digits" else data, tmp_path, **fields)
    with pytest.raises(ValueError, match=message):
        build(run)


def test_files_that_are_not_texts(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lm has no \.txt file"):
        arrays_of("text", tmp_path)
    with pytest.raises(ValueError, match=r"no file .*train\.tsv"):
        arrays_of("sst2", tmp_path)
    with pytest.raises(ValueError, match=r"none is neither a folder nor a tar archive"):
        arrays_of("sst2", tmp_path / "none")
    (tmp_path / "no.tar.gz").write_text("no archive")
    with pytest.raises(ValueError, match=r"no\.tar\.gz is neither a folder nor a tar archive"):
        arrays_of("sst2", tmp_path / "no.tar.gz")
    (tmp_path / "lm").mkdir()
    (tmp_path / "lm" / "short.txt").write_text("short")
    with pytest.raises(ValueError, match=r"short\.txt has 5 bytes, accepted are at least 2570"):
        arrays_of("text", tmp_path)
    good = arrays_of("sst2", texts)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"vocabulary": np.array(5)}, "tokens of x_train: label .* is out of range for 5 classes"),
        ({"x_test": good["x_test"][:, :9]}, "x_test: sequences of 9 tokens, those of x_train have 64"),
        ({"y_train": good["y_train"][:9]}, r"y_train: got shape \(9,\) for x_train of \(320, 64\)"),
        ({"x_train": good["x_train"].astype(np.float32)}, "x_train in .*: got float32, accepted are integers"),
        ({"y_test": None}, "has no y_test, which belong to y_train"),
    ]
    for change, message in bad:
        arrays = {key: value for key, value in {**good, **change}.items() if value is not None}
        np.savez(tmp_path / "bad.npz", **arrays)
        with pytest.raises(ValueError, match=message):
            load_data(str(tmp_path / "bad.npz"))
