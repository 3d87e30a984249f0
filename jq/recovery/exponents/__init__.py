"""Exponents of activations, chosen by what they do to the outputs of the network."""
