"""Steps of the runner give what Hugging Face gives, however they are cut."""

import random

import pytest
import torch

from tests.v1.worker.steps import (
    VOCAB,
    Steps,
    make_config,
    save_tiny_llama,
    save_tiny_qwen,
    start,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorTransferResults,
)


def prompts(seed: int, lengths=(1, 5, 16, 17, 33, 40)) -> dict[str, list[int]]:
    rng = random.Random(seed)
    return {f"r{n}": [rng.randrange(VOCAB) for _ in range(n)] for n in lengths}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def reference(folder):
    return save_tiny_llama(folder)


@pytest.fixture(scope="module")
def executor(folder, reference):
    executor = start(make_config(folder))
    yield executor
    executor.shutdown()


@pytest.fixture
def steps(executor):
    steps = Steps(executor)
    yield steps
    for req_id in list(steps.seqs):
        steps.finish(req_id)
    steps.executor.execute_model(steps.schedule({}))
    assert not executor.driver_worker.model_runner.requests
    assert executor.driver_worker.model_runner.input_batch.num_reqs == 0


@torch.inference_mode()
def greedy(reference, prompt, num_tokens) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        logits = reference(torch.tensor([tokens])).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("chunk", [64, 7, 1])
def test_greedy_tokens_equal_the_reference(steps, reference, chunk):
    asked = prompts(1)
    for req_id, prompt in asked.items():
        steps.add(req_id, prompt)
    got = steps.run(8, chunk)
    for req_id, prompt in asked.items():
        assert got[req_id] == greedy(reference, prompt, 8), req_id


def test_requests_come_and_go_while_others_run(steps, reference):
    asked = prompts(2)
    rng = random.Random(3)
    waiting, results = list(asked), {}
    while len(results) < len(asked):
        if waiting and rng.random() < 0.5:
            steps.add(req_id := waiting.pop(0), asked[req_id])
        counts = {}
        for req_id, seq in steps.seqs.items():
            if rng.random() < 0.8:  # others pause in this step
                left = len(seq.tokens) - seq.computed
                counts[req_id] = min(left, rng.randrange(1, 11))
        steps.step(counts)
        for req_id, seq in list(steps.seqs.items()):
            if len(seq.output) >= 6:
                results[req_id] = steps.finish(req_id).output
            elif rng.random() < 0.05:  # aborted in flight, and asked again
                steps.finish(req_id)
                waiting.append(req_id)
    for req_id, output in results.items():
        assert output == greedy(reference, asked[req_id], 6)


def test_a_preempted_request_goes_on_as_if_nothing_happened(steps, reference):
    asked = prompts(4, (20, 21, 22))
    for req_id, prompt in asked.items():
        steps.add(req_id, prompt)
    steps.run(3)
    steps.preempt("r21")
    # Its blocks are written by others meanwhile.
    steps.add("x", prompts(5, (40,))["r40"])
    for _ in range(2):
        steps.step({"r20": 1, "r22": 1, "x": 1 if steps.seqs["x"].computed else 40})
    got = steps.run(9)
    for req_id, prompt in asked.items():
        assert got[req_id][:9] == greedy(reference, prompt, 9)


def test_logits_of_a_prompt_equal_the_reference(steps, reference):
    prompt = prompts(6, (40,))["r40"]
    for chunk in (64, 9):
        name = f"c{chunk}"
        steps.add(name, prompt, prompt_logprobs=3, logprobs=2)
        found = {}
        while not steps.seqs[name].output:
            left = len(prompt) - steps.seqs[name].computed
            output = steps.step({name: min(chunk, left)})
            found |= output.prompt_logprobs_dict
        with torch.inference_mode():
            want = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
        rows = found[name]
        assert rows.logprobs.shape == (39, 4)
        assert rows.logprob_token_ids[:, 0].tolist() == prompt[1:]
        ids = rows.logprob_token_ids.long()
        torch.testing.assert_close(
            rows.logprobs, want[:-1].gather(1, ids), rtol=1e-4, atol=1e-4
        )
        best = want[:-1].topk(3).values
        torch.testing.assert_close(rows.logprobs[:, 1:], best, rtol=1e-4, atol=1e-4)
        target = want[:-1].gather(1, ids[:, :1])
        ranks = (want[:-1] > target + 1e-6).sum(-1) + 1
        assert torch.equal(rows.selected_token_ranks.long(), ranks)
        sampled = output.logprobs
        assert sampled.logprob_token_ids.shape == (1, 3)
        assert sampled.sampled_token_ranks.tolist() == [1]
        assert sampled.logprobs[0, 0] == pytest.approx(want[-1].max().item(), abs=1e-4)
        # Complete prompts are reported once, even when they are computed again.
        steps.preempt(name)
        output = steps.step({name: 41})
        assert output.prompt_logprobs_dict == {}
        steps.finish(name)


