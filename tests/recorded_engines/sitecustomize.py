"""Imported by each process of a run that its command line starts: engines note what they make (tests/engine_record.py).

An engine that is a copy does so as well, for its server is a copy of the program.
"""

import sys

if "models.engines.serve" in sys.orig_argv:
    from tests.engine_record import note

    note()
elif any(word.endswith("/launch.py") for word in sys.orig_argv):
    from pipeline.hosts import fork_server

    become = fork_server._become

    def noting(connection, request, files, others):
        from tests.engine_record import note

        if request.argv[0] == fork_server.ENGINE:
            note()
        become(connection, request, files, others)

    fork_server._become = noting
