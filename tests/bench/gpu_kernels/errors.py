"""What can go wrong with a measurement, as far as somebody else than a programmer can mend it."""


class MeasurementError(Exception):
    """Base of the errors below; its text is a sentence for whoever ran the measurement."""


class AnchorError(MeasurementError):
    """A file of anchors is missing or not what it should be."""


class WrongResultError(MeasurementError):
    """An operation computed something else than its reference, so its time says nothing."""
