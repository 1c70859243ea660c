"""The figures of docs/how.md as self-contained SVG: a layer, the rotation, and what a block keeps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotrain
from hotrain.plotting.memory import draw_bytes, parts_of
from hotrain.plotting.steps import alone
from hotrain.plotting.style import INK, LOOKS, MUTED, SECOND, drawing, stand_in, to_svg
from hotrain.quantize.integer import quantize
from hotrain.transform.hadamard import rotate

BATCH = 8
VALUES = [0.6, -0.3, 1.1, -0.9, 0.2, 8.0, -0.5, 0.8, -1.2, 0.4, 0.1, -0.7, 0.9, -0.2, 0.5, -0.4]
WIDTH, HEIGHT = 430, 356


def how_layer() -> str:
    """One linear layer, exact and converted: what runs, and what waits from forward to backward."""
    says = (
        "One linear layer: exact keeps x in 16 or 32 bits for g_w; converted it keeps 8-bit codes and multiplies codes"
    )
    body = [*_row("exact", 8, "x, 16 or 32 bits", 120, ("g_x = g_y w", "g_w = g_yᵀ x"))]
    converted = ("g_x = Q8(g_y H) Q8(Hᵀ w)", "g_w = Q8(H g_y)ᵀ Q8(H x)")
    body += _row("hotrain", 194, "Q8(H x), or nothing", 60, converted)
    head = f'<svg class="figure" viewBox="-2 -4 {WIDTH} {HEIGHT}" role="img" aria-label="{says}">'
    return alone("".join([head, *body, "</svg>"]))


def _row(name: str, top: int, kept: str, width: int, gradients: Sequence[str]) -> list[str]:
    colour = f"var(--m-{'hq8' if name == 'hotrain' else 'exact'})"
    lines = [
        _text(0, top + 14, name, size=13, weight=600, fill=colour),
        _text(0, top + 44, "forward", fill="var(--muted)"),
        _text(80, top + 44, "y = x wᵀ", mono=True),
        _text(180, top + 44, "exact in both" if name == "hotrain" else "", fill="var(--muted)"),
        f'<path d="M96 {top + 52}v18m-4 -6l4 6l4 -6" fill="none" stroke="{colour}" stroke-width="1.5"/>',
        _text(0, top + 90, "kept", fill="var(--muted)"),
        f'<rect x="80" y="{top + 74}" width="{width}" height="24" rx="3" fill="{colour}"/>',
        _text(88 + width, top + 90, kept, mono=True),
        f'<path d="M96 {top + 102}v18m-4 -6l4 6l4 -6" fill="none" stroke="{colour}" stroke-width="1.5"/>',
        _text(0, top + 136, "backward", fill="var(--muted)"),
    ]
    return lines + [_text(80, top + 136 + 17 * i, line, mono=True) for i, line in enumerate(gradients)]


def _text(
    x: int, y: int, text: str, *, size: int = 12, fill: str = "var(--ink)", weight: int = 400, mono: bool = False
) -> str:
    family = ' font-family="ui-monospace,Menlo,Consolas,monospace"' if mono else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{fill}"{family}>{text}</text>'


def how_rotation() -> str:
    """Sixteen values with an outlier and their int4 steps, before and after H."""
    values = torch.tensor([VALUES])
    with drawing("16 values with an outlier, in 4 bits", 3.6) as figure:
        panels = figure.subplots(2, 1, sharey=True)
        for axes, t, name in zip(panels, (values, rotate(values)), ("as they are", "after H"), strict=True):
            codes = quantize(t, 4, scale="tensor", rounding="nearest")
            rounded = codes.dequantize()
            error = ((rounded - t).norm() / t.norm()).item()
            # Processors differ in the last digits.
            axes.bar(
                range(16),
                t[0].double().round(decimals=4).tolist(),
                width=0.5,
                color=stand_in(LOOKS["hq8"]),
                linewidth=0,
            )
            axes.plot(
                rounded[0].double().round(decimals=4).tolist(), "_", color=SECOND, markersize=11, markeredgewidth=2
            )
            title = f"{name}: {int((codes.codes == 0).sum())} of 16 round to zero, error {100 * error:.0f} %"
            axes.set_title(title, loc="left", fontsize=8.5, color=INK)
            axes.set_xticks([])
            axes.axhline(0, color=MUTED, linewidth=0.7)
        panels[1].set_xlabel("bars: values; dashes: what 4 bits make of them")
        return alone(to_svg(figure, "Sixteen values with one outlier, rounded to 4 bits before and after the rotation"))


class _Block(nn.Module):
    """A block of ViT-B."""

    def __init__(self, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


def how_block() -> str:
    """Bytes kept by a block of ViT-B, exact and with the default, by operator."""
    with torch.device("meta"):
        model = _Block().bfloat16()
        x = torch.empty(BATCH, 197, 768, dtype=torch.bfloat16, requires_grad=True)
    kept = {"exact": hotrain.predicted_bytes(model, x).by_operator}
    hotrain.convert(model)
    kept["hq8"] = hotrain.predicted_bytes(model, x).by_operator
    names = {"exact": "exact", "hq8": "the default"}
    return alone(draw_bytes(kept, parts_of(list(kept.values())), names, f"One block of ViT-B in bf16, {BATCH} images"))


ALL = {"how_layer": how_layer, "how_rotation": how_rotation, "how_block": how_block}
