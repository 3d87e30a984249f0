"""Calibration data: sources of any kind as samples, and samples as batches."""
