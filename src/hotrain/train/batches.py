"""Training and test batches of a run, in a reproducible order.

The order of an epoch and every random crop and flip are functions of ``(seed, epoch, batch)``, not of a generator's
state: a run resumed in the middle of an epoch sees exactly the batches that the uninterrupted one would have seen,
and two methods compared under one seed see the same images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hotrain.train.contexts import isolated_rng
from hotrain.train.contrastive import two_views
from hotrain.train.data import ArrayData, Data
from hotrain.train.dense_folder import DenseFolder, Item, read_item
from hotrain.train.distributed import Processes
from hotrain.train.image_file import FolderData, open_image
from hotrain.train.models import Normalization
from hotrain.train.run import TrainRun
from hotrain.train.scenes import SceneData, draws, scenes
from hotrain.train.tokens import TokenData

# Images float32 (B, C, H, W), two views (2B, C, H, W), or token ids (B, L); labels int64 (B,), next tokens (B·L,),
# masks (B, H, W), or objects float32 (B, K, 5).
Batch = tuple[Tensor, Tensor]


class Feed:
    """The training and test batches of one process.

    Args:
        run: batch size, accumulation, augmentation, seed.
        data: what :func:`hotrain.train.data.load_data` returned.
        image_size: side of the images that the model sees, in pixels.
        normalization: per-channel statistics; None: those of the training images (arrays) or of ImageNet (folders).
        processes: of the run; each gets its own part of an epoch, on its device. None: one, on the CPU.

    Raises:
        ValueError: fewer training images than one update needs.
    """

    def __init__(
        self,
        run: TrainRun,
        data: Data,
        *,
        image_size: int,
        normalization: Normalization | None = None,
        processes: Processes | None = None,
    ) -> None:
        processes = processes or Processes()
        self.run, self.data = run, data
        self.rank, self.world, self.device = processes.rank, processes.world, processes.device
        share = data.train_size // self.world
        # An incomplete last batch is dropped unless it is the only one.
        self.updates_per_epoch = max(1, share // run.batch_size) // run.accumulation
        if share == 0 or self.updates_per_epoch == 0:
            raise ValueError(
                f"data: {data.train_size} training images are fewer than one update needs "
                f"(batch_size {run.batch_size} × accumulation {run.accumulation} × processes {self.world})"
            )
        # Images of one update over all processes; a share smaller than a batch is one smaller batch.
        self.images_per_update = min(run.batch_size, share) * run.accumulation * self.world
        kinds: dict[type, Any] = {TokenData: _InMemory, ArrayData: _Arrays, SceneData: _Scenes}
        kinds |= {FolderData: _Folder, DenseFolder: _DenseFolder}
        self._images: _InMemory | _Folder = kinds[type(data)](run, data, image_size, normalization, self.device)

    def order(self, epoch: int) -> Tensor:
        """Shuffled training indices of this process in an epoch, int64 ``(N // world,)`` for N training images."""
        generator = torch.Generator().manual_seed(_key(self.run.seed, epoch))
        order = torch.randperm(self.data.train_size, generator=generator, device="cpu")
        share = self.data.train_size // self.world
        return order[: share * self.world][self.rank :: self.world]

    def updates(self, epoch: int, first: int = 0) -> Iterator[list[Batch]]:
        """Iterate over an epoch's updates, from the one of index ``first`` on: the ``accumulation`` batches of each."""
        size, group = self.run.batch_size, self.run.accumulation
        order = self.order(epoch)
        chosen = [order[i * size : (i + 1) * size] for i in range(self.updates_per_epoch * group)]
        keys = [_key(self.run.seed, epoch, self.rank, i) for i in range(len(chosen))]
        batches = self._images.training(chosen[first * group :], keys[first * group :])
        yield from map(list, zip(*[batches] * group, strict=True))  # the same iterator, so the next ones each time

    def test_batches(self) -> Iterator[Batch]:
        """This process's part of the test images, without augmentation; all parts together are every image once."""
        indices = torch.arange(self.data.test_size, device="cpu")[self.rank :: self.world]
        return self._images.testing(list(indices.split(self.run.eval_batch_size)))

    def train_batches(self) -> Iterator[Batch]:
        """This process's part of the training images, without augmentation."""
        indices = torch.arange(self.data.train_size, device="cpu")[self.rank :: self.world]
        return self._images.testing(list(indices.split(self.run.eval_batch_size)), train=True)


def _key(*words: int) -> int:
    """Derive a 63-bit seed from all of ``words``."""
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> np.uint64(1))


