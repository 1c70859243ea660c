"""Data sets by name or path, checked before any work: what is wrong, and where, is said here and not in step 900.

Two kinds come out of :func:`load_data`. :class:`ArrayData` holds small images as uint8 arrays; the loop keeps them
on the device and augments them there. :class:`FolderData` lists image files; they are decoded by worker processes.
"""

from __future__ import annotations

import difflib
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hotrain.train.torchvision_shim import ensure_torchvision

if TYPE_CHECKING:
    from PIL import Image

NAMES = ("cifar10", "cifar100", "digits")
CHECKED_FILES = 20_000  # about ten seconds of decoding at Tiny ImageNet's size


@dataclass(frozen=True)
class ArrayData:
    """Small images in memory.

    Args:
        x_train, x_test: uint8, ``(N, C, H, W)``.
        y_train, y_test: int64, ``(N,)``, values in ``[0, len(classes))``.
        classes: names in label order.

    Raises:
        ValueError: shapes, dtypes or labels that do not fit, naming the array and the offending value.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        for split in ("train", "test"):
            x, y = getattr(self, f"x_{split}"), getattr(self, f"y_{split}")
            if x.dtype != torch.uint8 or x.ndim != 4:
                raise ValueError(f"x_{split}: got {x.dtype} of shape {tuple(x.shape)}, accepted is uint8 (N, C, H, W)")
            if len(x) == 0:
                raise ValueError(f"x_{split}: the split is empty")
            if y.shape != (len(x),):
                raise ValueError(f"y_{split}: got shape {tuple(y.shape)} for {len(x)} images in x_{split}")
            check_labels(y, len(self.classes), f"y_{split}")
        if self.x_train.shape[1:] != self.x_test.shape[1:]:
            raise ValueError(
                f"x_test: images of shape {tuple(self.x_test.shape[1:])}, "
                f"those of x_train have {tuple(self.x_train.shape[1:])}"
            )

    @property
    def channels(self) -> int:
        return self.x_train.shape[1]

    @property
    def image_size(self) -> int:
        """The longer side in pixels."""
        return max(self.x_train.shape[2:])

    @property
    def train_size(self) -> int:
        return len(self.x_train)


@dataclass(frozen=True)
class FolderData:
    """Image files by class. ``train`` and ``test`` are ``(path, label)`` pairs; labels are the sorted class folders.

    ``skipped`` counts the files left out because they cannot be decoded (``corrupt="skip"``).
    """

    train: tuple[tuple[str, int], ...]
    test: tuple[tuple[str, int], ...]
    classes: tuple[str, ...]
    skipped: int = 0
    channels: int = 3
    image_size: int = 224

    @property
    def train_size(self) -> int:
        return len(self.train)


def load_data(name: str, *, data_dir: str = "data", corrupt: str = "refuse") -> ArrayData | FolderData:
    """Read a data set.

    Args:
        name: ``cifar10`` or ``cifar100`` (through torchvision, downloaded into ``data_dir`` when absent),
            ``digits`` (scikit-learn's 1,797 real 8×8 images, offline), a folder with ``train/`` and ``val/`` or
            ``test/``, each with a folder a class, or an ``.npz`` file with ``x_train, y_train, x_test, y_test``.
        corrupt: ``refuse`` or ``skip`` image files that cannot be decoded. Folders of up to ``CHECKED_FILES`` files
            are decoded once before the run; in larger ones a bad file shows when its batch is read.

    Raises:
        ValueError: an unknown name, a missing file, or contents that are not as described above.
        RuntimeError: a download that failed.
    """
    path = Path(name).expanduser()
    if name == "digits":
        return _digits()
    if name in ("cifar10", "cifar100"):
        return _cifar(name, data_dir)
    if path.suffix == ".npz":
        return load_npz(path)
    if path.suffix == ".tsv":
        raise ValueError(f"data: {name} is text, a run trains on images; read it with hotrain.train.text.load_tsv")
    if path.is_dir():
        return load_folder(path, corrupt=corrupt)
    near = difflib.get_close_matches(name, NAMES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"data: got {name!r}, accepted are {', '.join(NAMES)}, an existing folder with train/ and val/ "
        f"or an .npz file{hint}"
    )


def check_labels(y: Tensor, classes: int, where: str) -> None:
    """Refuse labels outside ``[0, classes)``.

    Raises:
        ValueError: naming the first bad label, its index and how many there are.
    """
    bad = ((y < 0) | (y >= classes)).nonzero().flatten()
    if len(bad):
        i = int(bad[0])
        raise ValueError(
            f"{where}: label {int(y[i])} at index {i} is out of range for {classes} classes "
            f"(accepted 0 to {classes - 1}; {len(bad)} of {len(y)} labels are out of range)"
        )


def _digits() -> ArrayData:
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ModuleNotFoundError as error:
        raise RuntimeError("data 'digits' comes with scikit-learn: pip install 'hotrain[demo]'") from error
    digits = load_digits()
    images = (digits.images * (255 / 16)).round().astype(np.uint8)[:, None]  # 17 grey levels, (1797, 1, 8, 8)
    # The split is a property of the data set here, so it does not depend on the run's seed.
    x_train, x_test, y_train, y_test = train_test_split(
        images, digits.target.astype(np.int64), test_size=360, random_state=0, stratify=digits.target
    )
    return _from_numpy((x_train, y_train, x_test, y_test), digits.target_names)


def _cifar(name: str, data_dir: str) -> ArrayData:
    if not ensure_torchvision():
        raise RuntimeError(f"data {name!r} is read through torchvision: pip install 'hotrain[train]'")
    from torchvision.datasets import CIFAR10, CIFAR100

    kind = {"cifar10": CIFAR10, "cifar100": CIFAR100}[name]
    try:
        train, test = (kind(data_dir, train=split, download=True) for split in (True, False))
    except (OSError, RuntimeError) as error:
        raise RuntimeError(
            f"data {name!r} is not in {data_dir!r} and could not be downloaded ({error}). "
            "Without network give an .npz file with x_train, y_train, x_test, y_test instead"
        ) from error
    arrays = (_nchw(train.data), np.array(train.targets), _nchw(test.data), np.array(test.targets))
    return _from_numpy(arrays, train.classes)


def load_npz(path: Path) -> ArrayData:
    """Read ``x_train, y_train, x_test, y_test`` (and optional ``classes``): uint8 NHWC or NCHW, integer labels.

    Greyscale images may leave out the channel axis.

    Raises:
        ValueError: a missing or unreadable file, a missing array, or one that is not as described.
    """
    if not path.is_file():
        raise ValueError(f"data: no file {str(path)!r}")
    try:
        # Opened here, since np.load leaves its own file open when the contents are not a zip archive.
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"data: {path} cannot be read as .npz ({error})") from error
    missing = [k for k in ("x_train", "y_train", "x_test", "y_test") if k not in arrays]
    if missing:
        raise ValueError(f"data: {path} has no {', '.join(missing)} (it has {', '.join(arrays)})")
    for key in ("x_train", "x_test"):
        if arrays[key].dtype != np.uint8:
            raise ValueError(f"{key} in {path}: got {arrays[key].dtype}, accepted is uint8 images")
    for key in ("y_train", "y_test"):
        if arrays[key].dtype.kind not in "iu":
            raise ValueError(f"{key} in {path}: got {arrays[key].dtype}, accepted are integer labels")
    if "classes" in arrays:
        classes = tuple(map(str, arrays["classes"]))
    else:
        if arrays["y_train"].size == 0:
            raise ValueError(f"y_train in {path}: the split is empty")
        classes = tuple(map(str, range(int(arrays["y_train"].max()) + 1)))
    x_train, x_test = _nchw(arrays["x_train"]), _nchw(arrays["x_test"])
    y_train, y_test = (arrays[k].astype(np.int64).reshape(-1) for k in ("y_train", "y_test"))
    return _from_numpy((x_train, y_train, x_test, y_test), classes)


def _from_numpy(arrays: tuple[np.ndarray, ...], classes: Iterable[object]) -> ArrayData:
    x_train, y_train, x_test, y_test = map(torch.from_numpy, arrays)
    return ArrayData(x_train, y_train, x_test, y_test, tuple(map(str, classes)))


def _nchw(x: np.ndarray) -> np.ndarray:
    """``x`` (N, H, W), NHWC or NCHW as contiguous NCHW. The axis of size 1 or 3 is the channel; NHWC if both are."""
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[3] in (1, 3, 4):
        x = x.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(x)


def load_folder(root: Path, *, corrupt: str = "refuse") -> FolderData:
    """List ``root/train/CLASS/*`` and ``root/val`` or ``root/test`` likewise; decode the files once if few.

    Raises:
        ValueError: no train or test split, a split without class folders, a class of the test split that the
            training split lacks, an empty split, or (``corrupt="refuse"``) a file that cannot be decoded.
    """
    ensure_torchvision()
    from timm.data.readers.reader_image_folder import find_images_and_targets

    splits = {"train": root / "train", "test": next((root / s for s in ("val", "test") if (root / s).is_dir()), None)}
    if not splits["train"].is_dir():  # type: ignore[union-attr]
        raise ValueError(f"data: {root} has no folder train/ (accepted: train/CLASS/*.jpg and val/ or test/ likewise)")
    if splits["test"] is None:
        raise ValueError(f"data: {root} has neither val/ nor test/; accuracy is measured on one of them")
    classes = sorted(p.name for p in splits["train"].iterdir() if p.is_dir())  # type: ignore[union-attr]
    if not classes:
        raise ValueError(f"data: {splits['train']} has no class folders (accepted: train/CLASS/*.jpg)")
    index = {c: i for i, c in enumerate(classes)}
    found: dict[str, tuple[tuple[str, int], ...]] = {}
    skipped = 0
    for split, folder in splits.items():
        assert folder is not None
        unknown = sorted(p.name for p in folder.iterdir() if p.is_dir() and p.name not in index)
        if unknown:
            raise ValueError(f"data: {folder} has class folder {unknown[0]!r}, which {splits['train']} has not")
        files, _ = find_images_and_targets(str(folder), class_to_idx=index, leaf_name_only=True)
        readable = files
        if len(files) <= CHECKED_FILES:
            readable = [item for item in files if open_image(item[0], corrupt) is not None]
        skipped += len(files) - len(readable)
        if not readable:
            raise ValueError(f"data: no images in the class folders of {folder}")
        found[split] = tuple(readable)
    return FolderData(found["train"], found["test"], tuple(classes), skipped)


def open_image(path: str, corrupt: str = "refuse") -> Image.Image | None:
    """Decode one file to RGB; None for a file that cannot be decoded when ``corrupt`` is ``skip``.

    Raises:
        ValueError: such a file when ``corrupt`` is ``refuse``.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:  # what Pillow raises for truncated and garbled files
        if corrupt == "skip":
            return None
        raise ValueError(
            f"data: {path} cannot be decoded ({error}); repair or remove it, or leave such files out with corrupt=skip"
        ) from error
