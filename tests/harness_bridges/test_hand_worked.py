"""One small episode per harness, every view typed by hand from the papers' descriptions.

The template shows a message as `[role] text`, so that a whole prompt can be written down.
"""

import re

import pytest
from support.harnesses import World, make, play

from harness_bridges import boundary, compaction, file_memory, memexrl, memory_tools, tc_rag
from harness_bridges.agentfold import EMPTY, HEADING, INSTRUCTION, LONGER
from harness_bridges.branches import episode_tape, survivors
from harness_bridges.errors import ConfigError

VIEW = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "


def view(*lines):
    return "\n".join([*lines, "[assistant] "])


def kinds(episode):
    return [(edit.turn, edit.kind, edit.cause) for edit in episode.edits]


def turns_that_diverge(episode):
    found = survivors(episode.turns, episode_tape(episode))
    return sorted(set(found.turn[found.diverges].tolist()))


def test_weather():
    """002, App. A: o1 is popped past the budget; S was written before, T after."""
    weather = "weather: " + "rain likely tomorrow afternoon " * 6

    def world():
        return World(["w: Shanghai", weather, "metro line 2 runs"], (("user", "umbrella?"),))

    texts = [
        "<search>where</search>",
        "<search>get_weather</search>",
        "S: rain is likely, bring one <search>get_transit</search>",
        "T: take line 2 <answer>umbrella, line 2</answer>",
    ]
    usage = tc_rag.USAGE.format(which="largest")
    opening = f"[user] umbrella?\n\n{usage}"
    # Past the budget as soon as the transit envelope has come, not before.
    free, _ = play(make("tc_rag", tc_rag_pop="largest", tc_rag_budget=None), texts,
                   world=world(), template=VIEW)  # fmt: skip
    harness = make("tc_rag", tc_rag_pop="largest", tc_rag_budget=free.turns[2].prompt_ids.size)
    e, prompts = play(harness, texts, world=world(), template=VIEW)
    first = view(
        opening, "[assistant] <search>where</search>", "[user] w: Shanghai",
        "[assistant] <search>get_weather</search>", f"[user] {weather.strip()}",
    )  # fmt: skip
    assert prompts[2].split() == first.split(), "S is written while o1 is in view"
    assert prompts[3] == view(
        opening, "[assistant] <search>where</search>", "[user] w: Shanghai",
        "[assistant] <search>get_weather</search>",
        f"[assistant] {texts[2]}", "[user] metro line 2 runs",
    )  # fmt: skip
    assert kinds(e) == [(3, "pop", "length")]
    assert turns_that_diverge(e) == [2], "S lost the forecast; T never had it"


def test_tc_rag_pops_the_oldest_envelope_whole():
    """002, Fig. 3(d): pop is the policy's own call and leaves no summary."""
    texts = [
        "<search>a</search>", "<search>b</search>", "<pop></pop>", "<pop></pop>",
        "<pop></pop>", "<answer>x</answer>",
    ]  # fmt: skip
    e, prompts = play(make("tc_rag", tc_rag_budget=None), texts, world=World(["o1", "o2"]),
                      template=VIEW)  # fmt: skip
    head = [f"[system] S\n\n{tc_rag.USAGE.format(which='oldest')}", "[user] Q"]
    a, b, pop = (f"[assistant] {text}" for text in texts[:3])
    gone = "[user] The oldest result was removed."
    assert prompts[2] == view(*head, a, "[user] o1", b, "[user] o2")
    assert prompts[3] == view(*head, a, b, "[user] o2", pop, gone)
    assert prompts[4] == view(*head, a, b, pop, gone, pop, gone)
    assert prompts[5].endswith(f"{pop}\n[user] There is no result to remove.\n[assistant] ")
    assert kinds(e) == [(3, "pop", "policy"), (4, "pop", "policy")]
    assert [c["turn"] for c in e.metadata["tool_calls"]] == [2, 3, 4]


