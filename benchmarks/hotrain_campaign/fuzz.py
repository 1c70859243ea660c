"""Random command lines, and damaged files: each is used or refused with one clear line, and none runs code or hangs."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import random
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hotrain import files
from hotrain_campaign import damage
from hotrain_campaign.cases import Case, Finding, ended, in_child, told

TINY = {"patch_size": 4, "embed_dim": 32, "depth": 1, "num_heads": 2}
SETTINGS = ["steps=2", "batch_size=8", "audit=false", "num_workers=0", f"model_args={json.dumps(TINY)}"]


@dataclass(frozen=True)
class Good:
    """Good files, to be damaged.

    Attributes:
        npz, images, tsv: data sets.
        calibration: of the tiny demo_vit with the method hot.
        checkpoint: of a run of it.
        comparison: the folder of a comparison, with its report's records.
    """

    npz: Path
    images: Path
    tsv: Path
    calibration: Path
    checkpoint: Path
    comparison: Path


def preload() -> None:
    """Import what commands import when they run, so that the cases' processes have it already."""
    import hotrain_recipes
    import timm.optim

    import hotrain.calibration
    import hotrain.plotting.report
    import hotrain.train.loop  # noqa: F401

    hotrain_recipes.all()
    timm.create_model("test_vit")


def good_files(folder: Path) -> Good:
    """Make them, in a process of its own: autograd does not work in forks of a process that has used it."""
    good = Good(
        folder / "digits.npz",
        folder / "images",
        folder / "train.tsv",
        folder / "calibration.json",
        folder / "checkpoint.pt",
        folder / "comparison",
    )
    child = in_child(partial(_make, good), folder / "making")
    if ended(child, 300) != 0:
        raise RuntimeError(f"the good files could not be made: {(folder / 'making').read_text()[-2000:]}")
    return good


def _make(good: Good) -> None:
    from PIL import Image

    from hotrain.cli.main import app
    from hotrain.train import load_data

    data = load_data("digits")
    sizes = {"x_train": 700, "y_train": 700, "x_test": 40, "y_test": 40}  # labels of more than a buffer's 4096 bytes
    arrays = {name: getattr(data, name)[:count].numpy() for name, count in sizes.items()}
    np.savez(good.npz, **arrays, classes=np.array(list("0123456789")))
    pixels = np.random.default_rng(0).integers(0, 255, (2, 4, 20, 20, 3), dtype=np.uint8)
    for split in ("train", "val"):
        for label in (0, 1):
            (good.images / split / f"class {label}").mkdir(parents=True)
            for i in range(4):
                Image.fromarray(pixels[label, i]).save(good.images / split / f"class {label}" / f"{i}.png")
    lines = ["sentence\tlabel", *(f"{word} film, é{i}\t{i % 2}" for i, word in enumerate(["good", "bad"] * 5))]
    good.tsv.write_text("\n".join(lines) + "\n")
    base = ["demo_vit", "--data", str(good.npz), *(word for s in SETTINGS for word in ("--set", s))]
    out = ["--out", str(good.comparison)]
    for line in (
        ["calibrate", *base, "--method", "hot", "--batches", "1", "--out", str(good.calibration)],
        ["train", *base, "--out", str(good.npz.parent / "runs"), "--quiet"],
        ["compare", *base, "--methods", "exact,hot", *out, "--quiet"],
    ):
        app(line, standalone_mode=False)
    next((good.npz.parent / "runs").glob("*/checkpoint.pt")).rename(good.checkpoint)


# ---- what a case does ----


