"""Directories of models: found, fetched, made, checked, described and exported."""
