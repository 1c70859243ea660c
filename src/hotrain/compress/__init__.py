"""Compressed activations: norms, activation functions, attention, dropout and products save quantized tensors.

rules                     which saved tensor of which operation may be rounded, how far and why: one table
formats, slopes           the number formats, and the derivatives of activation functions
operators                 one file each: reference, launch of the kernels, autograd function, custom operator, handlers
codes, launcher           packing and unpacking shared by them, and the fallback of kernels to references
interpose, mode_stack     the TorchFunctionMode that calls operators in place of PyTorch's functions, and its wrapping
layouts                   images of compiled models in channels_last, while the model sees PyTorch's default layout
mixins                    module classes exchanged for ones with another forward
report                    records of what is saved in which format, and of what is not
checkpointing, offload    activation checkpointing of blocks, and offloading to the host's memory, switched on by class
sharing, rematerialize    activation sharing: a layer's input is dequantized in backward from its producer's tensors
eager                     saved-tensor hooks for functions without an operator of their own
pace                      which blocks stay exact in eager mode, where the host would hold up the GPU
compiled, graph, halves   the same for compiled graphs, as a pass behind PyTorch's partitioner
nodes                     values, readers and calls of the nodes of such graphs, and formulas traced into them
choosing, costs           what a compiled step keeps exact to be fast, and what operators cost, measured
readings                  what backward reads in the place of a tensor there, and how the tensor is put back
exact_norms, exact_attention  of exact training, put back into such a step
fusing, factors           kernels of a compiled step merged with what is around them, and the products that are
layer_codes, merging      the same for converted layers and the codes beside them; what both have in common
padding                   products of matrices whose rows are no whole 16 bytes, padded where that is faster
losses                    cross entropy of interpolated logits, or of a head, as one operator, in Dynamo's graphs
logits                    logits beside a loss: their gradient outside of the graph, where unused ones cost nothing
in_place                  results of operators written over what they are computed from
kernel_nodes              kernels as nodes of the graph, which Inductor launches itself, where there is no CUDA graph
"""