def test_agentfold_folds_a_fold():
    """002, Fig. 3(e): the foldable prefix becomes the sampled summary, more than once."""
    long = "x" * 150
    texts = [
        "<search>a</search>", "<search>b</search>", "sum one", "<search>c</search>", "sum two",
        "<answer>z</answer>",
    ]  # fmt: skip
    harness = make("agentfold", agentfold_threshold=340)
    e, prompts = play(harness, texts, world=World([f"1{long}", f"2{long}", f"3{long}"]),
                      template=VIEW)  # fmt: skip
    head = ["[system] S", "[user] Q"]
    a, b, c = (f"[assistant] <search>{x}</search>" for x in "abc")
    o1, o2, o3 = (f"[user] {i}{long}" for i in "123")
    one, two = (["[system] S", f"[user] Q\n\n{HEADING}sum {n}"] for n in ("one", "two"))
    assert prompts[2] == view(*head, a, o1, b, f"{o2}\n\n{INSTRUCTION}")
    assert prompts[3] == view(*one, b, o2)
    assert prompts[4] == view(*one, b, o2, c, f"{o3}\n\n{INSTRUCTION}")
    assert prompts[5] == view(*two, c, o3)
    assert kinds(e) == [(3, "fold", "length"), (5, "fold", "length")]
    assert len(e.turns) == 6 and e.metadata["ended"] == "environment"


@pytest.mark.parametrize(("summary", "problem"), [("", EMPTY), (" ", EMPTY), ("y" * 400, LONGER)])
def test_a_useless_summary_costs_a_turn_and_changes_nothing(summary, problem):
    long = "x" * 150
    texts = [
        "<search>a</search>", "<search>b</search>", summary, "<search>c</search>", "fine",
        "<answer>z</answer>",
    ]  # fmt: skip
    harness = make("agentfold", agentfold_threshold=340, agentfold_summary_tokens=400)
    world = World([f"1{long}", f"2{long}", f"3{long}"])
    e, prompts = play(harness, texts, world=world, template=VIEW, max_turns=5, max_new_tokens=500)
    head = ["[system] S", "[user] Q"]
    a, b = (f"[assistant] <search>{x}</search>" for x in "ab")
    assert prompts[3] == view(*head, a, f"[user] 1{long}", b, f"[user] 2{long}")
    assert f"\n\n{problem} {INSTRUCTION}" in prompts[4], "the next request says why"
    assert kinds(e) == [(3, "strip", "harness"), (5, "fold", "length")]
    short, _ = play(harness, texts, world=World([f"1{long}", f"2{long}", f"3{long}"]),
                    template=VIEW, max_turns=3)  # fmt: skip
    assert short.metadata["ended"] == "turns" and len(short.turns) == 3


@pytest.mark.parametrize("place", ("old", "end"))
def test_memexrl_spans_leave_and_come_back(place):
    """002, Fig. 3(f): offload leaves a stub, retrieve re-injects, the rest returns at the end."""
    off = '<memory_offload>{"name": "p", "span": "1"}</memory_offload>'
    back = '<memory_retrieve>{"name": "p"}</memory_retrieve>'
    texts = [
        "<search>a</search>", "<search>b</search>", off, back, off,
        "<answer>early</answer>", "<answer>z</answer>",
    ]  # fmt: skip
    obs = ["first result, long enough to be found", "second result"]
    e, prompts = play(make("memexrl", memexrl_place=place), texts, world=World(obs), template=VIEW)
    head = [f"[system] S\n\n{memexrl.USAGE}", "[user] Q"]
    a, b = "[assistant] <search>a</search>", "[assistant] <search>b</search>"
    o1, o2 = f"[user] [1] {obs[0]}", f"[user] [2] {obs[1]}"
    stub, stored = "[user] [results 1 were stored as 'p']", f"[user] {memexrl.STORED}"
    offload, retrieve = f"[assistant] {off}", f"[assistant] {back}"
    early = "[assistant] <answer>early</answer>"
    assert prompts[2] == view(*head, a, o1, b, o2)
    assert prompts[3] == view(*head, a, stub, b, o2, offload, stored)
    if place == "old":
        told = f"[user] {memexrl.RESTORED}"
        assert prompts[4] == view(*head, a, o1, b, o2, offload, stored, retrieve, told)
        tail = [b, o2, offload, stored, retrieve, told, offload, stored]
        assert prompts[5] == view(*head, a, stub, *tail)
        assert prompts[6] == view(*head, a, o1, *tail, early, f"[user] {memexrl.ALL_BACK}")
    else:
        tail = [stub, b, o2, offload, stored, retrieve]
        assert prompts[4] == view(*head, a, *tail, o1)
        assert prompts[5] == view(*head, a, *tail, stub, offload, stored)
        assert prompts[6] == view(
            *head, a, *tail, stub, offload, stored, early, f"{o1}\n\n{memexrl.ALL_BACK}"
        )
    assert kinds(e) == [
        (3, "offload", "policy"), (4, "retrieve", "policy"),
        (5, "offload", "policy"), (6, "retrieve", "harness"),
    ]  # fmt: skip
    tape = episode_tape(e)
    lengths = [tape.positions(t).size for t in range(len(e.turns))]
    assert lengths == [t.prompt_ids.size for t in e.turns], "each view replays from the record"
    inserted = [s for edit in e.edits for _, s in edit.inserted if s[0] < edit.position]
    assert inserted, "old positions are live again"


