"""hotrain: train vision and language models with Hadamard backward passes.

::

    import hotrain
    fast = hotrain.compile(model)     # on a GPU: converts, and compiles for CUDA graphs; train `fast` as before
    report = hotrain.convert(model)   # or convert alone, and compile or not as you like
    print(report)

The two gradients of a layer are computed in `hotrain.backward`; methods are data (`hotrain.preset`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .compiling import compile
from .conversion import ConversionReport, convert, converted_layers, revert
from .draws import manual_seed
from .kernels import accumulation
from .method import GradInput, GradWeight, Method, Saved
from .plans import Point
from .presets import preset, presets
from .transform.tokens import Grid

if TYPE_CHECKING:
    from .analysis.cost import cost
    from .analysis.fidelity import fidelity
    from .analysis.fit import fit
    from .analysis.frontier import Frontier, frontier
    from .analysis.layer_times import plan
    from .audit.predicted import predicted_bytes
    from .audit.saved_bytes import saved_bytes
    from .budget import checkpoint_blocks
    from .calibration import BitSchedule, Calibration, calibrate
    from .ranks import Ranks, calibrate_ranks

# Questions asked of a model: imported when first asked for.
_LAZY = {
    "calibrate": "calibration",
    "calibrate_ranks": "ranks",
    "Ranks": "ranks",
    "Calibration": "calibration",
    "BitSchedule": "calibration",
    "predicted_bytes": "audit.predicted",
    "saved_bytes": "audit.saved_bytes",
    "checkpoint_blocks": "budget",
    "cost": "analysis.cost",
    "fidelity": "analysis.fidelity",
    "fit": "analysis.fit",
    "Frontier": "analysis.frontier",
    "frontier": "analysis.frontier",
    "plan": "analysis.layer_times",
}

__all__ = [
    "BitSchedule", "Calibration", "ConversionReport", "Frontier", "GradInput", "GradWeight", "Grid", "Method", "Point",
    "Ranks", "Saved", "__version__", "accumulation", "calibrate", "calibrate_ranks", "checkpoint_blocks", "compile",
    "convert", "converted_layers", "cost", "fidelity", "fit", "frontier", "manual_seed", "plan", "predicted_bytes",
    "preset", "presets", "revert", "saved_bytes",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
