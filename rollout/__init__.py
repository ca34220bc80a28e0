"""Rollout: prompts -> rewarded groups of samples. Shared types and configs lie at the root; a folder has one purpose.

`types` and `config` are the shared vocabulary and import neither torch nor Ray; no file of `rollout` imports `trainer`.
"""
