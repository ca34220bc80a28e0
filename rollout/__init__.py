"""From prompts to rewarded groups of samples. The nouns are at the root; each folder is a room.

`types` and `config` are the vocabulary and import neither torch nor Ray; nothing here imports `trainer`.
"""
