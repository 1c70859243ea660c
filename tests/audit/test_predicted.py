"""What autograd would keep, predicted without running the model: to the byte what is measured."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import pickle
import re
from collections import UserDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import hotrain


class Net(nn.Module):
    """A convolution, a batch norm, attention and an MLP, with functions that no operator supports."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.batch = nn.Conv2d(3, 32, 4, 4), nn.BatchNorm2d(32)
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.wide, self.drop = nn.Linear(32, 64), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.batch(self.conv(x))).flatten(2).mT
        q, k, v = self.qkv(self.norm(x)).view(len(x), -1, 3, 4, 8).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x.exp() * self.drop(nn.functional.glu(self.wide(x), -1)) / (1 + x.square())


@pytest.mark.parametrize("batch", [2, 16])
@pytest.mark.parametrize("method", [None, "hq8", "hot-unbiased", "exact"])
def test_to_the_byte(method: str | None, batch: int) -> None:
    model, x = Net(), torch.randn(batch, 3, 64, 64)
    if method is not None:
        hotrain.convert(model, method, memory="linear" if method == "hot-unbiased" else "block")
    state, predicted = copy.deepcopy(model.state_dict()), hotrain.predicted_bytes(model, x)
    measured = hotrain.saved_bytes(model, x)  # behind it: nothing that is remembered of shapes alone may be read
    assert predicted.by_operator == measured.by_operator
    assert predicted.by_module == measured.by_module
    assert predicted.total == measured.total > 0
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_a_batch_that_is_only_a_shape() -> None:
    """Only shapes are read; the batch itself, which the convolution keeps, is counted once like everything else."""
    model = Net()
    hotrain.convert(model)
    small = hotrain.predicted_bytes(model, torch.empty(16, 3, 64, 64, device="meta")).total
    large = hotrain.predicted_bytes(model, torch.empty(1024, 3, 64, 64, device="meta")).total
    assert large > 2**24
    # All that is kept grows with the batch, but for a number or two a layer.
    assert large / 1024 == pytest.approx(small / 16, rel=0.01)


@pytest.mark.parametrize("converted", [False, True])
def test_under_autocast_and_with_frozen_parameters(converted: bool) -> None:
    """Exact models too: what they keep is in autocast's dtype, half of float32."""
    model, x = Net(), torch.randn(4, 3, 64, 64)
    model.conv.requires_grad_(False)
    if converted:
        hotrain.convert(model)
    with torch.autocast("cpu", torch.bfloat16):
        predicted, measured = hotrain.predicted_bytes(model, x), hotrain.saved_bytes(model, x)
    # PyTorch's fake kernels have the statistics of norms in bfloat16, its real ones on a CPU in float32.
    norms = {"native_layer_norm", "native_batch_norm", "hotrain norm"}
    for name in measured.by_operator.keys() - norms:
        assert predicted.by_operator[name] == measured.by_operator[name], name
    assert predicted.total == pytest.approx(measured.total, rel=0.02)


def test_what_depends_on_values_is_refused() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return y[y[:, 0] > 0]

    with pytest.raises(ValueError, match=r"predicted_bytes: Routed does not run without .* hotrain.saved_bytes"):
        hotrain.predicted_bytes(Routed(), torch.randn(4, 8))


def test_what_a_model_raises_that_reads_values_does_not_end_training() -> None:
    """As the losses of detection do: boxes in mappings that are no dict, which SciPy matches."""
    optimize = pytest.importorskip("scipy.optimize")

    class Matched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: Tensor, labels: list[UserDict[str, Tensor]]) -> Tensor:
            y = self.layer(x)
            rows, columns = optimize.linear_sum_assignment(torch.cdist(y.detach(), labels[0]["boxes"]))
            return (y[rows] - labels[0]["boxes"][columns]).square().mean()

    model, batch = Matched(), (torch.randn(32, 64), [UserDict(boxes=torch.randn(8, 64))])
    report = hotrain.convert(model)
    model(*batch).backward()
    assert report.totals() is None
    assert "1 layer converted" in str(report)
    assert "kept for backward: not known from shapes; hotrain.saved_bytes(model, batch), or **batch" in str(report)
    with pytest.raises(ValueError, match=r"Matched does not run without values on .+ \(.+\); .* hotrain.saved_bytes"):
        hotrain.predicted_bytes(model, *batch)


