"""Work for a client ends when the client goes away."""

import asyncio
from typing import Any

from fastapi import Request


async def until_disconnect(request: Request, work: Any) -> Any:
    """Awaits `work`, and cancels it when the client goes away.

    Returns None in that case.
    """
    task: asyncio.Future[Any] = asyncio.ensure_future(work)

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watcher = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        # Also when this itself is cancelled: the server ends.
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
