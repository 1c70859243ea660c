"""A checkpoint file is whole and ours, or it is refused in one line, before anything of it is used."""

import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hotrain import files
from hotrain.train import TrainRun, saved_run, silent, train
from hotrain.train import checkpoint as checkpoints

Make = Callable[..., TrainRun]
ADVICE = ("weights_only", "allow_pickle", "unsafe", "trust")


def refused(file: Path, message: str, run: TrainRun | None = None) -> None:
    """``train`` refuses ``file`` in one line, without advice to load it unsafely, and leaves nothing behind."""
    before = sorted(file.parent.parent.rglob("*"))
    with pytest.raises(ValueError, match=message) as caught:
        train(run, resume=file, on_progress=silent)
    text = str(caught.value)
    assert "\n" not in text
    assert str(caught.value).startswith("resume: ")
    assert not any(word in text for word in ADVICE)
    assert sorted(file.parent.parent.rglob("*")) == before


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory, few_digits: Path) -> bytes:
    """A checkpoint with every part, also averages of weights."""
    run = TrainRun(
        model="demo_vit", model_args={"patch_size": 4, "embed_dim": 32, "depth": 1, "num_heads": 2}, device="cpu",
        data=str(few_digits), method="hot", batch_size=32, epochs=2, ema=0.9,
        calibrate_batches=1, audit=False, out_dir=str(tmp_path_factory.mktemp("runs")),
    )  # fmt: skip
    return train(run, stop_after=2, on_progress=silent).checkpoint_path.read_bytes()


@pytest.fixture
def file(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "run" / "checkpoint.pt"
    path.parent.mkdir()
    path.write_bytes(content)
    return path


def test_the_file_is_good_and_torch_reads_it_too(file: Path) -> None:
    state = checkpoints.load(file)
    assert state["update"] == 2
    assert torch.load(file, weights_only=True)["run"] == state["run"]
    assert train(None, resume=file, on_progress=silent).finished


def places(content: bytes) -> list[int]:
    """Offsets in parts of a file that an archive's CRCs do and do not cover."""
    pickle = content.index(b"data.pkl")
    return [
        0,
        pickle + 200,  # in the pickle
        content.index(b"FB", pickle) + 10,  # in padding
        content.rindex(b"PK\x01\x02") + 12,  # in the archive's directory
        content.rindex(b"PK\x05\x06") + 16,  # in its end
        len(content) - 80,  # in the checksum's line
        len(content) - 10,  # in the checksum
        len(content) - 1,
    ]


def test_a_flipped_bit_anywhere_is_refused(file: Path, content: bytes) -> None:
    for offset in {*places(content), *range(0, len(content), len(content) // 97)}:
        damaged = bytearray(content)
        damaged[offset] ^= 1 << offset % 8
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"is damaged|has no checksum"):
            checkpoints.load(file)
    refused(file, r"is damaged: .* do not have the checksum")


def test_a_zeroed_page_is_refused(file: Path, content: bytes) -> None:
    page = len(content) // 2 // 4096 * 4096
    file.write_bytes(content[:page] + bytes(4096) + content[page + 4096 :])
    refused(file, "is damaged")


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.999], ids=["empty", "a-third", "almost-all"])
def test_a_truncated_file_is_refused(file: Path, content: bytes, keep: float) -> None:
    file.write_bytes(content[: int(len(content) * keep)])
    refused(file, "no checksum at its end: it is truncated")


def test_more_behind_the_checksum_is_refused(file: Path, content: bytes) -> None:
    file.write_bytes(content + b"x")
    refused(file, "no checksum")


def signed(file: Path, content: bytes) -> Path:
    """``content`` with a checksum that fits, as someone may write it who means harm."""
    import hashlib

    file.write_bytes(content + checkpoints._MARK + hashlib.sha256(content).hexdigest().encode() + b"\n")
    return file


def torch_bytes(value: Any, path: Path) -> bytes:
    torch.save(value, path)
    return path.read_bytes()


def test_foreign_files_are_refused(file: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "executed",)

    evil = torch_bytes({"format": 2, "x": Evil()}, tmp_path / "x")
    script = tmp_path / "script.zip"
    with zipfile.ZipFile(script, "w") as archive:
        archive.writestr("archive/constants.pkl", b"")
    foreign = {
        "text": b"not a checkpoint",
        "text that begins like a pickle": b"export x\n" * 100,
        "code": evil,
        "a tensor": torch_bytes(torch.ones(3), tmp_path / "x"),
        "weights": torch_bytes({"model": {}}, tmp_path / "x"),
        "a zip": script.read_bytes(),
    }
    for name, bytes_ in foreign.items():
        file.write_bytes(bytes_)
        refused(file, "no checksum at its end: it is truncated, not a checkpoint of hotrain's trainer, or of format 1")
        refused(signed(file, bytes_), "is not a checkpoint of hotrain's trainer")
        assert not (tmp_path / "executed").exists(), name