def test_a_report_outlives_its_model() -> None:
    """Bytes that it was asked for stay, in a copy too; where it never was, it says that there is no model to ask."""
    reports = []
    for asked in (True, False):
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        report = hotrain.convert(model)
        model(torch.randn(32, 64)).sum().backward()
        before = report.totals() if asked else None
        reports.append(report)
        del model
        gc.collect()
        assert report.totals() == before
    asked_once, never = reports
    assert re.search(r"kept for backward of the first batch \([\d×]+\): [\d.]+ KiB, exact keeps", str(asked_once))
    assert pickle.loads(pickle.dumps(asked_once)).totals() == asked_once.totals()
    assert "kept for backward: not known, the model is gone; print the report while there is the model" in str(never)
    unused = hotrain.convert(nn.Sequential(nn.Linear(64, 64)))  # gone, and it kept nothing
    gc.collect()
    assert "kept for backward" not in str(unused)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0])


def test_what_an_lstm_keeps_is_not_predicted() -> None:
    """Its workspace, nine tenths of what it keeps, is empty on fake tensors: reports said 0.8 MiB of 4.5."""
    x = torch.randn(32, 8, 64)
    for model, name in ((Recurrent(), "rnn"), (nn.LSTM(64, 64), "the model")):
        with pytest.raises(ValueError, match=rf"'{name}' is an LSTM, whose workspace .* use hotrain\.saved_bytes"):
            hotrain.predicted_bytes(model, x)
    gru = nn.GRU(64, 64)  # PyTorch's own operators, on a CPU
    assert hotrain.predicted_bytes(gru, x).total == hotrain.saved_bytes(gru, x).total


def test_the_report_counts_the_workspace_of_an_lstm() -> None:
    model, x = Recurrent(), torch.randn(32, 8, 64)
    report = hotrain.convert(model)
    model(x).sum().backward()
    assert report.totals() is None
    found = re.search(r"lstm +kept in full precision: ([\d.]+) MiB per call", str(report))
    assert found is not None
    # Beside x, and sums of its biases, which are small: the report lists neither.
    assert float(found[1]) == pytest.approx(hotrain.saved_bytes(model.rnn, x).total / 2**20, abs=0.15)


class Attributes(nn.Module):
    """Tensors that are neither parameters nor buffers: a table, the last result, another model that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.last = nn.Linear(64, 64), torch.randn(64), None
        self.tables = {"turns": [(torch.polar(torch.ones(32), torch.randn(32)),)]}
        self.hidden = [nn.Linear(64, 64).requires_grad_(False)]

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(self.hidden[0](x).unflatten(-1, (-1, 2))) * self.tables["turns"][0][0]
        y = self.linear(nn.functional.silu(torch.view_as_real(turned).flatten(-2))) * self.scale
        y = y if self.last is None else y * (1 + self.last).exp()
        self.last = y.detach() / 10
        return y


def test_tensors_that_are_plain_attributes() -> None:
    """Llama's code has its rotations so: copying them as they are, among fake tensors, failed."""
    model, x = Attributes(), torch.randn(8, 64, 64, requires_grad=True)
    report = hotrain.convert(model)
    for _ in range(2):
        model(x).sum().backward()
        before = dict(vars(model))
        predicted = hotrain.predicted_bytes(model, x)
        assert vars(model) == before
        assert type(model.last) is Tensor
        assert predicted.by_operator == hotrain.saved_bytes(model, x).by_operator
    assert report.totals() is not None


