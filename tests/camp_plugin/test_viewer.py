"""The viewer, opened in headless Chromium and compared with the record that it shows."""

import dataclasses
import hashlib
import json
import shutil

import numpy as np
import pytest
from support.episodes import with_log_probs
from support.harnesses import World, make, play
from support.models import tiny_model, tiny_model_dir, tiny_tokenizer

from camp_plugin.cli import main
from camp_plugin.local.host import LocalHost
from camp_plugin.probe import target_log_probs
from camp_plugin.report.viewer import ROLES, episode_data, token_texts, write_report
from harness_bridges.branches import branches, episode_tape
from harness_bridges.record import Episode, Turn
from harness_bridges.store import append_episode
from loss_hooks.method import find_method
from rollout_adapters.tokenizer import HFChat

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
NASTY = "</script><b>/*CODE*/ /*DATA*/İİé🙂&amp; needle"


@pytest.fixture(scope="module")
def chat():
    return HFChat(tiny_tokenizer(), frozenset({1}))


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", vocab=len(tiny_tokenizer()), layers=1)


@pytest.fixture(scope="module")
def episodes(model):
    """A fold, an offload with a retrieve, and a control whose text is hostile."""
    search = "<search>a</search>"
    off = '<memory_offload>{"name": "p", "span": "1"}</memory_offload>'
    back = '<memory_retrieve>{"name": "p"}</memory_retrieve>'
    plays = [
        play(make("agentfold", agentfold_threshold=200, agentfold_summary_tokens=30),
             [f"{search}", f"{search}", "so far", search], max_turns=4),
        play(make("memexrl"), [search, search, off, search, back, search], max_turns=6),
        play(make("search_r1"), [search], world=World([NASTY, NASTY]), max_turns=3),
    ]  # fmt: skip
    found = []
    for i, (e, _) in enumerate(plays):
        rng = np.random.default_rng(i)
        noisy = [np.minimum(target - rng.random(target.size), 0) for target in _exact(model, e)]
        e = with_log_probs(e, noisy)
        task = f"task {i} /*STYLE*/ /*CODE*/"
        found.append(
            dataclasses.replace(e, rollout_id=i, task_id=task, reward=i / 2, turn_rewards=())
        )
    return found


def _exact(model, e):
    scored, _ = target_log_probs(e, find_method("packed_mask"), LocalHost(model), 1.0)
    return np.split(scored, np.cumsum([t.output_ids.size for t in e.turns])[:-1])


def scores(model, e):
    methods = (("walk", "naive_compressed"), ("full", "naive_full"), ("exact", "packed_mask"))
    host = LocalHost(model)
    return {key: target_log_probs(e, find_method(name), host, 1.0)[0] for key, name in methods}


@pytest.fixture(scope="module")
def browser(report):  # made first: playwright keeps an event loop of its own running
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def open_page(browser, path, **options):
    """The page, with everything that goes wrong or asks for the network collected."""
    page = browser.new_page(**{"viewport": {"width": 1400, "height": 900}, **options})
    page.faults = []
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.on("console", lambda x: x.type == "error" and page.faults.append(x.text))
    page.on("request", lambda r: r.url.startswith("file:") or page.faults.append(r.url))
    page.goto(f"file://{path}")
    page.wait_for_function("state.data !== null")
    return page


