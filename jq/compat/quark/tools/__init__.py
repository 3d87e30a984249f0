"""Quark's tools that are run with `python -m`, by their paths and with their arguments.

Each is a thin shell over `jq.convert` or another function of jq. `docs/reference/compat.md` says what to take in place of
the tools that are not here.
"""
