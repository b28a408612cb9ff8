"""What can go wrong with an engine: one tree, each message a reason that the table can print.

EngineError
├── InstallError        it could not be installed
├── StartError          it did not become ready
├── DiedError           it ended in the middle of something
├── SilentError         it did not answer in time
└── RefusedError        it answers that it cannot do this
"""


class EngineError(Exception):
    """An engine could not be measured; the message says why, in one line."""


class InstallError(EngineError):
    """Its environment could not be made."""


class StartError(EngineError):
    """It did not become ready."""


class DiedError(EngineError):
    """Its process ended."""


class SilentError(EngineError):
    """It did not answer in time, and was ended."""


class RefusedError(EngineError):
    """Driven in this way, it cannot do what was asked."""
