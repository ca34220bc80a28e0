"""Corrections of the rollout-training mismatch, and losses: tensors and a config in, anchors, weights and losses out.

This package imports torch and the standard library only. The flow is tokens -> correction -> surrogate -> loss,
measured by mismatch; `config` and `objective` are readable without torch, so this file imports no module.
"""
