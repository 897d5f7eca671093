"""Training of drafters: EAGLE-3 and EAGLE-2 heads and standalone draft models, against a frozen target, in plain PyTorch.

Needs torch, transformers, tokenizers, numpy and safetensors only, so that it runs on a machine that serves nothing.
"""
