"""The search environment: splits, answers that can be found, rewards."""

import re
from dataclasses import dataclass

import pytest

from harness_bridges.errors import ConfigError
from rollout_adapters.environments.registry import find_environment, register_environment
from rollout_adapters.environments.search_qa import split_of


@pytest.fixture(scope="module")
def environment():
    cls = find_environment("search_qa")
    return cls(cls.Config())


def test_splits_are_disjoint_by_country(environment):
    train, test = environment.tasks("train"), environment.tasks("test")
    assert len(train) > 1000 and len(test) > 200
    assert {t.task_id for t in train}.isdisjoint(t.task_id for t in test)
    country_of = {c.name: code for code, k in environment.countries.items() for c in k.cities}
    for split, tasks in (("train", train), ("test", test)):
        for task in tasks:
            city = task.task_id.split("/")[2]
            assert split_of(country_of[city]) == split


def test_task_order_is_fixed(environment):
    again = find_environment("search_qa")(find_environment("search_qa").Config())
    assert [t.task_id for t in environment.tasks("train")] == [
        t.task_id for t in again.tasks("train")
    ]


def test_following_the_links_with_the_search_tool_finds_the_answer(environment):
    """An oracle agent that reads the pages: city, then country, then (if asked) neighbour."""
    solved = 0
    tasks = environment.tasks("test")[:60]
    for task in tasks:
        session = environment.start(task)
        question = task.payload["question"]
        city = re.search(r"the city of (.*) lies", question).group(1)
        country = look_up(session, city, rf"{re.escape(city)}: city in (.*?)\. Population")
        if country and "neighbour" in question:
            country = look_up(session, country, r"Largest neighbour: (.*?)\.")
        field = "Currency" if "currency" in question else "Capital"
        answer = country and look_up(session, country, rf"{field}: (.*?)\. ")
        step = session.step(f"<answer>{answer}</answer>")
        assert step.done
        solved += step.reward == 1.0
    assert solved >= 0.9 * len(tasks)


def look_up(session, title, pattern):
    seen = session.step(f"<search>{title}</search>").observation
    lines = [x for x in re.split(r"\n|<information>", seen) if x.startswith(f"{title}: ")]
    found = [re.search(pattern, x) for x in lines]
    return next((m.group(1) for m in found if m), None)


@pytest.mark.parametrize(
    ("response", "done", "reward"),
    [
        ("<answer>{}</answer>", True, 1.0),
        ("thinking... <answer> the {}. </answer>", True, 1.0),
        ("<answer>Atlantis</answer>", True, 0.2),
        ("Atlantis", False, 0.0),
        ("<answer>{}", False, 0.0),
    ],
)
def test_reward_is_exact_match_with_a_format_bonus(environment, response, done, reward):
    task = environment.tasks("test")[0]
    step = environment.start(task).step(response.replace("{}", task.payload["answer"]))
    assert (step.done, step.reward) == (done, reward)


def test_search_returns_top_k_pages_or_says_so(environment):
    session = environment.start(environment.tasks("test")[0])
    found = session.step("<search>Ecuador</search>").observation
    assert found.startswith("<information>Ecuador: country") and found.count("\n") == 2
    assert "Nothing found" in session.step("<search>zzqqxx</search>").observation
    assert "Nothing found" in session.step("<search> </search>").observation


def test_bad_settings_and_names(environment):
    with pytest.raises(ConfigError, match="search_qa_top_k=0"):
        environment.Config(search_qa_top_k=0)
    with pytest.raises(ConfigError, match="split='dev'"):
        environment.tasks("dev")
    with pytest.raises(ConfigError, match="did you mean 'search_qa'"):
        find_environment("search-qa")


def test_a_third_party_registers_in_one_line():
    @register_environment("toy_for_test")
    class Toy:
        @dataclass
        class Config:
            pass

        def tasks(self, split):
            return []

        def start(self, task):
            raise KeyError(task)

    assert find_environment("toy_for_test") is Toy
    with pytest.raises(ConfigError, match="is no environment"):
        register_environment("half_done")(int)
