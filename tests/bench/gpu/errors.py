"""What can go wrong with a run, as far as somebody else than a programmer can mend it."""


class GpuRunError(Exception):
    """Its text is a sentence for whoever ran it."""


class CheckFailedError(GpuRunError):
    """Something is not as it must be."""


class DoesNotFitError(GpuRunError):
    """A cell needs more memory than this device has."""