def command(line: list[str]) -> str:
    """Run a command line of hotrain: accepted, or refused with one line that begins with ``error:``.

    Raises:
        Finding: a traceback, another exit code, more than one line, or nothing said.
    """
    from hotrain.cli.main import app

    code: Any = 0
    raised = ""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=how) for how in ("strict", "backslashreplace")]
    before = sys.stdout, sys.stderr, sys.argv
    sys.stdout, sys.stderr, sys.argv = *streams, ["hotrain", *line]  # type: ignore[assignment]
    try:
        app(line)
    except SystemExit as stop:
        code = stop.code
    except BaseException as error:
        raised = told(error)
    finally:
        for stream in streams:
            stream.flush()
        sys.stdout, sys.stderr, sys.argv = before
    said = streams[1].buffer.getvalue().decode(errors="replace")  # type: ignore[attr-defined]
    if raised:
        raise Finding(f"a traceback: {raised}")
    errors = [text for text in said.splitlines() if text.startswith("error: ")]
    if code in (0, None):
        return "accepted"
    if code == 1 and "failed: " in said:  # a comparison's runs
        return "refused"
    if code != 2:
        raise Finding(f"exit code {code!r}: {said[-200:]!r}")
    if not errors and "Usage:" not in said and "─ Error ─" not in said:  # typer's own, with its usage or without
        raise Finding(f"exit code 2 without a reason: {said[-200:]!r}")
    if errors and (len(errors) > 1 or not said.rstrip("\n").splitlines()[-1].startswith("error: ")):
        raise Finding(f"more than one line: {said[-300:]!r}")
    if errors and len(errors[0]) < len("error: ") + 8:
        raise Finding(f"an empty message: {errors[0]!r}")
    return "refused"


def loaded(load: Callable[[], Any], want: Any, same: Callable[[Any, Any], bool], name: str = "") -> str:
    """Read a file: refused with a message that names it, or read as what was written.

    Args:
        load: reads it.
        want: what was written; None: whatever is read is right.
        same: compares.
        name: that the message has to have in it.

    Raises:
        Finding: another error, no name, or other contents than were written.
    """
    from hotrain.cli.errors import is_mistake

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = load()
    except Exception as error:
        if not is_mistake(error):
            raise Finding(f"not a refusal: {told(error)}") from error
        text = str(error)
        if name not in text:
            raise Finding(f"does not name {name}: {told(error)}") from error
        if any(word in text for word in ("weights_only", "allow_pickle")):
            raise Finding(f"advises to unpickle: {told(error)}") from error
        return "refused"
    if want is not None and not same(got, want):
        raise Finding("read without a word, with other contents than were written")
    return "accepted"


# ---- the kinds ----


def _file_cases(
    kind: str,
    good: Path,
    count: int,
    draw: random.Random,
    read: Callable[[Path], Any],
    exact: bool = True,
) -> Iterator[Case]:
    """Damaged copies of a file, and other things at its path. exact: what is read must be what was written."""
    from hotrain_campaign.equality import same

    data = good.read_bytes()
    for _ in range(count):
        how = draw.choice(list(damage.BYTES))
        seed = draw.randrange(1 << 30)

        def run(how: str = how, seed: int = seed) -> str:
            path = Path(good.name)
            path.write_bytes(damage.damaged(data, how, random.Random(seed)))
            return loaded(lambda: read(path), read(good) if exact else None, same, path.name)

        yield Case(f"{kind}: bytes", f"{how}, seed {seed}", run)
    for place, put in damage.PLACES.items():

        def at(put: Any = put) -> str:
            path = Path(good.name)
            put(path, good)
            return loaded(lambda: read(path), read(good), same, path.name)

        yield Case(f"{kind}: places", place, at)


def _json_cases(kind: str, good: Path, count: int, draw: random.Random, use: Callable[[Path], str]) -> Iterator[Case]:
    """JSON of wrong types, missing and additional fields, and numbers that no field can take."""
    text = good.read_text()
    for _ in range(count):
        seed = draw.randrange(1 << 30)

        def run(seed: int = seed) -> str:
            path = Path(good.name)
            changed, done = damage.misshapen(text, random.Random(seed))
            path.write_text(changed, encoding="utf-8", errors="surrogatepass")
            try:
                return use(path)
            except Finding as finding:
                raise Finding(f"{done}: {finding}") from finding

        yield Case(f"{kind}: values", f"seed {seed}", run)


