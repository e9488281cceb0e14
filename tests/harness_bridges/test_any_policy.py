"""Whatever a policy says, and whatever its template asks for, an episode ends in a record."""

import pytest
from support.harnesses import WHITE_BOX, make, play, random_policy

from harness_bridges.errors import ConfigError
from harness_bridges.recover import build_tape
from harness_bridges.tools import Call, find_call
from loss_hooks.rows import walk_targets

STRICT = (
    "{% for m in messages %}{% if not loop.first and m.role == loop.previtem.role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}] {{ m.content }}\n"
    "{% endfor %}[assistant] "
)


@pytest.mark.parametrize("name", [n for n in WHITE_BOX if n != "tc_rag"])
def test_roles_alternate(name):
    """Templates of many models refuse two messages of one role in a row."""
    harness = make(name, agentfold_threshold=300, agentfold_keep=0)
    e, _ = play(harness, random_policy(name, 3), template=STRICT, max_turns=12)
    assert len(e.turns) > 3


def test_a_template_that_refuses_the_messages_is_named():
    texts = ["<search>a</search>", "<pop></pop>", "x"]
    with pytest.raises(ConfigError, match=r"system, user, assistant, assistant, user.*alternate"):
        play(make("tc_rag", tc_rag_budget=None), texts, template=STRICT)


def test_a_response_that_is_only_the_end_of_turn_token_stays_what_it_is():
    """No edit, and a target like every other."""
    texts = ["<search>a</search>", "<|im_end|>", "<search>b</search>", "<answer>z</answer>"]
    e, _ = play(make("search_r1"), texts)
    assert e.turns[1].output_ids.tolist() == [1]
    assert e.edits == () and build_tape(e.turns).edits == ()
    assert walk_targets(e).turn.size == e.num_sampled


@pytest.mark.parametrize(
    "call",
    (
        "[" * 3000,
        '{"key": "k", "text": "\\ud800"}',
        '{"key": "\\ud83d x", "text": "v"}',
        '{"name": "a", "span": "' + "9" * 5000 + '"}',
        '{"name": "a", "span": "²"}',
        '{"name": "\\ud800", "span": "1"}',
        "1e999",
    ),
)
@pytest.mark.parametrize("name", ("memexrl", "memory_tools"))
def test_no_call_ends_the_run(name, call):
    tools = {"memexrl": ("memory_offload", "memory_retrieve"),
             "memory_tools": ("memory_add", "memory_read", "memory_list")}[name]  # fmt: skip
    texts = ["<search>a</search>", *(f"<{tool}>{call}</{tool}>" for tool in tools)]
    e, _ = play(make(name), texts, max_turns=8, max_new_tokens=9000, max_context=90000)
    assert len(e.turns) == 8 and e.edits == ()


def test_calls_are_found_in_linear_time_and_as_before():
    tools = ("pop", "bash")
    text = "<bash>" * 100_000 + "<pop>x"
    assert find_call(text, tools) is None
    assert find_call(f"{text}</pop>", tools) == Call("pop", "x")
    assert find_call("<pop><bash>a</pop></bash>", tools) == Call("pop", "<bash>a")
    assert find_call("</pop><bash>a</bash><pop></pop>", tools) == Call("bash", "a")
    assert find_call("<pop></bash>", tools) is None
