"""Block hashes name content; the free queue keeps order in O(1) a block."""

import random
import time

import pytest
import torch

from tests.v1.core.utils import make_request
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name, sha256
from vllm.v1.core import block_hash as bh
from vllm.v1.core.block_hash import (
    BlockHash,
    BlockHashListWithBlockSize,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    KVCacheInvariantError,
    generate_block_hash_extra_keys,
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    hash_block_tokens,
    init_none_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.request import Request

ALGORITHMS = ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]


@pytest.fixture(autouse=True)
def _restore_none_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bh, "NONE_HASH", bh.NONE_HASH)


def image(identifier: str, offset: int, length: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=offset, length=length),
    )


def with_images(num_tokens: int, *features: MultiModalFeatureSpec, size: int = 4):
    return Request(
        "r",
        list(range(num_tokens)),
        SamplingParams(),
        None,
        mm_features=list(features),
        block_hasher=get_request_block_hasher(size, sha256),
    )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_root_is_random_unless_seeded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hash_fn = get_hash_fn_by_name(name)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    init_none_hash(hash_fn)
    first = bh.NONE_HASH
    init_none_hash(hash_fn)
    assert first and first != bh.NONE_HASH
    monkeypatch.setenv("PYTHONHASHSEED", "some seed")
    init_none_hash(hash_fn)
    assert hash_fn("some seed") == bh.NONE_HASH


@pytest.mark.parametrize("name", ALGORITHMS)
def test_hash_is_of_parent_tokens_and_extra_keys(name: str) -> None:
    hash_fn = get_hash_fn_by_name(name)
    init_none_hash(hash_fn)
    first = hash_block_tokens(hash_fn, None, [1, 2], ("key",))
    assert first == hash_fn((bh.NONE_HASH, (1, 2), ("key",)))
    second = hash_block_tokens(hash_fn, first, (3, 4))
    assert second == hash_fn((first, (3, 4), None))


def test_requests_hash_full_blocks_as_they_grow() -> None:
    whole = make_request("a", list(range(13)))
    grown = make_request("b", list(range(3)))
    assert len(whole.block_hashes) == 3
    for token in range(3, 13):
        grown.append_output_token_ids(token)
    assert grown.block_hashes == whole.block_hashes


@pytest.mark.parametrize("position", range(12))
def test_a_token_changes_its_block_and_all_later_ones(position: int) -> None:
    tokens = list(range(12))
    before = make_request("a", tokens).block_hashes
    tokens[position] = 99
    after = make_request("b", tokens).block_hashes
    same = [x == y for x, y in zip(before, after, strict=True)]
    assert same == [i < position // 4 for i in range(3)]


def test_salt_lora_and_embeddings_tell_requests_apart() -> None:
    def hashes(**kwargs: object) -> tuple[BlockHash, ...]:
        return tuple(make_request("r", list(range(8)), **kwargs).block_hashes)

    def embedded(value: float) -> tuple[BlockHash, ...]:
        request = Request(
            "r",
            None,
            SamplingParams(),
            None,
            prompt_embeds=torch.full((8, 2), value, dtype=torch.bfloat16),
            block_hasher=get_request_block_hasher(4, sha256),
        )
        assert request.num_prompt_tokens == 8
        return tuple(request.block_hashes)

    lora = LoRARequest("adapter", 1, "/path")
    variants = [
        hashes(),
        hashes(cache_salt="a"),
        hashes(cache_salt="b"),
        hashes(lora_request=lora),
        hashes(lora_request=lora, cache_salt="a"),
        embedded(1.0),
        embedded(2.0),
    ]
    assert hashes(cache_salt="a") == hashes(cache_salt="a")
    for position in range(2):
        assert len({variant[position] for variant in variants}) == len(variants)


def test_salt_is_a_key_of_the_first_block_only() -> None:
    request = make_request("r", list(range(8)), cache_salt="s")
    assert generate_block_hash_extra_keys(request, 0, 4, 0) == (("s",), 0)
    assert generate_block_hash_extra_keys(request, 4, 8, 0) == (None, 0)


@pytest.mark.parametrize(
    ("start", "end", "first", "expected"),
    [
        (0, 5, 0, ((("one", 0),), 1)),
        (3, 8, 0, ((("one", -3),), 1)),
        (6, 10, 0, (None, 1)),
        (0, 15, 0, ((("one", 0), ("two", 10)), 2)),
        (8, 12, 1, ((("two", 2),), 1)),
        (12, 16, 1, ((("two", -2),), 2)),
        (16, 20, 2, (None, 2)),
    ],
)
def test_items_are_keys_of_the_blocks_they_overlap(
    start: int, end: int, first: int, expected: object
) -> None:
    request = with_images(20, image("one", 0, 5), image("two", 10, 5))
    assert generate_block_hash_extra_keys(request, start, end, first) == expected


def test_item_that_spans_blocks_marks_each_of_them() -> None:
    one = with_images(16, image("x", 2, 12)).block_hashes
    other = with_images(16, image("y", 2, 12)).block_hashes
    assert all(a != b for a, b in zip(one, other, strict=True))


def test_extra_keys_come_in_a_fixed_order() -> None:
    request = Request(
        "r",
        list(range(4)),
        SamplingParams(),
        None,
        mm_features=[image("x", 1, 2)],
        lora_request=LoRARequest("adapter", 1, "/path"),
        cache_salt="s",
    )
    keys, _ = generate_block_hash_extra_keys(request, 0, 4, 0)
    assert keys == ("adapter", ("x", 1), "s")


@pytest.mark.parametrize("group_id", [0, 1, 255, 256, 2**32 - 1])
def test_group_id_is_four_bytes_after_the_hash(group_id: int) -> None:
    key = make_block_hash_with_group_id(BlockHash(b"hash"), group_id)
    assert key == b"hash" + group_id.to_bytes(4, "big")
    assert get_block_hash(key) == b"hash"
    assert get_group_id(key) == group_id


@pytest.mark.parametrize("scale", [1, 2, 3])
def test_hashes_of_larger_blocks_are_those_at_their_ends(scale: int) -> None:
    small = [BlockHash(bytes([i])) for i in range(7)]
    large = BlockHashListWithBlockSize(small, 4, 4 * scale)
    expected = small[scale - 1 :: scale]
    assert list(large) == expected
    assert len(large) == len(expected)
    assert [large[i] for i in range(len(large))] == expected
    assert large[-1] == expected[-1]
    assert large[1:] == expected[1:]
    with pytest.raises(IndexError):
        large[len(expected)]


def test_hashes_refuse_sizes_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="6"):
        BlockHashListWithBlockSize([], 4, 6)


