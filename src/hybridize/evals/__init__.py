"""Evaluations of a causal language model, teacher or student: they use its forward pass and `generate` only."""
