"""Scenes for dense prediction, drawn from the images of a data set: several of them on a canvas of smooth colours.

Every scene has one to four images, each at 24 to 48 pixels of a canvas of 128, at random places, mirrored or not; later
ones cover earlier ones. Its mask has the class of the image at each pixel, its boxes are the images' rectangles. A
scene is a function of an image and of numbers drawn on the CPU, so that it is the same on any device; it is drawn where
the images are, whenever a batch is made, and never stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hotrain.train.data import ArrayData

OBJECTS = 4  # at most, in a scene
SCALE = 4  # side of the canvas over that of an image
SIDES = (3 / 16, 3 / 8)  # of an image in the scene, as shares of the canvas
FIELD = 4  # the background is enlarged from so many colours squared
BACKGROUND = "background"
VISIBLE = 0.5  # share of an image above which it has a box


@dataclass(frozen=True)
class SceneData(ArrayData):
    """Images in memory of which scenes are drawn: training scenes of training images, test scenes of test images.

    There are as many scenes as images; each epoch draws others, test scenes are always the same.

    Args:
        classes: names in label order; of masks the background's first, so that labels of images are one less.
        masks: whether the scenes have masks or boxes.
    """

    masks: bool

    @classmethod
    def of(cls, images: ArrayData, *, masks: bool) -> SceneData:
        """Scenes of the images of a data set."""
        classes = (BACKGROUND, *images.classes) if masks else images.classes
        return cls(images.x_train, images.y_train, images.x_test, images.y_test, classes, masks)

    @property
    def image_size(self) -> int:
        """Side of the canvas in pixels, unless the run says otherwise."""
        return SCALE * super().image_size


def draws(count: int, channels: int, key: int) -> Tensor:
    """The random numbers of ``count`` scenes, float32 ``(count, …)`` in [0, 1), on the CPU."""
    generator = torch.Generator().manual_seed(key)
    return torch.rand(count, 1 + 5 * OBJECTS + channels * FIELD**2, generator=generator, device="cpu")


def scenes(
    images: Tensor, labels: Tensor, first: Tensor, drawn: Tensor, size: int, *, masks: bool
) -> tuple[Tensor, Tensor]:
    """Draw scenes.

    Args:
        images: uint8, (N, C, H, W).
        labels: (N,).
        first: indices of the image that is surely in each scene, (B,).
        drawn: of `draws`, (B, …), on the images' device.
        size: side of the canvas in pixels.
        masks: whether to return masks or boxes.

    Returns:
        Pictures, float32 (B, C, size, size) from 0 to 255, and masks, int64 (B, size, size), 0 for the background and
        1 + the label elsewhere; or boxes, float32 (B, `OBJECTS`, 5): label, centre and size (x, y, w, h, as shares of
        the canvas). The label is -1 where there is no image, or more than half of it is covered.
    """
    batch, channels = len(first), images.shape[1]
    count = 1 + (drawn[:, 0] * OBJECTS).long().clamp(max=OBJECTS - 1)
    which, side, left, top, flip = drawn[:, 1 : 1 + 5 * OBJECTS].view(batch, 5, OBJECTS).unbind(1)
    which = (which * len(images)).long().clamp(max=len(images) - 1)
    which[:, 0] = first
    side = ((SIDES[0] + (SIDES[1] - SIDES[0]) * side) * size).round().clamp(min=1)
    left, top = (left * (size - side + 1)).floor(), (top * (size - side + 1)).floor()
    field = drawn[:, 1 + 5 * OBJECTS :].view(batch, channels, FIELD, FIELD)
    picture = 255 * F.interpolate(field, size=(size, size), mode="bilinear", align_corners=True)
    owner = torch.full((batch, size, size), -1, device=images.device)
    pixels = torch.arange(size, device=images.device) + 0.5
    for k in range(OBJECTS):
        x = 2 * (pixels - left[:, k, None]) / side[:, k, None] - 1  # from -1 to 1 within the image
        y = 2 * (pixels - top[:, k, None]) / side[:, k, None] - 1
        inside = (x.abs() < 1)[:, None, :] & (y.abs() < 1)[:, :, None] & (k < count)[:, None, None]
        x = torch.where(flip[:, k, None] < 0.5, -x, x)
        grid = torch.stack((x[:, None, :].expand(-1, size, -1), y[:, :, None].expand(-1, -1, size)), -1)
        pasted = F.grid_sample(images[which[:, k]].float(), grid, padding_mode="border", align_corners=False)
        picture = torch.where(inside[:, None], pasted, picture)
        owner = torch.where(inside, k, owner)
    classes = labels[which]
    if masks:
        return picture, torch.where(owner < 0, 0, 1 + classes.gather(1, owner.clamp(min=0).flatten(1)).view_as(owner))
    seen = torch.stack([(owner == k).sum((1, 2)) for k in range(OBJECTS)], 1)
    label = torch.where(seen > VISIBLE * side.square(), classes, -1)
    return picture, torch.stack((label, left + side / 2, top + side / 2, side, side), 2) / torch.tensor(
        [1.0, *[size] * 4], device=images.device
    )
