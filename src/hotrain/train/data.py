"""Data sets by name or path, checked when they are loaded.

:func:`load_data` returns one of four kinds. :class:`ArrayData` holds small images as uint8 arrays; they are kept on
the device and augmented there. :class:`FolderData` lists image files; worker processes decode them. Texts are
:class:`hotrain.train.tokens.TokenData`, and image files with masks or boxes
:class:`hotrain.train.dense_folder.DenseFolder`.
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hotrain._version import install_extra
from hotrain.train.arrays import InMemory, check_labels, read_arrays
from hotrain.train.dense_folder import load_dense
from hotrain.train.image_file import FolderData, open_image
from hotrain.train.tokens import TokenData, load_tokens
from hotrain.train.torchvision_shim import ensure_torchvision

NAMES = ("cifar10", "cifar100", "digits")
CHECKED_FILES = 20_000  # about ten seconds of decoding at Tiny ImageNet's size


@dataclass(frozen=True)
class ArrayData(InMemory):
    """Small images in memory.

    Args:
        x_train, x_test: uint8, ``(N, C, H, W)``.
        y_train, y_test: int64, ``(N,)``, values in ``[0, len(classes))``.
        classes: names in label order.

    Raises:
        ValueError: shapes, dtypes or labels that do not fit, naming the array and the offending value.
    """

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
        """Number of channels."""
        return self.x_train.shape[1]

    @property
    def image_size(self) -> int:
        """The longer side in pixels."""
        return max(self.x_train.shape[2:])


Data = ArrayData | FolderData | TokenData


def load_data(name: str, *, data_dir: str = "data") -> Data:
    """Read a data set.

    Image files of folders of up to ``CHECKED_FILES`` are decoded once before the run; in larger ones a bad file shows
    when its batch is read.

    Args:
        name: ``cifar10`` or ``cifar100`` (through torchvision, downloaded into ``data_dir`` when absent),
            ``digits`` (scikit-learn's 1,797 real 8×8 images, offline), a folder with ``train/`` and ``val/`` or
            ``test/``, each with one folder per class, or with ``annotations/`` (`hotrain.train.dense_folder`), or an
            ``.npz`` file with ``x_train, y_train, x_test, y_test``, or with tokens (`hotrain.train.tokens`).

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
        is_text = "vocabulary" in read_arrays(path, (), ("vocabulary",))
        return load_tokens(path) if is_text else load_npz(path)
    if path.suffix == ".tsv":
        raise ValueError(f"data: {name} is text: train on the tokens that `hotrain prepare sst2 --texts FOLDER` makes")
    if path.is_dir():
        return load_dense(path) if (path / "annotations").is_dir() else load_folder(path)
    near = difflib.get_close_matches(name, NAMES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"data: got {name!r}, accepted are {', '.join(NAMES)}, an existing folder with train/ and val/ "
        f"or an .npz file{hint}"
    )


def _digits() -> ArrayData:
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ModuleNotFoundError as error:
        raise RuntimeError(f"data 'digits' comes with scikit-learn: {install_extra('train')}") from error
    digits = load_digits()
    images = (digits.images * (255 / 16)).round().astype(np.uint8)[:, None]  # 17 grey levels, (1797, 1, 8, 8)
    # The split is a property of the data set here, so it does not depend on the run's seed.
    x_train, x_test, y_train, y_test = train_test_split(
        images, digits.target.astype(np.int64), test_size=360, random_state=0, stratify=digits.target
    )
    return _from_numpy((x_train, y_train, x_test, y_test), digits.target_names)


def _cifar(name: str, data_dir: str) -> ArrayData:
    if not ensure_torchvision():
        raise RuntimeError(f"data {name!r} is read through torchvision: {install_extra('train')}")
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

    Greyscale images may leave out the channel axis. Other arrays of the file are not read. Without ``classes`` the
    classes are 0 to the largest training label. Classes without a training image cause a warning.

    Raises:
        ValueError: a missing or unreadable file, a missing array, one that is not as described, or arrays larger than
            this machine's memory.
    """
    arrays = read_arrays(path, _ARRAYS, ("classes",))
    for key in ("x_train", "x_test"):
        if arrays[key].dtype != np.uint8:
            raise ValueError(f"{key} in {path}: got {arrays[key].dtype}, accepted is uint8 images")
    for key in ("y_train", "y_test"):
        if arrays[key].dtype.kind not in "iu":
            raise ValueError(f"{key} in {path}: got {arrays[key].dtype}, accepted are integer labels")
    classes: Iterable[object]
    if "classes" in arrays:
        if arrays["classes"].ndim != 1:
            raise ValueError(f"classes in {path}: got shape {arrays['classes'].shape}, accepted is a list of names")
        classes = arrays["classes"]
    else:
        classes = range(_count_classes(arrays["y_train"].reshape(-1), f"y_train in {path}"))
    x_train, x_test = _nchw(arrays["x_train"]), _nchw(arrays["x_test"])
    y_train, y_test = (_int64(arrays[k]).reshape(-1) for k in ("y_train", "y_test"))
    data = _from_numpy((x_train, y_train, x_test, y_test), classes)
    _warn_of_empty_classes(data.y_train, data.classes, str(path))
    return data


_ARRAYS = ("x_train", "y_train", "x_test", "y_test")


def _int64(y: np.ndarray) -> np.ndarray:
    """Convert labels to int64. A value too large becomes the largest int64, which ``check_labels`` refuses."""
    return (np.minimum(y, np.uint64(2**63 - 1)) if y.dtype == np.uint64 else y).astype(np.int64)


def _count_classes(y: np.ndarray, where: str) -> int:
    """Return the largest label plus one (ValueError: no label, or more classes than images)."""
    if y.size == 0:
        raise ValueError(f"{where}: the split is empty")
    index = int(y.argmax())
    count = int(y[index]) + 1
    if count > y.size:
        raise ValueError(
            f"{where}: label {count - 1} at index {index} would make {count} classes of {y.size} images; "
            "number the labels from 0 without gaps, or add an array `classes` with the names of all classes"
        )
    return count


def _warn_of_empty_classes(y: Tensor, classes: Sequence[str], where: str) -> None:
    """Warn of classes without a training image."""
    empty = (y[y >= 0].bincount(minlength=len(classes)) == 0).nonzero().flatten().tolist()
    if empty:
        some = ", ".join(repr(classes[i]) for i in empty[:3]) + (", …" if len(empty) > 3 else "")
        warnings.warn(
            f"data: {where}: {len(empty)} of {len(classes)} classes have no training image ({some})", stacklevel=4
        )


def _from_numpy(arrays: tuple[np.ndarray, ...], classes: Iterable[object]) -> ArrayData:
    x_train, y_train, x_test, y_test = map(torch.from_numpy, arrays)
    return ArrayData(x_train, y_train, x_test, y_test, tuple(map(str, classes)))


def _nchw(x: np.ndarray) -> np.ndarray:
    """Bring (N, H, W), NHWC or NCHW to contiguous NCHW; NHWC if the last axis can be the channel (size 1, 3, 4)."""
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[3] in (1, 3, 4):
        x = x.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(x)


def load_folder(root: Path) -> FolderData:
    """List the image files of ``root/train/CLASS/*`` and, likewise, ``root/val`` or ``root/test``.

    Up to ``CHECKED_FILES`` files per split are decoded once, as a check. Only files directly in a class folder are
    read; nested folders, and classes without a training image, cause a warning. Links are followed.

    Raises:
        ValueError: no train or test split, a split without class folders, a class of the test split that the
            training split does not have, a class folder given twice or linked to a folder that contains it, an empty
            split, or a file that cannot be decoded.
    """
    train, test = root / "train", next((root / s for s in ("val", "test") if (root / s).is_dir()), None)
    if not train.is_dir():
        raise ValueError(f"data: {root} has no folder train/ (accepted: train/CLASS/*.jpg and val/ or test/ likewise)")
    if test is None:
        raise ValueError(f"data: {root} has neither val/ nor test/; accuracy is measured on one of them")
    classes = sorted(p.name for p in train.iterdir() if p.is_dir())
    if not classes:
        raise ValueError(f"data: {train} has no class folders (accepted: train/CLASS/*.jpg)")
    index = {c: i for i, c in enumerate(classes)}
    found = []
    for folder in (train, test):
        unknown = sorted(p.name for p in folder.iterdir() if p.is_dir() and p.name not in index)
        if unknown:
            raise ValueError(f"data: {folder} has class folder {unknown[0]!r}, which {train} has not")
        files = _list_images(folder, index)
        if not files:
            raise ValueError(f"data: no images in the class folders of {folder}")
        for path, _ in files if len(files) <= CHECKED_FILES else ():
            open_image(path)
        found.append(tuple(files))
    _warn_of_empty_classes(torch.tensor([label for _, label in found[0]], device="cpu"), classes, str(train))
    return FolderData(found[0], found[1], tuple(classes))


def _list_images(split: Path, index: dict[str, int]) -> list[tuple[str, int]]:
    """List the image files directly in the class folders of ``split``, with their labels, in natural order."""
    from timm.data.readers.img_extensions import get_img_extensions
    from timm.utils.misc import natural_key

    endings = tuple(get_img_extensions())
    inside = split.resolve()
    real: dict[Path, Path] = {}
    files: list[tuple[str, int]] = []
    nested: list[str] = []
    for folder in sorted(p for p in split.iterdir() if p.is_dir()):
        target = folder.resolve()
        if inside.is_relative_to(target):
            raise ValueError(f"data: {folder} is a link to {target}, which it is in; remove it")
        if target in real:
            raise ValueError(f"data: {folder} and {real[target]} are the same folder; remove one of them")
        real[target] = folder
        for entry in os.scandir(folder):
            if os.path.isdir(entry.path):
                nested.append(entry.path)
            elif entry.name.lower().endswith(endings) and not entry.name.startswith("._"):  # macOS's beside each
                files.append((entry.path, index[folder.name]))
    if nested:
        warnings.warn(
            f"data: {len(nested)} folders within class folders of {split} are not read (the first is {min(nested)}); "
            "move their images up",
            stacklevel=4,
        )
    return sorted(files, key=lambda item: natural_key(item[0]))
