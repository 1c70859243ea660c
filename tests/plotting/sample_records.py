"""Records of the shape a demo leaves, made up to test the drawing: the numbers mean nothing."""

from __future__ import annotations

import math

from hotrain.plotting import Records

METHODS = ("exact", "hq8", "hot", "hot-unbiased", "hla", "lbp-wht", "int4", "hot:rank=4", "exact:memory=block")
MODELS = ("vit", "resnet")
LAYERS = ("blocks.0.attn.qkv", "blocks.0.attn.proj", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2")


def sample_records(seeds: tuple[int, ...] = (0, 1), epochs: int = 6) -> Records:
    """A full set of records: every section of the report has something to draw."""
    rows, curves, memory, spectrum = [], [], [], []
    for m, model in enumerate(MODELS):
        for k, method in enumerate(METHODS):
            kept = 3_000_000 if method == "exact" else 1_100_000 + 90_000 * k
            operators = {
                "addmm" if method == "exact" else "hotrain linear": kept // 3,
                "hotrain slope" if method == "hq8" else "gelu": 50_000 if method == "hq8" else 400_000,
                "softmax": 300_000,
                "native_layer_norm": 200_000,
            }
            operators |= {f"small {i}": 9_000 + i for i in range(6)}
            memory.append({"model": model, "method": method, "total": kept, "by_operator": operators})
            for seed in seeds:
                top = 97.5 - 0.6 * k - m + 0.2 * seed
                accuracy = [top * (1 - math.exp(-1.1 * (epoch + 1))) for epoch in range(epochs)]
                loss = [2.3 * math.exp(-(0.9 - 0.07 * k) * epoch) for epoch in range(epochs)]
                rows.append(
                    {
                        "model": model, "method": method, "seed": seed, "accuracy": accuracy[-1],
                        "saved_bytes": kept, "bit_ops": 4.2e12 / (1 + k), "step_ms": 31.0 + 9 * k,
                    }
                )  # fmt: skip
                if method == "hq8":
                    rows[-1]["layers"] = [
                        {"layers": 11, "g_x": "int8", "g_w": "int8", "x": "shared with norm (int4)", "bytes": 0},
                        {"layers": 1, "g_x": "int8", "g_w": "int8", "x": "int8", "bytes": 24_576},
                    ]
                curves.append(
                    {
                        "model": model, "method": method, "seed": seed, "epoch": list(range(1, epochs + 1)),
                        "accuracy": accuracy, "loss": loss,
                    }
                )  # fmt: skip
        for i, layer in enumerate(LAYERS):
            for tensor, fall in (("g_y", 0.12), ("x", 0.35)):
                energy = [math.exp(-fall * s * (1 + 0.3 * i)) for s in range(16)]
                total = sum(energy)
                spectrum.append(
                    {"model": model, "layer": layer, "tensor": tensor, "energy": [e / total for e in energy]}
                )
    meta = {
        "title": "Memory and accuracy on real digits",
        "default": "hq8",
        "test_images": dict.fromkeys(MODELS, 360),
        "methods": {method: f"What {method} is." for method in METHODS},
        "models": {
            "vit": {"label": "small ViT", "description": "64 tokens, batch 64"},
            "resnet": {"label": "small ResNet", "description": "3×3 convolutions, batch 64"},
        },
        "device": "cpu", "threads": 2, "versions": {"hotrain": "0.1.0", "torch": "2.13.0"},
        "commit": "abc1234",
        "command": "hotrain demo --seeds 0,1", "seeds": list(seeds), "epochs": epochs, "batch_size": 64,
        "seconds": 201.4, "notes": ["A note with <angle brackets> & an ampersand."],
    }  # fmt: skip
    return Records(meta, rows, curves, memory, spectrum)