def test_memexrl_answers_wrong_calls():
    texts = [
        "<search>a</search>",
        "<memory_offload>no json</memory_offload>",
        '<memory_offload>{"name": "p", "span": "7"}</memory_offload>',
        '<memory_offload>{"name": "p", "span": "1"}</memory_offload>',
        '<memory_offload>{"name": "p", "span": "1"}</memory_offload>',
        '<memory_retrieve>{"name": "q"}</memory_retrieve>',
        "<answer>z</answer>",
        "<answer>z</answer>",
    ]
    e, prompts = play(make("memexrl"), texts, world=World(["o1"]), template=VIEW)
    said = [prompt.rpartition("[user] ")[2] for prompt in prompts]
    assert 'expected JSON with a "name"' in said[2]
    assert "span='7'" in said[3] and "You see: 1." in said[3]
    assert "The name 'p' is taken" in said[5]
    assert "'q' is not in the store. Stored: 'p'." in said[6]
    assert e.reward == 1.0


def test_memexrl_restores_before_the_last_turn():
    texts = [
        "<search>a</search>", '<memory_offload>{"name": "p", "span": "1"}</memory_offload>',
        "<search>b</search>", "<answer>z</answer>",
    ]  # fmt: skip
    e, prompts = play(make("memexrl"), texts, world=World(["o1", "o2"]), template=VIEW, max_turns=4)
    assert "[1] o1" not in prompts[2] and "[1] o1" in prompts[3] and e.reward == 1.0
    assert kinds(e) == [(2, "offload", "policy"), (3, "retrieve", "harness")]


BIG = "x" * 700


def bounded(name, texts, *observations, **settings):
    """An episode whose boundary is due after the first big observation."""
    budgets = {"max_new_tokens": 900, "max_turns": settings.pop("max_turns", 12)}
    settings = {"boundary_observation_tokens": 50, "boundary_write_tokens": 150, **settings}
    harness = make(name, **settings)
    with pytest.raises(ConfigError) as refused:
        play(harness, ["x"], template=VIEW, max_context=200, **budgets)
    budgets["max_context"] = int(re.search(r"need at least (\d+)", str(refused.value))[1]) + 100
    return play(harness, texts, world=World(observations), template=VIEW, **budgets)


def write(text):
    return f"<bash>mkdir -p .agent_memory; printf '{text}' > {file_memory.PATH}</bash>"


def test_file_memory():
    """000, App. A.2: an invalid write leaves the boundary pending, a valid one replaces."""
    texts = [
        "<search>a</search>",
        "<search>native</search>",
        "<bash>exit 3</bash>",
        write("found a"),
        f"<bash>cat {file_memory.PATH}</bash>",
        "<answer>z</answer>",
    ]
    e, prompts = bounded("file_memory", texts, BIG)
    head = [f"[system] S\n\n{file_memory.USAGE}"]
    request = file_memory.REQUEST
    a, native, failed = (f"[assistant] {text}" for text in texts[:3])
    assert prompts[1] == view(*head, "[user] Q", a, f"[user] {BIG}\n\n{request}")
    problem = f"[user] There is no complete <bash>command</bash> in your reply.\n\n{request}"
    assert prompts[2] == view(*head, "[user] Q", a, f"[user] {BIG}\n\n{request}", native, problem)
    assert prompts[3] == view(
        *head, "[user] Q", a, f"[user] {BIG}\n\n{request}", native, problem,
        failed, f"[user] [exit code 3]\n\n\n{request}",
    )  # fmt: skip
    fresh = [*head, f"[user] Q\n\n{file_memory.NEUTRAL}"]
    assert prompts[4] == view(*fresh), "the contents are not injected"
    assert prompts[5] == view(*fresh, f"[assistant] {texts[4]}", "[user] [exit code 0]\nfound a")
    assert kinds(e) == [(4, "replace", "length")] and e.reward == 1.0


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("true", "does not exist"),
        (f"mkdir -p {file_memory.PATH}", "is a directory; it must be a regular file"),
        (f"mkdir -p .agent_memory; ln -s /etc/passwd {file_memory.PATH}", "is a symbolic link"),
        (f"mkdir -p .agent_memory; mkfifo {file_memory.PATH}", "is a special file"),
        (f"mkdir -p .agent_memory; touch {file_memory.PATH}", "is empty"),
        (
            f"mkdir -p .agent_memory; head -c 8193 /dev/zero > {file_memory.PATH}",
            "has more than 8192 bytes",
        ),
    ],
)
def test_file_memory_refuses_what_is_no_continuation(command, problem):
    texts = ["<search>a</search>", f"<bash>{command}</bash>", f"<bash>rm -rf .a*; {command}</bash>"]
    e, prompts = bounded("file_memory", [*texts, "<answer>z</answer>"], BIG, max_turns=4)
    assert problem in prompts[2] and problem in prompts[3] and e.edits == ()
    assert e.metadata["ended"] == "turns"


