"""Advantages, losses, corrections and their metrics: pure functions, chosen by name or import path."""
