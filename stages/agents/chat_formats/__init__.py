"""Chat formats of checkpoints: conversations to tokens and back. `load.py` makes them."""
