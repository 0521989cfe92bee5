"""Imported by every process of a run at its start: engines note what they make (tests/engine_record.py)."""

import sys

if "models.engines.serve" in sys.orig_argv:
    from tests.engine_record import note

    note()
