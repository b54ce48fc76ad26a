"""The base URL of a server, from what a user types for it.

Knows addresses. Refuses to know whether anybody answers there: servers may start later.
"""

import re
from urllib.parse import SplitResult, urlsplit

_EXPECTED = "expected HOST:PORT, http://HOST[:PORT] or https://HOST[:PORT]"
_SCHEMES = ("http", "https")
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_IPV6 = re.compile(r"[0-9a-fA-F:.]*:[0-9a-fA-F:.%]*")
_MAX_PORT = 65535


def server_url(text: str, option: str) -> str:
    """What "host:port", "http://host:port/" or ".../v1" stands for: "http://host:port".

    Raises ValueError, naming `option`, the text and what is wrong with it.
    """
    whole = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(whole)
        fault = _fault_in(parts, whole)
        if not fault and parts.port is None and "://" not in text:
            fault = "it names neither a port nor a scheme"
    except ValueError as error:  # brackets and ports that are none
        fault = str(error)
    if fault:
        raise ValueError(f"{option} {text!r}: {fault}; {_EXPECTED}")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    user, at, host = parts.netloc.rpartition("@")
    return f"{parts.scheme}://{user}{at}{host.lower()}{path}"


def _fault_in(parts: SplitResult, whole: str) -> str:
    """What is wrong with an URL, or nothing. Raises ValueError for odd ports."""
    if any(char.isspace() or not char.isprintable() for char in whole):
        return "it holds blanks"
    if parts.scheme not in _SCHEMES:
        return f"the scheme {parts.scheme!r} is not served"
    host, port = parts.hostname or "", parts.port
    if not host:
        return "it names no host"
    if not (_HOST_NAME.fullmatch(host) or _IPV6.fullmatch(host)):
        return f"{host!r} is no name of a host"
    if parts.netloc.endswith(":") or port == 0:
        return f"the port must be 1 to {_MAX_PORT}"
    if parts.path.startswith("//"):
        return "it holds // in an odd place"
    if parts.query or parts.fragment:
        return "it ends with more than a path"
    return ""