def test_a_prompt_of_one_token_has_empty_prompt_logprobs(steps):
    steps.add("one", [3], prompt_logprobs=2)
    output = steps.step({"one": 1})
    assert output.prompt_logprobs_dict["one"].logprobs.shape == (0, 3)


def test_prompt_logprobs_of_a_cached_prefix_are_nan_not_stale(steps):
    prompt = prompts(12, (33,))["r33"]
    steps.add("first", prompt)
    steps.step({"first": 33})
    steps.add("hit", prompt, prompt_logprobs=1)
    hit = steps.seqs["hit"]
    hit.computed, hit.blocks = 16, ([steps.seqs["first"].blocks[0][0]],)
    rows = steps.step({"hit": 17}).prompt_logprobs_dict["hit"]
    assert rows.logprobs[:16].isnan().all() and not rows.logprobs[16:].isnan().any()
    assert rows.logprob_token_ids[:, 0].tolist() == prompt[1:]
    hit.blocks[0].pop(0)  # it belongs to the first request


def test_seeded_output_does_not_depend_on_batch_or_chunks(steps):
    asked = prompts(7, (30, 31))
    settings = {"temperature": 1.5, "seed": 9, "top_p": 0.95}
    steps.add("alone", asked["r30"], **settings)
    alone = list(steps.run(8)["alone"])
    steps.finish("alone")
    steps.add("other", asked["r31"], temperature=1.0)
    steps.step({"other": 31})
    steps.add("again", asked["r30"], **settings)
    steps.add("third", asked["r31"], temperature=0.7, seed=1, top_k=5)
    assert steps.run(8, chunk=11)["again"] == alone


def test_penalties_and_min_tokens_reach_the_sampler(steps, reference):
    prompt = prompts(8, (12,))["r12"]
    first = greedy(reference, prompt, 1)[0]
    steps.add("bias", prompt, logit_bias={5: 100.0})
    steps.add("stop", prompt, min_tokens=2, stop_token_ids=[first])
    steps.add("allow", prompt, allowed_token_ids=[7, 8])
    steps.add("repeat", prompt, logit_bias={5: 100.0}, frequency_penalty=2.0)
    got = steps.run(3)
    assert got["bias"] == [5, 5, 5]
    assert first not in got["stop"][:2]
    assert set(got["allow"]) <= {7, 8}
    assert got["repeat"][0] == 5


def test_a_step_without_requests_is_empty(steps):
    output = steps.step({})
    assert output.req_ids == [] and output.sampled_token_ids == []


def test_blocks_are_zeroed_and_copied_before_the_step(steps):
    runner = steps.executor.driver_worker.model_runner
    for cache in runner.kv_caches.values():
        cache[5] = 5
        cache[6] = 6
        cache[7] = 7
    steps.add("a", [1, 2, 3])
    steps.step({"a": 3}, new_block_ids_to_zero=[5], kv_cache_block_copies=[(6, 7)])
    for cache in runner.kv_caches.values():
        assert not cache[5].any()
        assert (cache[6] == 6).all() and (cache[7] == 6).all()


