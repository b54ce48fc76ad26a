"""Per-row processor state follows additions, removals and moves of the batch."""

import random

import pytest
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import (
    BUILTIN_LOGITS_PROCESSORS,
    BatchUpdate,
    BatchUpdateBuilder,
    LogitBiasLogitsProcessor,
    LogitsProcessor,
    LogitsProcessors,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
    MoveDirectionality,
    StructuredOutputLogitsProcessor,
    build_logitsprocs,
    load_custom_logitsprocs,
)

CPU = torch.device("cpu")
VOCAB = 20


class Doubler(LogitsProcessor):
    """A plugin as users write it."""

    def __init__(self, vllm_config, device, is_pin_memory):
        self.updates = 0

    def apply(self, logits):
        return logits * 2

    def is_argmax_invariant(self):
        return True

    def update_state(self, batch_update):
        self.updates += batch_update is not None


def params(**changes):
    made = SamplingParams(**changes)
    made._all_stop_token_ids.add(19)
    return made


def naive_apply(rows, logits):
    """What the three built-in processors do together, row by row."""
    out = logits.clone()
    for row, (p, output) in rows.items():
        for token, value in (p.logit_bias or {}).items():
            out[row, token] += value
        if len(output) < p.min_tokens:
            out[row, list(p.all_stop_token_ids)] = -float("inf")
        if p.min_p > 0:
            probs = out[row].softmax(-1)
            out[row][probs < p.min_p * probs.max()] = -float("inf")
    return out


@pytest.mark.parametrize("seed", range(5))
def test_builtin_processors_follow_random_batch_changes(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    processors = [cls(None, CPU, False) for cls in BUILTIN_LOGITS_PROCESSORS]
    processors.sort(key=lambda p: isinstance(p, MinPLogitsProcessor))
    rows = {}
    for _ in range(60):
        builder = BatchUpdateBuilder()
        for row in [r for r in rows if rng.random() < 0.2]:
            builder.removed_append(row)
            del rows[row]
        for row in range(8):
            if rng.random() < 0.2:
                kinds = [{}, {"min_p": 0.4}, {"logit_bias": {3: 5.0, 7: -2.5}}]
                kinds.append({"min_tokens": rng.randrange(1, 4), "stop_token_ids": [2]})
                p, output = params(**rng.choice(kinds)), []
                rows[row] = (p, output)
                builder.added.append((row, p, [1], output))
        if rows and rng.random() < 0.5:
            source, target = rng.choice(list(rows)), rng.randrange(8)
            if source != target:
                if target in rows:
                    rows[source], rows[target] = rows[target], rows[source]
                    how = MoveDirectionality.SWAP
                else:
                    rows[target] = rows.pop(source)
                    how = MoveDirectionality.UNIDIRECTIONAL
                builder.moved.append((source, target, how))
        update = builder.get_and_reset(len(rows))
        logits = torch.randn(8, VOCAB)
        want = naive_apply(rows, logits)
        for processor in processors:
            processor.update_state(update)
            if processor.is_active():
                logits = processor.apply(logits)
        assert torch.equal(logits, want)
        for _, output in rows.values():
            output.append(0)


def test_processors_are_inactive_without_rows_that_need_them():
    for cls in BUILTIN_LOGITS_PROCESSORS:
        processor = cls(None, CPU, False)
        processor.update_state(BatchUpdate(1, [], [(0, params(), None, [])], []))
        assert not processor.is_active()
    assert not LogitsProcessors(
        [cls(None, CPU, False) for cls in BUILTIN_LOGITS_PROCESSORS]
    ).edits_greedy()


def test_min_tokens_end_without_a_batch_change():
    processor = MinTokensLogitsProcessor(None, CPU, False)
    output = []
    added = [(0, params(min_tokens=2), None, output)]
    processor.update_state(BatchUpdate(1, [], added, []))
    for step in range(4):
        assert processor.is_active() == (step < 2)
        output.append(5)
        processor.update_state(None)


def test_processors_are_sorted_by_whether_the_argmax_stays():
    processors = build_logitsprocs(None, CPU, False, custom_logitsprocs=[Doubler])
    kinds = {type(p) for p in processors.argmax_invariant}
    assert kinds == {MinPLogitsProcessor, Doubler}
    kinds = {type(p) for p in processors.non_argmax_invariant}
    assert kinds == {
        LogitBiasLogitsProcessor,
        MinTokensLogitsProcessor,
        StructuredOutputLogitsProcessor,
    }


@pytest.mark.parametrize("separator", [":", "."])
def test_plugins_load_by_name(separator):
    assert load_custom_logitsprocs([f"{__name__}{separator}Doubler"]) == [Doubler]


def test_a_plugin_that_is_no_processor_is_refused():
    with pytest.raises(ValueError, match="expected a subclass"):
        load_custom_logitsprocs([f"{__name__}:params"])


def test_removal_after_rows_were_reused_is_refused():
    builder = BatchUpdateBuilder()
    builder.removed_append(3)
    builder.removed_append(1)
    assert builder.peek_removed() == 1 and builder.pop_removed() == 1
    with pytest.raises(RuntimeError, match="row 2"):
        builder.removed_append(2)
    assert builder.get_and_reset(1).removed == [3]
    assert builder.get_and_reset(1) is None