def test_file_memory_wants_a_change():
    texts = [
        "<search>a</search>", write("one"), "<search>b</search>", write("one"),
        "<bash>true</bash>", write("two"), "<answer>z</answer>",
    ]  # fmt: skip
    e, prompts = bounded("file_memory", texts, BIG, "y" * 700)
    assert "says the same as at the last boundary" in prompts[4]
    assert "did not write" in prompts[5]
    assert kinds(e) == [(2, "replace", "length"), (6, "replace", "length")]


def test_without_the_required_write_the_context_is_replaced_either_way():
    """000, D.4."""
    texts = ["<search>a</search>", "<bash>false</bash>", "<answer>z</answer>"]
    e, prompts = bounded("file_memory", texts, BIG, boundary_require_write=False)
    assert prompts[2] == view(
        f"[system] S\n\n{file_memory.USAGE}", f"[user] Q\n\n{file_memory.NEUTRAL}"
    )
    assert e.reward == 1.0


def test_memory_tools():
    add, update = (
        f'<{tool}>{{"key": "continuation", "text": "t"}}</{tool}>'
        for tool in (memory_tools.ADD, memory_tools.UPDATE)
    )
    read = '<memory_read>{"key": "continuation"}</memory_read>'
    texts = ["<search>a</search>", update, add, read, "<answer>z</answer>"]
    e, prompts = bounded("memory_tools", texts, BIG)
    request = memory_tools.REQUEST
    assert prompts[1].endswith(f"{BIG}\n\n{request}\n[assistant] ")
    assert f"There is no key 'continuation'. Keys: none.\n\n{request}" in prompts[2]
    fresh = [f"[system] S\n\n{memory_tools.USAGE}", f"[user] Q\n\n{memory_tools.NEUTRAL}"]
    assert prompts[3] == view(*fresh)
    assert prompts[4] == view(*fresh, f"[assistant] {read}", "[user] t")
    assert kinds(e) == [(3, "replace", "length")]


def test_compaction():
    texts = ["<search>a</search>", "", "we know a", "<answer>z</answer>"]
    e, prompts = bounded("compaction", texts, BIG)
    request = compaction.REQUEST
    assert prompts[1].endswith(f"{BIG}\n\n{request}\n[assistant] ")
    assert f"Your summary is empty.\n\n{request}" in prompts[2]
    assert prompts[3] == view("[system] S", f"[user] Q\n\n{compaction.HEADING}we know a")
    assert kinds(e) == [(3, "compact", "length")]
    assert turns_that_diverge(e) == [2], "the summary stays, in another place"


def test_an_observation_over_the_ceiling_ends_the_episode_with_its_rewards():
    """000, C.2: the invalid prompt is not served."""
    e, prompts = bounded("compaction", ["<search>a</search>"], "x" * 3000)
    assert e.metadata["ended"] == "context" and e.status == "truncated" and len(prompts) == 1


def test_a_context_without_room_for_a_boundary_is_refused():
    with pytest.raises(ConfigError, match=r"rollout_max_context_len=300: .* raise it, or lower"):
        play(make("compaction"), ["x"], max_context=300)
    with pytest.raises(ConfigError, match="boundary_write_tokens=0: must be at least 1"):
        boundary.BoundaryConfig(boundary_write_tokens=0)
