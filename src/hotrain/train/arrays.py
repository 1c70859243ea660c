"""A data set in memory, and arrays of .npz files, read with errors that say what is wrong and checked."""

from __future__ import annotations

import lzma
import os
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

_MAX_RATIO = 20  # above any compression ratio of images; some machines report less memory than they have
# What zipfile raises for damaged files; RuntimeError for entries that are encrypted, or packed as it cannot unpack.
_DAMAGED = (OSError, EOFError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, RuntimeError)


@dataclass(frozen=True)
class InMemory:
    """Inputs (N, …) and labels of both splits, and the names of the classes in label order."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: tuple[str, ...]

    @property
    def train_size(self) -> int:
        """Number of training images or sequences."""
        return len(self.x_train)

    @property
    def test_size(self) -> int:
        """Number of test images or sequences."""
        return len(self.x_test)


def read_arrays(path: Path, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """The arrays of an ``.npz`` file; others in it are not read.

    Raises:
        ValueError: a missing or unreadable file, a missing array, or arrays larger than this machine's memory.
    """
    if not path.is_file():  # a pipe would wait, a device would not end
        raise ValueError(f"data: no file {str(path)!r}")
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            missing = [k for k in required if k not in members]
            if missing:
                raise ValueError(f"data: {path} has no {', '.join(missing)} (it has {', '.join(members)})")
            wanted = {k: members[k] for k in (*required, *optional) if k in members}
            _check_size(path, list(wanted.values()))
            return {name: _read_array(archive, member, path) for name, member in wanted.items()}
    except _DAMAGED as error:
        raise ValueError(f"data: {path} cannot be read as .npz ({error}); write it with numpy.savez") from error


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> np.ndarray:
    with archive.open(member) as stream:
        try:
            array = np.lib.format.read_array(stream, allow_pickle=False)
            if stream.read(1):  # at the end of the stream its checksum is verified
                raise ValueError("its header says fewer bytes than it has")
            return array
        except (ArithmeticError, MemoryError, TypeError, ValueError, tokenize.TokenError) as error:
            if "pickle" in str(error):  # NumPy would advise allow_pickle=True
                error = ValueError("it holds Python objects")
            reason = " ".join(str(error).split())
            raise ValueError(f"data: {path}: {member.filename} cannot be read as an array ({reason})") from None


def _check_size(path: Path, members: list[zipfile.ZipInfo]) -> None:
    """Refuse arrays that decompress to more than the machine's memory and to far more than the file."""
    need, packed = sum(info.file_size for info in members), sum(info.compress_size for info in members)
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > max(have, _MAX_RATIO * packed):
        raise ValueError(f"data: {path} unpacks to {need / 2**30:,.1f} GiB, this machine has {have / 2**30:,.1f} GiB")


def check_labels(y: Tensor, classes: int, where: str) -> None:
    """Check that all integer labels (N,) of the array ``where`` are in ``[0, classes)``.

    Raises:
        ValueError: a label is out of range; the message gives the first one, its index and how many there are.
    """
    bad = ((y < 0) | (y >= classes)).nonzero().flatten()
    if len(bad):
        i = int(bad[0])
        raise ValueError(
            f"{where}: label {int(y[i])} at index {i} is out of range for {classes} classes "
            f"(accepted 0 to {classes - 1}; {len(bad)} of {len(y)} labels are out of range)"
        )
