"""The command line: words -> checked configs -> runs. `commands.py` is the entry, `compose.py` the heart."""
