"""Triton kernels for NVIDIA GPUs of compute capability 8.0 and later.

foretoken_kernels.reference defines them.
"""
