"""What stands between the layers keeps little too: norms, activations, attention, dropout, products.

`functions` holds their formulas, `attention` those of scaled dot products, `ops` gives both one operator each, which
autograd and a compiler go through alike, `mode` puts the operators in the place of PyTorch's functions while a
converted model runs forward, and `policy` says in which format each of them keeps what.
"""
