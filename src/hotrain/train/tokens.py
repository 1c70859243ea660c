"""Texts in memory as token ids, for a classification or for language modelling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hotrain.train.arrays import InMemory, check_labels, read_arrays

PADDING = 0
_ARRAYS = ("x_train", "x_test", "vocabulary")


@dataclass(frozen=True)
class TokenData(InMemory):
    """Token sequences in memory, all of one length.

    Args:
        x_train, x_test: int64, (N, L), in [0, vocabulary); `PADDING` fills short texts up.
        y_train, y_test: int64, labels (N,), or of language modelling the next token of each, (N, L).
        classes: names in label order; of language modelling the ids.
        vocabulary: number of ids.

    Raises:
        ValueError: shapes, ids or labels that do not fit, naming the array.
    """

    vocabulary: int

    def __post_init__(self) -> None:
        for split in ("train", "test"):
            x, y = getattr(self, f"x_{split}"), getattr(self, f"y_{split}")
            if x.ndim != 2 or not x.numel():
                raise ValueError(f"x_{split}: got shape {tuple(x.shape)}, accepted are sequences of tokens (N, L)")
            if x.shape[1] != self.image_size:
                raise ValueError(
                    f"x_{split}: sequences of {x.shape[1]} tokens, those of x_train have {self.image_size}"
                )
            if y.shape not in ((len(x),), x.shape):
                raise ValueError(f"y_{split}: got shape {tuple(y.shape)} for x_{split} of {tuple(x.shape)}")
            check_labels(x.flatten(), self.vocabulary, f"tokens of x_{split}")
            check_labels(y.flatten(), len(self.classes), f"y_{split}")

    @property
    def is_text_model(self) -> bool:
        """Whether each position predicts the next token."""
        return self.y_train.ndim == 2

    @property
    def channels(self) -> int:
        """Number of ids."""
        return self.vocabulary

    @property
    def image_size(self) -> int:
        """Tokens of a sequence."""
        return self.x_train.shape[1]


def load_tokens(path: Path) -> TokenData:
    """Read an ``.npz`` file, as `hotrain prepare` writes it.

    Its arrays are x_train and x_test, ids (N, L), and vocabulary, (); for a classification also y_train, y_test, (N,),
    and classes, (C,). Without labels each position predicts the next: of L ids the last is only predicted.

    Raises:
        ValueError: a missing array, or one that is not as described.
    """
    arrays = read_arrays(path, _ARRAYS, ("y_train", "y_test", "classes"))
    for name, array in arrays.items():
        if name != "classes" and array.dtype.kind not in "iu":
            raise ValueError(f"{name} in {path}: got {array.dtype}, accepted are integers")
    if arrays["vocabulary"].ndim:
        raise ValueError(f"vocabulary in {path}: got shape {arrays['vocabulary'].shape}, accepted is one number")
    vocabulary = int(arrays["vocabulary"])
    of = {name: torch.from_numpy(array.astype(np.int64)) for name, array in arrays.items() if name != "classes"}
    x, test = of["x_train"], of["x_test"]
    if "y_train" not in of:
        if x.ndim != 2 or test.ndim != 2:
            raise ValueError(f"data: {path}: got shapes {tuple(x.shape)} and {tuple(test.shape)}, accepted is (N, L)")
        ids = tuple(map(str, range(vocabulary)))
        return TokenData(x[:, :-1], x[:, 1:], test[:, :-1], test[:, 1:], ids, vocabulary)
    missing = [name for name in ("y_test", "classes") if name not in arrays]
    if missing:
        raise ValueError(f"data: {path} has no {', '.join(missing)}, which belong to y_train")
    return TokenData(x, of["y_train"], test, of["y_test"], tuple(map(str, arrays["classes"])), vocabulary)
