"""The number format in which each operator saves its tensors: the table of ``memory="block"``.

Chosen by the error of the gradients for the bytes saved (measurements in docs/numerics.md).
"""

from __future__ import annotations

from ..saved import Bits, Grouped, Levels

# Rounded to nearest: stochastic rounding has no bias, but 1.5 times the error (docs/numerics.md).
GROUPED = {
    "int8": Grouped(8),
    "int4 nearest": Grouped(4),
    "int4 nearest/row": Grouped(4, whole=True),  # a per-row scale: a norm reduces over the row anyway
}
BITS = Bits()

# Derivatives in 4 bits, from -2/11 to 13/11: the range of GELU (-0.13 to 1.13), SiLU (-0.10 to 1.10) and Mish.
SLOPES = Levels(4, first=-2, per_one=11)

# operator → format of what it saves
FORMATS = {
    "norm": "int4 nearest/row",
    "curve": "int4 nearest",  # an activation's input, for its derivative and the next layer's input
    "softmax": "int8",
    "query_key": "int8",  # attention weights depend on it exponentially
    "value_output": "int4 nearest",
    "product": "int4 nearest",
    "matmul": "int8",
    "linear": "int4 nearest",  # of layers that stay exact
    "conv": "int4 nearest",
}

KEY = "hotrain"  # of a graph node's metadata: the model that the node belongs to
SMALL = 1 << 14  # tensors with fewer elements are saved as they are
