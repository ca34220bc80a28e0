"""User code: one kind of process for what a user writes, rewards and rollout functions alike.

    parent: pool.py (what is called, when and how often)  <- lines of JSON ->  child: serving.py (one persistent loop)

A call has a deadline, is made again after a failure, and costs nothing but itself, whatever its code does. `mark.py`
tells the parent whose code runs. `custom_code.py` and `custom_class.py` find what a config names: a function, a class.
`rollout/rewards/child.py` and `rollout/episodes/child.py` say what a call does.
"""