def test_another_format_is_refused_with_its_number(file: Path, tmp_path: Path) -> None:
    refused(signed(file, torch_bytes({"format": 99, "run": {}}, tmp_path / "x")), "has format 99, this version reads 2")


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no checkpoint at"):
        checkpoints.load(tmp_path / "absent.pt")


def _first(tensors: dict[str, Any]) -> str:
    return next(k for k, v in tensors.items() if isinstance(v, torch.Tensor) and v.is_floating_point() and v.ndim > 1)


def _weight(change: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    def edit(state: dict[str, Any]) -> None:
        name = _first(state["model"])
        state["model"][name] = change(state["model"][name])

    return edit


UNTIDY: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    *((f"without-{name}", lambda s, name=name: s.pop(name), f"it has no {name}") for name in checkpoints.FIELDS),
    ("a-foreign-run", lambda s: s["run"].update(epoch=3), "'run' cannot be restored .*did you mean 'epochs'"),
    ("a-run-of-nonsense", lambda s: s["run"].update(lora={"rang": 3}), "'run' cannot be restored .*lora"),
    (
        "an-absolute-run_id",
        lambda s: s.update(run_id="/elsewhere/victim"),
        "run_id is '/elsewhere/victim', .* plain folder name",
    ),
    ("a-run_id-above", lambda s: s.update(run_id="../victim"), "run_id is '../victim'"),
    ("a-run_id-of-dots", lambda s: s.update(run_id=".."), r"run_id is '\.\.'"),
    ("an-update-to-come", lambda s: s.update(update=10**9), "is of update 1000000000, the run has 10"),
    ("NaN-weights", _weight(lambda w: torch.full_like(w, math.nan)), "has entries that are NaN or infinite"),
    ("fp16-weights", _weight(torch.Tensor.half), "is torch.float16 in the checkpoint, accepted is torch.float32"),
    ("a-weight-that-is-a-number", _weight(lambda w: 3.0), "is a float, accepted is a tensor"),
    ("an-optimizer-without-groups", lambda s: s["optimizer"].pop("param_groups"), "'state' cannot be restored"),
    ("no-averages", lambda s: s.update(ema=None), "'state' cannot be restored"),
    ("a-foreign-calibration", lambda s: s["calibration"].pop("layers"), "'state' cannot be restored"),
    ("no-draws", lambda s: s.update(draws={}), "'state' cannot be restored"),
    ("no-generators", lambda s: s.update(rng=[{}]), "'state' cannot be restored"),
    ("generators-of-two-processes", lambda s: s.update(rng=s["rng"] * 2), "is of 2 processes, here are 1"),
]


@pytest.mark.parametrize(("edit", "message"), [case[1:] for case in UNTIDY], ids=[case[0] for case in UNTIDY])
def test_a_checkpoint_that_does_not_fit_is_refused_in_one_line(
    file: Path, edit: Callable[[dict[str, Any]], Any], message: str
) -> None:
    state = checkpoints.load(file)
    edit(state)
    checkpoints.save(state, file)
    refused(file, message)


def test_a_run_id_never_leads_out_of_the_output_folder(file: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "checkpoint.pt").write_bytes(b"precious")
    state = checkpoints.load(file)
    run = saved_run(file)
    for run_id in (str(victim), "../victim", "a/../../victim"):
        checkpoints.save({**state, "run_id": run_id}, file)
        refused(file, "accepted is a plain folder name", run)
    assert [p.name for p in victim.iterdir()] == ["checkpoint.pt"]
    assert (victim / "checkpoint.pt").read_bytes() == b"precious"


@pytest.mark.parametrize("error", ["while PyTorch writes", "while the checksum is written"])
def test_a_failed_write_leaves_the_old_checkpoint(
    file: Path, content: bytes, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    """PyTorch answers an error of its file with one of its own, about positions in an archive."""
    limit = 1000 if error == "while PyTorch writes" else len(content) - checkpoints._TAIL
    real = open

    class Full:
        def __init__(self, path: Path, mode: str) -> None:
            self.file = real(path, mode)

        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *args: object) -> None:
            self.file.close()

        def write(self, data: bytes) -> int:
            if self.file.tell() + len(data) > limit:
                raise OSError(28, "No space left on device")
            return self.file.write(data)

        def flush(self) -> None:
            self.file.flush()

    state = checkpoints.load(file)
    monkeypatch.setattr(files, "open", Full, raising=False)
    with pytest.raises(OSError, match="No space left on device"):
        checkpoints.save(state, file)
    assert file.read_bytes() == content
    assert [p.name for p in file.parent.iterdir()] == ["checkpoint.pt"]


def test_the_checksum_is_of_the_bytes_on_disk(file: Path) -> None:
    import hashlib

    head, mark, digest = file.read_bytes().rpartition(checkpoints._MARK)
    assert mark
    assert digest == hashlib.sha256(head).hexdigest().encode() + b"\n"
