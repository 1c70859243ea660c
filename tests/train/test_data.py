"""Data sets: every way they can be wrong is said before any work, naming what and where."""

import builtins
import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hotrain.train import TrainRun
from hotrain.train import data as data_module
from hotrain.train.batches import Feed, channel_statistics, random_crop, random_flip
from hotrain.train.data import ArrayData, FolderData, load_data
from hotrain.train.distributed import Processes
from hotrain.train.image_file import open_image


def arrays(**changes: Any) -> dict[str, np.ndarray]:
    """Ten 8×8 RGB images of five classes, NHWC."""
    generator = np.random.default_rng(0)
    good = {
        "x_train": generator.integers(0, 256, (10, 8, 8, 3), dtype=np.uint8),
        "y_train": np.arange(10) % 5,
        "x_test": generator.integers(0, 256, (5, 8, 8, 3), dtype=np.uint8),
        "y_test": np.arange(5),
    }
    return {k: v for k, v in {**good, **changes}.items() if v is not None}


def test_digits_are_real_offline_and_split_the_same_every_time() -> None:
    first, second = load_data("digits"), load_data("digits")
    assert isinstance(first, ArrayData)
    assert isinstance(second, ArrayData)
    assert first.x_train.shape == (1437, 1, 8, 8)
    assert first.x_test.shape == (360, 1, 8, 8)
    assert torch.equal(first.x_train, second.x_train)
    assert first.x_train.max() == 255  # all of uint8's range is used
    assert first.y_test.bincount().tolist() == [36, 36, 35, 37, 36, 37, 36, 36, 35, 36]  # stratified


@pytest.mark.parametrize(
    ("x", "shape"),
    [
        (np.zeros((4, 8, 6, 3), np.uint8), (3, 8, 6)),  # NHWC
        (np.zeros((4, 3, 8, 6), np.uint8), (3, 8, 6)),  # NCHW
        (np.zeros((4, 8, 6), np.uint8), (1, 8, 6)),  # greyscale without a channel axis
        (np.zeros((4, 1, 8, 3), np.uint8), (3, 1, 8)),  # ambiguous: read as NHWC
    ],
)
def test_npz_layouts(tmp_path: Path, x: np.ndarray, shape: tuple[int, ...]) -> None:
    np.savez(tmp_path / "d.npz", x_train=x, y_train=np.arange(4), x_test=x, y_test=np.arange(4))
    data = load_data(str(tmp_path / "d.npz"))
    assert isinstance(data, ArrayData)
    assert tuple(data.x_train.shape[1:]) == shape
    assert data.classes == ("0", "1", "2", "3")


BAD_ARRAYS = [
    (arrays(y_train=np.array([0, 1, 2, 3, 4, 5, 6, 7, -1, 8])), "y_train: label -1 at index 8 is out of range"),
    (arrays(y_test=np.array([0, 1, 2, 3, 5])), "y_test: label 5 at index 4 is out of range for 5 classes"),
    (arrays(classes=np.array(["a", "b"])), r"y_train: label 2 at index 2 .* \(accepted 0 to 1; 6 of 10"),
    (arrays(y_test=None), "has no y_test"),
    (arrays(x_train=np.zeros((10, 8, 8, 3), np.float32)), "x_train .* got float32"),
    (arrays(y_train=np.zeros(10)), "y_train .* got float64"),
    (arrays(y_train=np.arange(9) % 5), r"y_train: got shape \(9,\) for 10 images"),
    (arrays(x_test=np.zeros((0, 8, 8, 3), np.uint8), y_test=np.zeros(0, int)), "x_test: the split is empty"),
    (arrays(x_train=np.zeros((0, 8, 8, 3), np.uint8), y_train=np.zeros(0, int)), "y_train .* the split is empty"),
    (arrays(x_test=np.zeros((5, 9, 8, 3), np.uint8)), "x_test: images of shape"),
    (arrays(x_train=np.zeros((10, 8), np.uint8)), "x_train: got .* accepted is uint8"),
]


@pytest.mark.parametrize(("content", "message"), BAD_ARRAYS)
def test_bad_arrays_are_refused(tmp_path: Path, content: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "d.npz", **content)
    with pytest.raises(ValueError, match=message):
        load_data(str(tmp_path / "d.npz"))


