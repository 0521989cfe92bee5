"""Graders of text as it stands: comparison, form, choice among letters, instructions that code can check."""
