"""What can go wrong with a run, as far as somebody else than a programmer can mend it."""


class GpuRunError(Exception):
    """Base of the errors below; its text is a sentence for whoever ran it."""


class WheelsError(GpuRunError):
    """Wheels could not be installed, or some are missing."""


class PeerError(GpuRunError):
    """The file of a peer's figures is missing or not what it should be."""


class CheckFailedError(GpuRunError):
    """Something is not as it must be."""


class DoesNotFitError(GpuRunError):
    """A cell needs more memory than this device has."""


class SystemFailedError(GpuRunError):
    """A process of the system did not start, or did not end as it should."""
