"""An engine core that never ends loading, for tests of how it is stopped."""

import time

from vllm.v1.executor.uniproc_executor import UniProcExecutor


class StallingExecutor(UniProcExecutor):
    """Says that it loads, and goes on with that."""

    def _init_executor(self) -> None:
        print("LOADING", flush=True)
        time.sleep(600)
