"""LQS: the rule on gradients made by hand, the file, and that a calibration leaves no trace."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotrain
from hotrain import BitSchedule, Calibration
from hotrain.calibration import LayerChoice, scale_errors
from hotrain.nn.state import layer_states

WIDTH = 32


class Two(nn.Module):
    """Two Linear layers on the same tokens; the loss sets each one's g_y."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


def _given(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    x, g_a, g_b = batch
    y_a, y_b = model(x)
    return (y_a * g_a).sum() + (y_b * g_b).sum()


def _everything(module: nn.Module, name: str) -> bool:
    return True


def _two(method: str = "hot") -> nn.Module:
    torch.manual_seed(0)
    model = Two()
    hotrain.convert(model, method, filter_fn=_everything)
    return model


def _batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """g_y of `a`: one token 100 times the others. Of `b`: tokens alike."""
    generator = torch.Generator().manual_seed(seed)
    x, g_a, g_b = (torch.randn(2, 16, WIDTH, generator=generator) for _ in range(3))
    g_a[0, 5] *= 100
    return x, g_a, g_b


def test_an_outlier_token_asks_for_a_scale_a_token() -> None:
    model = _two()
    calibration = hotrain.calibrate(model, [_batch()], _given)
    assert {name: choice.choice for name, choice in calibration.layers.items()} == {"a": "token", "b": "tensor"}
    assert calibration.layers["a"].ratio < 0.5 < calibration.layers["b"].ratio
    calibration.apply(model)
    assert {name: state.method.grad_input.scale for name, state in layer_states(model)} == {"a": "token", "b": "tensor"}
    assert "1 of 2 layers take per-token scales" in str(calibration)


def test_a_compiled_model_is_its_module() -> None:
    """Names are those of the module, for one and the other."""
    model = _two()
    compiled = torch.compile(model, backend="eager")
    calibration = hotrain.calibrate(compiled, [_batch()], _given)
    assert calibration == hotrain.calibrate(model, [_batch()], _given)
    calibration.apply(compiled)
    assert {state.method.grad_input.scale for _, state in layer_states(model)} == {"token", "tensor"}
    for wrong in (lambda: hotrain.calibrate(None, []), lambda: calibration.apply(None), lambda: hotrain.cost(None)):
        with pytest.raises(TypeError, match="the model is a NoneType; accepted is a"):
            wrong()
    with pytest.raises(TypeError, match="saved_bytes: the model is a str"):
        hotrain.saved_bytes("vit")


@pytest.mark.parametrize("method", ["hot", "int4"])
def test_errors_are_those_of_the_tensor_that_is_quantized(method: str) -> None:
    g_y = _batch()[1].flatten(0, 1)
    path = hotrain.preset(method, rounding="nearest").grad_input
    g = g_y
    if path.transform == "hadamard":
        H = torch.tensor([[1.0]])
        for _ in range(4):
            H = torch.cat((torch.cat((H, H), 1), torch.cat((H, -H), 1))) / math.sqrt(2)
        g = (g_y.view(-1, WIDTH // 16, 16) @ H).flatten(1)

    def error(scale: Tensor) -> float:
        return float((g - (g / scale).round() * scale).norm() / g.norm())

    one, many = error(g.abs().max() / 7), error(g.abs().amax(1, keepdim=True) / 7)
    # A value within a float32 rounding of a half may go either way: far less than the error itself.
    assert scale_errors(g_y, path, key=0) == pytest.approx((one, many), rel=1e-3)
    assert scale_errors(g_y, path, key=0, statistic="mse") == pytest.approx((one**2, many**2), rel=2e-3)


def test_zero_gradients_have_no_error() -> None:
    assert scale_errors(torch.zeros(16, 16), hotrain.preset("hot").grad_input, key=0) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("statistic", "threshold", "choice", "reason"),
    [
        ("l2", 0.5, "tensor", "0.62 is not below a half"),
        ("mse", 0.5, "token", "its square, 0.39, is"),
        ("l2", 0.7, "token", "a looser rule"),
        ("mse", 0.25, "tensor", "the square of the rule of l2"),
    ],
)
def test_rule(statistic: str, threshold: float, choice: str, reason: str) -> None:
    # Tokens whose magnitudes spread enough for an L2 ratio between 0.5 and 0.7.
    x, g_a, _ = _batch()
    g_a[0, 5] /= 100
    g_a *= torch.linspace(0.35, 1.6, 16)[:, None]
    found = hotrain.calibrate(_two(), [(x, g_a, g_a)], _given).layers["a"]
    assert 0.5 < found.ratio < 0.7
    chosen = hotrain.calibrate(_two(), [(x, g_a, g_a)], _given, statistic=statistic, threshold=threshold)
    assert chosen.layers["a"].choice == choice, reason


def test_mean_over_batches() -> None:
    hotrain.manual_seed(0)
    model = _two()
    both = hotrain.calibrate(model, [_batch(0), _batch(1)], _given).layers["b"]
    assert both.batches == 2
    first = hotrain.calibrate(model, [_batch(0)], _given).layers["b"]
    # The second batch alone, under the draws that it has as the second of two.
    second = (2 * both.error_tensor - first.error_tensor, 2 * both.error_token - first.error_token)
    again = hotrain.calibrate(model, [_batch(1)], _given).layers["b"]
    assert second == pytest.approx((again.error_tensor, again.error_token), rel=0.05)  # other draws, same tensor
    assert both.ratio == pytest.approx(both.error_token / both.error_tensor)


def test_no_more_batches_than_asked_for() -> None:
    endless = (_batch(seed) for seed in itertools.count())
    assert hotrain.calibrate(_two(), endless, _given, max_batches=3).layers["a"].batches == 3
    assert next(endless)[0].equal(_batch(3)[0])


class Net(nn.Module):
    """BatchNorm has buffers, dropout draws."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 3, padding=1)
        self.norm, self.drop = nn.BatchNorm2d(32), nn.Dropout(0.5)
        self.point, self.head = nn.Conv2d(32, 32, 1), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.point(self.drop(self.norm(self.conv(x)))).mean((2, 3)))


class Loader:
    """Batches that draw from PyTorch's generator, as a shuffling DataLoader does."""

    def __iter__(self):
        while True:
            yield torch.randn(2, 3, 8, 8), torch.randint(0, 4, (2,))


@pytest.mark.parametrize("training", [True, False])
def test_left_as_found(training: bool) -> None:
    torch.manual_seed(0)
    model = Net()
    hotrain.convert(model, "hot-unbiased", filter_fn=_everything)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(2, 3, 8, 8), torch.tensor([0, 1])

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    step(model, optimizer)  # gradients are there, and draws have advanced
    model.train(training)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    grads = [(p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
    counters = [(s.draws.step, s.draws.generation, s.calls, s.fallback) for _, s in layer_states(model)]
    generator = torch.get_rng_state()

    hotrain.calibrate(model, Loader(), F.cross_entropy)

    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    now = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(g is old and torch.equal(g, value) for g, (old, value) in zip(now, grads, strict=True))
    assert [(s.draws.step, s.draws.generation, s.calls, s.fallback) for _, s in layer_states(model)] == counters
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(module.training is training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


def test_training_goes_on_as_if_nothing_had_been_measured() -> None:
    def run(calibrated: bool) -> list[Tensor]:
        torch.manual_seed(0)
        hotrain.manual_seed(0)
        model = Net()
        hotrain.convert(model, "hot-unbiased", filter_fn=_everything)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            if calibrated:
                hotrain.calibrate(model, Loader(), F.cross_entropy, max_batches=1)
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(2, 3, 8, 8)), torch.tensor([0, 1])).backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


def test_gradients_are_exact_upstream_of_converted_layers() -> None:
    """The first layer's g_y comes through an exact second layer, whatever the method."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    x, g = torch.randn(2, 16, WIDTH), torch.randn(2, 16, WIDTH)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) * g).sum()

    hotrain.convert(model, "int4", filter_fn=_everything)
    measured = hotrain.calibrate(model, [x], loss).layers["0"]
    g_first = (g.flatten(0, 1) @ model[1].weight).detach()
    want = scale_errors(g_first, model[0]._hotrain.method.grad_input, key=0)  # int4 rounds to nearest: no key matters
    assert (measured.error_tensor, measured.error_token) == pytest.approx(want, rel=1e-4)


def test_file(tmp_path: Path) -> None:
    calibration = hotrain.calibrate(_two(), [_batch()], _given)
    path = tmp_path / "lqs.json"
    calibration.save(path)
    assert Calibration.load(path) == calibration
    assert Calibration.load(str(path)) == calibration
    value = json.loads(path.read_text())
    assert value["version"] == 1
    assert value["layers"]["a"]["choice"] == "token"
    assert list(tmp_path.iterdir()) == [path]  # no draft is left
    value["layers"]["b"]["choice"] = "token"  # edited by hand
    path.write_text(json.dumps(value))
    with pytest.raises(ValueError, match=r"is damaged: .* if you have edited it, remove the line sha256"):
        Calibration.load(path)
    del value["sha256"]
    path.write_text(json.dumps(value))
    model = _two()
    Calibration.load(path).apply(model)
    assert all(state.method.grad_input.scale == "token" for _, state in layer_states(model))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "found 'list'"),
        ('{"layers": {}}', "version 1"),
        ('{"version": 99}', "found 99"),
        ('{"version": 1, "layers": {}}', "statistic"),
        ('{"version": 1, "statistic": "l2", "threshold": 0.5, "layers": {"a": {"choice": "token"}}}', "missing"),
        (
            '{"version": 1, "statistic": "l2", "threshold": 0.5, "layers": {"a": {"choice": "row", '
            '"error_tensor": 1, "error_token": 1, "ratio": 1, "batches": 1}}}',
            "choice='row'",
        ),
        ("[" * 100_000, "not JSON"),  # deeper than Python's stack
        ('{"version": 1, "statistic": "l3", "threshold": 0.5, "layers": {}}', "statistic='l3' is not one of l2, mse"),
        ('{"version": 1, "statistic": "l2", "threshold": "x", "layers": {}}', "threshold='x' is not a finite number"),
        *(
            (
                '{"version": 1, "statistic": "l2", "threshold": 0.5, "layers": {"a": {"choice": "token", '
                f'"error_tensor": {value}, "error_token": 1, "ratio": 1, "batches": 1}}}}}}',
                "a: error_tensor=.* is not a finite number, 0 or more",
            )
            for value in ("NaN", "1e400", "-1", '"1"', "null", "true")
        ),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "lqs.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Calibration.load(path)


def test_a_flipped_bit_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lqs.json"
    calibration = Calibration({"a": LayerChoice("token", 0.5, 0.125, 0.25, 3)}, "l2", 0.5)
    calibration.save(path)
    good = path.read_bytes()
    for bit in range(8 * len(good)):
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with contextlib.suppress(ValueError):
            assert Calibration.load(path) == calibration, f"bit {bit}"  # white space


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "lqs.json"
    os.mkfifo(path)  # reading it would wait for ever
    with pytest.raises(ValueError, match="is no regular file"):
        Calibration.load(path)
    path.unlink()
    path.symlink_to("/dev/zero")  # reading it would take all memory
    with pytest.raises(ValueError, match="is no regular file"):
        Calibration.load(path)


def test_a_full_disk_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lqs.json"
    choice = LayerChoice("token", 0.5, 0.125, 0.25, 3)
    Calibration({"a": choice}).save(path)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        Calibration({"b": choice}).save(path)
    assert list(tmp_path.iterdir()) == [path]
    assert list(Calibration.load(path).layers) == ["a"]


def test_a_calibration_of_another_model() -> None:
    choice = LayerChoice("token", 1.0, 0.1, 0.1, 1)
    model = _two()
    with pytest.raises(ValueError, match=r"it has c, .*it lacks b"):
        Calibration({"a": choice, "c": choice}).apply(model)
    # Nothing was changed on the way to the error.
    assert all(state.method.grad_input.scale == "auto" for _, state in layer_states(model))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"statistic": "l1"}, "statistic='l1'"),
        ({"max_batches": 0}, "max_batches=0"),
        ({"threshold": 0.0}, "threshold=0.0"),
    ],
)
def test_bad_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hotrain.calibrate(_two(), [_batch()], _given, **arguments)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="no batch"):
        hotrain.calibrate(_two(), [], _given)
    with pytest.raises(ValueError, match="no layer quantizes"):
        hotrain.calibrate(_two("hla"), [_batch()], _given)
    x, g_a, g_b = _batch()
    with pytest.raises(ValueError, match="the loss is nan"):
        hotrain.calibrate(_two(), [(x * float("nan"), g_a, g_b)], _given)
    with pytest.raises(ValueError, match="no gradient reached a converted layer"):
        hotrain.calibrate(_two(), [_batch()], lambda model, batch: sum(p.sum() for p in model.parameters()))


def test_a_layer_that_no_gradient_reaches_has_no_choice() -> None:
    """A frozen layer with nothing trainable before it, as in a LoRA model."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH))
    hotrain.convert(model, "hot", filter_fn=_everything)
    calibration = hotrain.calibrate(model, [torch.randn(2, 16, WIDTH)], lambda model, x: model(x).square().sum())
    assert (calibration.layers["0"].choice, calibration.layers["0"].batches) == ("token", 0)
    assert "no gradient" in str(calibration)
    calibration.apply(model)


def test_methods_without_a_choice_are_left_alone() -> None:
    """LUQ has a format of its own: one scale, whatever the gradient."""
    model = Two()
    hotrain.convert(model, "luq", filter_fn=lambda module, name: name == "a")
    hotrain.convert(model, "hot", filter_fn=lambda module, name: name == "b")
    calibration = hotrain.calibrate(model, [_batch()], _given)
    assert set(calibration.layers) == {"b"}
    calibration.apply(model)


def test_bit_schedule() -> None:
    model = _two()
    schedule = BitSchedule(warmup=2)
    target = {name: state.method for name, state in layer_states(model)}
    seen = []
    for epoch in (0, 1, 2, 3, 1):  # back to 1: a run that was resumed
        assert schedule.apply(model, epoch) == ["a", "b"]
        seen.append(model.a._hotrain.method.grad_input.bits)
    assert seen == [8, 8, 4, 4, 8]
    assert [schedule.at(epoch) for epoch in (0, 1, 2)] == [8, 8, 4]
    schedule.apply(model, 2)
    assert {name: state.method for name, state in layer_states(model)} == target
    assert BitSchedule().warmup == 25  # the paper's


def test_bit_schedule_leaves_the_rest() -> None:
    model = _two()
    before = copy.deepcopy(model.a._hotrain.method)
    BitSchedule().apply(model, 0)
    after = model.a._hotrain.method
    assert (after.grad_weight, after.saved) == (before.grad_weight, before.saved)
    hotrain.convert(model, "luq", filter_fn=lambda module, name: name == "a")
    assert BitSchedule().apply(model, 0) == ["b"]


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("hla", {}, r"nothing is set: a \(hla\), b \(hla\)\. Convert the model with hot, .*leave the schedule out"),
        ("luq", {}, r"a \(luq\), b \(luq\)"),  # a format of its own
        ("hq8", {"number": "e4m3"}, r"a \(hq8\), b \(hq8\).*number=\"int\""),
        ("exact", {}, "no layer of this Two is converted"),
    ],
)
def test_a_bit_schedule_that_sets_nothing_says_so(method: str, options: dict, said: str) -> None:
    model = Two()
    hotrain.convert(model, method, filter_fn=_everything, **options)
    with pytest.warns(UserWarning, match=said):
        assert BitSchedule().apply(model, 0) == []


def test_the_named_presets_have_bits_to_schedule() -> None:
    for method in ("hot", "hot-unbiased", "hot-importance", "hq", "hq8", "hq4", "int4"):
        assert BitSchedule().apply(_two(method), 0) == ["a", "b"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"bits": 5}, "bits=5"), ({"warmup_bits": None}, "warmup_bits=None"), ({"warmup": -1}, "-1")],
)
def test_bad_schedules(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BitSchedule(**fields)


def test_batches_that_are_none_are_refused() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    hotrain.convert(model, "hot")
    with pytest.raises(TypeError, match="the batches are a NoneType"):
        hotrain.calibrate(model, None)
