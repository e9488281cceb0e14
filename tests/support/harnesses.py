"""Harnesses on scripted policies: an engine, a session, and how to run them."""

import asyncio
import hashlib
import os
import random
import shutil
import string

import numpy as np
import pytest
from support.models import TEMPLATE, tiny_tokenizer

from harness_bridges.conversation import Conversation
from harness_bridges.engine import Generation, RunIds, RunLimits, Step
from harness_bridges.harness import find_harness
from rollout_adapters.sandbox.config import SandboxConfig
from rollout_adapters.sandbox.sandbox import Sandbox
from rollout_adapters.tokenizer import HFChat

WHITE_BOX = (
    "search_r1",
    "tc_rag",
    "agentfold",
    "memexrl",
    "file_memory",
    "memory_tools",
    "compaction",
)
SMALL = {
    "agentfold_threshold": 420,
    "agentfold_summary_tokens": 40,
    "tc_rag_budget": 700,
}


def make(name, **settings):
    """A harness with small budgets."""
    cls = find_harness(name)
    wanted = {**SMALL, **settings}
    known = cls.Config.__dataclass_fields__
    return cls(cls.Config(**{k: v for k, v in wanted.items() if k in known}))


class Say:
    """An engine that says given texts in order; a text may be a function of the prompt's text."""

    def __init__(self, chat, texts, *, unique=False):
        self.chat, self.texts, self.prompts, self.unique = chat, list(texts), [], unique

    async def generate(self, prompt_ids, *, max_new_tokens, temperature, stop):
        self.prompts.append(prompt_ids.tolist())
        count = len(self.prompts)
        text = self.texts[(count - 1) % len(self.texts)]
        if callable(text):
            text = text(count - 1, self.chat.decode(prompt_ids.tolist()))
        if self.unique:
            # Text of its own from its first token on: payloads cannot tell equal text apart.
            first = (string.ascii_letters + string.digits)[count % 62]
            text = first + hashlib.sha256(str(count).encode()).hexdigest()[:24] + text
        for mark in stop:
            if mark in text:
                text = text[: text.index(mark) + len(mark)]
        ids = np.array(self.chat.encode(text)[:max_new_tokens])
        return Generation(
            output_ids=ids,
            output_logprobs=-np.linspace(0.1, 1.0, ids.size),
            finish_reason="stop",
            weight_version="0",
        )


class World:
    """Answers searches with given observations, or with noise; an answer ends the episode."""

    def __init__(self, observations=(), opening=(("system", "S"), ("user", "Q"))):
        self.observations, self.count = list(observations), 0
        self.opening = opening
        self.stop = ("</search>", "</answer>")
        self.final = ("</answer>",)

    def step(self, response):
        if "</answer>" in response:
            return Step(observation="", done=True, reward=1.0)
        self.count += 1
        if self.count <= len(self.observations):
            return Step(observation=self.observations[self.count - 1], done=False)
        noise = hashlib.sha256(f"{self.count}{response}".encode()).hexdigest()
        return Step(observation=f"Found {self.count}: {noise}", done=False)

    def close(self):
        pass


def backends():
    """Sandbox backends that this machine has."""
    found = ["bubblewrap"] if shutil.which("bwrap") else []
    return [*found, "docker"] if os.environ.get("DOCKER_HOST") else found


def play(harness, texts, *, world=None, template=TEMPLATE, chat=None, unique=False, **limits):
    """Run one episode; returns it and the text of every prompt."""
    if type(harness).__name__ == "FileMemory" and not shutil.which("bwrap"):
        pytest.skip("needs bubblewrap")
    chat = chat or HFChat(tiny_tokenizer(template), frozenset({1}))
    engine = Say(chat, texts, unique=unique)
    bounds = RunLimits(**{"max_turns": 12, "max_new_tokens": 96, "max_context": 4096, **limits})
    ids = RunIds(rollout_id=0, group_id=0, session_id="s", task_id="t")
    sandbox = Sandbox(SandboxConfig(camp_sandbox="bubblewrap"))
    conversation = Conversation(engine, chat, world or World(), bounds, ids, sandbox.open)

    async def run():
        try:
            await harness.run(conversation)
        finally:
            await conversation.close()

    asyncio.run(run())
    episode = conversation.episode()
    assert [t.prompt_ids.tolist() for t in episode.turns] == engine.prompts
    return episode, [chat.decode(prompt) for prompt in engine.prompts]


ACTIONS = (
    "<search>a</search>",
    "<search>b</search>",
    "<search>c</search>",
    "<pop></pop>",
    '<memory_offload>{"name": "x", "span": "1"}</memory_offload>',
    '<memory_offload>{"name": "y", "span": "1-3"}</memory_offload>',
    '<memory_offload>{"name": "x", "span": "2"}</memory_offload>',
    '<memory_retrieve>{"name": "x"}</memory_retrieve>',
    '<memory_retrieve>{"name": "y"}</memory_retrieve>',
    "<bash>echo $RANDOM$RANDOM | tee -a notes; ls</bash>",
    '<memory_add>{"key": "k", "text": "v"}</memory_add>',
    "<memory_list></memory_list>",
    "nothing in particular",
    "<search>a</search><|im_end|>",
    "<|im_end|>",
    "",
)


def random_policy(name, seed):
    """Random actions, valid and invalid; at a boundary the harness's own valid write, mostly."""
    chance = random.Random(seed)
    demonstrate = getattr(find_harness(name), "demonstrate", None)

    def say(turn, prompt):
        forced = demonstrate(turn, prompt) if demonstrate and chance.random() < 0.8 else ""
        if forced is None:
            return f"summary {chance.random()}"
        if forced and ("is about to be replaced" in prompt or chance.random() < 0.4):
            return forced
        return f"{chance.random()} {chance.choice(ACTIONS)}"

    return [say]
