"""What the gap between rollout engine and trainer means: tensors and a config in, anchors, weights and losses out.

This package imports torch and the standard library only. The flow is correction -> surrogate -> loss, measured by
diagnostics; `config` and `objective` are readable without torch, so nothing is imported here.
"""
