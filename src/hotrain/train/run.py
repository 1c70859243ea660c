"""TrainRun: the complete configuration of a training run, as plain data.

A run is made by a recipe, varied with :func:`replace` or with ``field=value`` strings (:func:`with_settings`), and
written as JSON to every record and checkpoint. It is validated when it is constructed.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from hotrain import files
from hotrain.method import Method
from hotrain.presets import preset


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters through peft; the classifier is trained too.

    Args:
        rank, alpha, dropout: as in ``peft.LoraConfig`` (the papers use 16, 32 and 0.1).
        targets: last names of the linear layers that get an adapter (timm's names).
        convert: which layers get the run's method: the frozen ones, the adapters, or both. Adapters lose accuracy by it
            (HOT, Table 3).
    """

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.1
    targets: tuple[str, ...] = ("qkv",)
    convert: Literal["frozen", "adapters", "both"] = "frozen"


@dataclass(frozen=True)
class TrainRun:
    """Configuration of a training run: everything that decides what it computes, and where it writes.

    Lengths are in epochs unless the name says otherwise; a rate is per optimizer update. One *update* is one
    optimizer step over ``batch_size × accumulation × processes`` images.

    Raises:
        ValueError: a field of another type or out of range; the message says what is accepted.
    """

    # What is trained, and on what
    name: str = "run"
    # without labels: see contrastive.py; a class for each pixel, or boxes: dense.py
    task: Literal["classification", "simclr", "byol", "segmentation", "detection"] = "classification"
    model: str = "small_vit"  # a timm name or one of hotrain.train.models.SMALL
    model_args: dict[str, Any] = field(default_factory=dict)  # further keyword arguments of timm.create_model
    pretrained: bool = False
    init: str | None = None  # a checkpoint of another run, whose weights but for the classifier this one starts with
    data: str = "digits"  # cifar10 | cifar100 | digits | a folder of images | an .npz file; dense: scenes drawn of it
    data_dir: str = "data"  # where cifar10 and cifar100 are kept or downloaded to
    image_size: int | None = None  # side in pixels; None: as the data has it (folders: 224)
    num_workers: int = 4  # processes that decode image files; arrays need none

    # How gradients are computed
    method: str | Method = "exact"
    method_overrides: dict[str, Any] = field(default_factory=dict)
    plan: Literal["speed", "graphs", "memory"] = "speed"  # of hotrain.convert: which layers stay exact on a GPU
    bit_warmup_epochs: int = 0  # int8 gradients for the first epochs (hotrain.BitSchedule)
    calibrate_batches: int = 0  # training batches for LQS; 0: no calibration
    calibrate_at: int = 0  # the epoch before which it runs
    calibration_file: str | None = None  # a saved calibration instead
    lora: Lora | None = None

    # How long, how much at once
    epochs: int = 10
    steps: int | None = None  # optimizer updates; given, it replaces epochs
    batch_size: int = 128  # images in one forward of one process
    accumulation: int = 1
    eval_batch_size: int = 256

    # Optimizer and schedule
    optimizer: str = "adamw"  # a name of timm.optim
    lr: float = 1e-3
    weight_decay: float = 0.05
    momentum: float = 0.9
    schedule: Literal["cosine", "multistep", "constant"] = "cosine"
    warmup_epochs: float = 0.0
    warmup_lr: float = 1e-6
    min_lr: float = 0.0
    milestones: tuple[float, ...] = (0.5, 0.75)  # multistep: fractions of the run at which the rate drops to a tenth
    clip: float | None = None  # largest gradient norm
    ema: float | None = None  # decay of the averaged weights

    # Augmentation and targets
    crop_padding: int = 4  # arrays: random crop after padding this many pixels; 0: none
    flip: bool = True
    auto_augment: str | None = None  # image folders: timm's policy, such as rand-m9-mstd0.5-inc1
    mixup: float = 0.0
    cutmix: float = 0.0
    smoothing: float = 0.0
    random_erase: float = 0.0

    # Numerics and machine
    amp: Literal["bf16", "fp16"] | None = None
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    compile: bool = False  # torch.compile; on a GPU as CUDA graphs unless plan="speed"
    channels_last: bool = False  # memory format of images and convolution weights, faster for 16-bit kernels of GPUs
    grad_checkpointing: bool = False
    deterministic: bool = False  # deterministic algorithms only: needed for a bit-exact resume on CUDA
    seed: int = 0

    # What is written
    out_dir: str = "runs"
    evaluate_every: int = 1  # epochs between evaluations, each with a checkpoint; the last epoch always has them
    checkpoint_every: int = 0  # updates between checkpoints within an epoch; one follows every evaluation anyway
    log: Literal["tensorboard", "trackio"] | None = None  # a tracker, beside the records
    audit: bool = True  # measure saved bytes and bit operations on one training batch before the first update

    def __post_init__(self) -> None:
        for part, where in ((self, ""), (self.lora, "lora.")):
            _check_types(part, where)
        for name, value in vars(self).items():
            low, high = _RANGES.get(name, (0, _INF))
            if isinstance(value, int | float) and not low <= value <= high:
                accepted = f"values from {low} to {high}" if high < _INF else f"finite values from {low}"
                raise ValueError(f"{name}: got {value}, accepted are {accepted}")
        if self.clip == 0:
            raise ValueError("clip: got 0, which would leave no gradient; accepted are values above 0, or none for off")
        for name in ("model_args", "method_overrides"):
            try:  # what a record cannot hold is refused before the training
                json.dumps(getattr(self, name), allow_nan=False, default=sorted)
            except (TypeError, ValueError) as error:
                got = getattr(self, name)
                raise ValueError(f"{name}: got {got}, accepted are finite JSON values ({error})") from error
        if (self.mixup or self.cutmix) and self.batch_size % 2:
            raise ValueError(f"batch_size: got {self.batch_size}, mixup and cutmix need an even number")
        if self.schedule == "multistep" and not all(0.0 < m < 1.0 for m in self.milestones):
            raise ValueError(f"milestones: got {self.milestones}, accepted are fractions between 0 and 1")
        if self.device not in ("auto", "cpu", "cuda") and not self.device.startswith("cuda:"):
            raise ValueError(f"device: got {self.device!r}, accepted are auto, cpu, cuda and cuda:N")
        if self.amp == "fp16" and self.device == "cpu":
            raise ValueError("amp: got 'fp16' with device 'cpu', use 'bf16' there")
        if self.calibration_file is not None and self.calibrate_batches:
            raise ValueError("calibration_file: got both a file and calibrate_batches, give one of them")
        if self.task != "classification":
            others = ["lora", "ema", "mixup", "cutmix", "smoothing", "random_erase"]
            others += ["calibrate_batches"] if self.task in ("simclr", "byol") else ["init", "pretrained"]
            given = [name for name in others if getattr(self, name)]
            if given:
                raise ValueError(f"{given[0]}: it is not for task={self.task!r}; leave it out")
        self.resolve_method()

    def resolve_method(self) -> Method:
        """Return the method: the preset of that name, or the given Method, with the overrides.

        Raises:
            ValueError: an unknown preset or override, or a value that is not allowed.
        """
        if isinstance(self.method, Method):
            return self.method.override(**self.method_overrides) if self.method_overrides else self.method
        return preset(self.method, **self.method_overrides)

    @property
    def method_label(self) -> str:
        """Short name of the method in tables: the preset, with its overrides if any."""
        base = self.method if isinstance(self.method, str) else self.method.name
        extra = "+".join(f"{k}={v}" for k, v in self.method_overrides.items())
        return f"{base}:{extra}" if extra else base

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data; :meth:`from_dict` is the inverse."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=sorted))  # a Method's knobs are a set

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TrainRun:
        """Make a run from the data that :meth:`to_dict` returned, also before fields were removed that had one value.

        Raises:
            ValueError: an unknown field (with the nearest known one) or a bad value.
        """
        values = {name: value for name, value in data.items() if (name, value) not in _REMOVED}
        for name in values:
            _check_field(name)
        parts: dict[str, Callable[[Any], Any]] = {"lora": lambda value: Lora(**value), "method": Method.from_dict}
        for name, read in parts.items():
            if isinstance(values.get(name), dict):
                try:
                    values[name] = read(values[name])
                except (KeyError, TypeError) as error:
                    raise ValueError(f"{name}: a part is missing or unknown ({error})") from error
        return cls(**values)


