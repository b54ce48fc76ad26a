"""What a pool holds: one formula for the check, the estimate and the report."""

import logging

import pytest
import torch

from tests.v1.spec_samples import config, full, in_format, sliding
from vllm.v1.core.kv_cache_utils import (
    blocks_per_request,
    check_enough_kv_cache_memory,
    estimate_max_model_len,
    get_kv_cache_capacity,
    get_kv_cache_configs,
    get_kv_cache_groups,
    get_max_concurrency_for_kv_cache_config,
    needed_memory,
    pool_use,
)
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

GiB = 1 << 30


def mixed_model(num_layers: int = 30, name: str = "turboquant_4bit_nc") -> dict:
    dense, packed = in_format("bfloat16"), in_format(name)
    skipped = {0, 1, num_layers - 2, num_layers - 1}
    return {f"{i}": dense if i in skipped else packed for i in range(num_layers)}


MODELS = {
    "full": {f"{i}": full() for i in range(4)},
    "window": {**{f"f{i}": full() for i in range(2)}, "s0": sliding(sliding_window=64)},
    "mixed formats": mixed_model(),
    "mixed windows": {
        "f": in_format("int8_per_token_head", num_kv_heads=2, head_size=512),
        "s": in_format(
            "int8_per_token_head", SlidingWindowSpec, head_size=256, sliding_window=64
        ),
    },
    "states": {
        "a": full(block_size=64),
        "m": MambaSpec(64, ((5000,),), (torch.float32,)),
    },
}
every_model = pytest.mark.parametrize("specs", MODELS.values(), ids=MODELS)


# --- known numbers --------------------------------------------------------------------


def test_concurrency_of_known_plans() -> None:
    spec = full(num_kv_heads=32, head_size=128, dtype=torch.float16)
    window = sliding(
        num_kv_heads=32, head_size=128, dtype=torch.float16, sliding_window=1024
    )
    cfg = config(16384, max_in_flight_tokens=1024)

    def concurrency(num_blocks: int, *specs) -> float:
        groups = [KVCacheGroupSpec(["a"], spec) for spec in specs]
        return get_max_concurrency_for_kv_cache_config(
            cfg, KVCacheConfig(num_blocks, [], groups)
        )

    assert concurrency(int(1024 * 1.5), spec) == 1.5
    assert concurrency(129 * 3, window) == 3  # 2047 tokens: 128 blocks and one more
    assert concurrency((1024 + 129) * 3, spec, window) == 3
    assert concurrency(10) == 0


@pytest.mark.parametrize(
    ("configured", "estimate"), [(16385, 16384), (16384, 16384), (16383, 16383)]
)
def test_known_longest_model_length(configured: int, estimate: int) -> None:
    spec = full(num_kv_heads=32, head_size=128, dtype=torch.float16)
    specs = {f"layer_{i}": spec for i in range(32)}
    assert estimate_max_model_len(config(configured), specs, 8 * GiB) == estimate


def test_mixed_formats_hold_what_the_bytes_say() -> None:
    specs = mixed_model(30)
    cfg = config(4096)
    (found,) = get_kv_cache_configs(cfg, [specs], [4 * GiB])
    per_token = (4 * 512 + 26 * 134) * 8
    tokens, _ = get_kv_cache_capacity(cfg, found)
    assert tokens == pytest.approx(4 * GiB / per_token, rel=1e-3)
    dense = {name: in_format("bfloat16") for name in specs}
    (plain,) = get_kv_cache_configs(config(4096), [dense], [4 * GiB])
    gain = found.num_blocks / plain.num_blocks
    assert gain == pytest.approx(30 * 512 / (4 * 512 + 26 * 134), rel=1e-3)
    (use,) = pool_use(cfg, found.kv_cache_groups)
    assert use.lost_percent == 0
    assert use.page_bytes == (17_152, 65_536)


@pytest.mark.parametrize(
    ("name", "gain"), [("fp8", 2.0), ("int8_per_token_head", 1.94)]
)
def test_attention_only_models_gain_what_the_format_saves(
    name: str, gain: float
) -> None:
    blocks = []
    for fmt in ("bfloat16", name):
        specs = {f"{i}": in_format(fmt) for i in range(8)}
        blocks.append(get_kv_cache_configs(config(), [specs], [GiB])[0].num_blocks)
    assert blocks[1] / blocks[0] == pytest.approx(gain, abs=0.01)


def test_padding_and_empty_places_are_counted_as_lost() -> None:
    cfg = config()
    groups = get_kv_cache_groups(cfg, MODELS["mixed windows"])
    lost = [use.lost_percent for use in pool_use(cfg, groups)]
    assert min(lost) == 0
    assert 0 < max(lost) < 1
    groups = get_kv_cache_groups(
        cfg,
        {**{f"f{i}": full() for i in range(2)}, **{f"s{i}": sliding() for i in "123"}},
    )
    assert [use.lost_percent for use in pool_use(cfg, groups)] == [0, 0, 50]


# --- one formula ----------------------------------------------------------------------


@every_model
def test_a_pool_of_exactly_the_need_serves_exactly_one_request(specs: dict) -> None:
    cfg = config(1000, max_in_flight_tokens=64)
    groups = get_kv_cache_groups(cfg, specs)
    needed = needed_memory(cfg, groups)
    check_enough_kv_cache_memory(cfg, groups, needed)
    (found,) = get_kv_cache_configs(cfg, [specs], [needed])
    assert found.num_blocks == blocks_per_request(cfg, groups)
    assert get_max_concurrency_for_kv_cache_config(cfg, found) == 1
    assert get_kv_cache_capacity(cfg, found) == (1000, 1)
    with pytest.raises(ValueError, match="max_model_len 1000"):
        check_enough_kv_cache_memory(cfg, groups, needed - 1)


