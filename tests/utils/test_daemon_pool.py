"""A pool whose threads keep no process alive."""

import asyncio
import subprocess
import sys
import threading

import pytest

from vllm.utils.daemon_pool import DaemonPool

ENDLESS = """
import asyncio, time
from vllm.utils.daemon_pool import DaemonPool

def work():
    while True:
        pass

async def main():
    try:
        await asyncio.wait_for(DaemonPool(1).run(work), 0.2)
    except TimeoutError:
        print("given up", flush=True)

asyncio.run(main())
"""


def test_results_and_errors_come_back() -> None:
    async def run() -> None:
        pool = DaemonPool(2)
        results = await asyncio.gather(*(pool.run(pow, n, 2) for n in range(20)))
        assert results == [n * n for n in range(20)]
        with pytest.raises(ZeroDivisionError):
            await pool.run(divmod, 1, 0)
        assert await pool.run(divmod, 7, 2) == (3, 1)

    asyncio.run(run())


def test_work_waits_where_all_threads_are_taken() -> None:
    async def run() -> None:
        pool, may_end, begun = DaemonPool(2), threading.Event(), threading.Semaphore(0)

        def work() -> int:
            begun.release()
            may_end.wait()
            return threading.get_ident()

        tasks = [asyncio.create_task(pool.run(work)) for _ in range(5)]
        await asyncio.sleep(0.1)
        assert begun.acquire(timeout=5) and begun.acquire(timeout=5)
        assert not begun.acquire(blocking=False)
        tasks[4].cancel()
        may_end.set()
        assert len(set(await asyncio.gather(*tasks[:4]))) <= 2
        await asyncio.sleep(0.1)
        assert begun.acquire(timeout=5) and begun.acquire(timeout=5)
        assert not begun.acquire(blocking=False)  # what was cancelled never began

    asyncio.run(run())


def test_a_pool_has_threads() -> None:
    with pytest.raises(ValueError, match="0 threads"):
        DaemonPool(0)


def test_no_exit_waits_for_work_without_end() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDLESS],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "given up\n", "")
