"""The trainer: run configuration, training loop, run records. Its import lets timm load with a CPU-only PyTorch."""

from hotrain.train.torchvision_shim import ensure_torchvision

ensure_torchvision()

from hotrain.train.checkpoint import saved_run  # noqa: E402 (timm must be importable first)
from hotrain.train.compare import Comparison, compare, finished_cells  # noqa: E402
from hotrain.train.data import load_data  # noqa: E402
from hotrain.train.loop import train  # noqa: E402
from hotrain.train.outcome import Diverged, Interrupted, NotSaved, Result  # noqa: E402
from hotrain.train.progress import Progress, progress_bar, silent  # noqa: E402
from hotrain.train.run import Lora, TrainRun, parse_method, replace, with_preset, with_settings  # noqa: E402
from hotrain.train.setup import Setup, build, training_batches  # noqa: E402

__all__ = [
    "Comparison", "Diverged", "Interrupted", "Lora", "NotSaved", "Progress", "Result", "Setup", "TrainRun", "build",
    "compare", "ensure_torchvision", "finished_cells", "load_data", "parse_method", "progress_bar", "replace",
    "saved_run", "silent", "train", "training_batches", "with_preset", "with_settings",
]  # fmt: skip
