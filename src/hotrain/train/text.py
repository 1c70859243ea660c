"""Text data: labelled text from ``.tsv`` files as token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

PADDING, CLASSIFY, SEPARATE = 0, 1, 2
_FIRST_BYTE = 3

Tokenizer = Callable[[str, str | None], Sequence[int]]  # (text, second text or None) -> token ids


@dataclass(frozen=True)
class TextData:
    """Labelled token sequences, right-padded.

    Args:
        ids: int64, ``(N, L)``.
        mask: int64, ``(N, L)``, 1 at tokens and 0 at padding.
        labels: int64, ``(N,)``.
        classes: label names in label order.
    """

    ids: Tensor
    mask: Tensor
    labels: Tensor
    classes: tuple[str, ...]


def byte_tokens(text: str, second: str | None = None) -> list[int]:
    """Tokenize as UTF-8 bytes with start and separator tokens: 259 ids, nothing to download."""
    ids = [CLASSIFY, *(b + _FIRST_BYTE for b in text.encode()), SEPARATE]
    if second is not None:
        ids += [*(b + _FIRST_BYTE for b in second.encode()), SEPARATE]
    return ids


def pretrained_tokenizer(name: str) -> Tokenizer:
    """Return the transformers tokenizer of a name or folder.

    Raises:
        RuntimeError: transformers is not installed, or the tokenizer is neither cached nor reachable.
    """
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise RuntimeError("a pretrained tokenizer needs transformers: pip install 'hotrain[text]'") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise RuntimeError(
            f"tokenizer {name!r} is neither a folder nor cached nor reachable; give a local folder or use bytes"
        ) from error
    return lambda text, second: tokenizer(text, second)["input_ids"]


def load_tsv(
    path: str | Path,
    *,
    tokenizer: Tokenizer = byte_tokens,
    length: int = 128,
    label: str = "label",
    text: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
) -> TextData:
    """Read a tab-separated file with one labelled text (or pair of texts) per line.

    Args:
        path: the file, in UTF-8.
        tokenizer: makes ids from one or two texts.
        length: largest number of tokens; longer sequences are truncated.
        label: name of the label column.
        text: names of one or two text columns; None: every other column whose name starts with ``sentence``,
            ``text``, ``question`` or ``premise``/``hypothesis``, or all other columns if there are at most two.
        classes: label names in order, so that several files share them; None: the labels that occur, sorted.
        columns: names of the columns of a file without a header line; None: its first line names them.

    Raises:
        ValueError: a file that is empty or not UTF-8, a missing column, a line with another number of fields or an
            unknown label, with its number.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"data: no file {str(path)!r}")
    try:
        with open(path, encoding="utf-8-sig") as file:
            # GLUE quotes nothing: a quotation mark is text.
            rows = [line.rstrip("\n").split("\t") for line in file]
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data: {path} is not UTF-8 (byte 0x{error.object[error.start]:02x}); convert it, "
            "with `iconv -f latin1 -t utf-8` if it is Latin-1"
        ) from error
    except OSError as error:
        raise ValueError(f"data: {path} cannot be read ({error.strerror})") from error
    header = list(columns) if columns is not None else rows[0] if rows else []
    body = list(enumerate(rows, start=1))[0 if columns is not None else 1 :]
    if not body:
        raise ValueError(f"data: {path} has no line of text")
    texts = list(text) if text is not None else _text_columns(header, label)
    for name in [label, *texts]:
        if name not in header:
            raise ValueError(f"data: {path} has no column {name!r} (it has {', '.join(header)})")
    if not 1 <= len(texts) <= 2:
        raise ValueError(f"data: {path}: got text columns {texts}, accepted are one or two; name them with text=")
    for number, row in body:
        if len(row) != len(header):
            raise ValueError(f"data: {path} line {number}: {len(row)} fields, accepted are {len(header)}")
    names = [row[header.index(label)] for _, row in body]
    known = tuple(classes) if classes is not None else tuple(sorted(set(names)))
    for (number, _), name in zip(body, names, strict=True):
        if name not in known:
            raise ValueError(f"data: {path} line {number}: label {name!r}, accepted are {', '.join(known)}")
    first, second = header.index(texts[0]), header.index(texts[1]) if len(texts) == 2 else None
    sequences = [list(tokenizer(row[first], None if second is None else row[second]))[:length] for _, row in body]
    ids = torch.full((len(sequences), max(map(len, sequences))), PADDING, device="cpu")
    mask = torch.zeros_like(ids)
    for i, sequence in enumerate(sequences):
        ids[i, : len(sequence)] = torch.tensor(sequence, device="cpu")
        mask[i, : len(sequence)] = 1
    return TextData(ids, mask, torch.tensor([known.index(name) for name in names], device="cpu"), known)


def _text_columns(header: Sequence[str], label: str) -> list[str]:
    others = [name for name in header if name != label]
    starts = ("sentence", "text", "question", "premise", "hypothesis")
    return [name for name in others if name.lower().startswith(starts)] or others
