"""Errors that cross layers and reach users with their meaning intact."""


class VLLMValidationError(ValueError):
    """A value that a user sent and that cannot be served.

    `parameter` names the field, so that the server can report it; `value` is what came.
    """

    def __init__(
        self, message: str, *, parameter: str | None = None, value: object = None
    ) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value


class EngineDeadError(RuntimeError):
    """The engine core has stopped; no request can be served any more."""


class EngineGenerateError(RuntimeError):
    """The engine failed on one request; others go on."""
