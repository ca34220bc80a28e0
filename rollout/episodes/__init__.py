"""Episodes: responses in which the model and a rollout function take turns: tools, environments, several attempts.

A rollout function (`episode.py` states the contract) runs in processes of its own (`child.py`). `EpisodeSampler`
(`sampler.py`) stands between the collector and the engines and looks like the engines to the one and like a collector
to the others, so nothing else knows about turns.
"""
