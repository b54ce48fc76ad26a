"""Errors in the OpenAI shape, and the mapping from exceptions to them."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

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
        return error_response(_where_no_json(error), HTTPStatus.BAD_REQUEST)
    where = [str(part) for part in first["loc"] if part != "body"]
    if not where:
        return error_response(
            "the body must be a JSON object, with Content-Type: application/json",
            HTTPStatus.BAD_REQUEST,
        )
    field = where[0]
    same = [fault for fault in faults if field in map(str, fault["loc"])]
    return error_response(_told(same, error.body), HTTPStatus.BAD_REQUEST, field)


def _where_no_json(error: RequestValidationError) -> str:
    first = error.errors()[0]
    reason = (first.get("ctx") or {}).get("error", first["msg"])
    text, position = error.body, first["loc"][-1]
    if isinstance(text, str) and isinstance(position, int):
        line = text.count("\n", 0, position) + 1
        column = position - text.rfind("\n", 0, position)
        reason = f"{reason} at line {line}, column {column}"
    return f"the body is not valid JSON: {reason}"


def _told(faults: Sequence[dict[str, Any]], body: Any) -> str:
    """What is wrong with a field, where in it, and what is there: "prompt[1]: Input
    should be a valid string, got 5".

    A field that takes several types has complaints of each of them. Those that come
    furthest in its lists are of the type that was meant.
    """
    reached = [[i for i in f["loc"] if isinstance(i, int)] for f in faults]
    furthest = max(reached)
    meant = [f for f, place in zip(faults, reached, strict=True) if place == furthest]
    texts = dict.fromkeys(f["msg"].removeprefix("Value error, ") for f in meant)
    message = f"{_place(meant[0]['loc'], body)}: {'; or '.join(texts)}"
    if meant[0]["type"] == "missing":
        return message
    return f"{message}, got {_as_json(meant[0].get('input'))}"


def _place(location: Sequence[str | int], body: Any) -> str:
    """Where in a body a fault is. Types between which a field has the choice stand in
    its location as well, and are no part of the body."""
    _, field, *others = location
    place, value = str(field), body.get(field) if isinstance(body, dict) else None
    for part in others:
        if isinstance(value, list) and isinstance(part, int):
            place, value = f"{place}[{part}]", value[part]
        elif isinstance(value, dict) and part in value:
            place, value = f"{place}.{part}", value[part]
    return shorten(place, 200)


def _as_json(value: Any) -> str:
    """A value in a message; what JSON spells otherwise than Python, as JSON does."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return short_repr(value)


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
        # Such as Allow, which says the methods that a path has.
        return JSONResponse(body.model_dump(), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def on_any(_: Request, error: Exception) -> JSONResponse:
        return json_error(error)

    for kind in (NotFoundError, ValueError, EngineDeadError, EngineGenerateError):

        @app.exception_handler(kind)
        async def on_known(_: Request, error: Exception) -> JSONResponse:
            return json_error(error)
