"""Checks of Parity on a GPU host that has torch and transformers, but neither Ray nor SGLang nor a network.

    make gpu-check [ARGS="--device cpu --checks 2,3"]      the list for such a host: `gpu_check.checks`
    make gpu-check FULL=1                                  the list for a host with SGLang: `gpu_check.full`

`gpu_check/run.py` runs each check in a process of its own. A check is a generator of rows (`gpu_check/rows.py`);
it uses the project's own worker, log-prob head, attention, memory plan, weight sync and embedded engine.
"""
