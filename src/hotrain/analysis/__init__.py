"""Analysis of a model: saved bytes, operations, gradient errors, per-layer timing, largest batch, memory against time.

Analyses leave the model unchanged: modes, buffers, gradients, generators and draw counters
(`as_found`). The results print as tables and have their rows as plain dicts.

    saved_bytes   bytes that autograd keeps between forward and backward, by module and by operator
    predicted     the same without running the model
    cost          FLOPs and bit operations of forward and both gradient paths
    fidelity      error, cosine and bias of g_x and g_w against exact; energy by sequency
    fit           the largest batch in a memory budget
    frontier      peak memory against step time; `steps` runs what both measure
    layer_times   times the exact backward against a method's, layer by layer, on this device
"""
