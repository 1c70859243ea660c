"""Compressed activations: norms, activation functions, attention, dropout and products save quantized tensors.

rules                     which saved tensor of which operation may be rounded, how far and why: one table
formats, slopes           the number formats, and the derivatives of activation functions
functions, attention      autograd functions: forward, what is packed for backward, gradients from what is unpacked
ops, kernel_ops           a custom operator for each, for eager mode and torch.compile; opaque ones with a Triton kernel
mode, mode_stack          the TorchFunctionMode that calls these operators in place of PyTorch's, and its place
interpose, mixins         module classes exchanged for ones whose forward runs under the mode
composed_norms            RMS norms that a model writes out by hand, recognized by class and result
checkpointing             activation checkpointing of blocks, switched on by class
sharing, rematerialize    activation sharing: a layer's input is dequantized in backward from its producer's tensors
eager                     saved-tensor hooks for functions without an operator of their own
compiled, graph           the same for compiled graphs, as a pass behind PyTorch's partitioner
"""
