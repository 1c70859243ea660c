"""Which operator keeps what in which format: the table behind ``memory="block"``.

Chosen from the error of the gradients against the bytes (docs/numerics.md has the measurements).
"""

from __future__ import annotations

from ..saved import Bits, Grouped, Levels

# Values. "exact" keeps a tensor as it is.
GROUPED = {"int8": Grouped(8), "int4": Grouped(4, dithered=True), "int2": Grouped(2, dithered=True)}
GROUPED["int4/row"] = Grouped(4, dithered=True, whole=True)  # a scale a row: a norm's statistics run over it anyway
BITS = Bits()

# Slopes in four bits: from -2/11 to 13/11, which holds those of GELU (-0.13 to 1.13), SiLU (-0.10 to 1.10) and Mish.
SLOPES = Levels(4, first=-2, per_one=11)
# From -4/7 to 11/7: hardswish's slope lies from -0.5 to 1.5.
WIDE_SLOPES = Levels(4, first=-4, per_one=7)

# operator → format of what it keeps
FORMATS = {
    "norm": "int4/row",  # the normalised values enter g_x by their mean alone
    "softmax": "int8",
    "query_key": "int8",  # an error there changes the weights of attention exponentially
    "value_output": "int8",
    "product": "int8",
    "linear": "int8",  # of layers that stay exact
    "conv": "int8",
}

SMALL = 1 << 14  # entries under which a tensor is kept as it is
