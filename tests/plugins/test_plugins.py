"""Plugins of other distributions: found by entry point, filtered, named if broken."""

import importlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.plugins.distribution import install
from tests.remote_server import RemoteServer
from tests.tiny_model import tiny_model  # noqa: F401
from vllm import SamplingParams, plugins
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.testing.kv_connector.models import VOCABULARY, ModelFolders
from vllm.testing.kv_connector.real_engine import (
    engine,
    generate,
    random_prompts,
    run,
    tokens_of,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

ALL = {
    "vllm.general_plugins": [
        "mine = plugged:register",
        "broken = plugged:fail",
        "missing = no_such_module_of_plugins:register",
    ],
    "vllm.stat_logger_plugins": ["stats = plugged:Stats"],
    "vllm.logits_processors": [
        "counting = plugged:Counting",
        "nothing = plugged:HEARD",
    ],
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path; what plugins registered is taken back."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(
        KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry)
    )
    plugins.load_general_plugins.cache_clear()
    yield tmp_path
    AttentionBackendEnum.CUSTOM.clear_override()
    plugins.load_general_plugins.cache_clear()
    sys.modules.pop("plugged", None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return ModelFolders(tmp_path_factory.mktemp("models"))["full"]


def heard() -> list[str]:
    return importlib.import_module("plugged").HEARD


def test_general_plugins_run_once_and_broken_ones_are_named(
    site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install(site, "plugged", ALL)
    with caplog.at_level("ERROR", "vllm"):
        for _ in range(2):
            plugins.load_general_plugins()
    assert heard() == ["register", "fail"]
    assert "plugin broken failed" in caplog.text
    assert "plugin missing (vllm.general_plugins) could not be loaded" in caplog.text
    assert "Plugged" in KVConnectorFactory._registry


@pytest.mark.parametrize(
    "allowed, expected", [("mine", ["register"]), ("broken,other", ["fail"]), ("", [])]
)
def test_vllm_plugins_names_those_that_may_load(
    site: Path, monkeypatch: pytest.MonkeyPatch, allowed: str, expected: list[str]
) -> None:
    install(site, "plugged", ALL)
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    plugins.load_general_plugins()
    assert heard() == expected
    for group in ("vllm.stat_logger_plugins", "vllm.logits_processors"):
        assert plugins.load_plugins_by_group(group) == {}


def test_a_backend_and_a_spec_of_a_plugin_serve_a_model(
    site: Path, folder: str
) -> None:
    install(site, "plugged", {"vllm.general_plugins": ["mine = plugged:register"]})
    prompts = random_prompts([5, 40])
    expected = tokens_of(run(folder, prompts))
    with engine(folder, attention_backend="CUSTOM") as llm:
        assert tokens_of(generate(llm, prompts)) == expected
        assert "customize_spec" in heard()
        core: Any = llm.llm_engine.engine_core
        core = core.engine_core
        (group,) = core.kv_cache_config.kv_cache_groups
        plugged = importlib.import_module("plugged")
        assert type(group.kv_cache_spec) is plugged.Spec
        (manager,) = core.scheduler.kv_cache_manager.coordinator.single_type_managers
        assert type(manager) is plugged.Manager
        assert KVCacheSpecRegistry.get_manager_class(plugged.Spec) is plugged.Manager
        assert issubclass(plugged.Manager, FullAttentionManager)


def test_stat_loggers_of_plugins_hear_every_step(site: Path, folder: str) -> None:
    install(site, "plugged", ALL)
    with engine(folder, disable_log_stats=False) as llm:
        assert heard().count("stats") == heard().count("initialized") == 1
        generate(llm, random_prompts([5]), 3)
        assert heard().count("record") >= 3


def test_a_stat_logger_of_another_class_is_an_error(site: Path, folder: str) -> None:
    wrong = {"vllm.stat_logger_plugins": ["wrong = plugged:Counting"]}
    install(site, "plugged", wrong)
    with (
        pytest.raises(TypeError, match=r"'wrong'.*expected a subclass"),
        engine(folder, disable_log_stats=False),
    ):
        raise AssertionError("the engine started")


# --- logits processors ----------------------------------------------------------------


def counting(start: int, num_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=num_tokens,
        ignore_eos=True,
        extra_args={"count": start},
    )


def check_counting(folder: str, seed: int = 1, **settings: Any) -> None:
    """Rows come, go and move in every step: each request gets its own numbers."""
    rng = random.Random(seed)
    prompts = random_prompts([rng.randrange(1, 60) for _ in range(40)])
    wishes = [counting(100 * i, rng.randrange(1, 25)) for i in range(len(prompts))]
    plain = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
    with engine(folder, max_num_seqs=6, **settings) as llm:
        (expected,) = llm.generate(
            [{"prompt_token_ids": prompts[0]}], plain, use_tqdm=False
        )
        params = [plain, *wishes[1:]]
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
        )
        with pytest.raises(ValueError, match=r"Counting refuses.*got 'x'"):
            wrong = SamplingParams(extra_args={"count": "x"})
            llm.generate([{"prompt_token_ids": [2, 3]}], wrong, use_tqdm=False)
    assert tokens_of(outputs[:1]) == tokens_of([expected])
    for wish, output in zip(wishes[1:], outputs[1:], strict=True):
        start = (wish.extra_args or {})["count"]
        assert list(output.outputs[0].token_ids) == [
            (start + i) % VOCABULARY for i in range(wish.max_tokens or 0)
        ]


@pytest.mark.parametrize("blocks", [None, 12], ids=["room", "pressure"])
def test_installed_logits_processors_hear_of_rows_in_order(
    site: Path, folder: str, caplog: pytest.LogCaptureFixture, blocks: int | None
) -> None:
    install(site, "plugged", ALL)
    with caplog.at_level("ERROR", "vllm"):
        pool = {"num_gpu_blocks_override": blocks, "max_model_len": 112}
        check_counting(folder, **(pool if blocks else {}))
    assert "logits processor 'nothing' failed to load" in caplog.text


@pytest.mark.parametrize("form", ["name", "class"])
def test_given_logits_processors_need_no_entry_point(
    site: Path, folder: str, form: str
) -> None:
    install(site, "plugged", {})
    given: Any = "plugged:Counting"
    if form == "class":
        given = importlib.import_module("plugged").Counting
    check_counting(folder, logits_processors=[given])
    with (
        pytest.raises(ValueError, match="expected a subclass"),
        engine(folder, logits_processors=["plugged:HEARD"]),
    ):
        raise AssertionError("the engine started")


def test_a_server_takes_plugins_into_its_engine_process(
    site: Path,
    tiny_model: str,  # noqa: F811
) -> None:
    install(site, "plugged", {"vllm.general_plugins": ALL["vllm.general_plugins"]})
    args = [
        *("--dtype", "float32", "--kv-cache-memory-bytes", "4MiB"),
        *("--attention-backend", "CUSTOM", "--logits-processors", "plugged:Counting"),
    ]
    env = {"PYTHONPATH": f"{site}:{Path(__file__).parents[2]}"}
    with RemoteServer(tiny_model, args, env) as server:

        def ask(count: Any) -> Any:
            body = {
                "prompt": [5, 6, 7],
                "max_tokens": 4,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
                "vllm_xargs": {"count": count},
            }
            return json.load(
                urlopen(
                    Request(
                        f"{server.url}/v1/completions",
                        json.dumps(body).encode(),
                        {"Content-Type": "application/json"},
                    )
                )
            )

        assert ask(17)["choices"][0]["token_ids"] == [17, 18, 19, 20]
        with pytest.raises(HTTPError) as refused:
            ask("x")
        assert refused.value.code == 400
        assert "Counting refuses" in refused.value.read().decode()
    assert "plugin broken failed" in server.log
