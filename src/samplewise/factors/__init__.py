"""Structures of per-sample gradients, each with its cheapest answers."""
