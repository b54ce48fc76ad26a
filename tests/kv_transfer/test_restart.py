"""`vllm serve` with a disk tier, stopped and started anew: hits, equal tokens, and a
store that was damaged meanwhile."""

import json
import shutil
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.kv_transfer.engines import (
    LOGPROB_TOLERANCE,
    engine,
    generate,
    offloading,
    random_prompts,
)
from tests.remote_server import RemoteServer
from tests.tiny_model import tiny_model  # noqa: F401
from vllm.outputs import RequestOutput

PROMPTS = random_prompts([200, 211, 224])
NUM_TOKENS = 12
BLOCK = 16
HITS = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]


@pytest.fixture(scope="module")
def alone(tiny_model: str) -> list[RequestOutput]:  # noqa: F811
    with engine(tiny_model, skip_tokenizer_init=False) as llm:
        return generate(llm, PROMPTS, NUM_TOKENS)


class Answers:
    """What a server that lives for these prompts only says."""

    def __init__(self, model: str, store: Path) -> None:
        transfer = offloading(disk_path=str(store))
        args = [
            *("--dtype", "float32", "--kv-cache-memory-bytes", "8MiB"),
            "--enable-prompt-tokens-details",
            *("--kv-transfer-config", json.dumps(transfer)),
        ]
        with RemoteServer(model, args) as server:
            client = server.client()
            name = client.models.list().data[0].id
            self.found = [
                client.completions.create(
                    model=name,
                    prompt=prompt,
                    max_tokens=NUM_TOKENS,
                    temperature=0,
                    logprobs=1,
                    extra_body={"ignore_eos": True, "return_token_ids": True},
                )
                for prompt in PROMPTS
            ]
            text = urlopen(f"{server.url}/metrics").read().decode()
        self.metrics = text.splitlines()

    @property
    def cached(self) -> list[int]:
        details = [answer.usage.prompt_tokens_details for answer in self.found]
        return [detail.cached_tokens if detail else 0 for detail in details]

    def counted(self, name: str) -> float:
        start = f"vllm:kv_connector_{name}_total{{"
        (line,) = [line for line in self.metrics if line.startswith(start)]
        return float(line.rsplit(" ", 1)[1])

    def check(self, alone: list[RequestOutput]) -> None:
        """Equal tokens, and logprobs that differ by rounding only."""
        for answer, expected in zip(self.found, alone, strict=True):
            (choice,), (output,) = answer.choices, expected.outputs
            assert choice.text == output.text
            assert choice.model_extra["token_ids"] == list(output.token_ids)
            for mine, step, token in zip(
                choice.logprobs.token_logprobs,
                output.logprobs,
                output.token_ids,
                strict=True,
            ):
                assert abs(mine - step[token].logprob) < LOGPROB_TOLERANCE


def damage(path: Path, how: int) -> None:
    """Flips a bit, cuts the file, or fills it with zeros."""
    blob = bytearray(path.read_bytes())
    if how == 0:
        blob[-9] ^= 4
    elif how == 1:
        del blob[-100:]
    else:
        blob[:] = bytes(len(blob))
    path.write_bytes(blob)


def test_a_server_started_anew_goes_on_with_what_is_on_disk(
    tiny_model: str,  # noqa: F811
    tmp_path: Path,
    alone: list[RequestOutput],
) -> None:
    store = tmp_path / "store"
    first = Answers(tiny_model, store)
    first.check(alone)
    assert first.cached == [0, 0, 0]
    files = sorted(store.glob("*/*/*.safetensors"))
    assert len(files) >= sum(HITS) // BLOCK
    damaged = tmp_path / "damaged"
    shutil.copytree(store, damaged)

    again = Answers(tiny_model, store)
    again.check(alone)
    assert again.cached == HITS
    assert again.counted("fetched_blocks") == sum(HITS) // BLOCK
    assert again.counted("damaged_blocks") == 0

    # Every file, each kind of damage in turn: nothing of it may be believed.
    for index, path in enumerate(sorted(damaged.glob("*/*/*.safetensors"))):
        damage(path, index % 3)
    computed = Answers(tiny_model, damaged)
    computed.check(alone)
    assert computed.cached == [0, 0, 0]
    assert computed.counted("damaged_blocks") > 0
