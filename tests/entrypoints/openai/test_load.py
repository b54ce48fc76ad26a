"""Which requests count as load."""

import asyncio
from types import SimpleNamespace

import httpx
from fastapi import FastAPI

from vllm.entrypoints.openai.middleware import LoadMiddleware


def test_load_counts_work_and_not_who_looks_at_it() -> None:
    state = SimpleNamespace(in_flight=0)
    app = FastAPI()
    inside, release = asyncio.Event(), asyncio.Event()

    async def work() -> int:
        inside.set()
        await release.wait()
        return state.in_flight

    app.get("/v1/work")(work)
    for path in ("/load", "/health", "/ping", "/metrics", "/version"):
        app.get(path)(lambda: state.in_flight)
    app.add_middleware(LoadMiddleware, state=state)

    async def run() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as http:
            assert (await http.get("/load")).json() == 0
            working = asyncio.ensure_future(http.get("/v1/work"))
            await inside.wait()
            for path in ("/load", "/health", "/ping", "/metrics", "/version"):
                assert (await http.get(path)).json() == 1
            release.set()
            assert (await working).json() == 1
            assert (await http.get("/load")).json() == 0

    asyncio.run(run())
