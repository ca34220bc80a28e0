"""Processes beside a worker: children that may hang or crash, process marks, memory and clocks."""
