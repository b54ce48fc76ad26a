"""Work for a client ends when the client goes away."""

import asyncio
from typing import Any

from fastapi import Request


async def until_disconnect(request: Request, work: Any) -> Any:
    """Awaits `work`, and cancels it when the client goes away.

    Returns None in that case.
    """
    task = asyncio.ensure_future(work)

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watcher = asyncio.ensure_future(disconnected())
    done, _ = await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
    if task in done:
        watcher.cancel()
        return task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return None
