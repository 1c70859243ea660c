"""A callback for Lightning's Trainer: ``Trainer(callbacks=[HadamardCallback()])``.

It converts in ``setup``, before the strategy moves the model and makes optimizers, or in ``on_fit_start`` for a module
with a ``configure_model`` hook. A checkpoint has the keys of the exact module, and the state of the random draws.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from torch import nn

from .. import draws
from .._version import require
from ..method import Method
from ..presets import DEFAULT
from .common import DRAWS, Conversion

# `pytorch_lightning` is the same code in a second package, with classes of its own.
if importlib.util.find_spec("lightning") is None and importlib.util.find_spec("pytorch_lightning") is not None:
    require("pytorch-lightning", "2.6")
    from pytorch_lightning import Callback
    from pytorch_lightning.utilities.model_helpers import is_overridden
else:
    require("lightning", "2.6")
    from lightning.pytorch import Callback  # type: ignore[assignment,no-redef,unused-ignore]
    from lightning.pytorch.utilities.model_helpers import is_overridden

# class of a strategy or precision plugin → what to do instead
_UNSUPPORTED = {
    "FSDPStrategy": "FSDP of version 1 flattens the parameters and has not been tested: use strategy='ddp'",
    "DeepSpeedStrategy": "DeepSpeed has not been tested with converted layers: use strategy='ddp'",
    "ModelParallelStrategy": (
        "parameters are sharded in configure_model: call hotrain.convert(self.net) there before fully_shard, and leave "
        "the callback out"
    ),
    "XLAStrategy": "XLA has not been tested with converted layers: use strategy='ddp' on GPUs",
    "XLAFSDPStrategy": "XLA has not been tested with converted layers: use strategy='ddp' on GPUs",
    "TransformerEnginePrecision": "it puts other layers in the place of the converted ones: use precision='bf16-mixed'",
    "BitsandbytesPrecision": "it puts other layers in the place of the converted ones: use precision='bf16-mixed'",
}


class HadamardCallback(Conversion, Callback):  # type: ignore[misc]
    """Converts what a LightningModule trains, before its optimizers are made.

    At the end of training the loggers get `metrics`.

    Args:
        method: as for `hotrain.convert`.
        module: name of the submodule to convert, whose forward ``training_step`` calls. None: the only child with
            parameters, or the LightningModule itself where there are several.
        **options: further arguments of `hotrain.convert`.
    """

    def __init__(self, method: str | Method = DEFAULT, *, module: str | None = None, **options: Any) -> None:
        super().__init__(method, **options)
        self.module = module
        self.saved: dict[str, int] | None = None  # draws of the checkpoint that a run goes on from

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Convert before training (``stage`` is ``"fit"``), if the layers are there already.

        Raises:
            ValueError: the strategy or the precision is not supported, the module is compiled, `module` names none, or
                as `convert`.
        """
        if stage != "fit":
            return
        for part in (trainer.strategy, trainer.precision_plugin):
            name = next((kind.__name__ for kind in type(part).__mro__ if kind.__name__ in _UNSUPPORTED), None)
            if name is not None:
                raise ValueError(f"hotrain: Lightning's {name} is not supported: {_UNSUPPORTED[name]}")
        if getattr(pl_module, "_compiler_ctx", None) is not None:
            raise ValueError(
                "hotrain: the LightningModule is compiled already. Pass it as it is, and compile the network in its "
                "__init__ without this callback: self.net = hotrain.compile(net), which converts it."
            )
        self.checked = False
        if not is_overridden("configure_model", pl_module):
            self.convert(self._chosen(pl_module))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Convert a module that ``configure_model`` has made; its parameters stay the optimizer's."""
        model = self.convert(self._chosen(pl_module))
        if self.saved is not None:
            self.go_on(model, self.saved)
            self.saved = None

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the draws to a checkpoint."""
        checkpoint[DRAWS] = draws.state_dict(self._chosen(pl_module))

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Take the draws from a checkpoint, if it has them."""
        self.saved = checkpoint.get(DRAWS)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Check the first step: see `Conversion.check`."""
        self.check()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Give the loggers the metrics."""
        for logger in trainer.loggers:
            logger.log_metrics(self.metrics(), step=trainer.global_step)

    def _chosen(self, pl_module: nn.Module) -> nn.Module:
        named = dict(pl_module.named_children())
        if self.module is not None:
            found = dict(pl_module.named_modules()).get(self.module)
            if found is None:
                raise ValueError(
                    f"hotrain: HadamardCallback(module={self.module!r}): {type(pl_module).__name__} has no such "
                    f"submodule; its children are {', '.join(map(repr, named)) or 'none'}"
                )
            return found
        trained = [child for child in named.values() if any(True for _ in child.parameters())]
        return trained[0] if len(trained) == 1 else pl_module
