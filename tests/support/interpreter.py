"""A brute-force interpreter of edit scripts: plain lists of (token, birth number), no algebra.

A script is a list of actions on a live view; `("call", n)` samples n tokens from it. Every token
gets a birth number when it first appears, so identity is never a matter of its value.
"""

import itertools
from dataclasses import dataclass, field


@dataclass
class Run:
    """What happened, in the most literal form."""

    turns: list = field(default_factory=list)  # (prompt tokens, output tokens)
    births: list = field(default_factory=list)  # per turn, births of prompt and of output
    sampled_by: dict = field(default_factory=dict)  # birth -> (turn, offset)
    edited: list = field(default_factory=list)  # per turn, whether an edit came before it


def run_script(script, fresh):
    """Play a script; `fresh()` gives the next token value."""
    run, view, graveyard, births, edited = Run(), [], [], 0, False

    def new(count):
        nonlocal births
        made = [(fresh(), births + i) for i in range(count)]
        births += count
        return made

    for action in script:
        name, args = action[0], action[1:]
        if name == "observe":
            view += new(args[0])
        elif name == "call" and view:
            out = new(args[0])
            for offset, (_, birth) in enumerate(out):
                run.sampled_by[birth] = (len(run.turns), offset)
            run.turns.append(([t for t, _ in view], [t for t, _ in out]))
            run.births.append(([b for _, b in view], [b for _, b in out]))
            run.edited.append(edited)
            edited = False
            view = view + out
        elif name == "evict" and len(view) > 1:  # pop, offload, strip
            start, stop = sorted(a % len(view) for a in args)
            graveyard += view[start:stop]
            edited = edited or stop > start
            view = view[:start] + view[stop:]
            if not view:
                view = new(1)
        elif name == "replace" and len(view) > 1:  # a stub in place of a span
            start, stop = sorted(a % len(view) for a in args[:2])
            graveyard += view[start:stop]
            edited = True
            view = view[:start] + new(args[2]) + view[stop:]
        elif name == "move" and len(view) > 2:  # a fold puts a summary in front of older text
            start, stop, to = sorted(a % len(view) for a in args)
            span = view[stop:to]
            edited = edited or bool(span and stop > start)
            view = view[:start] + span + view[start:stop] + view[to:]
        elif name == "retrieve" and graveyard:  # a span comes back, to some place
            start = args[0] % len(graveyard)
            span = graveyard[start : start + 3]
            del graveyard[start : start + 3]
            at = args[1] % (len(view) + 1)
            edited = True
            view = view[:at] + span + view[at:]
    _observe_again(run)
    return run


def _observe_again(run):
    """What comes back behind the last live token is a new observation, not the old token."""
    fresh = itertools.count(max((b for p, o in run.births for b in p + o), default=0) + 1)
    now = {}
    for turn in range(1, len(run.births)):
        before = {b for part in run.births[turn - 1] for b in part}
        prompt, output = run.births[turn]
        prompt = [now.get(b, b) for b in prompt]
        last = max((i for i, b in enumerate(prompt) if b in before), default=-1)
        seen = {b for t in range(turn) for part in run.births[t] for b in part}
        for i in range(last + 1, len(prompt)):
            if prompt[i] in seen:
                now[run.births[turn][0][i]] = prompt[i] = next(fresh)
        run.births[turn] = (prompt, output)


def survivors(run):
    """{(turn, offset): walk position} of sampled tokens in the last view."""
    walk = run.births[-1][0] + run.births[-1][1]
    return {run.sampled_by[b]: i for i, b in enumerate(walk) if b in run.sampled_by}


def leaves(run):
    """Survivors whose walk prefix differs, token for token, from the prefix they came from."""
    walk = run.turns[-1][0] + run.turns[-1][1]
    found = set()
    for (turn, offset), position in survivors(run).items():
        prompt, output = run.turns[turn]
        if walk[:position] != prompt + output[:offset]:
            found.add((turn, offset))
    return found


def distinct_prefixes(run):
    """All (prefix, token) pairs of all turns."""
    paths = [prompt + output for prompt, output in run.turns]
    return {tuple(path[: i + 1]) for path in paths for i in range(len(path))}