def test_a_model_of_small_tensors_says_that_they_stay() -> None:
    """Not that a training forward, which there was, will tell."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    report = hotrain.convert(model)
    assert str(report).endswith("between the layers: known after a training forward of the whole model")
    model(torch.randn(64, 64)).sum().backward()
    assert str(report).endswith("outside of checkpoints, keeps 16,384 entries in 16 or 32 bits)")


def test_a_forward_derivative_that_fails_on_fakes_leaves_autograd_as_it_was() -> None:
    """PyTorch leaves autograd out of all later calls when `jvp` of a layer norm raises on a fake tensor."""

    class Jvp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            y, slope = torch.func.jvp(self.inner, (x,), (torch.ones_like(x),))
            return self.head(y - slope.detach())  # type: ignore[no-any-return]

    model, x = Jvp(), torch.randn(8, 64)
    report = hotrain.convert(model)
    model(x).square().sum().backward()
    assert "not known from shapes" in str(report)
    with contextlib.suppress(ValueError):
        hotrain.predicted_bytes(model, x)
    assert nn.Linear(3, 3)(torch.ones(1, 3)).requires_grad


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this PyTorch has no product of groups")
def test_an_operator_that_refuses_fake_tensors_is_not_logged() -> None:
    """PyTorch logs it with a traceback, once an attempt: printing the report of a float32 mixture of experts wrote
    hundreds of lines of error for a model that trains."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.experts = nn.Linear(64, 64), nn.Parameter(torch.randn(2, 64, 64))

        def forward(self, x: Tensor) -> Tensor:
            return torch._grouped_mm(self.layer(x), self.experts, torch.tensor([16, 32], dtype=torch.int32))

    model, x = Experts(), torch.randn(32, 64)
    report = hotrain.convert(model)
    model(x).square().sum().backward()
    log, logged = logging.getLogger("torch._subclasses.fake_tensor"), []

    def seen(record: logging.LogRecord) -> bool:
        logged.append(record)
        return False

    log.addFilter(seen)
    try:
        assert "1 layer converted" in str(report)
        with pytest.raises(ValueError, match="does not run without values"):
            hotrain.predicted_bytes(model, x)
    finally:
        log.removeFilter(seen)
    assert not logged
    assert not log.disabled


class Watching:
    """A hook that is no function: a copy of it would be a copy of all that it watches."""

    def __init__(self) -> None:
        self.mean, self.calls = torch.zeros(()), 0

    def __deepcopy__(self, memory: object) -> Watching:
        raise AssertionError("copied")

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean()


