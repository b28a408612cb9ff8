"""What can go wrong with an engine; each message is a reason that the table can print."""


class EngineError(Exception):
    """An engine could not be measured: it did not become ready, ended or fell silent. The message is one line."""


class InstallError(EngineError):
    """Its environment could not be made."""


class RefusedError(EngineError):
    """Driven in this way, it cannot do what was asked."""
