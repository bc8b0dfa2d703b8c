"""A policy's weights: loading, what describes them, precision, quantization, built-in models, and decoder/."""
