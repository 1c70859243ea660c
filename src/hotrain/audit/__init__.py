"""Bytes that a model saves between forward and backward, measured and predicted; conversion reports use both."""
