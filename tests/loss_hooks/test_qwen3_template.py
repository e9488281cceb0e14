"""A template that drops earlier reasoning: the real Qwen3 one edits the context every turn."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.gradients import EXACT, assert_same_gradients, gradients, oracle_loss
from support.harnesses import World, make, play
from support.models import tiny_model
from support.oracle import turn_log_probs

from camp_plugin.local.host import LocalHost
from camp_plugin.probe import target_log_probs
from harness_bridges.branches import branches, episode_tape, survivors
from harness_bridges.recover import build_tape
from loss_hooks.method import find_method
from rollout_adapters.tokenizer import HFChat

DIRECTORY = Path(sys.prefix) / "qwen3"
pytestmark = pytest.mark.skipif(not DIRECTORY.is_dir(), reason="needs npm: `make test` fetches it")

THOUGHT = "<think>\nReason number {0}: {0}{0}{0}.\n</think>\n\n"
ACTION = "<search>query {0}</search>"
OPENING = (("system", "Search, then answer."), ("user", "Which sea?"))


@pytest.fixture(scope="module")
def chat():
    return HFChat.from_pretrained(DIRECTORY)


def think_and_act(turn, prompt):
    return (THOUGHT + ACTION).format(turn)


@pytest.fixture(scope="module")
def stripped(chat):
    """Four turns of reasoning and a search; nobody edits but the template."""
    return play(make("search_r1"), [think_and_act], world=World(opening=OPENING), chat=chat,
                max_turns=4)  # fmt: skip


@pytest.fixture(scope="module")
def folded(chat):
    """The same under a harness that folds, too."""
    harness = make("agentfold", agentfold_threshold=130, agentfold_summary_tokens=40)
    world = World(opening=OPENING)
    return play(harness, [think_and_act], world=world, chat=chat, max_turns=4)


def test_prompts_are_what_the_template_says(chat, stripped):
    _, prompts = stripped
    messages = [{"role": role, "content": text} for role, text in OPENING]
    for turn, prompt in enumerate(prompts):
        shown = chat.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert prompt == shown
        assert "<think>" not in prompt
        said = think_and_act(turn, prompt)
        messages.append({"role": "assistant", "content": said})
        after = prompts[turn + 1] if turn + 1 < len(prompts) else None
        if after is not None:
            seen = after.rsplit("<|im_start|>user\n", 1)[1].split("<|im_end|>")[0]
            messages.append({"role": "user", "content": seen})


def test_dropped_reasoning_is_an_edit_by_the_template(chat, stripped):
    e, _ = stripped
    tape = episode_tape(e)
    assert [(x.turn, x.kind, x.cause) for x in e.edits] == [
        (turn, "strip", "chat_template") for turn in (1, 2, 3)
    ]
    for edit in e.edits:
        gone = "".join(chat.decode(tape.tokens[a:b].tolist()) for a, b in edit.removed)
        assert gone == THOUGHT.format(edit.turn - 1)
    assert len(branches(e.turns)) == 4


def test_actions_survive_by_their_sampled_ids_and_diverge(chat, stripped):
    e, _ = stripped
    tape = episode_tape(e)
    left = survivors(e.turns, tape)
    for turn in range(3):
        mine = left.turn == turn
        ids = e.turns[turn].output_ids[left.offset[mine]].tolist()
        assert chat.decode(ids) == ACTION.format(turn)
        assert left.diverges[mine].all()
    assert not left.diverges[left.turn == 3].any()


def test_payloads_alone_tell_the_same(stripped):
    e, _ = stripped
    mine, found = episode_tape(e), build_tape(e.turns)
    assert [x.turn for x in mine.edits] == [x.turn for x in found.edits]
    a, b = survivors(e.turns, mine), survivors(e.turns, found)
    for name in ("turn", "offset", "diverges"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_folds_and_strips_are_told_apart(folded):
    e, _ = folded
    causes = [(x.kind, x.cause) for x in e.edits]
    assert ("fold", "length") in causes
    assert set(causes) <= {("fold", "length"), ("strip", "chat_template")}


def small_vocabulary(e):
    """The same episode on ids that a tiny model has: which ids they are decides nothing."""
    ids = np.unique(np.concatenate([t.sequence for t in e.turns]))
    turns = tuple(
        dataclasses.replace(
            t,
            prompt_ids=np.searchsorted(ids, t.prompt_ids),
            output_ids=np.searchsorted(ids, t.output_ids),
        )
        for t in e.turns
    )
    return dataclasses.replace(e, turns=turns), ids.size


@pytest.mark.parametrize("which", ("stripped", "folded"))
def test_both_exact_methods_train_them_exactly(which, request):
    e, size = small_vocabulary(request.getfixturevalue(which)[0])
    model = tiny_model("qwen3", vocab=size, layers=2)
    weights = {key: p.detach() for key, p in model.named_parameters()}
    expected = torch.cat([turn_log_probs(weights, model.config, t) for t in e.turns]).numpy()
    for method in EXACT:
        found, _ = target_log_probs(e, find_method(method), LocalHost(model), 1.0)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
    group = [
        dataclasses.replace(e, rollout_id=i, reward=float(i), turn_rewards=()) for i in range(2)
    ]
    expected_loss, expected_gradients = oracle_loss(model, group)
    for method in EXACT:
        model.zero_grad()
        loss, gradient, _ = gradients(model, method, group)
        assert abs(loss - expected_loss) <= 1e-9
        assert_same_gradients(gradient, expected_gradients, 1e-8)
