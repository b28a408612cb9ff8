"""What can go wrong with a benchmark as such, as leaves of the client's tree of errors.

InvalidRequestError
├── WorkloadError        what was asked for cannot be meant, or two options exclude each other
└── TraceError           the trace cannot be read; says where and what was expected
UnavailableError
└── EndpointError        no OpenAI-compatible server answers at that address
PacelineError
├── LibraryMissingError  an optional library is not installed; says how to install it
├── ReportError          a result cannot be written
└── NoOutputError        an answer ended without a token
"""

from paceline_client.errors import InvalidRequestError, PacelineError, UnavailableError


class WorkloadError(InvalidRequestError):
    """What was asked for cannot be meant, or two options exclude each other."""


class TraceError(InvalidRequestError):
    """The trace cannot be read; says where and what was expected."""


class EndpointError(UnavailableError):
    """No OpenAI-compatible server answers at that address."""


class LibraryMissingError(PacelineError):
    """An optional library is not installed; says how to install it."""

    def __init__(self, library: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs {library}: in the checkout, pip install ./protos ./clients '.[bench]'",
            reason="LIBRARY_MISSING",
        )


class ReportError(PacelineError):
    """A result cannot be written."""


class NoOutputError(PacelineError):
    """An answer ended without a token, so that there is nothing to time."""
