"""Folders in ADE20K's form (images and masks) and in COCO's (images and ``instances_*.json``)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hotrain.files import parse_json, read_text
from hotrain.train.image_file import FolderData, open_image

NAMES = "objectInfo150.txt"  # ADE20K's list of classes
IGNORED = -100  # of masks: what cross-entropy leaves out

Item = tuple[str, str | tuple[tuple[float, ...], ...]]
"""The file of an image, and that of its mask, or its objects: label, left, top, width, height in pixels."""


@dataclass(frozen=True)
class DenseFolder(FolderData):
    """Image files with masks or boxes.

    Args:
        train, test: image, and mask or objects.
        classes: names in label order.
        masks: masks or boxes.
        objects: the most of an image.
    """

    masks: bool
    objects: int = 0
    image_size: ClassVar[int] = 512


def load_dense(root: Path) -> DenseFolder:
    """List the images of a folder, and their masks or boxes.

    ADE20K's form: ``images/training/*.jpg`` and ``images/validation``, with masks of the same names (``.png``) in
    ``annotations/training`` and ``annotations/validation``. 0 is no class and is left out of loss and metric, k is the
    k-th class; their names are in ``objectInfo150.txt``, or they are numbered as far as the training masks go.

    COCO's: ``annotations/instances_train2017.json`` and ``instances_val2017.json``, with images in ``train2017`` and
    ``val2017``, or other names after ``train`` and ``val``. Crowds and boxes without an area are left out.

    Raises:
        ValueError: a folder or file that is missing, an image without its mask, an annotation of an image or category
            that is not listed, or no image.
    """
    lists = sorted((root / "annotations").glob("instances_*.json"))
    found = _coco(root, lists) if lists else _ade(root)
    for split, items in (("training", found.train), ("test", found.test)):
        if not items:
            raise ValueError(f"data: {root} has no {split} images")
    return found


def _ade(root: Path) -> DenseFolder:
    splits: list[tuple[Item, ...]] = []
    for split in ("training", "validation"):
        images, masks = root / "images" / split, root / "annotations" / split
        for folder in (images, masks):
            if not folder.is_dir():
                raise ValueError(
                    f"data: {folder} is missing (accepted: images/training/*.jpg with annotations/training/*.png, and "
                    "validation likewise; or annotations/instances_train*.json and instances_val*.json)"
                )
        items: list[Item] = []
        for image in sorted(path for path in images.iterdir() if path.is_file()):
            mask = masks / f"{image.stem}.png"
            if not mask.is_file():
                raise ValueError(f"data: {image} has no mask {mask}")
            items.append((str(image), str(mask)))
        splits.append(tuple(items))
    if (root / NAMES).is_file():
        lines = [line for line in read_text(root / NAMES).splitlines()[1:] if line.strip()]
        classes = [line.split("\t")[-1].split(",")[0].strip() for line in lines]
    else:
        decoded = (_mask(str(mask)) for _, mask in splits[0])
        highest = max((int(mask[mask != 255].max(initial=0)) for mask in decoded), default=0)
        classes = [str(number) for number in range(1, highest + 1)]
    return DenseFolder(splits[0], splits[1], tuple(classes), masks=True)


def _coco(root: Path, lists: list[Path]) -> DenseFolder:
    splits: list[tuple[Item, ...]] = []
    named: dict[int, str] = {}
    for split in ("train", "val"):
        mine = [path for path in lists if path.stem.startswith(f"instances_{split}")]
        if len(mine) != 1:
            raise ValueError(f"data: {root}/annotations has {len(mine)} files instances_{split}*.json, accepted is one")
        try:
            table = parse_json(read_text(mine[0]))
            named = named or {int(each["id"]): str(each["name"]) for each in table["categories"]}
            labels = {number: label for label, number in enumerate(sorted(named))}
            objects: dict[int, list[tuple[float, ...]]] = {each["id"]: [] for each in table["images"]}
            for each in table["annotations"]:
                box = [float(value) for value in each["bbox"]]
                if not each.get("iscrowd") and min(box[2:]) > 0:
                    objects[each["image_id"]].append((float(labels[each["category_id"]]), *box))
            folder = root / mine[0].stem.removeprefix("instances_")
            splits.append(tuple((str(folder / e["file_name"]), tuple(objects[e["id"]])) for e in table["images"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"data: {mine[0]} is not as COCO's ({type(error).__name__}: {error})") from error
    most = max((len(boxes) for items in splits for _, boxes in items), default=0)
    return DenseFolder(splits[0], splits[1], tuple(named[n] for n in sorted(named)), masks=False, objects=max(1, most))


def _mask(path: str) -> np.ndarray:
    image = open_image(path, mode=None)
    values = np.array(image)
    if values.ndim != 2 or values.dtype.kind not in "iu":
        raise ValueError(f"data: {path}: got {image.mode}, accepted are masks with one number at each pixel")
    return values.astype(np.int64)


def read_item(item: Item, data: DenseFolder, size: int, mirror: bool) -> tuple[Tensor, Tensor]:
    """Decode an image and its mask or objects, resized to a square.

    Args:
        size: side in pixels; the ratio of the sides is not kept.
        mirror: whether to exchange left and right.

    Returns:
        Image, float32 (3, size, size) from 0 to 255, and mask, int64 (size, size), or objects, float32
        (``data.objects``, 5), as `hotrain.train.scenes.scenes` makes them.

    Raises:
        ValueError: a file that cannot be decoded, or a mask of another size or with other classes.
    """
    from PIL import Image

    path, known = item
    image = open_image(path)
    width, height = image.size
    small = image.resize((size, size), Image.Resampling.BILINEAR)
    picture = torch.from_numpy(np.array(small)).permute(2, 0, 1).float()
    target: Any
    if isinstance(known, str):
        mask = _mask(known)
        if mask.shape != (height, width):
            raise ValueError(f"data: {known} has {mask.shape[::-1]} pixels, its image {image.size}")
        if mask.max() > len(data.classes) and (mask[mask > len(data.classes)] != 255).any():
            raise ValueError(f"data: {known} has class {mask.max()}, accepted are 0 to {len(data.classes)}, and 255")
        mask = np.where((mask == 0) | (mask > len(data.classes)), IGNORED, mask - 1)
        rows, columns = (((np.arange(size) + 0.5) * side / size).astype(int) for side in (height, width))
        target = torch.from_numpy(mask[rows][:, columns])
    else:
        target = torch.tensor([-1.0, 0, 0, 0, 0], device="cpu").repeat(data.objects, 1)
        for place, (label, left, top, across, down) in enumerate(known):
            centre = ((left + across / 2) / width, (top + down / 2) / height)
            target[place] = torch.tensor([label, *centre, across / width, down / height], device="cpu")
    if mirror:
        picture = picture.flip(-1)
        if data.masks:
            target = target.flip(-1)
        else:
            target[:, 1] = 1 - target[:, 1]
    return picture, target