def test_hooks_are_not_run_on_fake_tensors() -> None:
    """A mean of activations that a hook keeps became a fake tensor in a printed report, and the next step raised."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(32, 64)
    report = hotrain.convert(model)
    watching, means, seen = Watching(), [torch.zeros(())], []

    def average(module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        means[0] = 0.9 * means[0] + 0.1 * y.detach().mean()

    model[0].register_forward_hook(average)
    model[1].register_forward_hook(watching, always_call=True)
    model[1].register_forward_pre_hook(lambda module, args, kwargs: seen.append("pre"), with_kwargs=True)
    model[2].register_full_backward_pre_hook(lambda module, g: seen.append("backward pre"))
    model[2].register_full_backward_hook(lambda module, g_x, g_y: seen.append("backward"))
    model(x).sum().backward()
    expected, mean = seen.copy(), means[0]
    assert report.totals() is not None
    assert "kept for backward of the first batch" in str(report)
    predicted = hotrain.predicted_bytes(model, x).total
    assert (seen, watching.calls) == (expected, 1)
    assert means[0] is mean
    model(x).sum().backward()  # hooks of the model itself are where they were
    assert (seen, watching.calls) == (expected * 2, 2)
    assert predicted == hotrain.saved_bytes(model, x).total


class Collecting(nn.Module):
    """A model that collects by hooks of its own what it returns, as transformers' do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.found = nn.Sequential(nn.Linear(64, 64), Part()), []
        self.layers[1].register_forward_hook(self.collect)

    def collect(self, module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        self.found.append(y)

    def forward(self, x: Tensor) -> Tensor:
        self.found.clear()
        self.layers(x)
        return self.found[0]


class Part(nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, 64)


def test_hooks_that_a_model_needs_run_and_a_users_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the library that the model's classes are of: SegFormer of transformers returns what hooks collect."""
    model, seen = Collecting(), []
    model.layers[1].register_forward_hook(other := lambda *_: seen.append(1))
    monkeypatch.setattr(other, "__module__", "users")
    assert hotrain.predicted_bytes(model, torch.randn(32, 64)).total == 2 * 32 * 64 * 4
    assert seen == []


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("computed", [nn.utils.weight_norm, nn.utils.spectral_norm, prune.Identity.apply])
def test_weights_that_a_hook_computes_are_refused(computed: Callable[..., object]) -> None:
    """The hooks of PyTorch's utilities leave a weight that is no leaf: without a copy of it there is no prediction."""
    model = nn.Sequential(nn.Linear(64, 64))
    computed(model[0], name="weight")
    model(torch.randn(32, 64)).sum().backward()
    with pytest.raises(ValueError, match="predicted_bytes: Sequential does not run without values"):
        hotrain.predicted_bytes(model, torch.randn(32, 64))


class Language(nn.Module):
    """Returns the loss of labels, as transformers' models do; both embedding and loss save their integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("twice", [False, True])
def test_one_tensor_given_twice_is_counted_once(twice: bool) -> None:
    model, ids = Language(), torch.randint(50, (4, 32))
    labels = ids if twice else ids.clone()
    measured = hotrain.saved_bytes(model, ids, labels=labels).total
    assert hotrain.predicted_bytes(model, ids, labels=labels).total == measured


def test_mappings_in_a_batch_keep_their_class() -> None:
    """transformers' outputs are arguments too (encoder_outputs), and their values attributes."""

    class Batch(UserDict[str, Tensor]):
        def __getattr__(self, name: str) -> Tensor:
            if name == "data":
                raise AttributeError(name)
            return self.data[name]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, batch: Batch) -> Tensor:
            return self.layer(batch.x)

    model, batch = Net(), Batch(x=torch.randn(32, 64))
    report = hotrain.convert(model)
    model(batch).sum().backward()
    totals = report.totals()
    assert totals is not None
    assert totals[0] == hotrain.saved_bytes(model, batch).total < totals[1]
    assert batch.x.device.type == "cpu"


def test_a_weight_that_a_hook_computes_is_computed() -> None:
    """Before its first forward `spectral_norm` has the weight as a plain tensor, of which no gradient would be kept."""
    model, x = nn.Sequential(nn.utils.spectral_norm(nn.Linear(64, 64)), nn.ReLU()), torch.randn(8, 64)
    assert hotrain.predicted_bytes(model, x).total == hotrain.saved_bytes(model, x).total


class _Parts(nn.Module):
    """An autoencoder, of which training calls the parts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


def test_a_report_says_that_parts_were_called_and_not_the_model() -> None:
    """What is between its layers is not compressed then, but where the parts were converted."""
    model, x = _Parts(), torch.randn(512, 64)
    report = hotrain.convert(model)
    model.decoder(model.encoder(x)).sum().backward()
    said = "kept for backward: not known, no training step through the model's own forward was seen."
    assert said in str(report)
    model(x).sum().backward()
    assert said not in str(report)
    assert report.totals()[0] == hotrain.saved_bytes(model, x).total


def test_a_second_conversion_has_a_total_of_its_own() -> None:
    model, x = _Parts(), torch.randn(512, 64)
    report = hotrain.convert(model)
    model(x).sum().backward()
    before = report.totals()
    hotrain.convert(model, "hq4")
    model(x).sum().backward()
    assert report.totals() != before
    assert report.totals()[0] == hotrain.saved_bytes(model, x).total
