"""What a white-box harness asserts equals what its payloads alone give away."""

from collections import Counter

import numpy as np
import pytest
import torch
from support.harnesses import WHITE_BOX, make, play, random_policy
from support.models import STRIPPING_TEMPLATE, TEMPLATE, tiny_model, tiny_tokenizer

from harness_bridges.branches import branches, episode_tape, survivors
from harness_bridges.recover import DEFAULT_MIN_RUN, build_tape

LIMITS = {"max_turns": 18, "max_context": 2900, "max_new_tokens": 140}
SMALL = {"boundary_observation_tokens": 64, "boundary_write_tokens": 140}


FRAMING = 2 * DEFAULT_MIN_RUN
"""Which of two equal template tokens stayed cannot be told from payloads: so many may differ."""


def left_view(tape, edit):
    """Multisets of the tokens that the edit took from the view: what the policy said, the rest."""
    before = tape.positions(edit.turn - 1, output=True)
    gone = np.setdiff1d(before, tape.positions(edit.turn))
    said = tape.turn[gone] >= 0
    return Counter(tape.tokens[gone[said]].tolist()), Counter(tape.tokens[gone[~said]].tolist())


def assert_agree(e):
    asserted, recovered = episode_tape(e), build_tape(e.turns)
    for t in range(len(e.turns)):
        np.testing.assert_array_equal(asserted.tokens[asserted.positions(t)], e.turns[t].prompt_ids)
    assert [x.turn for x in asserted.edits] == [x.turn for x in recovered.edits]
    for mine, theirs in zip(asserted.edits, recovered.edits, strict=True):
        (said, shown), (said_too, shown_too) = (
            left_view(asserted, mine),
            left_view(recovered, theirs),
        )
        assert said == said_too, mine
        assert ((shown - shown_too) + (shown_too - shown)).total() <= FRAMING, mine
    a, b = survivors(e.turns, asserted), survivors(e.turns, recovered)
    assert list(zip(a.turn, a.offset, a.diverges, strict=True)) == list(
        zip(b.turn, b.offset, b.diverges, strict=True)
    )


@pytest.mark.parametrize("template", (TEMPLATE, STRIPPING_TEMPLATE))
@pytest.mark.parametrize("name", WHITE_BOX)
def test_scripted_policies(name, template):
    edits = 0
    for seed in range(4):
        harness = make(name, **SMALL)
        policy = random_policy(name, seed)
        e, _ = play(harness, policy, template=template, unique=True, **LIMITS)
        assert_agree(e)
        edits += len(e.edits)
    assert edits or name == "search_r1"


def sampled_thought(model, tokenizer, seed):
    """A thought sampled from a model at temperature 1, then a random action."""
    generator = torch.Generator().manual_seed(seed)

    def think(prompt):
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        with torch.no_grad():
            for _ in range(10):
                logits = model(torch.tensor([ids[-200:]])).logits[0, -1].softmax(-1)
                ids.append(int(torch.multinomial(logits, 1, generator=generator)))
        return tokenizer.decode(ids[-10:], skip_special_tokens=True)

    return think


@pytest.mark.parametrize("name", WHITE_BOX)
def test_sampled_policies(name):
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama", float64=False, vocab=len(tokenizer), layers=1)
    think = sampled_thought(model, tokenizer, 5)
    act = random_policy(name, 5)[0]

    def say(turn, prompt):
        return think(prompt) + act(turn, prompt)

    for _ in range(2):
        e, _ = play(make(name, **SMALL), [say], unique=True, **LIMITS)
        assert_agree(e)


def test_a_span_that_returns_to_the_end_is_told_by_the_bridge_alone():
    """Payloads cannot tell a retrieve to the end from an observation that repeats old text."""
    off = '<memory_offload>{"name": "p", "span": "1"}</memory_offload>'
    texts = ["<search>a</search>", off, '<memory_retrieve>{"name": "p"}</memory_retrieve>', "x"]
    e, _ = play(make("memexrl", memexrl_place="end"), texts, unique=True, max_turns=4)
    asserted, recovered = episode_tape(e), build_tape(e.turns)
    assert asserted.tokens.size < recovered.tokens.size
    assert len(branches(e.turns)) == 2
    assert [x.kind for x in e.edits] == ["offload", "retrieve"]
    assert left_view(asserted, e.edits[0]) == left_view(recovered, recovered.edits[0])