MANY = 2**63 + 5
BAD_CONTENTS: list[tuple[dict[str, np.ndarray], str]] = [
    # Without a check these would make a list of a thousand million names, or one of 2^64.
    (arrays(y_train=np.array([0] * 9 + [10**9])), "label 1000000000 at index 9 would make 1000000001 classes of 10"),
    (arrays(y_train=np.array([0] * 9 + [MANY], np.uint64)), f"label {MANY} at index 9 would make"),
    (arrays(y_test=np.array([0, 1, MANY, 3, 4], np.uint64)), "y_test: label 9223372036854775807 at index 2 is out of"),
    (arrays(classes=np.array(list("abcde")), y_train=np.full(10, MANY, np.uint64)), "y_train: label 92233720368547758"),
    (arrays(classes=np.array(5)), r"classes in .*: got shape \(\), accepted is a list of names"),
    (arrays(classes=np.array([["a"], ["b"]])), r"classes in .*: got shape \(2, 1\)"),
    (arrays(x_test=np.array([None])), r"x_test\.npy cannot be read as an array \(it holds Python objects\)$"),
]


@pytest.mark.parametrize(("content", "message"), BAD_CONTENTS)
def test_contents_that_would_cost_memory_or_run_code_are_refused_in_one_line(
    tmp_path: Path, content: dict[str, np.ndarray], message: str
) -> None:
    np.savez(tmp_path / "d.npz", **content)
    with pytest.raises(ValueError, match=message) as caught:
        load_data(str(tmp_path / "d.npz"))
    assert "\n" not in str(caught.value)
    assert "allow_pickle" not in str(caught.value)


def test_arrays_that_are_not_asked_for_are_not_read(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "executed",)

    np.savez(tmp_path / "d.npz", **arrays(more=np.array([Evil()], object)))
    load_data(str(tmp_path / "d.npz"))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"<i8", b"<i4"),  # every other label would be 0
        (b"(9000,)", b"(9000,("),  # tokenize.TokenError
        (b"(9000,)", b"(9e99,)"),
    ],
)
def test_a_header_that_is_damaged_is_refused(tmp_path: Path, old: bytes, new: bytes) -> None:
    """zipfile verifies a checksum at the end of an entry, and a header may say that less of it is to be read."""
    path = tmp_path / "d.npz"
    x = np.zeros((9000, 2, 2), np.uint8)
    np.savez(path, x_train=x, y_train=np.arange(9000) % 5, x_test=x, y_test=np.arange(9000) % 5)
    content = path.read_bytes()
    head = content.index(b"\x93NUMPY", content.index(b"y_train.npy"))
    at = content.index(old, head)
    path.write_bytes(content[:at] + new + content[at + len(old) :])
    with pytest.raises(ValueError, match=r"d\.npz"):
        load_data(str(path))


def test_an_entry_that_is_marked_as_encrypted_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    np.savez(path, **arrays())
    content = bytearray(path.read_bytes())
    for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(mark) + flags] |= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot be read as \.npz .*encrypted"):
        load_data(str(path))


def test_a_single_array_that_calls_itself_npz(tmp_path: Path) -> None:
    with open(tmp_path / "d.npz", "wb") as file:
        np.save(file, np.arange(3))
    with pytest.raises(ValueError, match=r"d\.npz cannot be read as \.npz .* write it with numpy\.savez"):
        load_data(str(tmp_path / "d.npz"))


def test_a_header_that_promises_terabytes(tmp_path: Path) -> None:
    np.savez(tmp_path / "good.npz", **arrays())
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (10**10, 8, 8, 48)})
    with zipfile.ZipFile(tmp_path / "good.npz") as good, zipfile.ZipFile(tmp_path / "d.npz", "w") as bad:
        for name in good.namelist():
            bad.writestr(name, header.getvalue() if name == "x_train.npy" else good.read(name))
    with pytest.raises(ValueError, match=r"x_train\.npy cannot be read as an array"):
        load_data(str(tmp_path / "d.npz"))


def test_an_archive_that_unpacks_to_more_than_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "stored.npz", **arrays())
    black = np.zeros((1000, 8, 8, 3), np.uint8)
    np.savez_compressed(tmp_path / "d.npz", **arrays(x_train=black, y_train=np.arange(1000) % 5))
    pages = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 1000}
    monkeypatch.setattr(data_module.os, "sysconf", pages.__getitem__)
    with pytest.raises(ValueError, match=r"unpacks to 0\.0 GiB, this machine has 0\.0 GiB"):
        load_data(str(tmp_path / "d.npz"))
    load_data(str(tmp_path / "stored.npz"))  # what is not compressed is no larger than its file


