"""Quark's tools that are run with `python -m`, by their paths."""
