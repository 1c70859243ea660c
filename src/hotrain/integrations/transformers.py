"""A callback for transformers' Trainer: ``Trainer(model, ..., callbacks=[HadamardCallback()])``.

It converts when the Trainer has been made (``on_init_end``): the model is on its device then, and neither wrapped by
accelerate, whose autocast replaces the model's forward, nor compiled. ``on_train_begin`` is too late for both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from .. import draws
from .._version import require
from ..calibration import Calibration, calibrate
from ..files import parse_json, read_text, write_text
from ..method import Method
from ..presets import DEFAULT
from .common import DRAWS, Conversion

require("transformers", "5.0", "text")
require("accelerate", "1.10", "text")

from accelerate.state import AcceleratorState  # noqa: E402 (after the check of versions)
from transformers import TrainerCallback  # noqa: E402
from transformers.trainer import TRAINER_STATE_NAME  # noqa: E402
from transformers.utils import logging  # noqa: E402

logger = logging.get_logger("transformers.trainer")

# accelerate's distributed types in which conversion has no effect or was never tested
_UNTESTED = ("DEEPSPEED", "MEGATRON_LM", "XLA")


class HadamardCallback(Conversion, TrainerCallback):  # type: ignore[misc]
    """Converts the Trainer's model before it is wrapped, compiled or trained.

    The first log with a loss, and the last one, have `metrics` in them: as printed, and in
    ``trainer.state.log_history``, which each checkpoint saves. Reporters such as TensorBoard are called before any
    callback: for them, ``trainer.log(callback.metrics())`` after training. The report is logged as INFO at each save
    and at the end. A checkpoint has the state of the random draws beside the rest, with which a resumed run goes on.

    Args:
        method: as for `hotrain.convert`.
        calibrate: on how many batches `hotrain.calibrate` chooses the scales when training begins, by the model's own
            loss: of the first examples of the data set in its order, the same in each process. 0: not at all.
        **options: further arguments of `hotrain.convert`.

    Attributes:
        calibration: its result, logged as INFO; None without.

    Raises:
        ValueError: `calibrate` is no number of batches.
    """

    def __init__(self, method: str | Method = DEFAULT, *, calibrate: int = 0, **options: Any) -> None:
        super().__init__(method, **options)
        if type(calibrate) is not int or calibrate < 0:
            raise ValueError(f"hotrain: HadamardCallback(calibrate={calibrate!r}): accepted is a number of batches")
        self.batches = calibrate
        self.calibration: Calibration | None = None
        self._logged = False

    def on_init_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any) -> None:
        """Convert the model.

        Raises:
            ValueError: the set-up is not supported, or as `convert`.
        """
        assert model is not None
        _refuse(args)
        self.convert(model)

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: nn.Module | None = None,
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        """Check that the model that is trained is the one that was converted, and calibrate it.

        Raises:
            RuntimeError: it is another one.
            ValueError: as `hotrain.calibrate`.
        """
        assert model is not None
        if not self.converted(model):
            raise RuntimeError(
                "hotrain: the Trainer trains a model that HadamardCallback has not converted, and accelerate has "
                "wrapped it by now. Pass the callback as Trainer(..., callbacks=[callback]), not by add_callback; a "
                "model_init must return callback.convert(model)."
            )
        self.checked = self._logged = False
        if self.batches:  # not of the loader itself, whose sampler would go on from there
            rows, collate = train_dataloader.dataset, train_dataloader.collate_fn
            batches: Any = DataLoader(rows, args.train_batch_size, collate_fn=collate)
            self.calibration = calibrate(model, batches, max_batches=self.batches)
            self.calibration.apply(model)
            logger.info(str(self.calibration))
        found = state.stateful_callbacks.get(DRAWS)
        if found is not None:
            self.go_on(model, found)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check the first step: see `Conversion.check`."""
        if not args.torch_compile:
            self.check()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Add `metrics` to the first log of a loss and to the last log."""
        if not logs or not (("loss" in logs and not self._logged) or "train_loss" in logs):
            return
        self._logged = True
        logs.update(self.metrics())
        if state.log_history:
            state.log_history[-1].update(self.metrics())

    def on_save(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any) -> None:
        """Log the report, and save the draws in the checkpoint's state, which was written just before."""
        file = Path(args.output_dir) / f"checkpoint-{state.global_step}" / TRAINER_STATE_NAME
        if model is not None and state.is_world_process_zero and file.is_file():
            saved = parse_json(read_text(file))
            saved["stateful_callbacks"][DRAWS] = draws.state_dict(model)
            write_text(file, json.dumps(saved, indent=2, sort_keys=True) + "\n")
        self.on_train_end(args, state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the report."""
        logger.info(str(self.report))


def _refuse(args: Any) -> None:
    """Raise ValueError for TrainingArguments under which a converted model would not run converted."""
    state = AcceleratorState()
    kind = state.distributed_type.name
    if args.n_gpu > 1:
        raise ValueError(
            f"hotrain: the Trainer would copy the model to {args.n_gpu} GPUs in every step (nn.DataParallel), which is "
            "not supported. Start one process for each GPU (torchrun --nproc-per-node), or set CUDA_VISIBLE_DEVICES=0."
        )
    if kind in _UNTESTED:
        raise ValueError(
            f"hotrain: {kind} has not been tested with converted layers. Use DistributedDataParallel, or FSDP2 "
            "(fsdp_version: 2 in accelerate's configuration)."
        )
    if kind == "FSDP" and getattr(getattr(state, "fsdp_plugin", None), "fsdp_version", 1) != 2:
        raise ValueError(
            "hotrain: FSDP of version 1 flattens the parameters and has not been tested. Use FSDP2: fsdp_version: 2 in "
            "accelerate's configuration."
        )
    if state.mixed_precision == "fp8":
        raise ValueError(
            "hotrain: accelerate's mixed_precision='fp8' puts other layers in the place of the converted ones. Use "
            "bf16=True; HadamardCallback(forward='fp8') takes the forward products in fp8."
        )
