"""Sockets: free ports, addresses for ZeroMQ."""

import socket
import tempfile
import uuid
from pathlib import Path


def get_open_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind((host, 0))
        return sock.getsockname()[1]


def get_open_zmq_ipc_path() -> str:
    """A fresh ipc:// address in the system's temporary folder."""
    return f"ipc://{Path(tempfile.gettempdir()) / f'vllm-{uuid.uuid4().hex}'}"


def remove_ipc_path(address: str) -> None:
    """Removes the socket file of an ipc:// address; other addresses are left alone."""
    if address.startswith("ipc://"):
        Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
