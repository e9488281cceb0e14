"""White-box harnesses on a deterministic engine: live edits, asserted and recovered records."""

import asyncio
import dataclasses
import hashlib

import numpy as np
import pytest
from support.models import STRIPPING_TEMPLATE, TEMPLATE, tiny_tokenizer

from harness_bridges.agentfold import AgentFold
from harness_bridges.branches import branches, episode_tape, survivors
from harness_bridges.chat import Message
from harness_bridges.conversation import Conversation
from harness_bridges.engine import Generation, RunIds, RunLimits, Step
from harness_bridges.errors import ConfigError
from harness_bridges.harness import find_harness, register_harness
from harness_bridges.recover import build_tape
from harness_bridges.search_r1 import SearchR1
from rollout_adapters.tokenizer import HFChat


class ScriptedEngine:
    """Says given texts in order; keeps every prompt that it was sent."""

    def __init__(self, chat, texts):
        self.chat, self.texts, self.prompts = chat, list(texts), []

    async def generate(self, prompt_ids, *, max_new_tokens, temperature, stop):
        self.prompts.append(prompt_ids.tolist())
        count = len(self.prompts)
        # Each response is a text of its own from its first token on: payloads cannot tell
        # equal text of two responses apart, a bridge can.
        unique = hashlib.sha256(str(count).encode()).hexdigest()[:24]
        text = self.texts[(count - 1) % len(self.texts)].replace("{}", unique)
        ids = np.array(self.chat.encode(text)[:max_new_tokens])
        log_probs = -np.linspace(0.1, 1.0, ids.size)
        return Generation(
            output_ids=ids, output_logprobs=log_probs, finish_reason="stop", weight_version="0"
        )


class Echo:
    """Answers each response with text of its own; ends after `steps`."""

    def __init__(self, steps):
        self.steps, self.count = steps, 0
        self.opening = (("system", "You search."), ("user", "Where is the answer?"))
        self.stop = ("</search>",)

    def step(self, response):
        self.count += 1
        if self.count == self.steps:
            return Step(observation="", done=True, reward=0.5)
        noise = hashlib.sha256(f"{self.count}{response}".encode()).hexdigest()
        return Step(observation=f"Result {self.count}: {noise}", done=False)

    def close(self):
        pass


RESPONSES = [
    "{} <search>one",
    "{} <think>hm</think>\n\n{} <search>two",
    "{}: three.<|im_end|>",
]


def run(harness, *, template=TEMPLATE, steps=7, responses=RESPONSES, **limits):
    chat = HFChat(tiny_tokenizer(template), frozenset({1}))
    engine = ScriptedEngine(chat, responses)
    bounds = RunLimits(**{"max_turns": 30, "max_new_tokens": 64, "max_context": 4096, **limits})
    ids = RunIds(rollout_id=0, group_id=0, session_id="s", task_id="t")
    conversation = Conversation(engine, chat, Echo(steps), bounds, ids)
    asyncio.run(harness.run(conversation))
    return conversation.episode(), engine, chat


def fold_harness(**config):
    settings = {"agentfold_threshold": 400, "agentfold_summary_tokens": 40, **config}
    return AgentFold(AgentFold.Config(**settings))


def test_search_r1_never_edits():
    e, engine, _ = run(SearchR1(SearchR1.Config()))
    assert e.edits == () and len(branches(e.turns)) == 1
    assert [t.prompt_ids.tolist() for t in e.turns] == engine.prompts
    assert e.reward == 0.5 and e.turn_rewards[-1] == 0.5 and e.status == "completed"


def test_agentfold_folds_past_the_threshold_and_the_summary_is_sampled():
    e, engine, chat = run(fold_harness())
    assert [t.prompt_ids.tolist() for t in e.turns] == engine.prompts
    folds = [edit for edit in e.edits if edit.kind == "fold"]
    assert folds and all(edit.cause == "length" for edit in folds)
    for edit in folds:
        summary = e.turns[edit.turn - 1]
        shown = chat.decode(e.turns[edit.turn].prompt_ids.tolist())
        text = chat.decode(summary.output_ids.tolist()).removesuffix("<|im_end|>")
        assert f"Summary of the earlier steps:\n{text}<|im_end|>" in shown
        assert e.turns[edit.turn].prompt_ids.size < summary.prompt_ids.size


def test_the_folded_prefix_leaves_and_the_summary_survives():
    e, _, _ = run(fold_harness())
    tape = episode_tape(e)
    fold = e.edits[-1]
    gone = {p for a, b in fold.removed for p in range(a, b)}
    kept = set(tape.positions(fold.turn).tolist())
    start, stop = tape.outputs[fold.turn - 1]
    assert set(range(start, stop)) <= kept, "the summary stays, in another place"
    assert gone - kept, "older text is gone"
    left = survivors(e.turns, tape)
    summary = left.turn == fold.turn - 1
    assert summary.sum() == stop - start and left.diverges[summary].all()


