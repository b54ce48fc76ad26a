"""An engine in a process of its own, stepped whenever there is something to do."""

import multiprocessing
import os
import signal
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.kv_transfer.engines import NUM_TOKENS, engine, generate
from vllm import LLM, SamplingParams
from vllm.outputs import RequestOutput

# Processes fork from one that has imported everything and started nothing.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__])


def core_of(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core


def num_free(llm: LLM) -> int:
    pool = core_of(llm).scheduler.kv_cache_manager.block_pool
    return int(pool.get_num_free_blocks())


def idle(llm: LLM, timeout: float = 20.0) -> None:
    """Steps until no request and no transfer is left."""
    core, deadline = core_of(llm), time.monotonic() + timeout
    while core.has_work():
        assert time.monotonic() < deadline, "transfers do not end"
        core.step()
        time.sleep(0.0005)


def prefill_params() -> dict[str, Any]:
    """What a request asks for whose pages another engine reads."""
    return {"kv_transfer_params": {"do_remote_decode": True}}


def decode(
    llm: LLM, prompts: list[list[int]], params: list[Any], num_tokens: int = NUM_TOKENS
) -> list[RequestOutput]:
    """Goes on from prompts that another engine has computed and answered with
    `params`."""
    sampling = [
        SamplingParams(
            temperature=0.0,
            max_tokens=num_tokens,
            ignore_eos=True,
            logprobs=1,
            extra_args={"kv_transfer_params": told},
        )
        for told in params
    ]
    return llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False
    )


def _serve(pipe: Connection) -> None:
    """Commands in, results out; the engine of the last `start` goes on meanwhile."""
    torch.set_num_threads(1)
    llm: LLM | None = None
    context: Any = None
    while True:
        while llm is not None and not pipe.poll() and core_of(llm).has_work():
            core_of(llm).step()
            time.sleep(0.001)
        name, args, kwargs = pipe.recv()
        try:
            result: Any = None
            if name in ("start", "stop") and context is not None:
                context.__exit__(None, None, None)
                llm = context = None
            if name == "start":
                context = engine(*args, **kwargs)
                llm = context.__enter__()
                result = num_free(llm)
            elif name == "generate":
                assert llm is not None
                result = generate(llm, *args, **kwargs)
            elif name == "decode":
                assert llm is not None
                result = decode(llm, *args, **kwargs)
            elif name == "num_free":
                assert llm is not None
                result = num_free(llm)
            elif name == "setenv":
                variable, value = args
                os.environ.pop(variable, None)
                if value is not None:
                    os.environ[variable] = value
            pipe.send((result, None))
        except Exception:
            pipe.send((None, traceback.format_exc()))


class EngineProcess:
    """Starts empty; `start` takes what `engine` takes. Use it with `with`."""

    def __init__(self) -> None:
        self._pipe, theirs = _PROCESSES.Pipe()
        self.process = _PROCESSES.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()

    def submit(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Sends a command; `result` waits for what it gives."""
        self._pipe.send((name, args, kwargs))

    def result(self) -> Any:
        """RuntimeError with the traceback when the command raised."""
        result, error = self._pipe.recv()
        if error is not None:
            raise RuntimeError(error)
        return result

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.submit(name, *args, **kwargs)
        return self.result()

    def start(self, *args: Any, **kwargs: Any) -> int:
        """A new engine in place of the last one; its number of free blocks."""
        return int(self._call("start", *args, **kwargs))

    def setenv(self, name: str, value: str | None) -> None:
        """Sets a variable of that process for its next engine; None unsets it."""
        self._call("setenv", name, value)

    def stop(self) -> None:
        self._call("stop")

    def generate(self, *args: Any, **kwargs: Any) -> list[RequestOutput]:
        outputs: list[RequestOutput] = self._call("generate", *args, **kwargs)
        return outputs

    def prefill(self, prompts: list[list[int]]) -> list[Any]:
        """Computes prompts for another engine; what that one needs to know."""
        outputs = self.generate(prompts, 1, extra_args=prefill_params())
        return [output.kv_transfer_params for output in outputs]

    def num_free(self) -> int:
        return int(self._call("num_free"))

    def wait_for_free(self, expected: int, timeout: float = 20.0) -> None:
        """Returns once so many blocks are free; AssertionError when they never are."""
        deadline = time.monotonic() + timeout
        while (found := self.num_free()) != expected:
            assert time.monotonic() < deadline, f"{found} of {expected} blocks are free"
            time.sleep(0.02)

    def send_signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.join()
        while number == signal.SIGSTOP and not self._stands_still():
            time.sleep(0.001)

    def _stands_still(self) -> bool:
        """Says whether every thread is stopped: each stops at its own next chance."""
        threads = Path(f"/proc/{self.process.pid}/task").iterdir()
        stats = [(thread / "stat").read_text() for thread in threads]
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