def test_block_takes_one_hash_at_a_time() -> None:
    block = KVCacheBlock(3)
    assert block.block_hash is None
    block.set_block_hash(make_block_hash_with_group_id(BlockHash(b"a"), 0), 2)
    assert block.block_hash_num_tokens == 2
    with pytest.raises(KVCacheInvariantError):
        block.set_block_hash(make_block_hash_with_group_id(BlockHash(b"b"), 0))
    block.reset_hash()
    assert block.block_hash is None
    assert block.block_hash_num_tokens is None


# --- the free queue ------------------------------------------------------------------


def make_queue(n: int) -> tuple[list[KVCacheBlock], FreeKVCacheBlockQueue]:
    blocks = [KVCacheBlock(i) for i in range(n)]
    return blocks, FreeKVCacheBlockQueue(blocks)


def ids(queue: FreeKVCacheBlockQueue) -> list[int]:
    found = [block.block_id for block in queue.get_all_free_blocks()]
    backwards = []
    block = queue.fake_free_list_tail.prev_free_block
    while block is not queue.fake_free_list_head:
        backwards.append(block.block_id)
        block = block.prev_free_block
    assert found == backwards[::-1]
    assert queue.num_free_blocks == len(found)
    return found


def test_queue_takes_from_the_front_and_adds_at_both_ends() -> None:
    blocks, queue = make_queue(6)
    assert queue.popleft() is blocks[0]
    assert queue.popleft_n(2) == blocks[1:3]
    assert queue.popleft_n(0) == []
    queue.append(blocks[1])
    queue.append_n([blocks[0]])
    queue.prepend_n([blocks[2]])
    assert ids(queue) == [2, 3, 4, 5, 1, 0]
    queue.remove(blocks[4])
    assert ids(queue) == [2, 3, 5, 1, 0]
    queue.append_n([])
    queue.prepend_n([])
    assert ids(queue) == [2, 3, 5, 1, 0]
    assert blocks[4].prev_free_block is blocks[4].next_free_block is None


def test_queue_refuses_what_would_break_it() -> None:
    blocks, queue = make_queue(2)
    with pytest.raises(ValueError, match="No free blocks available"):
        queue.popleft_n(3)
    with pytest.raises(KVCacheInvariantError):
        queue.append(blocks[0])
    taken = queue.popleft()
    with pytest.raises(RuntimeError):
        queue.remove(taken)
    with pytest.raises(KVCacheInvariantError):
        queue.append_n([taken, taken])
    empty = FreeKVCacheBlockQueue([])
    with pytest.raises(ValueError, match="No free blocks available"):
        empty.popleft()
    empty.fake_free_list_tail.prev_free_block = None
    with pytest.raises(AssertionError):
        empty.append(KVCacheBlock(9))


def test_queue_equals_a_list() -> None:
    rng = random.Random(0)
    blocks, queue = make_queue(40)
    free, held = blocks.copy(), []
    for _ in range(2000):
        act = rng.randrange(4)
        some = rng.sample(held, rng.randrange(0, min(len(held), 4) + 1))
        if act == 0:
            n = rng.randrange(0, min(len(free), 4) + 1)
            held += queue.popleft_n(n)
            free = free[n:]
            continue
        if act == 1 and free:
            block = rng.choice(free)
            queue.remove(block)
            free = [b for b in free if b is not block]
            held.append(block)
            continue
        if act == 2:
            queue.append_n(some)
            free = free + some
        else:
            queue.prepend_n(some)
            free = some + free
        held = [b for b in held if all(b is not s for s in some)]
        assert ids(queue) == [b.block_id for b in free]


def test_queue_acts_do_not_depend_on_its_length() -> None:
    def seconds(n: int) -> float:
        blocks, queue = make_queue(n)
        start = time.perf_counter()
        for block in blocks[n // 2 : n // 2 + 500]:
            queue.remove(block)
            queue.append(block)
        return time.perf_counter() - start

    small = min(seconds(1_000) for _ in range(5))
    large = min(seconds(50_000) for _ in range(5))
    assert large < 20 * small