@pytest.mark.parametrize("keep", (0, 1, 2))
@pytest.mark.parametrize("template", (TEMPLATE, STRIPPING_TEMPLATE))
def test_asserted_and_recovered_edits_agree(keep, template):
    e, _, _ = run(fold_harness(agentfold_keep=keep), template=template, steps=9)
    asserted, recovered = episode_tape(e), build_tape(e.turns)
    assert any(edit.kind == "fold" for edit in asserted.edits)
    assert [x.turn for x in asserted.edits] == [x.turn for x in recovered.edits]
    for mine, theirs in zip(asserted.edits, recovered.edits, strict=True):
        # Which of two equal template tokens stayed is not decidable from payloads: compare what
        # was taken and put as token multisets, which is the same for every such choice.
        assert left_view(asserted, mine) == left_view(recovered, theirs)
    a, b = survivors(e.turns, asserted), survivors(e.turns, recovered)
    assert a.turn.tolist() == b.turn.tolist() and a.offset.tolist() == b.offset.tolist()
    assert a.diverges.tolist() == b.diverges.tolist()


def left_view(tape, edit):
    before = tape.positions(edit.turn - 1, output=True)
    gone = np.setdiff1d(before, tape.positions(edit.turn))
    return sorted(tape.tokens[gone].tolist())


def test_a_template_that_drops_old_reasoning_is_recorded_as_strip():
    e, _, _ = run(SearchR1(SearchR1.Config()), template=STRIPPING_TEMPLATE)
    assert e.edits and {(x.kind, x.cause) for x in e.edits} == {("strip", "chat_template")}
    assert len(branches(e.turns)) == len(e.edits) + 1


def test_sampled_ids_are_spliced_never_tokenised_again():
    """Case 06: [10, 11] both read "ab" = id 12 when re-encoded; the record keeps [10, 11]."""

    class Drifting(ScriptedEngine):
        async def generate(self, prompt_ids, **kwargs):
            self.prompts.append(prompt_ids.tolist())
            ids = np.array([self.chat.encode(c)[0] for c in "answer"])  # not the BPE's own split
            return Generation(
                output_ids=ids,
                output_logprobs=np.full(ids.size, -0.5),
                finish_reason="stop",
                weight_version="0",
            )

    chat = HFChat(tiny_tokenizer(), frozenset({1}))
    split = [chat.encode(c)[0] for c in "answer"]
    assert chat.encode("answer") != split
    ids = RunIds(rollout_id=0, group_id=0, session_id="s", task_id="t")
    engine = Drifting(chat, [])
    conversation = Conversation(engine, chat, Echo(3), RunLimits(), ids)
    asyncio.run(SearchR1(SearchR1.Config()).run(conversation))
    e = conversation.episode()
    assert e.edits == ()
    joined = "".join(f",{i}" for i in e.turns[2].prompt_ids)
    assert joined.count("".join(f",{i}" for i in split)) == 2


def test_a_text_that_is_shown_twice_keeps_its_first_identity():
    class Quoting(SearchR1):
        """Repeats the first response after each observation."""

        async def run(self, conversation):
            while await conversation.act():
                first = conversation.messages[2].parts[0]
                conversation.messages.append(Message("user", ("You said: ", first)))

    e, _, _ = run(Quoting(Quoting.Config()), steps=5)
    assert e.edits == () and len(branches(e.turns)) == 1
    left = survivors(e.turns, episode_tape(e))
    assert left.turn.size == e.num_sampled, "no token of the first response is lost"
    assert not left.diverges.any()


def test_marks_in_a_text_splice_nothing_and_break_nothing():
    e, engine, _ = run(SearchR1(SearchR1.Config()), responses=["a \U000f0000 b", "c"], steps=4)
    assert [t.prompt_ids.tolist() for t in e.turns] == engine.prompts


def test_an_aborted_call_ends_the_episode_as_aborted():
    class Dying(ScriptedEngine):
        async def generate(self, prompt_ids, **kwargs):
            found = await super().generate(prompt_ids, **kwargs)
            return dataclasses.replace(found, finish_reason="abort")

    chat = HFChat(tiny_tokenizer(), frozenset({1}))
    ids = RunIds(rollout_id=0, group_id=0, session_id="s", task_id="t")
    conversation = Conversation(Dying(chat, RESPONSES), chat, Echo(5), RunLimits(), ids)
    asyncio.run(fold_harness().run(conversation))
    e = conversation.episode()
    assert e.status == "aborted" and len(e.turns) == 1


def test_a_context_that_cannot_work_is_refused_before_any_call():
    with pytest.raises(ConfigError, match=r"agentfold_threshold .* must be below the context"):
        run(fold_harness(agentfold_threshold=4090))
    with pytest.raises(
        ConfigError, match=r"the opening prompt has .* raise rollout_max_context_len"
    ):
        run(SearchR1(SearchR1.Config()), max_context=20)


def test_budgets_end_the_episode_as_truncated():
    turns, _, _ = run(SearchR1(SearchR1.Config()), steps=99, max_turns=3)
    assert turns.status == "truncated" and len(turns.turns) == 3
    context, _, _ = run(SearchR1(SearchR1.Config()), steps=99, max_context=300)
    assert context.status == "truncated"
    assert max(t.sequence.size for t in context.turns) <= 300


@pytest.mark.parametrize(
    ("config", "message"),
    [({"agentfold_threshold": 0}, "agentfold_threshold=0"), ({"agentfold_keep": -1}, "=-1")],
)
def test_bad_settings(config, message):
    with pytest.raises(ConfigError, match=message):
        fold_harness(**config)


def test_registry():
    assert find_harness("agentfold") is AgentFold
    with pytest.raises(ConfigError, match="did you mean 'agentfold'"):
        find_harness("agent_fold")
    with pytest.raises(ConfigError, match="already registered"):
        register_harness("agentfold")(SearchR1)