class Connector:
    """Notes what it is called for; loads and saves nothing."""

    def __init__(self):
        self.calls = []
        self.bound = None

    def has_connector_metadata(self):
        return self.bound is not None

    def bind_connector_metadata(self, metadata):
        self.bound = metadata

    def clear_connector_metadata(self):
        self.bound = None

    def get_transfer_results(self, ids):
        self.calls.append(("get_transfer_results", set(ids)))
        return KVConnectorTransferResults({"sent"}, set(), {"lost"})

    def get_block_ids_with_load_errors(self):
        return {4}

    def get_kv_connector_stats(self):
        return None

    def get_kv_connector_kv_cache_events(self):
        return None

    def build_connector_worker_meta(self):
        return None

    def __getattr__(self, name):
        def note(*args, **kwargs):
            self.calls.append((name, *args))

        return note


@pytest.mark.parametrize("eager", [True, False])
def test_a_connector_is_called_around_the_forward_and_around_layers(folder, eager):
    executor = start(make_config(folder, enforce_eager=eager))
    runner = executor.driver_worker.model_runner
    connector = Connector()
    runner.set_kv_connector(connector)
    (name, caches), connector.calls = connector.calls[0], []
    assert name == "register_kv_caches" and set(caches) == set(runner.kv_caches)
    blocks = runner.kv_cache_config.num_blocks
    assert all(cache.shape[0] == blocks for cache in caches.values())
    steps = Steps(executor)
    steps.add("a", [1, 2, 3])
    output = steps.step({"a": 3}, kv_connector_metadata="meta")
    names = [call[0] for call in connector.calls]
    layers = list(runner.kv_caches)
    assert names[0] == "start_load_kv"
    last = ["finish_forward", "wait_for_save", "get_transfer_results"]
    assert names[-3:] == last
    count = len(layers)
    if eager or runner.plan is None:  # layer by layer
        assert names[1:-3] == ["wait_for_layer_load", "save_kv_layer"] * count
    else:
        assert names[1 : 1 + count] == ["wait_for_layer_load"] * count
        assert names[1 + count : -3] == ["save_kv_layer"] * count
    calls = connector.calls[1:-3]
    waited = [call[1] for call in calls if call[0] == "wait_for_layer_load"]
    all_saved = [call for call in calls if call[0] == "save_kv_layer"]
    assert waited == [call[1] for call in all_saved] == layers
    saved = all_saved[0]
    assert saved[1] == layers[0] and saved[2] is runner.kv_caches[layers[0]]
    assert saved[3].num_actual_tokens == 3
    assert output.kv_connector_output.finished_sending == {"sent"}
    assert output.kv_connector_output.failed_recving == {"lost"}
    assert output.kv_connector_output.invalid_block_ids == {4}
    assert connector.bound is None
    idle = steps.executor.execute_model(steps.schedule({}, kv_connector_metadata="m"))
    assert idle.kv_connector_output.finished_sending == {"sent"} and idle.req_ids == []


@pytest.mark.parametrize(
    "cache_dtype", ["fp8", "int8_per_token_head", "turboquant_4bit_nc", "nvfp4"]
)
def test_packed_formats_give_the_same_tokens_on_a_hit_and_in_any_chunks(
    folder, cache_dtype
):
    executor = start(make_config(folder, cache_dtype))
    steps = Steps(executor)
    asked = prompts(10, (17, 33))
    for req_id, prompt in asked.items():
        steps.add(req_id, prompt)
    whole = {req_id: list(out) for req_id, out in steps.run(6).items()}
    for req_id in asked:
        steps.finish(req_id)
    for req_id, prompt in asked.items():
        steps.add(f"again-{req_id}", prompt)
    for req_id, output in steps.run(6, chunk=5).items():
        assert output == whole[req_id.removeprefix("again-")]
    executor.shutdown()


def test_windowed_and_global_layers_have_block_tables_of_their_own(tmp_path):
    reference = save_tiny_qwen(tmp_path)
    executor = start(make_config(tmp_path))
    runner = executor.driver_worker.model_runner
    assert len(runner.attn_groups) == len(runner.kv_cache_config.kv_cache_groups) > 1
    steps = Steps(executor)
    asked = prompts(11, (5, 30, 41))
    for req_id, prompt in asked.items():
        steps.add(req_id, prompt)
    for req_id, output in steps.run(8, chunk=13).items():
        assert output == greedy(reference, asked[req_id], 8)
