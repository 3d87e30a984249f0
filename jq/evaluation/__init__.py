"""Metrics, and models or result folders evaluated on data."""
