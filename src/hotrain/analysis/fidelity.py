"""Errors of the gradients of converted layers, layer by layer, compared with exact ones.

One exact forward and backward gives every layer its x and its g_y; then each layer separately computes its gradients
from these, exactly and with its method, several times. So a layer's figures contain no errors of other layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..audit.unchanged import as_found
from ..layer_gradients import Call, LossFn, exact_calls
from ..tables import table
from ..transform.hadamard import TILE, rotate, sequency

PATHS = ("grad_input", "grad_weight")


@dataclass(frozen=True)
class Fidelity:
    """The gradients of each converted layer, compared with exact ones.

    Attributes:
        rows: one dict per layer: layer, method (``exact: reason`` where the layer could not follow its own), and for
            grad_input and grad_weight (None where that gradient is not needed), with norms over the whole gradient,
            relative to the exact one:

            - ``…_error``: L2 error, root mean square over the draws;
            - ``…_cosine``: with the exact gradient, mean over the draws;
            - ``…_bias``: L2 error of the mean over the draws;
            - ``…_noise``: the bias that an unbiased gradient has with so many draws: compare ``…_bias`` with it;

            ``grad_weight_lost``: the share of the outputs, or of the inputs if that is larger, with more error in g_w
            than gradient (root mean square over the draws), which figures of the whole do not show;

            and ``g_y_energy`` and ``x_energy``: 16 fractions of the energy along blocks of 16 tokens, by sequency from
            low to high.
        draws: how often each gradient was computed.
    """

    rows: list[dict[str, Any]]
    draws: int

    def __str__(self) -> str:
        half = TILE // 2
        body = []
        for row in self.rows:
            cells = [row["layer"]]
            for path in PATHS:
                cells += [_text(row[f"{path}_error"]), _text(row[f"{path}_cosine"])]
                cells.append(_text(row[f"{path}_bias"] if _is_biased(row, path) else None))
            cells.append("–" if row["grad_weight_lost"] is None else f"{row['grad_weight_lost']:.2f}")
            body.append(cells + [f"{sum(row[e][:half]):.2f}" for e in ("g_y_energy", "x_energy")])
        headers = ["layer", *(f"{g} {what}" for g in ("g_x", "g_w") for what in ("error", "cosine", "bias"))]
        lines = [
            f"layers' gradients against exact, {self.draws} draws",
            table([*headers, "lost", "low g_y", "low x"], body),
            "",
            *(f"{g}: {self._verdict(path)}" for g, path in (("g_x", PATHS[0]), ("g_w", PATHS[1]))),
            *self._losses(),
            _LEGEND,
        ]
        exact = [f"{row['layer']}: {row['method']}" for row in self.rows if row["method"].startswith("exact: ")]
        return "\n".join(lines + exact)

    def _losses(self) -> list[str]:
        """A sentence on the layers that lose parts of g_w, if there are any."""
        rows = [row for row in self.rows if row["grad_weight_lost"]]
        if not rows:
            return []
        worst = max(rows, key=lambda row: row["grad_weight_lost"])
        share = f"{worst['grad_weight_lost']:.2f} of the outputs or inputs of {worst['layer']}"
        return [f"g_w: {len(rows)} of {len(self.rows)} layers have parts with more error than gradient, most {share}"]

    def _verdict(self, path: str) -> str:
        """One sentence on one gradient of all layers."""
        rows = [row for row in self.rows if row[f"{path}_error"] is not None]
        if not rows:
            return "asked for in no layer"
        worst = max(rows, key=lambda row: row[f"{path}_error"])
        text = f"error up to {worst[f'{path}_error']:.3f} ({worst['layer']})"
        biased = [row for row in rows if _is_biased(row, path)]
        if not biased:
            return f"{text}; no bias that these draws tell from noise"
        most = max(biased, key=lambda row: row[f"{path}_bias"])
        return (
            f"{text}; biased in {len(biased)} of {len(rows)} layers, most {most[f'{path}_bias']:.3f} ({most['layer']})"
        )


_LEGEND = """
error, cosine: of one draw with the exact gradient, error as a share of its norm.
bias: error of the mean over the draws; – where it is what so many draws of an
unbiased gradient leave.  lost: share of the outputs, or of the inputs, with more
error in g_w than gradient.  low: share of the energy along blocks of 16 tokens that
is in the lower 8 of 16 frequencies, which a low-pass keeps."""

_BEYOND = 1.5  # times the noise of the mean, from which on its error is a bias; norms over thousands of entries agree
_ROUNDOFF = 1e-5  # relative, of sums in another order


def _is_biased(row: dict[str, Any], path: str) -> bool:
    bias, noise = row[f"{path}_bias"], row[f"{path}_noise"]
    return bias is not None and bias > max(_BEYOND * noise, _ROUNDOFF)


def fidelity(model: nn.Module, batch: Any, loss_fn: LossFn | None = None, draws: int = 8) -> Fidelity:
    """Measure every converted layer of `model` on one batch.

    The model, its ``.grad``, the generators and the draws are unchanged. A layer that is called several times is
    measured on its first call.

    Args:
        model: converted.
        batch: a few samples are enough: x and g_y of all layers are in memory at once.
        loss_fn: ``loss_fn(model, batch)`` as in `hotrain.calibrate`; None is cross-entropy on (input, target).
        draws: how often each layer's gradients are computed with its method, at least 2.

    Raises:
        ValueError: the model has no converted layers, the loss is bad, or draws < 2.
    """
    if type(draws) is not int or draws < 2:
        raise ValueError(f"fidelity: draws={draws!r} is not an integer of at least 2 (the bias is that of their mean)")
    with as_found(model):
        return Fidelity([_row(call, draws) for call in first_calls(exact_calls(model, batch, loss_fn))], draws)


def energy_by_sequency(tokens: Tensor) -> list[float]:
    """The share of a matrix's energy in each of the 16 Walsh functions along blocks of 16 tokens, low to high.

    Args:
        tokens: (T, C); the last block is padded with zeros.

    Returns:
        16 fractions; zeros for a matrix of zeros.
    """
    coefficients = rotate(tokens.float(), dim=0, n=TILE).view(-1, TILE, tokens.shape[1])
    energy = coefficients.double().square().sum(dim=(0, 2))
    by_sequency = torch.empty_like(energy)
    by_sequency[torch.tensor(sequency(TILE), device=energy.device)] = energy
    total = float(energy.sum())
    return [float(e) / total if total else 0.0 for e in by_sequency]


def first_calls(calls: list[Call]) -> list[Call]:
    """The first call of each layer in the order of the forward; gradients arrived in the order of the backward."""
    return list(reversed({call.name: call for call in calls}.values()))


def _row(call: Call, draws: int) -> dict[str, Any]:
    row: dict[str, Any] = {"layer": call.name, "method": call.state.method.name}
    exact = _gradients(call, converted=False)
    drawn = [_gradients(call, converted=True) for _ in range(draws)]
    if call.state.fallback is not None:
        row["method"] = f"exact: {call.state.fallback}"
    for path in PATHS:
        row |= _figures(path, exact[path], [gradients[path] for gradients in drawn])
    row["grad_weight_lost"] = _lost(exact["grad_weight"], [gradients["grad_weight"] for gradients in drawn])
    row["g_y_energy"] = energy_by_sequency(call.token_gradient())
    row["x_energy"] = energy_by_sequency(call.module.token_matrix(call.x))  # type: ignore[operator]
    return row


def _gradients(call: Call, converted: bool) -> dict[str, Tensor | None]:
    """g_x and g_w of one call alone, None where not asked for."""
    weight = call.module.weight
    assert isinstance(weight, Tensor)
    x = call.x.clone().requires_grad_(call.needs_grad_input)
    wanted = [(path, leaf) for path, leaf in zip(PATHS, (x, weight), strict=True) if leaf.requires_grad]
    call.module.training = converted
    as_called = torch.autocast(x.device.type, call.autocast, enabled=call.autocast is not None)
    with as_called, torch.enable_grad():
        y = call.module.forward(x)
    gradients = torch.autograd.grad(y, [leaf for _, leaf in wanted], call.grad_output)
    found: dict[str, Tensor | None] = dict.fromkeys(PATHS)
    found.update({path: g.double() for (path, _), g in zip(wanted, gradients, strict=True)})
    return found


def _figures(path: str, exact: Tensor | None, drawn: list[Any]) -> dict[str, float | None]:
    if exact is None:
        return {f"{path}_{what}": None for what in ("error", "cosine", "bias", "noise")}
    size = exact.norm()
    mean = torch.stack(drawn).mean(0)
    errors = torch.stack([(g - exact).norm() for g in drawn])
    cosines = torch.stack([F.cosine_similarity(g.flatten(), exact.flatten(), dim=0, eps=1e-300) for g in drawn])
    variance = torch.stack([(g - mean).norm().square() for g in drawn]).sum() / (len(drawn) - 1)
    return {
        f"{path}_error": _relative(errors.square().mean().sqrt(), size),
        f"{path}_cosine": float(cosines.mean()) if float(size) else float(float(errors.max()) == 0),
        f"{path}_bias": _relative((mean - exact).norm(), size),
        f"{path}_noise": _relative((variance / len(drawn)).sqrt(), size),
    }


def _lost(exact: Tensor | None, drawn: list[Any]) -> float | None:
    """The share of outputs, or of inputs, with more error than gradient; None without a gradient."""
    if exact is None:
        return None
    squares = torch.stack([(g - exact).square() for g in drawn]).mean(0)
    shares = []
    for axis in (0, 1):
        error, size = (t.transpose(0, axis).flatten(1).sum(1) for t in (squares, exact.square()))
        there = size > 0
        shares.append(float((error > size)[there].double().mean()) if there.any() else 0.0)
    return max(shares)


def _relative(error: Tensor, size: Tensor) -> float:
    if float(size) == 0:
        return 0.0 if float(error) == 0 else float("inf")
    return float(error / size)


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
