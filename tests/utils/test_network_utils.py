"""What keeps a server from listening is said by what is wrong, with its way out."""

import errno
import socket

import pytest

from vllm.utils import network_utils
from vllm.utils.network_utils import listen_on


def refusal(host: str, port: int) -> str:
    with pytest.raises(ValueError) as caught:
        listen_on(host, port)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("port", [-1, 65536, 99999, 1 << 80])
def test_a_port_that_does_not_exist_is_told_the_range(port: int) -> None:
    words = refusal("127.0.0.1", port)
    assert f"port {port} does not exist" in words and "1 to 65535, or 0" in words
    assert "stop what uses it" not in words


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "1.2.3.4.5"])
def test_a_host_without_an_address_is_said_to_have_none(host: str) -> None:
    words = refusal(host, 0)
    assert f"the host {host!r} cannot be resolved" in words and "--host" in words
    assert "stop what uses it" not in words


def test_an_address_of_another_machine_is_no_port_in_use() -> None:
    words = refusal("192.0.2.1", 0)
    assert "192.0.2.1:0" in words and "this machine has no such address" in words


def test_a_port_in_use_is_said_to_be() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = refusal("127.0.0.1", taken.getsockname()[1])
    assert "stop what uses it" in words and "--port" in words


def test_a_port_that_takes_privileges_is_said_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Denied(socket.socket):
        def bind(self, address: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(network_utils.socket, "socket", Denied)
    assert "choose a --port above 1023" in refusal("127.0.0.1", 80)
