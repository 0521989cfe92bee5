"""How models write tool calls, one file for each family; `registry.py` knows them by name."""
