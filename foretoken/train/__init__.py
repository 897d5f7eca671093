"""Training of drafters against a frozen target, in plain PyTorch: EAGLE-3 and EAGLE-2 heads,
standalone draft models.

It only needs torch, transformers, tokenizers, numpy and safetensors, so it runs on machines that
serve nothing.
"""
