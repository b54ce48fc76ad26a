"""Errors in the OpenAI shape, and the mapping from exceptions to them."""

from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from vllm.entrypoints.openai.protocol import ErrorInfo, ErrorResponse
from vllm.entrypoints.openai.unread_body import why_unread
from vllm.exceptions import EngineDeadError, EngineGenerateError, VLLMValidationError
from vllm.logger import init_logger
from vllm.utils.text_utils import short_repr, shorten

logger = init_logger(__name__)

_TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.METHOD_NOT_ALLOWED: "MethodNotAllowedError",
    HTTPStatus.INTERNAL_SERVER_ERROR: "InternalServerError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
}


class NotFoundError(Exception):
    """A name that this server does not know; `param` is the field that held it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def error_response(
    message: str, status: HTTPStatus, param: str | None = None
) -> ErrorResponse:
    """An error body. Its type follows the HTTP status; a message that is long, since it
    holds what the client sent, is shortened."""
    kind = _TYPES.get(status, "BadRequestError")
    return ErrorResponse(
        error=ErrorInfo(
            message=shorten(message),
            type=kind,
            param=None if param is None else shorten(param, 200),
            code=status.value,
        )
    )


def to_error(error: Exception) -> ErrorResponse:
    """The body and status that a client sees for an exception."""
    if isinstance(error, NotFoundError):
        return error_response(str(error), HTTPStatus.NOT_FOUND, error.param)
    if isinstance(error, VLLMValidationError):
        return error_response(str(error), HTTPStatus.BAD_REQUEST, error.parameter)
    if isinstance(error, (ValueError, TypeError, NotImplementedError)):
        return error_response(str(error), HTTPStatus.BAD_REQUEST)
    if isinstance(error, EngineDeadError):
        return error_response(str(error), HTTPStatus.SERVICE_UNAVAILABLE)
    if isinstance(error, EngineGenerateError):
        # The engine has logged it where it happened, with the request and the reason.
        return error_response(str(error), HTTPStatus.INTERNAL_SERVER_ERROR)
    logger.error("request failed", exc_info=error)
    return error_response(
        str(error) or type(error).__name__, HTTPStatus.INTERNAL_SERVER_ERROR
    )


def json_response(message: str, status: HTTPStatus) -> JSONResponse:
    """An error without an exception."""
    return JSONResponse(error_response(message, status).model_dump(), status.value)


def json_error(error: Exception) -> JSONResponse:
    body = to_error(error)
    return JSONResponse(body.model_dump(), status_code=body.error.code)


def _validation_error(error: RequestValidationError) -> ErrorResponse:
    """The first fault of a body that does not fit the request's fields."""
    faults = error.errors()
    first = faults[0]
    cause = (first.get("ctx") or {}).get("error")
    if isinstance(cause, VLLMValidationError):
        return to_error(cause)
    if first["type"] == "json_invalid":
        detail = (first.get("ctx") or {}).get("error", first["msg"])
        return error_response(
            f"the body is not valid JSON: {detail}", HTTPStatus.BAD_REQUEST
        )
    where = [str(part) for part in first["loc"] if part != "body"]
    if not where:
        return error_response(
            "the body must be a JSON object, with Content-Type: application/json",
            HTTPStatus.BAD_REQUEST,
        )
    # A field that takes several types has one complaint for each of them.
    field = where[0]
    same = [e["msg"] for e in faults if field in map(str, e["loc"])]
    same = [text.removeprefix("Value error, ") for text in same]
    message = f"{field}: {'; or '.join(dict.fromkeys(same))}"
    given = first.get("input")
    if isinstance(given, bool):
        message += f", got {str(given).lower()}"  # as JSON spells it
    elif isinstance(given, (str, int, float)):
        message += f", got {short_repr(given)}"
    return error_response(message, HTTPStatus.BAD_REQUEST, field)


def install_error_handlers(app: FastAPI) -> None:
    """Makes every error of the app leave in the OpenAI shape."""

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        body = _validation_error(error)
        return JSONResponse(body.model_dump(), status_code=body.error.code)

    @app.exception_handler(HTTPException)
    async def on_http(raw: Request, error: HTTPException) -> JSONResponse:
        message = why_unread(raw, error.__cause__) or str(error.detail)
        body = error_response(message, HTTPStatus(error.status_code))
        return JSONResponse(body.model_dump(), status_code=error.status_code)

    @app.exception_handler(Exception)
    async def on_any(_: Request, error: Exception) -> JSONResponse:
        return json_error(error)

    for kind in (NotFoundError, ValueError, EngineDeadError, EngineGenerateError):

        @app.exception_handler(kind)
        async def on_known(_: Request, error: Exception) -> JSONResponse:
            return json_error(error)
