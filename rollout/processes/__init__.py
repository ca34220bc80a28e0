"""Processes beside a worker: children that may hang or crash, code of the user, marks, memory, clocks."""