@pytest.fixture(scope="module")
def report(episodes, model, chat, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    score = lambda e: scores(model, e)  # noqa: E731
    write_report(episodes, path, title="a title", decode=chat.decode, score=score)
    return path


@pytest.fixture()
def page(browser, report):
    page = open_page(browser, report)
    yield page
    assert page.faults == []
    page.close()


@needs_browser
def test_the_list_opens_episodes(page, episodes):
    rows = page.locator("#episodes tbody tr")
    assert rows.count() == len(episodes)
    cells = [c.strip() for c in rows.nth(1).locator("td").all_text_contents()]
    tape = episode_tape(episodes[1])
    assert cells == ["1", "0.500", str(len(episodes[1].turns)), str(len(tape.edits)),
                     str(tape.tokens.size)]  # fmt: skip
    rows.nth(1).click()
    assert "task 1" in page.inner_text("#summary")
    page.keyboard.press("j")
    assert "task 2" in page.inner_text("#summary")
    page.keyboard.press("k")
    assert "task 1" in page.inner_text("#summary")
    page.click("#episodes th:nth-child(2)")
    first = page.locator("#episodes tbody tr").first.locator("td").first
    assert first.inner_text() == "2", "highest reward first"


@needs_browser
@pytest.mark.parametrize("number", (0, 1, 2))
def test_every_pixel_of_the_staircase_is_the_live_view(page, episodes, number):
    """One pixel per token and row: the role's colour if it is live, else a hole or nothing."""
    e = episodes[number]
    tape, legs = episode_tape(e), branches(e.turns)
    page.evaluate(f"open({number})")
    page.evaluate("stairs.scale = 2; stairs.size(); stairs.draw()")
    seen = page.evaluate(
        """() => {
        const pen = stairs.canvas.getContext("2d"), found = [];
        const ratio = window.devicePixelRatio;
        for (let r = 0; r < state.data.rows.length; r++) {
          const y = stairs.head + r * stairs.row + 5, line = [];
          const size = Math.min(stairs.length, Math.floor((stairs.box.clientWidth - GUTTER) / 2));
          const data = pen.getImageData(GUTTER * ratio, y * ratio, size * 2 * ratio, 1).data;
          for (let at = 0; at < size; at++) {
            line.push([...data.slice(8 * at * ratio, 8 * at * ratio + 3)].join());
          }
          found.push(line);
        }
        return found;
        }"""
    )
    names = [*ROLES, "hole", "hatch", "gone", "panel"]
    colours = page.evaluate(
        """(names) => {
        const style = getComputedStyle(document.documentElement);
        const hex = (name) => style.getPropertyValue(`--${name}`).trim();
        return names.map((n) => [1, 3, 5].map((i) => parseInt(hex(n).slice(i, i + 2), 16)).join());
        }""",
        names,
    )
    name_of = dict(zip(colours, names, strict=True))
    cursor = page.evaluate("state.at")
    for row, leg in enumerate(legs):
        live = set(tape.positions(leg.last, output=True).tolist())
        end = tape.outputs[leg.last][1]
        for at in range(len(seen[row])):
            if at == cursor:
                continue
            shown = name_of[seen[row][at]]
            if at in live:
                expected = "response" if tape.turn[at] >= 0 else None
                assert shown in ROLES and (shown == "response") == (expected == "response")
            else:
                assert shown in (("hole", "gone") if at < end else ("panel", "hole")), (row, at)


@needs_browser
def test_a_click_shows_the_token(page, episodes):
    e = episodes[1]
    tape = episode_tape(e)
    page.evaluate("open(1)")
    box = page.locator("#stairs canvas").bounding_box()
    at = tape.outputs[1][0] + 2
    geometry = page.evaluate("[GUTTER, stairs.scale, stairs.head, stairs.row]")
    gutter, scale, head, row = geometry
    page.mouse.move(box["x"] + gutter + (at + 0.5) * scale, box["y"] + head + row * 0.4)
    assert f"tape {at}" in page.inner_text("#tip")
    page.mouse.click(box["x"] + gutter + (at + 0.5) * scale, box["y"] + head + row * 0.4)
    facts = page.inner_text("#token")
    assert str(tape.tokens[at]) in facts and "turn 1, token 2" in facts
    assert str(round(e.turns[1].output_logprobs[2], 4)) in facts


@needs_browser
def test_heat_strips_are_the_differences(page, episodes, model):
    page.evaluate("open(0)")
    e = episodes[0]
    strips = {s["name"]: s for s in page.evaluate("state.data.strips")}
    rollout = np.concatenate([t.output_logprobs for t in e.turns])
    expected = scores(model, e)
    np.testing.assert_allclose(
        strips["naive_full"]["difference"], expected["full"] - rollout, atol=1e-4
    )
    walk = strips["naive_compressed, sdcc"]
    tape = episode_tape(e)
    then = np.concatenate([e.turns[tape.turn[at]].output_logprobs[[tape.offset[at]]]
                           for at in walk["at"]])  # fmt: skip
    np.testing.assert_allclose(walk["difference"], expected["walk"] - then, atol=1e-4)


@needs_browser
def test_search_finds_text_across_tokens(page, episodes, chat):
    page.evaluate("open(2)")
    text = "".join(token_texts(episode_tape(episodes[2]).tokens, chat.decode))
    page.keyboard.press("/")
    page.keyboard.type("🙂&AMP; Needle")
    assert page.inner_text("#hits") == f"{text.count('🙂&amp; needle')} found"
    page.keyboard.press("Enter")
    at = page.evaluate("state.at")
    shown = page.evaluate("state.data.texts.slice(state.at).join('')")
    assert shown.startswith("🙂&amp; needle") and at > 0
    assert page.locator("#text .cursor").count() == 1
    page.keyboard.press("Enter")
    assert page.evaluate("state.at") > at
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.fill("#query", "no such text")
    assert page.inner_text("#hits") == "0 found"


@needs_browser
def test_edits_jump_to_their_place(page, episodes):
    page.evaluate("open(1)")
    tape = episode_tape(episodes[1])
    items = page.locator("#edits li")
    assert items.count() == len(tape.edits)
    assert "offload by policy" in items.nth(0).inner_text()
    assert "back" in items.nth(1).inner_text()
    items.nth(1).click()
    assert page.evaluate("state.row") == 2
    page.keyboard.press("p")
    assert page.evaluate("[state.row, state.at]") == [1, tape.edits[0].removed[0][0]]
    page.keyboard.press("ArrowUp")
    assert page.evaluate("state.row") == 0
    before = page.evaluate("state.at")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("state.at") == before + 1


@needs_browser
def test_the_text_is_what_the_policy_saw(page, episodes, chat):
    e = episodes[0]
    for row, leg in enumerate(branches(e.turns)):
        page.evaluate(f"open(0); select({row}, 0)")
        spans = page.locator("#text span").all_text_contents()
        expected = chat.decode(e.turns[leg.last].sequence.tolist())
        assert "".join(spans) == expected[: len("".join(spans))] and spans


@needs_browser
def test_dark_light_and_small_screens(browser, report, tmp_path):
    page = open_page(browser, report, color_scheme="dark")
    dark = page.screenshot(path=tmp_path / "dark.png")
    page.keyboard.press("t")
    light = page.screenshot(path=tmp_path / "light.png")
    assert dark != light
    page.keyboard.press("?")
    assert page.locator("#keys").is_visible()
    page.close()
    phone = open_page(browser, report, viewport={"width": 400, "height": 800}, has_touch=True)
    assert phone.evaluate("document.documentElement.scrollWidth") <= 400
    phone.locator("#stairs canvas").tap(position={"x": 200, "y": 75})
    assert phone.evaluate("state.at") > 0
    assert page.faults == phone.faults == []
    phone.close()


@needs_browser
def test_four_hundred_turns_and_a_hundred_thousand_tokens(browser, tmp_path, chat):
    rng = np.random.default_rng(0)
    view, turns = rng.integers(2, 300, 200).tolist(), []
    for _ in range(400):
        out = rng.integers(2, 300, 50)
        turns.append(Turn(prompt_ids=view, output_ids=out, output_logprobs=-rng.random(50),
                          finish_reason="stop", weight_version="0"))  # fmt: skip
        view = [*view[:200], *(view[200:] + out.tolist())[-600:], *rng.integers(2, 300, 200)]
    e = Episode(turns=tuple(turns), rollout_id=0, group_id=0, session_id="s", task_id="t")
    path = tmp_path / "big.html"
    write_report([e], path, title="big", decode=chat.decode)
    page = open_page(browser, path)
    assert page.evaluate("[state.data.rows.length, state.data.tokens.length]") == [
        len(branches(e.turns)),
        episode_tape(e).tokens.size,
    ]
    assert page.evaluate("state.data.tokens.length") >= 100_000
    last = page.evaluate("state.data.edits.length - 1")
    page.locator("#edits li").nth(last).click()
    assert page.evaluate("state.row") == page.evaluate("state.data.rows.length - 1")
    drawn = page.evaluate("[stairs.canvas.clientHeight, stairs.box.clientHeight]")
    assert drawn[0] <= drawn[1], "the canvas is the viewport, not the episode"
    assert page.faults == []
    page.close()


def test_without_a_tokenizer_ids_are_shown(episodes, tmp_path, capsys):
    store = tmp_path / "e.jsonl"
    append_episode(store, episodes[0])
    out = tmp_path / "sub" / "r.html"
    assert main(["report", str(store), "-o", str(out)]) == 0
    assert "shown as ids" in capsys.readouterr().err
    page = out.read_text()
    data = page.split('class="episode">')[1].split("</script>")[0]
    vocabulary = json.loads(data)["vocabulary"]
    assert all(text == f"[{token}]" for token, text in vocabulary)


def test_forks_are_where_branches_leave_the_tree(episodes):
    rng = np.random.default_rng(1)
    many = []
    for _ in range(40):
        size = int(rng.integers(1, 8))
        many.append(Turn(prompt_ids=rng.integers(0, 2, size), output_ids=rng.integers(0, 2, 2),
                         output_logprobs=-rng.random(2), finish_reason="stop",
                         weight_version="0"))  # fmt: skip
    e = Episode(turns=tuple(many), rollout_id=0, group_id=0, session_id="s", task_id="t")
    for episode in (*episodes, e):
        paths = [episode.turns[leg.last].sequence.tolist() for leg in branches(episode.turns)]
        for row, found in enumerate(episode_data(episode, None, {})["rows"]):
            shared = [shared_prefix(paths[row], path) for path in paths[:row]]
            best = max(shared, default=0)
            assert (found["fork"], found["length"]) == (best, len(paths[row]))
            assert found["parent"] == (shared.index(best) if best else -1)


def shared_prefix(a, b):
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


def test_a_character_of_several_tokens_is_whole(chat):
    text = "a🙂é"
    ids = np.array(chat.encode(text))
    texts = token_texts(ids, chat.decode)
    assert "".join(texts) == text and len(texts) == ids.size and "\ufffd" not in "".join(texts)


def test_the_file_is_the_same_every_time(episodes, chat, tmp_path):
    digests = set()
    for name in ("a", "b"):
        write_report(episodes, tmp_path / name, title="x", decode=chat.decode)
        digests.add(hashlib.sha256((tmp_path / name).read_bytes()).hexdigest())
    assert len(digests) == 1
    assert "http" not in (tmp_path / "a").read_text()


def long_tape(limit):
    """Two contexts that a model holds, and a tape that it does not."""
    turns = [
        Turn(prompt_ids=np.full(limit - 8, 2 + i), output_ids=[3, 4, 5],
             output_logprobs=[-1.0] * 3, finish_reason="stop", weight_version="0")
        for i in range(2)
    ]  # fmt: skip
    return Episode(turns=tuple(turns), rollout_id=0, group_id=0, session_id="s", task_id="t",
                   metadata={"temperature": 1.0})  # fmt: skip


def test_a_tape_beyond_the_models_context_loses_only_naive_full(tmp_path, capsys):
    directory = tiny_model_dir(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    store = tmp_path / "e.jsonl"
    append_episode(store, long_tape(64))
    assert main(["report", str(store), "--model", str(directory), "-o", str(tmp_path / "r")]) == 0
    data = json.loads((tmp_path / "r").read_text().split('class="episode">')[1].split("</")[0])
    assert [s["name"] for s in data["strips"]] == ["naive_compressed, sdcc", "exact"]
    capsys.readouterr()
    assert main(["probe", str(store), "--model", str(directory), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["too_long_for_naive_full"] == 1
    assert found["methods"]["naive_full"]["loss_tokens"] == 0
    assert found["methods"]["packed_mask"]["loss_tokens"] == 6
    assert found["camp/delta_full"]["n"] == 0


@pytest.mark.parametrize("text", ("{", "{}", "[]"))
def test_a_damaged_config_beside_the_episodes_is_named(episodes, tmp_path, text, capsys):
    append_episode(tmp_path / "e.jsonl", episodes[0])
    (tmp_path / "config.json").write_text(text)
    assert main(["report", str(tmp_path / "e.jsonl"), "-o", str(tmp_path / "r.html")]) == 0
    assert "config.json: names no model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    (
        (["report", "e.jsonl", "-o", "."], "is a directory"),
        (["report", "e.jsonl", "-o", "e.jsonl/x/r.html"], "Not a directory"),
        (["report", "none.jsonl"], "there is no such file"),
        (["report", "empty.jsonl"], "there is no episode in it"),
        (["plot", ".", "-o", "m.foo"], "name a .png"),
        (["plot", ".", "-o", "e.jsonl/x/m.png"], "Not a directory"),
        (["probe", "--pitfalls", "--save", "e.jsonl"], "e.jsonl"),
    ),
)
def test_a_result_that_has_nowhere_to_go_is_refused_first(
    words, message, episodes, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    append_episode(tmp_path / "e.jsonl", episodes[0])
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "method": "sdcc", "harness": "h"}\n')
    assert main(words) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("camp-plugin: ") and message in said
