"""Analysis of a model: saved bytes, operations, gradient errors, per-layer timing, largest batch, memory against time.

Analyses leave the model unchanged: modes, buffers, gradients, generators and draw counters
(`as_found`). The results print as tables and have their rows as plain dicts.
"""
