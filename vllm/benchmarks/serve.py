"""`vllm bench serve`: a running server under load, measured by a streaming client."""

import argparse
import asyncio
import json
import time
from dataclasses import dataclass, field

import httpx
from tqdm.asyncio import tqdm

from vllm.benchmarks.workload import Workload, summary
from vllm.entrypoints.disagg.server_url import server_url
from vllm.utils.argparse_utils import FlexibleArgumentParser, at_least


@dataclass
class Timing:
    """Seconds of one request: to its first token, and between the following chunks."""

    first: float = 0.0
    total: float = 0.0
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0


def add_arguments(parser: FlexibleArgumentParser) -> None:
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="server")
    add("--model", default=None, help="model; default: the first that is served")
    add("--num-prompts", type=at_least(1), default=64, help="requests")
    add("--input-len", type=at_least(1), default=128, help="tokens of a prompt")
    add("--output-len", type=at_least(1), default=64, help="tokens to generate")
    add(
        "--prefix-len",
        type=at_least(0),
        default=0,
        help="tokens that all prompts share",
    )
    add("--concurrency", type=at_least(1), default=16, help="requests at once")
    add(
        "--vocab-size",
        type=at_least(1),
        default=30_000,
        help="token ids are below this",
    )
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    figures = asyncio.run(measure(args))
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        for name, value in figures.items():
            print(f"{name:22} {value}")
    return 0


async def measure(args: argparse.Namespace) -> dict[str, object]:
    """Sends all requests, at most `concurrency` at once, and sums up their timings."""
    load = Workload(
        num_prompts=args.num_prompts,
        input_len=args.input_len,
        output_len=args.output_len,
        prefix_len=args.prefix_len,
    )
    url = server_url(args.url, "--url")
    try:
        timings, seconds = await _all_requests(url, args, load)
    except httpx.HTTPError as error:
        raise ValueError(
            f"no answer from --url {url} ({str(error) or type(error).__name__}): start "
            "a server there with `vllm serve`, or give the URL of one that runs"
        ) from None
    return {
        "requests_per_s": len(timings) / seconds,
        "output_tokens_per_s": sum(t.tokens for t in timings) / seconds,
        "time_to_first_token_s": summary([t.first for t in timings]),
        "inter_token_latency_s": summary([g for t in timings for g in t.gaps]),
        "request_latency_s": summary([t.total for t in timings]),
    }


async def _all_requests(
    url: str, args: argparse.Namespace, load: Workload
) -> tuple[list[Timing], float]:
    """The timings of all requests, and the seconds from the first to the last."""
    gate = asyncio.Semaphore(args.concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        model = args.model or await _first_model(client, url)

        async def one(ids: list[int]) -> Timing:
            async with gate:
                return await _request(client, model, ids, load.output_len)

        start = time.perf_counter()
        prompts = load.prompts(args.vocab_size)
        timings = await tqdm.gather(*(one(p["prompt_token_ids"]) for p in prompts))
        return timings, time.perf_counter() - start


async def _first_model(client: httpx.AsyncClient, url: str) -> str:
    """The first model that is served. ValueError where no such server answers."""
    response = await client.get("/v1/models")
    try:
        return response.json()["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        raise ValueError(
            f"--url {url} answers /v1/models with status {response.status_code} and no "
            "list of models: expected a server of `vllm serve`; give --model where it "
            "lists none"
        ) from None


async def _request(
    client: httpx.AsyncClient, model: str, ids: list[int], output_len: int
) -> Timing:
    body = {
        "model": model,
        "prompt": ids,
        "max_tokens": output_len,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    timing, start = Timing(), time.perf_counter()
    last = start
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise ValueError(f"{response.status_code}: {await response.aread()!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter()
            chunk = json.loads(line.removeprefix("data: "))
            if usage := chunk.get("usage"):
                # Counted by the server: a chunk may hold several tokens.
                timing.tokens = usage["completion_tokens"]
            if not chunk["choices"]:
                continue
            if last == start:
                timing.first = now - start
            else:
                timing.gaps.append(now - last)
            last = now
    timing.total = time.perf_counter() - start
    return timing
