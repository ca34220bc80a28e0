"""The command line: words -> checked configs -> runs. `commands.py` is the entry, one file per command."""
