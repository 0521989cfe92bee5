"""The process of a grader pool: `python -m stages.graders.worker SOCKET_FD PARENT_PID MEMORY_BYTES`.

A call is the name of a grader, to import it outside of any deadline, or a GradeRequest, whose value is its Grade. Calls
run one after another, without an event loop: an async grader brings its own.
"""

from __future__ import annotations

import contextlib
import os
import sys

import msgspec

from stages.graders.grade import Grade, GradeRequest, UnknownGraderError
from stages.graders.registry import find_grader, grade_request
from stages.graders.synthetic import IN_WORKER_VARIABLE
from stages.workers.serve import become_worker, serve_in_turn

_decode = msgspec.msgpack.Decoder(str | GradeRequest).decode


def answer(call: msgspec.Raw) -> Grade | None:
    """Grade a request, or prepare a grader. A grader that cannot be prepared fails when an item is graded."""
    request = _decode(call)
    if isinstance(request, GradeRequest):
        return grade_request(request)
    with contextlib.suppress(UnknownGraderError):
        prepare = find_grader(request).prepare
        if prepare is not None:
            prepare()
    return None


def main(arguments: list[str]) -> None:
    """Serve until the socket closes. Does not return."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ[IN_WORKER_VARIABLE] = "1"
    serve_in_turn(become_worker(*map(int, arguments)), lambda: (answer, None))


if __name__ == "__main__":
    main(sys.argv[1:])