_REMOVED: list[tuple[str, Any]] = [
    *(("corrupt", "refuse"), ("grokfast", None), ("decay_rate", 0.1), ("mix_prob", 1.0), ("mix_switch_prob", 0.5)),
]
"""Fields that are gone, with the values that records and checkpoints may have of them."""
_INF = sys.float_info.max  # no upper bound, but finite
INT64 = 2**63 - 1  # the largest size, and the largest seed, that PyTorch takes
_RANGES: dict[str, tuple[float, float]] = {
    "image_size": (1, 16384),
    "num_workers": (0, 1024),
    "epochs": (1, _INF),
    "steps": (1, _INF),
    "batch_size": (1, INT64),
    "accumulation": (1, _INF),
    "eval_batch_size": (1, INT64),
    "momentum": (0.0, 1.0),
    "ema": (0.0, 1.0),
    "crop_padding": (0, 1024),
    "smoothing": (0.0, 1.0),
    "random_erase": (0.0, 1.0),
    "seed": (0, INT64),
    "evaluate_every": (1, _INF),
}
"""Smallest and largest value of a field; of other numbers: from 0."""


def replace(run: TrainRun, **fields: Any) -> TrainRun:
    """Return a copy of ``run`` with some fields changed, validated like any other run.

    Raises:
        ValueError: an unknown field (with the nearest known one) or a bad value.
    """
    for name in fields:
        _check_field(name)
    return dataclasses.replace(run, **fields)


