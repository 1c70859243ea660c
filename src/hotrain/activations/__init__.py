"""Compressed activations: norms, activation functions, attention, dropout and products save codes for backward.

    policy, curves            which format each function saves, and the slopes of activation functions
    functions, attention      the formulas: forward, what is packed, the gradients from what is unpacked
    ops, launches             a custom operator for each, for autograd and the compiler alike; those of one kernel each
    mode, stack, exchange, wrap
                              the function mode that calls these operators in place of PyTorch's while a model runs
    norms, recompute          RMS norms that a model composes by hand, and activation checkpointing, recognized by class
    origin, recipes           activation sharing: a layer's input is made again from the codes of the operator before
    rest, uses, partition     tensors without an operator: saved-tensor hooks in eager mode, a partitioner pass compiled
"""