def calibrations(good: Good, count: int, draw: random.Random) -> Iterator[Case]:
    """Calibration files, read by the library and by ``hotrain train``."""
    import hotrain

    read = hotrain.Calibration.load
    yield from _file_cases("calibration", good.calibration, count, draw, read)

    def use(path: Path) -> str:
        return loaded(lambda: read(path), None, lambda a, b: True, path.name)

    yield from _json_cases("calibration", good.calibration, count, draw, use)

    def train(path: Path) -> str:
        return command([*_train(good), "--method", "hot", "--set", f"calibration_file={path}"])

    yield from _json_cases("calibration, trained with", good.calibration, count // 20, draw, train)


def checkpoints(good: Good, count: int, draw: random.Random) -> Iterator[Case]:
    """Damaged checkpoints."""
    from hotrain.train import checkpoint

    yield from _file_cases("checkpoint", good.checkpoint, count, draw, checkpoint.load)


def arrays(good: Good, count: int, draw: random.Random) -> Iterator[Case]:
    """``.npz`` files: damaged, and with arrays of another kind."""
    from hotrain.train import load_data
    from hotrain_campaign.equality import same

    yield from _file_cases("npz", good.npz, count, draw, lambda path: load_data(str(path)))
    packed = good.npz.read_bytes()
    heads = [at for at in range(len(packed)) if packed.startswith((b"\x93NUMPY", b"PK"), at)]
    for _ in range(count):
        at, how, value = draw.choice(heads) + draw.randrange(128), draw.randrange(8), draw.randrange(256)

        def flipped(at: int = at, how: int = how, value: int = value) -> str:
            changed = bytearray(packed)
            changed[at % len(packed)] = value if how < 4 else changed[at % len(packed)] ^ 1 << how
            path = Path("digits.npz")
            path.write_bytes(changed)
            return loaded(lambda: load_data(str(path)), load_data(str(good.npz)), same, path.name)

        yield Case("npz: bytes of a header", f"byte {at}, {how}, {value}", flipped)
    with np.load(good.npz, allow_pickle=False) as file:
        content = dict(file)
    kinds = ["u1", "i1", "i8", "u8", "f4", "f8", "c8", "?", "S3", "U3", "M8[s]", ">i8", "f2", "V4"]
    for _ in range(count // 2):
        seed = draw.randrange(1 << 30)

        def run(seed: int = seed) -> str:
            draws = random.Random(seed)
            changed = dict(content)
            for _ in range(draws.choice((1, 1, 2))):
                name = draws.choice(list(content))
                shape = tuple(draws.choice((0, 1, 2, 3, 8, 40)) for _ in range(draws.randrange(6)))
                kind = np.dtype(draws.choice(kinds))
                value = np.frombuffer(draws.randbytes(kind.itemsize * int(np.prod(shape))), kind).reshape(shape)
                how = draws.randrange(4)
                if how == 0:
                    del changed[name]
                    break
                changed[name] = (
                    value
                    if how == 1
                    else content[name].astype(kind, casting="unsafe")
                    if how == 2
                    else content[name][::-2]
                )
            np.savez("digits.npz", **changed)
            line = ["--data", "digits.npz"]
            if draws.random() < 0.2:
                return command([*_train(good), *line])
            return loaded(lambda: load_data("digits.npz"), None, lambda a, b: True)

        def run_quietly(run: Callable[[], str] = run) -> str:
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return run()

        yield Case("npz: arrays", f"seed {seed}", run_quietly)


def images(good: Good, count: int, draw: random.Random) -> Iterator[Case]:
    """An image folder with a damaged file, or with something else at the path of a file or of a folder."""
    from hotrain.train import load_data
    from hotrain_campaign.equality import same

    names = sorted(str(p.relative_to(good.images)) for p in good.images.rglob("*"))
    files = [name for name in names if name.endswith(".png")]

    def copy() -> Path:
        import shutil

        return Path(shutil.copytree(good.images, "images"))

    def read(root: Path) -> Any:
        data = load_data(str(root))
        from hotrain.train.data import FolderData, open_image

        assert isinstance(data, FolderData)
        found = [(np.asarray(open_image(path)), label) for path, label in (*data.train, *data.test)]
        return found, data.classes

    for _ in range(count):
        name, how, seed = draw.choice(files), draw.choice(list(damage.BYTES)), draw.randrange(1 << 30)

        def run(name: str = name, how: str = how, seed: int = seed) -> str:
            path = copy() / name
            path.write_bytes(damage.damaged(path.read_bytes(), how, random.Random(seed)))
            return loaded(lambda: read(Path("images")), read(good.images), same, path.name)

        yield Case("images: bytes of a PNG", f"{name}, {how}, seed {seed}", run)
    for place, put in damage.PLACES.items():
        for name in ("train/class 0/0.png", "train/class 0", "train", "val", "val/class 1"):

            def at(put: Any = put, name: str = name) -> str:
                import shutil

                path = copy() / name
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                put(path, good.images / name)
                return loaded(lambda: read(Path("images")), None, lambda a, b: True)

            yield Case("images: places", f"{place} at {name}", at)


def texts(good: Good, count: int, draw: random.Random) -> Iterator[Case]:
    """Tab-separated text as GLUE has it. Text has no checksum, so that readable damage is read."""
    from hotrain_study.texts import read_phrases

    yield from _file_cases("tsv", good.tsv, count, draw, read_phrases, exact=False)


def reports(good: Good, count: int, draw: random.Random) -> Iterator[Case]:
    """Records of a comparison, drawn again: JSON has no checksum, so that readable damage is drawn."""
    import shutil

    def report(path: Path) -> str:
        folder = Path("records")
        folder.mkdir()
        for other in ("summary.json", "records.json"):
            if other != path.name:
                shutil.copy(good.comparison / other, folder)
        if path.is_symlink() or path.exists():
            path.rename(folder / path.name)
        return command(["report", "records"])

    for name in ("summary.json", "records.json"):
        yield from _json_cases(name, good.comparison / name, count, draw, report)
        data = (good.comparison / name).read_bytes()
        for _ in range(count // 2):
            how, seed = draw.choice(list(damage.BYTES)), draw.randrange(1 << 30)

            def run(how: str = how, seed: int = seed, name: str = name, data: bytes = data) -> str:
                path = Path(name)
                path.write_bytes(damage.damaged(data, how, random.Random(seed)))
                return report(path)

            yield Case(f"{name}: bytes", f"{how}, seed {seed}", run)
        for place, put in damage.PLACES.items():

            def at(put: Any = put, name: str = name) -> str:
                put(Path(name), good.comparison / name)
                return report(Path(name))

            yield Case(f"{name}: places", place, at)


def comparisons(good: Good, count: int, draw: random.Random) -> Iterator[Case]:
    """The plan and the records of a comparison that is resumed."""
    import shutil

    def resumed(name: str, change: Callable[[Path], None], exact: bool = True) -> str:
        folder = Path("comparison")
        folder.mkdir()
        for other in ("comparison.json", "runs.jsonl"):
            shutil.copy(good.comparison / other, folder)
        change(folder / name)
        if exact and name == "runs.jsonl":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with contextlib.suppress(ValueError):
                    if any(row not in rows for row in record.read(folder / name)):
                        raise Finding("read without a word, with other contents than were written")
        return command(["compare", "--resume", "comparison", "--quiet"])

    from hotrain.train import record

    rows = record.read(good.comparison / "runs.jsonl")
    for name in ("comparison.json", "runs.jsonl"):
        data = (good.comparison / name).read_bytes()
        for _ in range(count):
            how, seed = draw.choice(list(damage.BYTES)), draw.randrange(1 << 30)

            def run(how: str = how, seed: int = seed, name: str = name, data: bytes = data) -> str:
                return resumed(name, lambda path: _write(path, damage.damaged(data, how, random.Random(seed))))

            yield Case(f"{name}: bytes", f"{how}, seed {seed}", run)
        for signed in (False, True) if name == "runs.jsonl" else (False,):
            for _ in range(count // 2):
                seed = draw.randrange(1 << 30)

                def values(seed: int = seed, name: str = name, data: bytes = data, signed: bool = signed) -> str:
                    draws = random.Random(seed)
                    lines = data.decode().splitlines() if name == "runs.jsonl" else [data.decode()]
                    number = draws.randrange(len(lines))
                    lines[number], done = damage.misshapen(lines[number], draws)
                    if signed:
                        row = {key: value for key, value in json.loads(lines[number]).items() if key != "sha256"}
                        lines[number] = json.dumps({**row, "sha256": files.digest(row)})
                    text = "\n".join(lines) + "\n"
                    try:
                        return resumed(name, lambda path: _write(path, text.encode(errors="replace")), not signed)
                    except Finding as finding:
                        raise Finding(f"{done}: {finding}") from finding

                yield Case(f"{name}: values{', with a checksum' * signed}", f"seed {seed}", values)
        for place, put in damage.PLACES.items():

            def at(put: Any = put, name: str = name) -> str:
                def change(path: Path) -> None:
                    path.unlink()
                    put(path, good.comparison / name)

                return resumed(name, change)

            yield Case(f"{name}: places", place, at)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _train(good: Good) -> list[str]:
    line = ["train", "demo_vit", "--data", str(good.npz), "--quiet", "--out", "runs"]
    return [*line, *(word for setting in SETTINGS for word in ("--set", setting))]


# Values that are right and would take hours: a run of 10**9 steps is no hang.
LONG = {
    "steps": ["-1", "0", "1", "2", "x"],
    "draws": ["-1", "0", "1", "2", "3", "x"],
    "num_workers": ["-1", "0", "1", "x"],
}
MODELS = [
    "demo_vit",
    "demo_resnet",
    "test_vit",
    "test_convnext",
    "small_vit",
    "vit_tiny_patch16_224x",
    "",
    "é",
    "hf-hub:a/b",
    "../x",
]


def _text(draw: random.Random) -> str:
    value = damage.some_value(draw)
    return value if isinstance(value, str) else json.dumps(value) if draw.random() < 0.8 else str(value)


def _setting(draw: random.Random) -> str:
    from dataclasses import fields

    from hotrain.train import TrainRun

    names = [field.name for field in fields(TrainRun)]
    name = draw.choice(names)
    kind = draw.randrange(12)
    if kind == 0:
        return draw.choice(["", "=", "=1", "lr", "lora.rank=", "lora.rank=0", "lora.rank=-1", "lora.rank=1000000000000",
                            "lora.x=1", "lora.dropout=nan", "lora=1", "a.b.c=1",
                            "method_overrides.rank=99", "method_overrides.x=1", "model_args.depth=0",
                            "model_args.depth=-1", "model_args.embed_dim=33", "model_args.num_heads=0",
                            "model_args.patch_size=0", "model_args.patch_size=1000", "model_args.mlp_ratio=-1",
                            "model_args.drop_rate=2", "model_args.x=1", "model_args.norm_layer=x",
                            "model_args.act_layer=x", "model_args.img_size=0", "model_args.pretrained=true",
                            "model_args.num_classes=3", "model_args.features_only=true",
                            "model_args.class_token=7"])  # fmt: skip
    if name in LONG:
        return f"{name}={draw.choice(LONG[name])}"
    if name == "model":
        return f"model={draw.choice(MODELS)}"
    if name in ("epochs", "device", "out_dir", "name", "data", "data_dir", "calibration_file") and kind < 4:
        return f"{name}={draw.choice(damage.NAMES)}"
    small = ["0", "1", "2", "8", "0.5", "0.1", "-0.0", "true", "none", "bf16", "fp16", "constant", "multistep",
             "cosine", "sgd", "lamb", "lion", "adafactor", "lbfgs", "rand-m9-mstd0.5-inc1", "0.5,0.75", "memory",
             "graphs"]  # fmt: skip
    return f"{name}={draw.choice(small) if kind < 8 else _text(draw)}"


def _method(draw: random.Random) -> str:
    import hotrain

    fields = ["rank", "tile", "scale", "memory", "number", "order", "rounding", "grad_input_bits", "x_bits", "sampled",
              "forward", "saved", "bits", "transform", "knobs", "name", ""]  # fmt: skip
    name = draw.choice([*hotrain.presets(), draw.choice(damage.WORDS), "hot-unbaised"])
    values = ["0", "1", "4", "8", "16", "17", "-1", "token", "tensor", "auto", "none", "int", "fp8", "block", "linear",
              "nearest", "stochastic", "true", "[4]", "{}"]  # fmt: skip
    parts = [
        f"{draw.choice(fields)}={draw.choice(values) if draw.random() < 0.7 else _text(draw)}"
        for _ in range(draw.randrange(3))
    ]
    text = name + (":" if parts or draw.random() < 0.1 else "") + "+".join(parts)
    return text[: draw.randrange(len(text) + 1)] if draw.random() < 0.1 else text


def settings(good: Good, count: int, draw: random.Random) -> Iterator[Case]:
    """``--set`` and ``--method`` of a run, which is trained for two steps where they are accepted."""
    for _ in range(count):
        line = [word for _ in range(draw.choice((1, 1, 2))) for word in ("--set", _setting(draw))]
        yield Case("--set of a run", " ".join(line)[:200], partial(command, [*_train(good), *line]))
    for _ in range(count):
        line = ["--method", _method(draw)]
        yield Case("--method of a run", " ".join(line)[:200], partial(command, [*_train(good), *line]))


LEFT_OUT = ("demo", "bench", "frontier")  # they take minutes


def starts(good: Good) -> dict[str, list[str]]:
    """Verb → a line that is accepted, to which `lines` adds options: every verb but `LEFT_OUT`."""
    base = ["--data", str(good.npz), "--set", f"model_args={json.dumps(TINY)}", "--set", "batch_size=8"]
    return {
        "train": _train(good)[1:],
        "compare": ["demo_vit", *base, "--set", "steps=2", "--set", "audit=false", "--quiet", "--methods", "exact"],
        "calibrate": ["demo_vit", *base, "--batches", "1", "--method", "hot"],
        "memory": ["demo_vit", *base],
        "cost": ["demo_vit", *base],
        "fidelity": ["demo_vit", *base, "--draws", "2"],
        "recipes": [],
        "presets": [],
        "report": [str(good.comparison)],
        "study": ["demo_vit", "--list", "--methods", "exact,hot"],
        "prepare": ["digits"],
    }


def lines(good: Good, count: int, draw: random.Random) -> Iterator[Case]:
    """Random options of every verb of `starts`, with values of every kind."""
    import typer

    from hotrain.cli.main import app

    group: Any = typer.main.get_command(app)
    verbs: dict[str, Any] = {name: verb for name, verb in group.commands.items() if name not in LEFT_OUT}
    start = starts(good)
    for _ in range(count):
        name = draw.choice(list(verbs))
        verb = verbs[name]
        options = [p for p in verb.params if p.param_type_name == "option" and p.name not in ("help", "fit")]
        line = list(start[name])
        if draw.random() < 0.15 and line:
            line[0] = draw.choice([*damage.NAMES, *damage.WORDS, *MODELS])
        for _ in range(draw.choice((1, 1, 2, 3))):
            line += _option(draw.choice(options), draw) if options else []
        if draw.random() < 0.1:
            line.insert(
                draw.randrange(len(line) + 1), draw.choice([*damage.NAMES, "--", "-", "--x", "-h", "--traceback"])
            )
        yield Case(
            f"hotrain {name}", " ".join(line).replace(str(good.npz.parent), "…")[:300], partial(command, [name, *line])
        )


def _option(option: Any, draw: random.Random) -> list[str]:
    word = draw.choice(option.opts)
    if getattr(option, "is_flag", False):
        return [word]
    if option.name in LONG:
        return [word, draw.choice(LONG[option.name])]
    if option.name == "settings":
        return [word, _setting(draw)]
    if option.name in ("method", "methods"):
        return [word, _method(draw)]
    if option.name in ("data", "out", "resume", "checkpoint"):
        return [
            word,
            draw.choice(
                [*damage.NAMES, "/", "/dev/null", "/dev/full", "/proc/self/mem", "/proc/nothing/x", "~nobody/x"]
            ),
        ]
    return [
        word,
        draw.choice(["0", "1", "2", "-1", "8", "32", "cpu", "cuda:0", "bf16", "paper", "block"])
        if draw.random() < 0.6
        else _text(draw),
    ]


# ---- code in files ----


class _Evil:
    """Pickled, it would make the file ``executed`` in the working directory."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def _signed(data: bytes) -> bytes:
    from hotrain.train import checkpoint

    return data + checkpoint._MARK + hashlib.sha256(data).hexdigest().encode() + b"\n"


def _object_arrays(content: Any) -> bytes:
    file = io.BytesIO()
    names = ("x_train", "y_train", "x_test", "y_test", "classes")
    np.savez(file, **{name: np.array([content], dtype=object) for name in names})  # type: ignore[arg-type]
    return file.getvalue()


def _torch_bytes(content: Any, zipped: bool) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def _zip_of(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("x_train.npy", "y_train.npy", "x_test.npy", "y_test.npy", "archive/data.pkl", "archive/version"):
            archive.writestr(name, data)
    return file.getvalue()


_OVERLAY = 'model_args.pretrained_cfg_overlay={"file": "w.pth"}'


def pickles(good: Good, count: int, draw: random.Random) -> Iterator[Case]:
    """Files that would run code if anything unpickled them, wherever hotrain reads a file."""

    def contents(path: str) -> dict[str, bytes]:
        evil = {"format": 2, "x": _Evil(path)}
        made = {f"pickle, protocol {n}": pickle.dumps(_Evil(path), protocol=n) for n in range(6)}
        made |= {f"torch.save, zip {z}": _torch_bytes(evil, z) for z in (True, False)}
        made |= {"weights": _torch_bytes({"model": {"head.weight": _Evil(path)}}, True)}
        made |= {"object arrays": _object_arrays(_Evil(path)), "zip of pickles": _zip_of(pickle.dumps(_Evil(path)))}
        return made | {f"{name}, with a checksum": _signed(data) for name, data in made.items()}

    train = _train(good)
    uses: dict[str, tuple[str, list[str]]] = {
        "train --resume": ("run/checkpoint.pt", ["train", "--resume", "run"]),
        "train --resume FILE": ("x.pt", [*train, "--resume", "x.pt"]),
        "fidelity --checkpoint": ("x.pt", ["fidelity", "demo_vit", "--data", str(good.npz), "--checkpoint", "x.pt"]),
        "--data .npz": ("x.npz", [*train, "--data", "x.npz"]),
        "--data folder": ("f/train/a/0.png", [*train, "--data", "f"]),
        "calibration_file": ("c.json", [*train, "--method", "hot", "--set", "calibration_file=c.json"]),
        "report": ("r/summary.json", ["report", "r"]),
        "compare --resume, plan": ("c/comparison.json", ["compare", "--resume", "c"]),
        "model_args.checkpoint_path": ("w.pth", [*train, "--set", "model_args.checkpoint_path=w.pth"]),
        "model_args.checkpoint_path, a .bin": ("w.bin", [*train, "--set", "model_args.checkpoint_path=w.bin"]),
        "pretrained_cfg_overlay": ("w.pth", [*train, "--set", _OVERLAY, "--set", "model_args.pretrained=true"]),
        "pretrained from a file": (
            "w.pth",
            ["train", "demo_vit", "--data", str(good.npz), "--set", "model=test_vit", "--set", "pretrained=true",
             "--set", _OVERLAY, "--set", "steps=1", "--set", "image_size=160"],
        ),
    }  # fmt: skip
    for use, (name, line) in uses.items():
        for what in contents(""):

            def run(name: str = name, line: list[str] = line, what: str = what) -> str:
                canary = Path("executed").absolute()
                path = Path(name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(contents(str(canary))[what])
                if name.startswith("f/"):
                    (path.parents[2] / "val" / "a").mkdir(parents=True)
                try:
                    answer = command(line)
                finally:
                    if canary.exists():
                        raise Finding("the file's code ran")
                if answer == "accepted":
                    raise Finding("accepted")
                return answer

            yield Case("pickles that run code", f"{use}: {what}", run)


KINDS: dict[str, Callable[[Good, int, random.Random], Iterator[Case]]] = {
    "lines": lines,
    "settings": settings,
    "calibrations": calibrations,
    "checkpoints": checkpoints,
    "arrays": arrays,
    "images": images,
    "texts": texts,
    "reports": reports,
    "comparisons": comparisons,
    "pickles": pickles,
}