def to_device(t: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to ``device``; to a GPU asynchronously, through pinned memory."""
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t.to(device)


class _InMemory:
    """Inputs and labels of an :class:`InMemory` on the device, as they are: sequences of tokens."""

    def __init__(
        self, run: TrainRun, data: Any, image_size: int, normalization: Normalization | None, device: torch.device
    ) -> None:
        self.run, self.data, self.image_size = run, data, image_size
        self.train = data.x_train.to(device), data.y_train.to(device)
        self.test = data.x_test.to(device), data.y_test.to(device)

    def training(self, chosen: list[Tensor], keys: list[int]) -> Iterator[Batch]:
        return self.testing(chosen, train=True)

    def testing(self, chosen: list[Tensor], train: bool = False) -> Iterator[Batch]:
        x, y = self.train if train else self.test
        for indices in chosen:
            indices = to_device(indices, x.device)
            yield x[indices], y[indices].flatten()


class _Arrays(_InMemory):
    """Images of an :class:`ArrayData` on the device, cropped, flipped and scaled there."""

    def __init__(
        self, run: TrainRun, data: Any, image_size: int, normalization: Normalization | None, device: torch.device
    ) -> None:
        super().__init__(run, data, image_size, normalization, device)
        if normalization is None:
            mean, std = channel_statistics(data.x_train)
        else:
            mean, std = (torch.tensor(values, device="cpu") for values in normalization)
        self.mean, self.std = (values.view(1, -1, 1, 1).to(device) for values in (mean, std))

    def training(self, chosen: list[Tensor], keys: list[int]) -> Iterator[Batch]:
        for (x, y), key in zip(super().testing(chosen, train=True), keys, strict=True):
            generator = torch.Generator().manual_seed(key)
            if self.run.task != "classification":
                x = two_views(x / 255.0, generator) * 255.0
            else:
                if self.run.crop_padding:
                    x = random_crop(x, self.run.crop_padding, generator)
                if self.run.flip:
                    x = random_flip(x, generator)
            yield self._finish(x), y

    def testing(self, chosen: list[Tensor], train: bool = False) -> Iterator[Batch]:
        for x, y in super().testing(chosen, train):
            yield self._finish(x), y

    def _finish(self, x: Tensor) -> Tensor:
        x = (x.float().div_(255.0) - self.mean) / self.std
        if x.shape[-2:] != (self.image_size, self.image_size):
            x = F.interpolate(x, size=(self.image_size, self.image_size), mode="bilinear", antialias=True)
        return x


class _Scenes(_Arrays):
    """Scenes of the images of a :class:`SceneData`, drawn on the device: other ones each epoch, one test set."""

    def training(self, chosen: list[Tensor], keys: list[int]) -> Iterator[Batch]:
        for indices, key in zip(chosen, keys, strict=True):
            yield self._scenes(indices, draws(len(indices), self.data.channels, key), train=True)

    def testing(self, chosen: list[Tensor], train: bool = False) -> Iterator[Batch]:
        drawn = draws(self.data.train_size if train else self.data.test_size, self.data.channels, int(train))
        for indices in chosen:
            yield self._scenes(indices, drawn[indices], train=train)

    def _scenes(self, indices: Tensor, drawn: Tensor, train: bool) -> Batch:
        x, y = self.train if train else self.test
        first, drawn = to_device(indices, x.device), to_device(drawn, x.device)
        picture, target = scenes(x, y, first, drawn, self.image_size, masks=self.data.masks)
        return self._finish(picture), target


def channel_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Per-channel mean and standard deviation of images.

    They are computed from a histogram of the 256 grey levels, so no floating-point copy of the images is made.

    Args:
        x: uint8, (N, C, H, W).

    Returns:
        Mean and standard deviation, float32 (C,) each, in units of 255.
    """
    levels = torch.arange(256, dtype=torch.float64, device="cpu") / 255.0
    counts = torch.stack([torch.bincount(x[:, c].flatten(), minlength=256) for c in range(x.shape[1])]).double()
    weights = counts.cpu() / counts.sum(1, keepdim=True).cpu()
    mean = weights @ levels
    variance = (weights * (levels - mean[:, None]) ** 2).sum(1)
    return mean.float(), variance.sqrt().clamp_min(1 / 255.0).float()


def random_crop(x: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Shift every image of ``x`` (B, C, H, W) by up to ``padding`` pixels in each direction, with zero padding."""
    b, _, h, w = x.shape
    padded = F.pad(x, (padding,) * 4)
    shifts = torch.randint(0, 2 * padding + 1, (2, b, 1), generator=generator, device="cpu")
    top, left = to_device(shifts, x.device)
    rows = top + torch.arange(h, device=x.device)  # (B, H)
    columns = left + torch.arange(w, device=x.device)  # (B, W)
    images = torch.arange(b, device=x.device)[:, None, None]
    return padded[images, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def random_flip(x: Tensor, generator: torch.Generator) -> Tensor:
    """Flip every image of ``x`` (B, C, H, W) horizontally with probability 1/2."""
    flip = to_device(torch.rand(len(x), generator=generator, device="cpu") < 0.5, x.device)
    return torch.where(flip[:, None, None, None], x.flip(3), x)


class _Folder:
    """Images of a :class:`FolderData`, decoded and augmented by worker processes with timm's transforms."""

    def __init__(
        self, run: TrainRun, data: Any, image_size: int, normalization: Normalization | None, device: torch.device
    ) -> None:
        from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform

        mean, std = map(tuple, normalization or (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))
        common: dict[str, Any] = {"input_size": image_size, "mean": mean, "std": std, "interpolation": "bicubic"}
        with torch.device("cpu"):
            augment = create_transform(
                **common, is_training=True, hflip=0.5 if run.flip else 0.0, auto_augment=run.auto_augment
            )
            plain = create_transform(**common, is_training=False)
        self.run, self.device = run, device
        self.train = _Files(data.train, partial(self._read, augment))
        self.test = _Files(data.test, partial(self._read, plain))

    def training(self, chosen: list[Tensor], keys: list[int]) -> Iterator[Batch]:
        # One seed per image: its augmentation does not depend on which worker decodes it.
        plan = [
            [(int(i), _key(key, j)) for j, i in enumerate(indices)] for indices, key in zip(chosen, keys, strict=True)
        ]
        return self._load(self.train, plan)

    def testing(self, chosen: list[Tensor], train: bool = False) -> Iterator[Batch]:
        return self._load(self.train if train else self.test, [[(int(i), 0) for i in indices] for indices in chosen])

    def _read(self, transform: Callable[[Any], Tensor], item: tuple[str, int], seed: int) -> Batch:
        path, label = item
        image = open_image(path)
        with isolated_rng(seed), torch.device("cpu"):
            return transform(image), torch.tensor(label, device="cpu")

    def _load(self, files: _Files, plan: list[list[tuple[int, int]]]) -> Iterator[Batch]:
        loader: DataLoader[Any] = DataLoader(
            files,
            batch_sampler=plan,  # type: ignore[arg-type]
            num_workers=self.run.num_workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator().manual_seed(0),  # else the loader uses PyTorch's global generator
        )
        with torch.device("cpu"):  # its seed, and its workers; not what the consumer of a batch runs
            batches = iter(loader)
        for x, y in batches:
            yield x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)


class _DenseFolder(_Folder):
    """Images of a :class:`DenseFolder` with masks or boxes, decoded and resized by worker processes."""

    def __init__(self, run: TrainRun, data: Any, image_size: int, normalization: Any, device: torch.device) -> None:
        from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

        self.run, self.device = run, device
        self.mean, self.std = (
            255 * torch.tensor(values, device="cpu").view(3, 1, 1)
            for values in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
        )
        self.data, self.image_size = data, image_size
        self.train = _Files(data.train, partial(self._read_dense, run.flip))
        self.test = _Files(data.test, partial(self._read_dense, False))

    def _read_dense(self, flip: bool, item: Item, seed: int) -> Batch:
        mirror = flip and bool(np.random.default_rng(seed).random() < 0.5)
        picture, target = read_item(item, self.data, self.image_size, mirror)
        return (picture - self.mean) / self.std, target


class _Files(Dataset[Batch]):
    """Items of a data set, each decoded by ``read`` with the seed of its augmentation."""

    def __init__(self, items: Sequence[Any], read: Callable[[Any, int], Batch]) -> None:
        self.items, self.read = items, read

    def __getitem__(self, key: tuple[int, int]) -> Batch:
        index, seed = key
        return self.read(self.items[index], seed)
