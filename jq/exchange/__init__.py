"""Quantized models out and in: export, import, QOperator and conversions."""
