"""Edits of a spec: a finished model computes something else, with the same weights and without training."""
