"""Why a body could not be read as JSON, where the web framework only says that it was
not. Knows what reading JSON raises."""

from starlette.requests import Request


def why_unread(request: Request, error: BaseException | None) -> str | None:
    """The cause, in words for the client. None where `error` tells of none."""
    if not isinstance(error, (UnicodeDecodeError, RecursionError, ValueError)):
        return None
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        return (
            f"the body has Content-Encoding {encoding[:40]!r}, which this server does "
            "not decode: send JSON that is not compressed"
        )
    if isinstance(error, UnicodeDecodeError):
        if error.object[:2] == b"\x1f\x8b":
            return "the body is compressed with gzip: send JSON that is not compressed"
        return (
            f"the body is not valid {error.encoding.upper()}: byte "
            f"0x{error.object[error.start]:02x} at position {error.start}; expected "
            "JSON in UTF-8"
        )
    if isinstance(error, RecursionError):
        return "the body is not valid: its lists and objects are nested too deeply"
    if "digits" in str(error):
        return (
            "the body holds a whole number of thousands of digits: expected at most "
            "64 bits"
        )
    return f"the body is not valid JSON: {error}"
