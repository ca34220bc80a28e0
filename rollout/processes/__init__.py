"""Processes beside a worker: children that may hang or crash, user code, process marks, memory and clocks."""
