"""Mutants of the product: which changes of the code no test sees. docs/contributing.md says how to run it."""
