"""Sockets: free ports, addresses for ZeroMQ."""

import os
import socket
import tempfile
import uuid
from pathlib import Path

# What Linux takes in an address, without its final zero.
_MAX_SOCKET_PATH_BYTES = 107


def get_open_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind((host, 0))
        return sock.getsockname()[1]


def listen_on(host: str, port: int) -> socket.socket:
    """A socket bound to an address, taken before anything slow begins.

    Raises ValueError when the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        raise ValueError(
            f"cannot listen on {host}:{port} ({error}): stop what uses it or choose "
            "another with --host and --port"
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
