"""From prompts to rewarded groups of samples: engines, their workers, collection, rewards, data.

`types` and `config` are the vocabulary and import neither torch nor Ray; nothing here imports `trainer`.
"""
