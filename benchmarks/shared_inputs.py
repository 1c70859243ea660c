"""Error of g_w when a layer's input is shared with the operator before it, and what the second rounding adds.

    python benchmarks/shared_inputs.py --out benchmarks/results/shared_inputs_cpu_DATE.jsonl

A ViT-tiny as it is initialized, random images, on the CPU: the relative error ‖g_w − exact‖ / ‖exact‖ of each kind of
layer, mean over its layers and over batches. "shared, g_w in float" has int4 codes of the input and no other rounding
on the way to g_w; "own" has the method's 8-bit codes of the exact input; "shared" has both, one after the other.
"""

from __future__ import annotations

import copy
import statistics
import sys

import torch
from hotrain_bench.conditions import conditions, parser_of, write
from torch import Tensor, nn
from torch.nn import functional as F

import hotrain
import hotrain.train  # first: it lets timm load beside a CPU-only PyTorch

KINDS = ("qkv", "attn.proj", "fc1", "fc2")
BATCHES = 3


def gradients(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The gradient of every weight matrix of a block, by name."""
    weights = {name: p for name, p in model.named_parameters() if name.endswith("weight") and p.dim() == 2}
    loss = F.cross_entropy(model(images), labels)
    return dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))


def variants() -> dict[str, tuple[hotrain.Method, str]]:
    """Name → method and memory."""
    integer, fp8 = hotrain.preset("hq8", number="int"), hotrain.preset("hq8", number="e4m3")
    floating = hotrain.Method("hq8 but g_w in float", integer.grad_input, hotrain.GradWeight(tile=16, rank=16))
    return {
        "shared, g_w in float": (floating, "block"),
        "int8: own": (integer, "linear"),
        "int8: shared": (integer, "block"),
        "e4m3: own": (fp8, "linear"),
        "e4m3: shared": (fp8, "block"),
    }


def main() -> None:
    """Print the errors, and append them to the record."""
    parser = parser_of(__doc__)
    args = parser.parse_args()
    common = conditions(torch.device("cpu"), sys.argv, args.commit)
    torch.manual_seed(0)
    import timm

    exact = timm.create_model("vit_tiny_patch16_224", num_classes=10)
    batches = [(torch.randn(8, 3, 224, 224), torch.randint(10, (8,))) for _ in range(BATCHES)]
    truth = [gradients(exact, *batch) for batch in batches]
    for name, (method, memory) in variants().items():
        model = copy.deepcopy(exact)
        hotrain.convert(model, method, memory=memory)
        found = [gradients(model, *batch) for batch in batches]
        for kind in KINDS:
            errors = [
                float((mine[layer] - want[layer]).norm() / want[layer].norm())
                for mine, want in zip(found, truth, strict=True)
                for layer in want
                if kind in layer
            ]
            row = {"bench": "shared-inputs", "subject": kind, "variant": name, "g_w_error": statistics.fmean(errors)}
            print(kind, name, f"{row['g_w_error']:.3f}")
            empty = dict.fromkeys(("median_ms", "spread_ms", "peak_bytes", "activation_bytes"))
            write(args.out, {**row, **empty, **common})


if __name__ == "__main__":
    main()
