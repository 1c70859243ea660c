"""Which operator keeps what in which format: the table behind ``memory="block"``.

Chosen from the error of the gradients against the bytes (docs/numerics.md has the measurements).
"""

from __future__ import annotations

from ..saved import Bits, Grouped, Levels

# Values, rounded to nearest: dithering leaves no bias, but half as much error again (docs/numerics.md).
GROUPED = {
    "int8": Grouped(8),
    "int4 nearest": Grouped(4),
    "int4 nearest/row": Grouped(4, whole=True),  # a scale a row: a norm's statistics run over it anyway
}
BITS = Bits()

# Slopes in four bits: from -2/11 to 13/11, which holds those of GELU (-0.13 to 1.13), SiLU (-0.10 to 1.10) and Mish.
SLOPES = Levels(4, first=-2, per_one=11)

# operator → format of what it keeps
FORMATS = {
    "norm": "int4 nearest/row",
    "curve": "int4 nearest",  # the input of an activation, for its slope and for the layer behind it
    "softmax": "int8",
    "query_key": "int8",  # an error there changes the weights of attention exponentially
    "value_output": "int4 nearest",
    "product": "int4 nearest",
    "matmul": "int8",
    "linear": "int4 nearest",  # of layers that stay exact
    "conv": "int4 nearest",
}

SMALL = 1 << 14  # entries under which a tensor is kept as it is