def with_settings(run: TrainRun, settings: typing.Iterable[str]) -> TrainRun:
    """Return a copy of ``run`` changed by ``field=value`` strings, as on the command line.

    A value is parsed by the field's type: ``epochs=3``, ``lr=1e-3``, ``amp=none``, ``flip=false``,
    ``milestones=0.5,0.75``, ``model_args={"drop_path_rate": 0.1}``, ``lora.rank=8``, ``method_overrides.rank=4``.

    Raises:
        ValueError: a string without ``=``, an unknown field or a value that its type does not accept.
    """
    changes: dict[str, Any] = {}
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"setting {setting!r}: write it as field=value")
        name, dot, key = path.strip().partition(".")
        _check_field(name)
        current = changes.get(name, getattr(run, name))
        if not dot:
            changes[name] = parse_value(typing.get_type_hints(TrainRun)[name], text.strip())
        elif name == "lora":
            nested = current or Lora()
            hints = typing.get_type_hints(Lora)
            if key not in hints:
                raise ValueError(f"{path}: unknown field, {name} has {', '.join(hints)}")
            changes[name] = dataclasses.replace(nested, **{key: parse_value(hints[key], text.strip())})
        elif isinstance(current, dict):
            changes[name] = {**current, key: parse_json(text.strip())}
        else:
            raise ValueError(f"{path}: {name} has no parts, write {name}=value")
    return replace(run, **changes)


def parse_method(text: str) -> tuple[str, dict[str, Any]]:
    """Parse ``name[:field=value[+field=value…]]``, such as ``"hot:rank=4+scale=token"``: preset's name and overrides.

    Raises:
        ValueError: an override without ``=``, or no ``:`` before the first.
    """
    name, colon, rest = text.strip().partition(":")
    parts = [part.partition("=") for part in rest.split("+") if part]
    if "=" in name or (not colon and "+" in name) or not all(equals for _, equals, _ in parts):
        raise ValueError(f"method {text!r}: write overrides as name:field=value+field=value")
    return name, {key.strip(): parse_json(value.strip()) for key, _, value in parts}


def with_preset(run: TrainRun, method: str | Method) -> TrainRun:
    """Return a copy of ``run`` with a method, or that of `parse_method`, and no other overrides.

    Raises:
        ValueError: an unknown method or a bad override.
    """
    name, overrides = (method, {}) if isinstance(method, Method) else parse_method(method)
    return replace(run, method=name, method_overrides=overrides)


def parse_json(text: str) -> Any:
    """Parse ``text`` as JSON, ``none`` as None; return the string itself where it is neither."""
    if text.lower() == "none":
        return None
    try:
        return files.parse_json(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError:
        return text


def parse_value(kind: Any, text: str) -> Any:
    """Parse the value of a field by its type annotation; `TrainRun` checks it."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if text.lower() == "none" and type(None) in args:
            return None
        return parse_value(next(each for each in args if each is not type(None)), text)
    if origin is tuple:
        return tuple(parse_value(args[0], part.strip()) for part in text.split(",") if part.strip())
    if kind is str or origin is Literal:
        return text
    value = parse_json(text)
    return float(value) if kind is float and files.is_a(value, float) else value


def _check_field(name: str) -> None:
    known = [f.name for f in dataclasses.fields(TrainRun)]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f", known are {', '.join(known)}"
        raise ValueError(f"unknown field {name!r} of a run{hint}")


def _check_types(part: object, where: str) -> None:
    """Refuse values of other types than the fields declare; lists, as JSON has them, become tuples."""
    for name, kind in typing.get_type_hints(type(part)).items():
        value = getattr(part, name)
        if isinstance(value, list) and typing.get_origin(kind) is tuple:
            value = tuple(value)
            object.__setattr__(part, name, value)
        if not files.is_a(value, kind):
            raise ValueError(f"{where}{name}: got {value!r}, accepted is {files.kind_text(kind)}")
