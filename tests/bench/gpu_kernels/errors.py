"""What can go wrong with a measurement, as far as somebody else than a programmer can mend it."""


class MeasurementError(Exception):
    """Its text is a sentence for whoever ran the measurement."""


class WrongResultError(MeasurementError):
    """An operation computed something else than its reference, so its time says nothing."""
