"""Why a form is refused."""

import enum


class Reason(enum.StrEnum):
    """Of an error, as clients see it."""

    TOO_LARGE = "STRUCTURED_TOO_LARGE"
    UNSUPPORTED = "STRUCTURED_UNSUPPORTED"
    MALFORMED = "STRUCTURED_MALFORMED"
    TOO_COMPLEX = "STRUCTURED_TOO_COMPLEX"


class FormError(Exception):
    """`field` is its path in a request, such as `structured.regex`; `sentence` goes on behind the path."""

    def __init__(self, reason: Reason, field: str, sentence: str) -> None:
        super().__init__(f"{field}: {sentence}")
        self.reason = reason
        self.field = field
        self.sentence = sentence
