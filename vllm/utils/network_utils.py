"""Sockets: free ports, addresses for ZeroMQ."""

import errno
import os
import socket
import tempfile
import uuid
from pathlib import Path

# What Linux takes in an address, without its final zero.
_MAX_SOCKET_PATH_BYTES = 107
_MAX_PORT = 65535
# Why an address cannot be bound -> the way out.
_WAYS_OUT = {
    errno.EADDRINUSE: "stop what uses it, or choose another --port (0: any free one)",
    errno.EADDRNOTAVAIL: "this machine has no such address; choose one of its own with "
    "--host (0.0.0.0: all)",
    errno.EACCES: "this user may not listen there; choose a --port above 1023",
}


def get_open_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind((host, 0))
        return sock.getsockname()[1]


def listen_on(host: str, port: int) -> socket.socket:
    """A socket bound to an address, taken before anything slow begins.

    Raises ValueError, naming what is wrong with it, when it cannot be bound.
    """
    if not 0 <= port <= _MAX_PORT:
        raise ValueError(
            f"port {port} does not exist: expected 1 to {_MAX_PORT}, or 0 for any free "
            "one (--port)"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (socket.gaierror, UnicodeError) as error:
        sock.close()
        raise ValueError(
            f"cannot listen on {host}:{port}: the host {host!r} cannot be resolved "
            f"({error}); expected an address or a name of this machine (--host)"
        ) from None
    except OSError as error:
        sock.close()
        way_out = _WAYS_OUT.get(error.errno or 0, "choose another --host or --port")
        raise ValueError(
            f"cannot listen on {host}:{port} ({error}): {way_out}"
        ) from None
    return sock


def get_open_zmq_ipc_path() -> str:
    """A fresh ipc:// address in the system's temporary folder.

    Raises ValueError when that folder has too long a name for socket files.
    """
    folder = tempfile.gettempdir()
    path = str(Path(folder) / f"vllm-{uuid.uuid4().hex}")
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
        raise ValueError(
            f"the temporary folder {folder!r} has too long a name for socket files, "
            f"which take at most {_MAX_SOCKET_PATH_BYTES} bytes: set TMPDIR "
            "to a shorter one"
        )
    return f"ipc://{path}"


def remove_ipc_path(address: str) -> None:
    """Removes the socket file of an ipc:// address; other addresses are left alone."""
    if address.startswith("ipc://"):
        Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
