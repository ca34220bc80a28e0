"""Run directories -> one HTML page that opens offline. `page.py` is the entry."""
