"""Texts as the arrays of token ids that `hotrain.train.tokens.load_tokens` reads."""

from __future__ import annotations

import tarfile
import tempfile
import zlib
from collections import Counter
from pathlib import Path

import numpy as np

from hotrain.train.tokens import PADDING

CLASSIFY, UNKNOWN = 1, 2
SETS = ("sst2", "text")
"""Data sets that `arrays_of` makes."""


def arrays_of(name: str, texts: Path) -> dict[str, np.ndarray]:
    """The arrays of one of `SETS`, from a folder of texts or a tar archive of one.

    ``sst2``: GLUE's ``sst2/train.tsv`` and ``dev.tsv``, 64 words of a phrase, of those that occur twice. ``text``: all
    bytes of ``lm/*.txt`` in windows of 256, of each file the last tenth for the test.

    Raises:
        ValueError: no such folder or archive, or a missing or empty file in it.
    """
    if texts.is_dir():
        return _phrases(texts / "sst2") if name == "sst2" else _windows(texts / "lm")
    try:
        with tempfile.TemporaryDirectory() as folder, tarfile.open(texts) as archive:
            archive.extractall(folder, filter="data")
            return arrays_of(name, Path(folder))
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise ValueError(f"data: {texts} is neither a folder nor a tar archive that can be read ({error})") from error


def _phrases(folder: Path, length: int = 64) -> dict[str, np.ndarray]:
    found = {part: read_phrases(folder / f"{name}.tsv") for part, name in (("train", "train"), ("test", "dev"))}
    counts = Counter(word for text, _ in found["train"] for word in text.split())
    known = [word for word, times in counts.most_common() if times > 1]
    ids = {word: number for number, word in enumerate(known, start=UNKNOWN + 1)}
    classes = sorted({label for _, label in found["train"]})
    arrays = {"classes": np.array(classes), "vocabulary": np.array(len(ids) + UNKNOWN + 1)}
    for part, phrases in found.items():
        if other := {label for _, label in phrases}.difference(classes):
            raise ValueError(f"data: {folder} has label {min(other)!r} in dev.tsv, accepted are {', '.join(classes)}")
        x = np.full((len(phrases), length), PADDING, np.uint16)
        for row, (text, _) in zip(x, phrases, strict=True):
            words = [CLASSIFY, *(ids.get(word, UNKNOWN) for word in text.split())][:length]
            row[: len(words)] = words
        arrays[f"x_{part}"], arrays[f"y_{part}"] = x, np.array([classes.index(label) for _, label in phrases])
    return arrays


def read_phrases(path: Path) -> list[tuple[str, str]]:
    """Text and label of each line of a tab-separated file with the columns ``sentence`` and ``label``, as GLUE has it.

    Raises:
        ValueError: a missing or empty file, one that is not UTF-8, a missing column, or a line with another number of
            fields.
    """
    if not path.is_file():
        raise ValueError(f"data: no file {str(path)!r}")
    try:
        with open(path, encoding="utf-8-sig") as file:
            # GLUE quotes nothing: a quotation mark is text.
            header, *rows = ([line.rstrip("\n").split("\t") for line in file]) or [[]]
    except UnicodeDecodeError as error:
        raise ValueError(f"data: {path} is not UTF-8 (byte 0x{error.object[error.start]:02x}); convert it") from error
    except OSError as error:
        raise ValueError(f"data: {path} cannot be read ({error.strerror})") from error
    if not rows:
        raise ValueError(f"data: {path} has no line of text")
    for name in ("sentence", "label"):
        if name not in header:
            raise ValueError(f"data: {path} has no column {name!r} (it has {', '.join(header)})")
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise ValueError(f"data: {path} line {number}: {len(row)} fields, accepted are {len(header)}")
    return [(row[header.index("sentence")], row[header.index("label")]) for row in rows]


def _windows(folder: Path, length: int = 256) -> dict[str, np.ndarray]:
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise ValueError(f"data: {folder} has no .txt file")
    parts: dict[str, list[np.ndarray]] = {"x_train": [], "x_test": []}
    for file in files:
        text = np.frombuffer(file.read_bytes(), dtype=np.uint8)
        cut = len(text) - len(text) // 10
        for name, part in (("x_train", text[:cut]), ("x_test", text[cut:])):
            if len(part) <= length:
                raise ValueError(f"data: {file} has {len(text)} bytes, accepted are at least {10 * (length + 1)}")
            parts[name].append(np.lib.stride_tricks.sliding_window_view(part, length + 1)[::length])
    return {**{name: np.concatenate(found) for name, found in parts.items()}, "vocabulary": np.array(256)}