def test_gaps_between_labels_are_said(tmp_path: Path) -> None:
    labels = np.array([0, 1, 2, 3, 4, 5, 6, 0, 1, 9])
    np.savez(tmp_path / "d.npz", **arrays(y_train=labels))
    with pytest.warns(UserWarning, match=r"d\.npz: 2 of 10 classes have no training image \('7', '8'\)"):
        assert len(load_data(str(tmp_path / "d.npz")).classes) == 10


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.95], ids=["empty", "half", "without-its-directory"])
def test_a_truncated_npz_is_refused(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "d.npz"
    np.savez(path, **arrays())
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(ValueError, match=r"d\.npz cannot be read as \.npz"):
        load_data(str(path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cifra10", "did you mean 'cifar10'"),
        ("no/such/folder", "got 'no/such/folder'"),
        ("missing.npz", "no file 'missing.npz'"),
        ("sst2.tsv", "is text"),
    ],
)
def test_unknown_data(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_data(name)


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import CIFAR10

    def fail(self: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(CIFAR10, "download", fail)
    with pytest.raises(RuntimeError, match=r"could not be downloaded \(no route to host\).*\.npz"):
        load_data("cifar10", data_dir=str(tmp_path))


def test_digits_without_scikit_learn_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("sklearn"):
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(RuntimeError, match=r"pip install '\.\[train\]' in a clone"):
        load_data("digits")


def test_folder(folder: Path) -> None:
    data = load_data(str(folder))
    assert isinstance(data, FolderData)
    assert data.classes == ("bright", "dark")
    assert (len(data.train), len(data.test)) == (12, 4)
    assert {Path(p).parent.name for p, label in data.train if label == 1} == {"dark"}


def _remove(folder: Path, *parts: str) -> None:
    import shutil

    shutil.rmtree(folder.joinpath(*parts))


def _empty(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


BAD_FOLDERS: list[tuple[Callable[[Path], Any], str]] = [
    (lambda f: _remove(f, "train"), "has no folder train/"),
    (lambda f: _remove(f, "val"), "has neither val/ nor test/"),
    (lambda f: (_remove(f, "train", "bright"), _remove(f, "train", "dark")), "has no class folders"),
    (lambda f: (_empty(f / "val" / "bright"), _empty(f / "val" / "dark")), r"no images in the class folders of .*val"),
    (lambda f: (f / "val" / "grey").mkdir(), "has class folder 'grey'"),
]


@pytest.mark.parametrize(("damage", "message"), BAD_FOLDERS)
def test_bad_folders_are_refused(folder: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(folder)
    with pytest.raises(ValueError, match=message):
        load_data(str(folder))


def test_an_empty_class_folder_is_said(folder: Path) -> None:
    (folder / "train" / "grey").mkdir()
    with pytest.warns(UserWarning, match=r"train: 1 of 3 classes have no training image \('grey'\)"):
        assert load_data(str(folder)).classes == ("bright", "dark", "grey")


def test_folders_within_class_folders_are_said_and_not_walked(folder: Path) -> None:
    """Two links to a parent make an endless tree."""
    nested = folder / "train" / "dark" / "sub"
    nested.mkdir()
    (folder / "train" / "dark" / "0.png").rename(nested / "0.png")
    for name in ("loop", "loop2"):
        (folder / "train" / "dark" / name).symlink_to(folder)
    with pytest.warns(UserWarning, match=r"3 folders within class folders of .*train are not read .*dark/loop\)"):
        data = load_data(str(folder))
    assert isinstance(data, FolderData)
    assert len(data.train) == 11


def test_a_class_that_is_a_link_upwards_is_refused(folder: Path) -> None:
    (folder / "train" / "self").symlink_to(".")
    with pytest.raises(ValueError, match=r"train/self is a link to .*train, which it is in"):
        load_data(str(folder))
    (folder / "train" / "self").unlink()
    (folder / "train" / "self").symlink_to(folder.parent)
    with pytest.raises(ValueError, match="train/self is a link to"):
        load_data(str(folder))


def test_a_class_that_is_given_twice_is_refused(folder: Path) -> None:
    (folder / "train" / "night").symlink_to("dark")
    with pytest.raises(ValueError, match=r"train/night and .*train/dark are the same folder"):
        load_data(str(folder))


def test_a_class_on_another_disk_is_read(folder: Path, tmp_path: Path) -> None:
    (folder / "train" / "dark").rename(tmp_path / "far")
    (folder / "train" / "dark").symlink_to(tmp_path / "far")
    data = load_data(str(folder))
    assert isinstance(data, FolderData)
    assert len(data.train) == 12


@pytest.mark.parametrize("mode", ["I;16", "I;16B"])
def test_sixteen_bits_keep_their_upper_eight(mode: str, tmp_path: Path) -> None:
    """Pillow's own conversion clips at 255: scans and depth maps would be white."""
    pixels = np.random.default_rng(0).integers(0, 1 << 16, (5, 7))
    file = tmp_path / "scan.tif"
    Image.frombytes(mode, (7, 5), pixels.astype(">u2" if mode == "I;16B" else "<u2").tobytes()).save(file)
    got = np.asarray(open_image(str(file)))
    assert (got == (pixels >> 8)[..., None]).all()
    Image.fromarray(pixels.astype(np.uint16)).save(tmp_path / "scan.png")
    assert (np.asarray(open_image(str(tmp_path / "scan.png"))) == got).all()


def test_pixels_of_an_unknown_range_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "depth.tif"
    Image.fromarray(np.ones((4, 4), dtype=np.float32)).save(file)
    with pytest.raises(ValueError, match=r"depth\.tif cannot be decoded \(its pixels have mode F"):
        open_image(str(file))


def test_what_macos_puts_beside_a_file_is_no_image(folder: Path) -> None:
    before = load_data(str(folder))
    (folder / "train" / "dark" / "._0.png").write_bytes(b"\x00\x05\x16\x07")
    assert load_data(str(folder)) == before


def _bomb(path: Path) -> None:
    """A PNG of 40,000 × 40,000 black pixels in about a kilobyte of header and rows that never come."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", 40_000, 40_000, 1, 0, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)))


@pytest.mark.parametrize("damage", [_bomb, os.mkfifo, lambda p: p.symlink_to("nowhere"), lambda p: p.symlink_to(p)],
                         ids=["a-bomb", "a-pipe", "a-broken-link", "a-link-to-itself"])  # fmt: skip
def test_files_that_are_no_image_are_refused(folder: Path, damage: Callable[[Path], Any]) -> None:
    damage(folder / "train" / "dark" / "z.png")
    with pytest.raises(ValueError, match=r"dark/z\.png cannot be decoded .* remove it") as caught:
        load_data(str(folder))
    assert "\n" not in str(caught.value)


@pytest.fixture
def damaged(folder: Path) -> Path:
    """The folder with one truncated PNG and one text file that calls itself PNG."""
    file = folder / "train" / "bright" / "3.png"
    file.write_bytes(file.read_bytes()[:2000])
    (folder / "val" / "dark" / "1.png").write_text("not an image")
    return folder


def test_a_corrupt_image_is_refused_by_name(damaged: Path) -> None:
    with pytest.raises(ValueError, match=r"bright/3\.png cannot be decoded .* remove it"):
        load_data(str(damaged))


def test_in_a_large_folder_they_are_refused_when_their_batch_is_read(
    damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_module, "CHECKED_FILES", 0)
    feed = Feed(TrainRun(batch_size=6, num_workers=0), load_data(str(damaged)), image_size=16)
    with pytest.raises(ValueError, match="cannot be decoded"):
        list(feed.updates(0))


@pytest.mark.parametrize("workers", [0, 2])
def test_folder_batches_do_not_depend_on_workers_or_on_other_random_numbers(folder: Path, workers: int) -> None:
    data = load_data(str(folder))
    reference = Feed(TrainRun(batch_size=5, num_workers=0), data, image_size=16)
    other = Feed(TrainRun(batch_size=5, num_workers=workers), data, image_size=16)
    want = [batch for update in reference.updates(1) for batch in update]
    torch.manual_seed(7)
    before = torch.get_rng_state()
    got = [batch for update in other.updates(1) for batch in update]
    assert torch.equal(before, torch.get_rng_state())
    assert len(got) == len(want) == 2
    for (x, y), (x_want, y_want) in zip(got, want, strict=True):
        assert torch.equal(x, x_want)
        assert torch.equal(y, y_want)


def digits_feed(**fields: Any) -> Feed:
    kind = {k: fields.pop(k) for k in ("rank", "world") if k in fields}
    run = TrainRun(**{"data": "digits", "batch_size": 100, "crop_padding": 1, **fields})
    return Feed(run, load_data("digits"), image_size=16, processes=Processes(**kind))


def test_an_epoch_entered_in_its_middle_goes_on_as_it_would_have() -> None:
    feed = digits_feed(accumulation=3)
    assert feed.updates_per_epoch == 4  # 14 batches of 100 make 4 updates of 3; the rest is dropped
    whole = list(feed.updates(2))
    rest = list(feed.updates(2, first=2))
    assert [len(update) for update in whole] == [3] * 4
    for update, want in zip(rest, whole[2:], strict=True):
        for (x, y), (x_want, y_want) in zip(update, want, strict=True):
            assert torch.equal(x, x_want)
            assert torch.equal(y, y_want)


def test_epochs_and_seeds_differ_and_no_image_is_seen_twice() -> None:
    feed = digits_feed()
    orders = [feed.order(0), feed.order(1), digits_feed(seed=1).order(0)]
    assert all(len(set(order.tolist())) == 1437 for order in orders)
    assert not any(torch.equal(a, b) for a, b in [(orders[0], orders[1]), (orders[0], orders[2])])


def test_processes_share_an_epoch_without_overlap() -> None:
    parts = [digits_feed(rank=r, world=2).order(3) for r in (0, 1)]
    assert [len(p) for p in parts] == [718, 718]  # 1437 is odd: one image rests this epoch
    assert len(set(torch.cat(parts).tolist())) == 1436
    tests = [sum(len(y) for _, y in digits_feed(rank=r, world=2).test_batches()) for r in (0, 1)]
    assert tests == [180, 180]


def test_too_few_images_for_one_update_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1437 training images .*batch_size 500 × accumulation 3"):
        digits_feed(batch_size=500, accumulation=3)


def test_a_data_set_smaller_than_a_batch_is_one_batch() -> None:
    ((batch,),) = [list(update) for update in digits_feed(batch_size=2000).updates(0)]
    assert len(batch[1]) == 1437
    # images per second are of what was there, not of what was asked for
    assert digits_feed(batch_size=2000).images_per_update == 1437
    assert digits_feed(batch_size=100, accumulation=3, world=2).images_per_update == 600


def test_statistics_are_those_of_the_images() -> None:
    x = torch.randint(0, 256, (20, 3, 5, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = channel_statistics(x)
    want = x.double() / 255
    # float32's rounding of the result is the only error: the sums are exact counts.
    torch.testing.assert_close(mean.double(), want.mean((0, 2, 3)), rtol=1e-6, atol=0)
    torch.testing.assert_close(std.double(), want.std((0, 2, 3), correction=0), rtol=1e-6, atol=0)
    assert channel_statistics(torch.zeros(2, 1, 4, 4, dtype=torch.uint8))[1] > 0  # constant images: no division by 0


def test_crop_shifts_and_flip_mirrors() -> None:
    x = torch.arange(1, 2 * 2 * 5 * 4 + 1, dtype=torch.float32).view(2, 2, 5, 4)
    cropped = random_crop(x, 2, torch.Generator().manual_seed(3))
    top, left = torch.randint(0, 5, (2, 2), generator=torch.Generator().manual_seed(3))
    padded = torch.nn.functional.pad(x, (2, 2, 2, 2))
    for i in range(2):
        want = padded[i, :, top[i] : top[i] + 5, left[i] : left[i] + 4]
        assert torch.equal(cropped[i], want)
    many = torch.arange(4.0).expand(1000, 1, 1, 4)
    flipped = random_flip(many, torch.Generator().manual_seed(0))[:, 0, 0, 0] == 3
    assert abs(flipped.sum().item() - 500) < 4 * 1000**0.5 / 2  # 4 sigma of a fair coin


def test_greyscale_and_palette_files_become_rgb(folder: Path) -> None:
    Image.new("L", (40, 40), 128).save(folder / "train" / "dark" / "grey.png")
    Image.new("P", (40, 40)).save(folder / "train" / "dark" / "palette.png")
    feed = Feed(TrainRun(batch_size=14, num_workers=0), load_data(str(folder)), image_size=16)
    ((x, _),) = next(feed.updates(0))
    assert x.shape == (14, 3, 16, 16)


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    """Reading it would wait for ever."""
    pipe = tmp_path / "data.npz"
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="no file"):
        load_data(str(pipe))
