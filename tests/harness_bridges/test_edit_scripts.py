"""Random edit scripts against the brute-force interpreter."""

import itertools

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support import interpreter
from support.episodes import episode

from harness_bridges.branches import branches, survivors
from harness_bridges.recover import build_tape
from loss_hooks.method import find_method
from loss_hooks.prefix_tree import build_tree

index = st.integers(0, 40)
actions = st.one_of(
    st.tuples(st.just("observe"), st.integers(1, 6)),
    st.tuples(st.just("call"), st.integers(0, 4)),
    st.tuples(st.just("call"), st.integers(1, 4)),
    st.tuples(st.just("evict"), index, index),
    st.tuples(st.just("replace"), index, index, st.integers(1, 3)),
    st.tuples(st.just("move"), index, index, index),
    st.tuples(st.just("retrieve"), index, index),
)
scripts = st.lists(actions, min_size=2, max_size=24)
many = settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))


def play(script, fresh):
    run = interpreter.run_script([("observe", 5), *script, ("call", 2)], fresh)
    return run, episode(run.turns)


@many
@given(scripts)
def test_unique_tokens_recover_identity_exactly(script):
    counter = itertools.count(1)
    run, e = play(script, lambda: next(counter))
    tape = build_tape(e.turns, min_run=1)
    born = list(dict.fromkeys(b for prompt, output in run.births for b in prompt + output))
    assert tape.tokens.size == len(born), "every token once, in order of appearance"
    for turn, (prompt, _) in enumerate(run.births):
        assert [born[i] for i in tape.positions(turn)] == prompt
    left = survivors(e.turns, tape)
    owners = zip(left.turn.tolist(), left.offset.tolist(), strict=True)
    found = dict(zip(owners, left.position.tolist(), strict=True))
    assert found == interpreter.survivors(run)
    diverging = {key for key, d in zip(found, left.diverges, strict=True) if d}
    assert diverging == interpreter.leaves(run)


@many
@given(scripts)
def test_recovered_edits_replay_and_name_exactly_what_left(script):
    counter = itertools.count(1)
    run, e = play(script, lambda: next(counter))
    tape = build_tape(e.turns, min_run=1)
    born = list(dict.fromkeys(b for prompt, output in run.births for b in prompt + output))
    replayed = build_tape(e.turns, tape.edits)
    assert replayed.tokens.tolist() == tape.tokens.tolist()
    for a, b in zip(replayed.views, tape.views, strict=True):
        assert a.tolist() == b.tolist()
    left = {}
    for edit in tape.edits:
        gone = {born[i] for a, b in edit.removed for i in range(a, b)}
        put = {born[i] for _, (a, b) in edit.inserted for i in range(a, b)}
        left[edit.turn] = gone - put
    for turn in range(1, len(run.births)):
        before = {birth for part in run.births[turn - 1] for birth in part}
        assert left.get(turn, set()) == before - set(run.births[turn][0])
    asserted = episode(run.turns, edits=tape.edits)
    assert asserted.edits == tape.edits


@many
@given(scripts, st.integers(1, 4), st.integers(1, 3))
def test_repeated_tokens_stay_consistent(script, values, min_run):
    state = itertools.count()
    run, e = play(script, lambda: next(state) * 7919 % values)
    tape = build_tape(e.turns, min_run=min_run)
    for turn, (prompt, output) in enumerate(run.turns):
        positions = tape.positions(turn, output=True)
        assert tape.tokens[positions].tolist() == prompt + output
        assert np.unique(positions).size == positions.size, "a view holds a tape token once"
    assert int((tape.turn >= 0).sum()) == e.num_sampled
    build_tape(e.turns, tape.edits)


@many
@given(scripts, st.integers(1, 5))
def test_branches_and_trie(script, values):
    state = itertools.count()
    run, e = play(script, lambda: next(state) * 7919 % values)
    legs = branches(e.turns)
    assert [t for leg in legs for t in range(leg.first, leg.last + 1)] == list(range(len(e.turns)))
    tree, _ = build_tree([e.turns[leg.last].sequence for leg in legs])
    assert tree.tokens.size == len(interpreter.distinct_prefixes(run))
    for name in ("logit_tree", "packed_mask", "naive_full"):
        rows = find_method(name).rows(e)
        assert sum(int(row.loss_mask.sum()) for row in rows) == e.num_sampled, name


@many
@given(scripts)
def test_default_min_run_never_breaks_a_record(script):
    counter = itertools.count(1)
    run, e = play(script, lambda: next(counter) % 11)
    assume(len(run.turns) > 1)
    tape = build_tape(e.turns)
    build_tape(e.turns, tape.edits)
