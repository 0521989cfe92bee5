"""What was found while the prompt files were read: for the user, and for decisions at the start of a run.

Invariants: `rows == kept + sum(skipped.values())`; at most `LISTED` bad rows are kept, the rest is only counted.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

LISTED = 20

SkipKind = Literal["bad json", "missing key", "wrong type", "empty prompt", "template", "too long", "too large"]


class BadRow(Struct, frozen=True):
    """One row that was skipped, and why."""

    file: str
    line: int  # 1-based line of a text file, 1-based row of a table
    reason: str
    kind: SkipKind

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


class SourceCount(Struct):
    """Rows of one entry of `prompt_data`."""

    spec: str
    rows: int = 0
    kept: int = 0


class LoadReport(Struct):
    """Counts of one `PromptSet`."""

    sources: list[SourceCount] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    bad_rows: list[BadRow] = field(default_factory=list)
    unlabelled: int = 0  # kept rows without a label
    rm_types: dict[str, int] = field(default_factory=dict)  # metadata.rm_type of kept rows
    labels: list[str] = field(default_factory=list)  # of the first kept rows, for choosing a grader
    longest_tokens: int = 0  # longest prompt that was tokenised while loading

    @property
    def rows(self) -> int:
        return sum(source.rows for source in self.sources)

    @property
    def kept(self) -> int:
        return sum(source.kept for source in self.sources)

    def skip(self, bad: BadRow) -> None:
        """Count a skipped row, and list it if the list has room."""
        self.skipped[bad.kind] = self.skipped.get(bad.kind, 0) + 1
        if len(self.bad_rows) < LISTED:
            self.bad_rows.append(bad)

    def skip_histogram(self) -> str:
        """Counts of skipped rows by kind, most frequent first: 'missing key: 3, too long: 1'."""
        ordered = sorted(self.skipped.items(), key=lambda item: (-item[1], item[0]))
        return ", ".join(f"{kind}: {count}" for kind, count in ordered)

    def lines(self, listed: int = 3) -> list[str]:
        """What the user sees: one line per source, then the skipped rows and the first of them."""
        out = [f"{source.spec}: {source.kept} of {source.rows} rows usable" for source in self.sources]
        if self.skipped:
            out.append(f"skipped {sum(self.skipped.values())} rows ({self.skip_histogram()})")
            out.extend(f"  {bad}" for bad in self.bad_rows[:listed])
        if self.unlabelled:
            out.append(f"{self.unlabelled} of {self.kept} usable rows have no label")
        return out
