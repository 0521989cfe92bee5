"""What a grader is to those who call it, and how a name of the registry's table becomes one.

To add a grader: a file with a function `GradeRequest -> Grade`, and one line in the table `GRADERS` of `registry.py`,
`"name": Entry(build, form)`, where `build` makes a `Grader` of the text after the colon.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from stages.graders.grade import Grade, GradeRequest

Run = Callable[[GradeRequest], Grade]


class Grader(Struct, frozen=True):
    """A grader as it is called.

    `wrong` is the score of a response whose text makes the grader overrun its deadline; None where an overrun is not
    the text's fault, which fails the sample. `prepare` imports what the grader needs, and raises UnknownGraderError; a
    worker calls it once, outside of any item's deadline.
    """

    run: Run
    needs_label: bool = False
    in_stage: bool = True  # cheap and safe enough to run in the stage's own process
    wrong: float | None = None
    prepare: Callable[[], None] | None = None


class Entry(Struct, frozen=True):
    """How a name of the table becomes a grader. `build` gets the argument (None without one); ValueError refuses it."""

    build: Callable[[str | None], Grader]
    form: str  # what the user writes
    reads_text: bool = True  # whether `boxed_` in front makes sense


def fixed(grader: Grader, form: str) -> Entry:
    """A grader that takes no argument."""

    def build(argument: str | None) -> Grader:
        if argument is not None:
            raise ValueError("it takes no argument")
        return grader

    return Entry(build, form)


def against_label(run: Run, form: str) -> Entry:
    """A grader that compares with the label, takes no argument and is cheap."""
    return fixed(Grader(run, needs_label=True), form)
