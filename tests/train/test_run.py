"""A run as data: it checks itself, survives JSON, and is varied by fields and by command-line strings."""

import json
from typing import Any

import pytest

from hotrain import preset
from hotrain.train import Lora, TrainRun, parse_method, replace, with_settings

BAD = [
    ({"batch_size": 0}, "batch_size: got 0"),
    ({"lr": -1.0}, "lr: got -1.0"),
    ({"lr": float("nan")}, "lr: got nan"),  # NaN passes every comparison written the wrong way round
    ({"lr": float("inf")}, "lr: got inf, accepted is a finite number"),  # it would train to the end, then not fit JSON
    ({"weight_decay": 10**400}, "accepted is a finite number"),
    ({"clip": 0.0}, "clip: got 0, .* accepted are values above 0, or none for off"),
    ({"lora": Lora(dropout=float("nan"))}, "lora.dropout: got nan"),
    ({"lora": Lora(rank="8")}, "lora.rank: got '8', accepted is int"),  # type: ignore[arg-type]
    ({"lora": Lora(dropout=float("inf"))}, "lora.dropout: got inf"),
    ({"model_args": {"drop_rate": float("nan")}}, "model_args: got .* accepted are finite JSON values"),
    ({"model_args": {"norm_layer": object()}}, "model_args: got .* accepted are finite JSON values"),
    ({"epochs": 1.5}, "epochs: got 1.5"),
    ({"epochs": True}, "epochs: got True"),  # bool is an int to Python
    ({"schedule": "linear"}, "schedule: got 'linear'"),
    ({"amp": "fp8"}, "amp: got 'fp8'"),
    ({"task": "depth"}, "task: got 'depth', accepted is 'classification'"),
    ({"device": "tpu"}, "device: got 'tpu'"),
    ({"mixup": 0.8, "batch_size": 33}, "batch_size: got 33, mixup"),
    ({"schedule": "multistep", "milestones": (100.0,)}, "milestones: got"),
    ({"method": "hott"}, "did you mean 'hot'|Did you mean 'hot'"),
    ({"method": "hot", "method_overrides": {"rank": 17}}, "rank"),
    ({"method": "hot", "calibrate_batches": 2, "calibration_file": "c.json"}, "calibration_file: got both"),
    ({"amp": "fp16", "device": "cpu"}, "amp: got 'fp16'"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_a_bad_value_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainRun(**fields)


@pytest.mark.parametrize(
    "run",
    [
        TrainRun(),
        TrainRun(method="hot", method_overrides={"rank": 4, "saved_bits": None}, milestones=(0.25,)),
        TrainRun(lora=Lora(rank=4, targets=("qkv", "fc1")), amp="bf16"),
        TrainRun(method=preset("hot", rank=4)),  # a Method value, not a name
    ],
    ids=["defaults", "overrides", "nested", "method-value"],
)
def test_a_run_survives_json(run: TrainRun) -> None:
    assert TrainRun.from_dict(json.loads(json.dumps(run.to_dict()))) == run


def test_json_of_another_version_names_the_unknown_field() -> None:
    with pytest.raises(ValueError, match="unknown field 'epoch' of a run; did you mean 'epochs'"):
        TrainRun.from_dict({"epoch": 3})


def test_records_may_have_removed_fields_that_were_unset() -> None:
    removed = {"corrupt": "refuse", "grokfast": None, "decay_rate": 0.1, "mix_prob": 1.0, "mix_switch_prob": 0.5}
    assert TrainRun.from_dict({"epochs": 3, **removed}) == TrainRun(epochs=3)
    with pytest.raises(ValueError, match="unknown field 'corrupt'"):
        TrainRun.from_dict({"corrupt": "skip"})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"lora": {"rang": 3}}, "lora: a part is missing or unknown .*rang"),
        ({"method": {"name": "hot"}}, "method: a part is missing or unknown .*grad_input"),
    ],
)
def test_json_with_parts_missing_is_refused_by_name(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainRun.from_dict(data)


SETTINGS = [
    ("epochs=3", "epochs", 3),
    ("lr=1e-4", "lr", 1e-4),
    ("lr=1", "lr", 1.0),  # a whole number is a rate too
    ("steps=none", "steps", None),
    ("steps=7", "steps", 7),
    ("amp=bf16", "amp", "bf16"),
    ("flip=False", "flip", False),  # Python's spelling and JSON's
    ("milestones=0.3,0.6", "milestones", (0.3, 0.6)),
    ("data=/some/where=else.npz", "data", "/some/where=else.npz"),  # only the first = separates
    ('model_args={"depth": 2}', "model_args", {"depth": 2}),
    ("model_args.depth=2", "model_args", {"depth": 2}),
    ("lora.targets=qkv,fc1", "lora", Lora(targets=("qkv", "fc1"))),
]


@pytest.mark.parametrize(("setting", "name", "value"), SETTINGS)
def test_settings_are_read_by_the_fields_type(setting: str, name: str, value: object) -> None:
    got = getattr(with_settings(TrainRun(), [setting]), name)
    assert got == value
    assert type(got) is type(value)


def test_several_settings_of_one_nested_field_add_up() -> None:
    run = with_settings(TrainRun(), ["lora.rank=8", "lora.alpha=4"])
    assert run.lora == Lora(rank=8, alpha=4)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("epochs", "write it as field=value"),
        ("epoch=3", "did you mean 'epochs'"),
        ("epochs=three", "epochs: got 'three'"),
        ("lr=1e400", "lr: got inf"),
        ("epochs=0", "epochs: got 0"),  # well-formed, out of range
        ("lora.rang=8", "lora.rang: unknown field"),
        ("epochs.x=1", "epochs has no parts"),
    ],
)
def test_a_bad_setting_is_refused(setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_settings(TrainRun(), [setting])


def test_replace_refuses_unknown_fields() -> None:
    with pytest.raises(ValueError, match="did you mean 'batch_size'"):
        replace(TrainRun(), batchsize=3)


def test_parse_method() -> None:
    assert parse_method("hot") == ("hot", {})
    assert parse_method("hot:rank=4+scale=token+saved_bits=none") == (
        "hot",
        {"rank": 4, "scale": "token", "saved_bits": None},
    )
    with pytest.raises(ValueError, match="write overrides as"):
        parse_method("hot:rank")
