"""Episodes: responses in which the model and a rollout function take turns: tools, environments, several attempts.

A rollout function (`episode.py` states the contract) runs in processes of its own (`child.py`). `EpisodeSampler`
(`sampler.py`) stands between the collector and the engines: the collector uses it like the engines, and the engines
receive ordinary requests. So no other part knows about turns.
"""
