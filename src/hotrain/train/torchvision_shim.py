"""Import of torchvision, and with it timm, with a CPU-only PyTorch.

A CUDA build of torchvision cannot load its compiled operators with a CPU-only PyTorch. Its import then fails because it
registers a fake kernel for ``torchvision::nms``, an operator that is not defined. timm imports torchvision
unconditionally and fails with it. Declaring the operators' signatures first is enough: everything written in Python
works, and calling ``nms`` itself still raises.

With a working torchvision the import succeeds and nothing is declared.
"""

from __future__ import annotations

import importlib
import sys

import torch

# Operators that torchvision's Python files refer to at import time.
_SIGNATURE = "{}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS = ("nms", "qnms")
# A library's definitions are removed when the object is garbage-collected.
_declared: list[torch.library.Library] = []


def ensure_torchvision() -> bool:
    """Import torchvision, declaring its missing operators when its compiled part cannot load. False: not installed.

    Raises:
        RuntimeError: torchvision fails for another reason than a missing operator.
    """
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        return False
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
        for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in _OPERATORS:
            library.define(_SIGNATURE.format(operator))
        _declared.append(library)
        importlib.import_module("torchvision")
    return True