@every_model
def test_the_estimate_is_the_largest_length_that_passes_the_check(specs: dict) -> None:
    memory = 40 << 20
    cfg = config(1 << 20, max_in_flight_tokens=64)
    longest = estimate_max_model_len(cfg, specs, memory)
    assert cfg.model_config.max_model_len == 1 << 20
    for length, fits in ((longest, True), (longest + 1, False)):
        if 1 <= length <= 1 << 20:
            trial = config(length, max_in_flight_tokens=64)
            groups = get_kv_cache_groups(trial, specs)
            assert (needed_memory(trial, groups) <= memory) == fits


@every_model
def test_tensors_fit_the_memory(specs: dict) -> None:
    memory = 123_456_789
    (found,) = get_kv_cache_configs(config(1000), [specs], [memory])
    total = sum(t.size for t in found.kv_cache_tensors)
    assert total <= memory
    assert memory - total < total / found.num_blocks


@every_model
def test_the_two_log_lines_and_the_metric_agree(
    specs: dict, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = config(1000)
    logging.getLogger("vllm").addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, logger="vllm"):
            (found,) = get_kv_cache_configs(cfg, [specs], [200 << 20])
    finally:
        logging.getLogger("vllm").removeHandler(caplog.handler)
    tokens, concurrency = get_kv_cache_capacity(cfg, found)
    assert tokens == int(concurrency * 1000)
    assert cfg.cache_config.kv_cache_size_tokens == tokens
    assert cfg.cache_config.kv_cache_max_concurrency == concurrency
    assert f"KV cache size: {tokens:,} tokens" in caplog.text
    assert f"Maximum concurrency for 1,000 tokens per request: {concurrency:.2f}x" in (
        caplog.text
    )


# --- too little memory ----------------------------------------------------------------


def test_no_memory_names_the_setting() -> None:
    with pytest.raises(ValueError, match="gpu_memory_utilization"):
        get_kv_cache_configs(config(), [MODELS["full"]], [0])


def test_too_little_memory_states_numbers_and_the_way_out() -> None:
    specs = {f"{i}": full() for i in range(4)}  # 64 KiB per 16 tokens
    with pytest.raises(ValueError) as caught:
        get_kv_cache_configs(config(1 << 20), [specs], [1 << 30])
    text = str(caught.value)
    for words in (
        "max_model_len 1048576",
        "4.00 GiB",
        "1.00 GiB",
        "maximum model length that fits is 262144",
        "gpu_memory_utilization",
        "--kv-cache-dtype",
    ):
        assert words in text
    with pytest.raises(ValueError, match="Not even one token"):
        get_kv_cache_configs(config(16), [specs], [1000])


@pytest.mark.parametrize("auto_fit", [False, True])
def test_a_pool_of_a_given_size_is_what_is_to_be_raised(auto_fit: bool) -> None:
    given = {"original_max_model_len": -1} if auto_fit else {}
    cfg = config(1024, **given)
    cfg.cache_config.kv_cache_memory_bytes = 1000
    with pytest.raises(ValueError, match=r"aise kv_cache_memory_bytes \(now 1,000\)"):
        get_kv_cache_configs(cfg, [{"a": full()}], [1000])


def test_too_few_blocks_are_named_by_the_option_that_asked_for_them() -> None:
    cfg = config(16 * 100)
    cfg.cache_config.num_gpu_blocks_override = 99
    with pytest.raises(ValueError) as caught:
        get_kv_cache_configs(cfg, [{"a": full()}], [GiB])
    text = str(caught.value)
    assert "--num-gpu-blocks-override 99" in text and "100 blocks or more" in text
    assert "gpu_memory_utilization" not in text
    cfg.cache_config.num_gpu_blocks_override = 100
    assert get_kv_cache_configs(cfg, [{"a": full()}], [GiB])[0].num_blocks == 100


# --- the longest length that fits -----------------------------------------------------


def test_auto_fit_takes_the_worker_that_holds_least() -> None:
    specs = {f"{i}": full() for i in range(4)}
    cfg = config(1 << 20, original_max_model_len=-1)
    configs = get_kv_cache_configs(cfg, [specs, specs], [64 << 20, 32 << 20])
    assert cfg.model_config.max_model_len == 8192
    assert configs[0].num_blocks == 512
    assert get_max_concurrency_for_kv_cache_config(cfg, configs[0]) == 1


def test_auto_fit_keeps_a_length_that_fits_and_refuses_none() -> None:
    specs = {"a": full()}
    cfg = config(1024, original_max_model_len=-1)
    get_kv_cache_configs(cfg, [specs], [GiB])
    assert cfg.model_config.max_model_len == 1024
    with pytest.raises(ValueError, match="gpu_memory_utilization"):
        get_kv_cache_configs(config(1024, original_max_model_len=-1), [specs], [100])


def test_auto_fit_starts_from_the_model_when_no_length_was_resolved() -> None:
    cfg = config(-1)
    cfg.model_config.original_max_model_len = -1
    cfg.model_config.derived_max_model_len = 2048
    get_kv_cache_configs(cfg, [{"a": full()}], [GiB])
    assert cfg.model_config.max_model_len == 2048
