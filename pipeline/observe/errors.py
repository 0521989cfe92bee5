"""What can go wrong with the traces of a run.

ObserveError
├── MetricsError   a metrics file or event directory cannot be used
├── TraceError     a trace cannot be merged
├── SummaryError   a summary file cannot be read
├── SamplesError   a directory has no samples to show
└── EndpointError  the endpoint of metrics cannot listen
"""

from __future__ import annotations


class ObserveError(RuntimeError):
    """Base of all errors of this package."""


class MetricsError(ObserveError):
    """A metrics file or event directory cannot be used."""


class TraceError(ObserveError):
    """A trace cannot be merged."""


class SummaryError(ObserveError):
    """A summary file cannot be read."""


class EndpointError(ObserveError):
    """The endpoint of metrics cannot listen."""


class SamplesError(ObserveError):
    """A directory has no samples to show."""

    exit_code = 2  # of `launch.py samples`
