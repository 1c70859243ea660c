"""The callback of Lightning's Trainer: what it converts, when, what it refuses and logs."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hotrain
import hotrain.train

lightning = pytest.importorskip("lightning", reason="lightning is not installed: pip install lightning")

from hotrain.integrations.lightning import HadamardCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:(?!hotrain)")


def net() -> nn.Module:
    layers = [nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64)]
    return nn.Sequential(*layers)


class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
    def __init__(self, late: bool = False) -> None:
        super().__init__()
        if not late:
            self.net = net()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Late(Module):
    def __init__(self) -> None:
        super().__init__(late=True)

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = net()


class Parts(Module):
    """Two parts with parameters, and a step that calls them rather than the module's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 64)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return F.mse_loss(self.head(self.net(batch[0])), batch[0])


def fit(module: Any, callback: HadamardCallback, folder: Path, **options: Any) -> Any:
    options = {"logger": False, "max_steps": 2, **options}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(accelerator="cpu", default_root_dir=folder, callbacks=[callback], **quiet, **options)
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(8, 64, 64)), batch_size=4))
    return trainer


@pytest.mark.parametrize("kind", [Module, Late])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_it_converts_what_the_step_calls(kind: Any, precision: Any, tmp_path: Path) -> None:
    module, callback = kind(), HadamardCallback()
    trainer = fit(module, callback, tmp_path, precision=precision)
    assert callback.report is not None
    assert {row.name for row in callback.report.converted} == {"0", "3"}
    now, exact = callback.report.totals() or (None, None)
    assert now is not None
    assert exact is not None
    assert now < 0.5 * exact
    owned = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert owned == {id(p) for p in module.parameters()}


def test_checkpoints_are_those_of_the_exact_module(tmp_path: Path) -> None:
    module = Module()
    trainer = fit(module, HadamardCallback("hot", memory="linear"), tmp_path)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    exact = Module.load_from_checkpoint(tmp_path / "last.ckpt")
    x = torch.randn(2, 64, 64)
    with torch.no_grad():
        assert torch.equal(exact.net(x), module.net(x))
    again = fit(Module(), HadamardCallback(), tmp_path)  # and back, into a converted one
    again.strategy.model.load_state_dict(exact.state_dict())


@pytest.mark.parametrize("kind", [Module, Late])
def test_a_resumed_run_goes_on_with_its_draws(kind: Any, tmp_path: Path) -> None:
    """The same parameters, to the bit, as a run that was not interrupted."""
    torch.manual_seed(0)
    x = torch.randn(2, 16, 64).repeat(4, 1, 1)  # equal batches: Lightning goes on with one of its own choice
    start = Module().net.state_dict()

    def run(steps: int, resume: str | None = None) -> Any:
        hotrain.manual_seed(5)
        module = kind()
        module.configure_model()
        module.net.load_state_dict(start)
        trainer = lightning.Trainer(
            max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path, callbacks=[HadamardCallback("hot-unbiased")],
        )  # fmt: skip
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=2)
        trainer.fit(module, data, ckpt_path=resume)
        if steps == 2:
            trainer.save_checkpoint(tmp_path / "half.ckpt")
        return [p.detach().clone() for p in module.parameters()]

    whole = run(4)
    run(2)
    assert all(map(torch.equal, whole, run(4, str(tmp_path / "half.ckpt"))))
    checkpoint = torch.load(tmp_path / "half.ckpt", weights_only=True)
    assert checkpoint.pop("hotrain_draws")["step.0"] == 1
    torch.save(checkpoint, tmp_path / "half.ckpt")
    assert not all(map(torch.equal, whole, run(4, str(tmp_path / "half.ckpt")))), "the draws change nothing here"


def test_parts_are_told_which_to_convert(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="the step calls parts of the model"):
        fit(Parts(), HadamardCallback(), tmp_path)
    callback = HadamardCallback(module="net")
    fit(Parts(), callback, tmp_path)
    with pytest.raises(ValueError, match=r"Parts has no such submodule; its children are 'net', 'head'"):
        fit(Parts(), HadamardCallback(module="body"), tmp_path)


def test_loggers_get_the_memory(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path)
    fit(Module(), HadamardCallback(), tmp_path, logger=logger)
    logger.save()
    header, *rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    last = dict(zip(header.split(","), rows[-1].split(","), strict=True))
    assert last["hotrain/converted"] == "2"
    assert 0 < float(last["hotrain/kept_mib"]) < 0.5 * float(last["hotrain/kept_exact_mib"])


def test_a_compiled_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"compiled already.*self\.net = hotrain\.compile\(net\)"):
        fit(torch.compile(Module()), HadamardCallback(), tmp_path)


@pytest.mark.parametrize(
    ("strategy", "precision", "message"),
    [
        ("FSDPStrategy", "Precision", "FSDP of version 1"),
        ("DeepSpeedStrategy", "Precision", "use strategy='ddp'"),
        ("ModelParallelStrategy", "Precision", r"hotrain\.convert\(self\.net\) there before fully_shard"),
        ("DDPStrategy", "TransformerEnginePrecision", "precision='bf16-mixed'"),
    ],
)
def test_what_would_not_train_converted_is_refused(strategy: str, precision: str, message: str) -> None:
    from lightning.pytorch import plugins, strategies

    kinds = {"strategy": getattr(strategies, strategy)}
    kinds["precision_plugin"] = getattr(plugins, precision)
    trainer = SimpleNamespace(**{name: object.__new__(kind) for name, kind in kinds.items()})
    module = Module()
    with pytest.raises(ValueError, match=message):
        HadamardCallback().setup(trainer, module, "fit")
    assert not list(hotrain.converted_layers(module))
    HadamardCallback().setup(trainer, module, "test")


def test_the_callback_of_another_trainer_says_which_it_is() -> None:
    """Both have one name; a trainer asks for hooks that only its own has."""
    others = pytest.importorskip("hotrain.integrations.transformers").HadamardCallback()
    mine = HadamardCallback()
    for callback, hook, where in ((others, "setup", "transformers"), (mine, "on_init_end", "lightning")):
        with pytest.raises(
            AttributeError, match=rf"of hotrain.integrations.{where} has no attribute '{hook}'.*takes the"
        ):
            getattr(callback, hook)
    assert copy.deepcopy(mine).method == mine.method  # asks for attributes that there are not
