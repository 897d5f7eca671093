"""Train drafters against a frozen target, in plain PyTorch.

They are EAGLE-3 and EAGLE-2 heads, and standalone draft models.

It only needs torch, transformers, tokenizers, numpy and safetensors, so it runs on machines that
serve nothing.
"""
