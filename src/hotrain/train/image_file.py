"""Image files: a data set of them, and decoding with errors that say which file and why."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class FolderData:
    """Image files by class, or with what else is to be learned of each.

    Args:
        train, test: the path of each image, and its label (of a `DenseFolder` its mask or objects).
        classes: names in label order.

    Attributes:
        channels: number of channels of a decoded image.
        image_size: side in pixels that images are resized to, unless the run says otherwise.
    """

    train: tuple[tuple[str, Any], ...]
    test: tuple[tuple[str, Any], ...]
    classes: tuple[str, ...]
    channels: ClassVar[int] = 3
    image_size: ClassVar[int] = 224

    @property
    def train_size(self) -> int:
        """Number of training images."""
        return len(self.train)

    @property
    def test_size(self) -> int:
        """Number of test images."""
        return len(self.test)


def open_image(path: str, mode: str | None = "RGB") -> Image.Image:
    """Decode one image file.

    Args:
        mode: what its pixels are converted to, 16 bits to their upper 8; None: as the file has them.

    Raises:
        ValueError: a file that cannot be decoded, or of pixels whose range it does not say.
    """
    from PIL import Image

    # What Pillow raises for truncated and garbled files, and for those that unpack to more than 179 million pixels.
    bad = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise ValueError("it is no regular file")  # opening a pipe would wait for ever
        with Image.open(path) as image:
            return _in_8_bits(image).convert(mode) if mode else image.copy()
    except bad as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"data: {path} cannot be decoded ({reason}); repair or remove it") from error


def _in_8_bits(image: Image.Image) -> Image.Image:
    """The image, one of 16 bits by their upper 8: Pillow's `convert` would clip them at 255."""
    import numpy as np
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"its pixels have mode {image.mode}, of an unknown range; save it with 8 or 16 bits")
    return image
