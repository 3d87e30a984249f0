"""Accuracy recovery: equalization, bias correction and finetuning."""
