"""Training of drafters against a frozen target, in plain PyTorch: EAGLE-3 and EAGLE-2 heads, standalone draft models.

Needs torch, transformers, tokenizers, numpy and safetensors only, so that it runs on a machine that serves nothing.
"""
