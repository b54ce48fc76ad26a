"""What `vllm chat` and `vllm complete` share: talking to a running server."""

import argparse
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from typing import Any

from vllm.entrypoints.disagg.server_url import server_url
from vllm.utils.argparse_utils import FlexibleArgumentParser


def add_client_arguments(parser: FlexibleArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="server")
    parser.add_argument("--model-name", default=None, help="model; default: the first")
    parser.add_argument("--api-key", default=None, help="key of the server")
    parser.add_argument("-q", "--quick", default=None, help="send this and end")


class Client:
    """A server's URL with the headers and the model that its requests carry."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.url = server_url(args.url, "--url") + "/v1"
        self.headers = {"Content-Type": "application/json"}
        if args.api_key:
            self.headers["Authorization"] = f"Bearer {args.api_key}"
        self.model = args.model_name or self._get("/models")["data"][0]["id"]

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self.headers)
        try:
            return urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            raise ValueError(
                f"{error.code} from {self.url}{path}: {error.read()!r}"
            ) from None
        except (OSError, HTTPException) as error:
            why = getattr(error, "reason", error)
            raise ValueError(
                f"no server at {self.url} ({why}): start one with `vllm serve` or give "
                "--url"
            ) from None

    def _get(self, path: str) -> Any:
        with self._open(path) as response:
            return json.load(response)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Posts a request and yields the choices of its stream as they come."""
        with self._open(path, {**body, "model": self.model, "stream": True}) as lines:
            for line in lines:
                text = line.decode().strip().removeprefix("data: ")
                if text and text != "[DONE]":
                    yield from json.loads(text).get("choices", [])
