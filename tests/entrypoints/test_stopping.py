"""Ctrl-C and SIGTERM, whenever they come: one line, a status that tells, no remains."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.remote_server import RemoteCommand, RemoteServer
from tests.tiny_model import tiny_model  # noqa: F401
from vllm.utils.network_utils import get_open_zmq_ipc_path
from vllm.utils.signals import (
    Interrupted,
    Terminated,
    signals_as_exceptions,
    signals_held_back,
    termination_as_exception,
)

ROOT = Path(__file__).parents[2]
STALLING = "tests.entrypoints.stalling.StallingExecutor"
SERVE = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
OFFLINE = """
    import sys
    from vllm import LLM
    if __name__ == "__main__":
        LLM(
            sys.argv[1],
            kv_cache_memory_bytes="8MiB",
            distributed_executor_backend=sys.argv[2],
        )
"""


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder for temporary files; the names of socket files must be short."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def _heed_interrupts() -> None:
    """Shells have commands in the background ignore SIGINT, and that is inherited."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Starting:
    """A command in a process group, and a folder for temporary files, of its own."""

    def __init__(self, command: list[str], folder: Path, **env: str) -> None:
        self.folder = folder
        self.shared: set[Path] = set()
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_heed_interrupts,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
                | env,
            )
        self.children: list[psutil.Process] = []

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def is_loading(self) -> bool:
        return "LOADING" in self.log.read_text()

    def has_begun_a_core(self) -> bool:
        """True while the other process imports what it needs. One of two children is
        Python's resource tracker."""
        return len(psutil.Process(self.process.pid).children()) == 2

    def end(self, number: signal.Signals, *, group: bool) -> tuple[int, list[str]]:
        """Sends a signal; the exit status and the lines that came after it."""
        before = len(self.log.read_text())
        process = psutil.Process(self.process.pid)
        self.children = process.children(recursive=True)
        self.shared = {
            Path(mapped.path)
            for owner in (process, *self.children)
            for mapped in owner.memory_maps()
            if mapped.path.startswith("/dev/shm/")
        }
        (os.killpg if group else os.kill)(self.process.pid, number)
        status = self.process.wait(timeout=60)
        return status, self.log.read_text()[before:].splitlines()

    def __enter__(self) -> "Starting":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def left_behind(self) -> list[object]:
        """Processes, socket files and shared memory."""
        _, alive = psutil.wait_procs(self.children, timeout=30)
        alive = [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
        return [
            *alive,
            *self.folder.glob("vllm-*"),
            *(path for path in self.shared if path.exists()),
        ]


@pytest.mark.parametrize(
    ("number", "status", "words", "group", "moment"),
    [
        (signal.SIGINT, 130, "interrupted", True, "is_loading"),
        (signal.SIGINT, 130, "interrupted", True, "has_begun_a_core"),
        (signal.SIGINT, 130, "interrupted", False, "is_loading"),
        (signal.SIGTERM, 0, "terminated", False, "is_loading"),
        (signal.SIGTERM, 0, "terminated", True, "has_begun_a_core"),
    ],
)
def test_a_server_that_loads_is_stopped_in_one_line(
    number: signal.Signals,
    status: int,
    words: str,
    group: bool,
    moment: str,
    tiny_model: str,  # noqa: F811
    sockets: Path,
) -> None:
    options = ["--port", "0", "--distributed-executor-backend", STALLING]
    with Starting([*SERVE, tiny_model, *options], sockets) as server:
        server.wait_for(getattr(server, moment))
        assert server.end(number, group=group) == (status, [f"vllm serve: {words}"])
        assert not server.left_behind()


@pytest.mark.parametrize(
    ("number", "status", "group"),
    [(signal.SIGINT, -signal.SIGINT, True), (signal.SIGTERM, 143, False)],
)
def test_a_program_that_starts_an_engine_ends_as_others_do(
    number: signal.Signals,
    status: int,
    group: bool,
    tiny_model: str,  # noqa: F811
    tmp_path: Path,
    sockets: Path,
) -> None:
    script = tmp_path / "offline.py"
    script.write_text(textwrap.dedent(OFFLINE))
    command = [sys.executable, str(script), tiny_model, STALLING]
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with Starting(command, sockets, **env) as program:
        program.wait_for(program.is_loading)
        found, lines = program.end(number, group=group)
        assert found == status
        # Python shows where a program was interrupted; the core has nothing to add.
        is_shown = number == signal.SIGINT
        assert lines[-1:] == (["KeyboardInterrupt"] if is_shown else [])
        assert "\n".join(lines).count("Traceback") == is_shown
        assert not program.left_behind()


def test_a_service_manager_stops_a_server_whose_requests_run_on(
    tiny_model: str,  # noqa: F811
) -> None:
    with RemoteServer(tiny_model, ["--kv-cache-memory-bytes", "8MiB"]) as server:
        body = {"prompt": [5], "max_tokens": 120, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            children = psutil.Process(server.process.pid).children()
            for process in [*children, server.process]:
                process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert server.process.wait(timeout=60) == 0
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2]
    assert "has stopped" not in server.log


@pytest.mark.parametrize(
    ("number", "is_idle", "count", "gap"),
    [
        (signal.SIGINT, True, 2, 0.1),
        (signal.SIGINT, False, 200, 0.02),
        (signal.SIGTERM, False, 2, 0.3),
    ],
)
def test_a_server_that_is_told_again_and_again_ends_without_a_traceback(
    number: signal.Signals,
    is_idle: bool,
    count: int,
    gap: float,
    tiny_model: str,  # noqa: F811
) -> None:
    """Until it is gone; what runs then is cut, and told so."""
    args = ["--kv-cache-memory-bytes", "8MiB", "--trust-request-chat-template"]
    loops = "".join(f"{{% for i{n} in range(9000) %}}" for n in range(5))
    hanging = {
        "messages": [{"role": "user", "content": "hi"}],
        "chat_template": loops + "{% endfor %}" * 5,
    }
    answers: list[int] = []

    def ask(url: str) -> None:
        answer = httpx.post(f"{url}/v1/chat/completions", json=hanging, timeout=60)
        answers.append(answer.status_code)

    with RemoteServer(tiny_model, args) as server:
        thread = threading.Thread(target=ask, args=[server.url])
        if not is_idle:
            thread.start()
            time.sleep(0.5)
        for _ in range(count):
            if server.process.poll() is not None:
                break
            server.process.send_signal(number)
            time.sleep(gap)
        assert server.process.wait(timeout=40) == 0
    assert "Traceback" not in server.log and "Error" not in server.log, server.log
    if not is_idle:
        thread.join(30)
        assert answers == [503]


def test_a_proxy_that_is_told_twice_ends_without_a_traceback() -> None:
    words = ["disagg-proxy", "--prefill", "http://127.0.0.1:9"]
    with RemoteCommand([*words, "--decode", "http://127.0.0.1:9"]) as proxy:
        for _ in range(2):
            proxy.process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        assert proxy.process.wait(timeout=40) == 0
    assert "Traceback" not in proxy.log, proxy.log


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_template_that_never_ends_does_not_keep_the_server_alive(
    path: str,
    tiny_model: str,  # noqa: F811
) -> None:
    args = ["--kv-cache-memory-bytes", "8MiB", "--shutdown-timeout", "1"]
    loops = "".join(f"{{% for i{n} in range(9000) %}}" for n in range(5))
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "chat_template": loops + "{% endfor %}" * 5,
    }
    trusting = [*args, "--trust-request-chat-template"]
    with RemoteServer(tiny_model, trusting) as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}{path}", json=body, timeout=1)
        assert httpx.get(f"{server.url}/health", timeout=20).status_code == 200
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=40) == 0


def test_signals_raise_once_for_one_wish() -> None:
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    for number, kind in (
        (signal.SIGINT, Interrupted),
        (signal.SIGTERM, Terminated),
    ):
        with pytest.raises(kind), signals_as_exceptions():
            try:
                signal.raise_signal(number)
            finally:
                signal.raise_signal(number)  # what is put away is not torn
                cleaned = True
        assert cleaned
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_held_signals_come_at_the_end() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    reached = False
    try:
        with pytest.raises(KeyboardInterrupt), signals_held_back():
            os.kill(os.getpid(), signal.SIGINT)
            reached = True
    finally:
        signal.signal(signal.SIGINT, before)
    assert reached
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_handler_of_the_program_stays() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with termination_as_exception():
            signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM]
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with pytest.raises(Terminated) as caught, termination_as_exception():
            signal.raise_signal(signal.SIGTERM)
        assert caught.value.code == 143
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_temporary_folder_with_a_long_name_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 90)
    with pytest.raises(ValueError, match=r"x{90}.*107 bytes.*TMPDIR"):
        get_open_zmq_ipc_path()
