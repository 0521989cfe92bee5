"""A stage's spans on their way into the run's trace: `stages.base.Spans` over the trace writer of one replica."""

from __future__ import annotations

from pathlib import Path

from pipeline.observe.trace import TraceWriter


class StageSpans:
    """Writes the spans of one replica, or none. A context manager."""

    def __init__(self, directory: Path, stage: str, replica: str, *, enabled: bool) -> None:
        self._writer = TraceWriter(directory, replica, stage=stage) if enabled else None

    def __enter__(self) -> StageSpans:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def flush(self) -> None:
        """Hand what is buffered to the operating system."""
        if self._writer is not None:
            self._writer.flush()

    def add(
        self, name: str, start_s: float, dur_s: float, *, group: int = -1, sample: int = -1, detail: str = ""
    ) -> None:
        if self._writer is not None:
            arguments: dict[str, float | int | str] = {"detail": detail} if detail else {}
            self._writer.span(name, start_s=start_s, dur_s=dur_s, group_id=group, sample=sample, args=arguments)
