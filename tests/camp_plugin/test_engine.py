"""The embedded engine over HTTP, against plain forwards of the same model."""

import asyncio
import contextlib
import socket
import time

import httpx
import numpy as np
import pytest
import torch
from support.models import tiny_model, tiny_tokenizer

from camp_plugin.local.decoder import Decoder, PrefixCache
from camp_plugin.local.engine import LocalEngine, serve
from harness_bridges.errors import CampError, RecordError
from rollout_adapters.sglang import SGLangClient

EOS = 1


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model("qwen3", float64=False, vocab=len(tokenizer))


@contextlib.contextmanager
def running(model, tokenizer, **options):
    decoder = Decoder(model, eos_ids=frozenset({EOS}), decode_text=tokenizer.decode)
    engine = LocalEngine(decoder, **options)
    with serve(engine) as url:
        yield engine, url
    engine.close()


@pytest.fixture
def served(model, tokenizer):
    with running(model, tokenizer) as pair:
        yield pair


def prompts(count, seed=0):
    rng = np.random.default_rng(seed)
    shared = rng.integers(2, 290, 40)
    return [np.concatenate([shared, rng.integers(2, 290, 3 + 5 * i)]) for i in range(count)]


def generate_all(url, batch, **options):
    async def go():
        async with SGLangClient(url) as client:
            settings = {"max_new_tokens": 24, "temperature": 0.8, **options}
            calls = [client.generate(p, seed=i, **settings) for i, p in enumerate(batch)]
            return await asyncio.gather(*calls)

    return asyncio.run(go())


def plain_log_probs(model, prompt, output, temperature):
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *output]])).logits[0].double()
    rows = torch.log_softmax(logits / temperature, -1)[len(prompt) - 1 : -1]
    return rows.gather(-1, torch.tensor(output)[:, None]).squeeze(-1).numpy()


def test_batched_sampling_reports_the_models_own_log_probs(served, model):
    _, url = served
    batch = prompts(7)
    for prompt, found in zip(batch, generate_all(url, batch), strict=True):
        expected = plain_log_probs(model, prompt.tolist(), found.output_ids.tolist(), 0.8)
        np.testing.assert_allclose(found.output_logprobs, expected, atol=5e-5)
        assert found.finish_reason in ("stop", "length")
        assert EOS not in found.output_ids[:-1]


def test_samples_do_not_depend_on_the_batch(served):
    _, url = served
    together = generate_all(url, prompts(5))
    for i, prompt in enumerate(prompts(5)):

        async def one(prompt=prompt, i=i):
            async with SGLangClient(url) as client:
                return await client.generate(prompt, max_new_tokens=24, temperature=0.8, seed=i)

        assert asyncio.run(one()).output_ids.tolist() == together[i].output_ids.tolist()


def test_sampling_follows_the_distribution(served, model):
    _, url = served
    prompt = prompts(1)[0]
    draws = generate_all(url, [prompt] * 400, max_new_tokens=1, temperature=1.0)
    with torch.no_grad():
        probs = torch.softmax(model(torch.tensor([prompt.tolist()])).logits[0, -1], -1)
    counts = np.bincount([int(d.output_ids[0]) for d in draws], minlength=probs.numel())
    top = int(probs.argmax())
    assert abs(counts[top] / 400 - float(probs[top])) < 4 * (0.25 / 400) ** 0.5


def post(url, body):
    return httpx.post(f"{url}/generate", json=body, timeout=60)


def test_cut_sampling_still_reports_the_full_softmax(served, model):
    _, url = served
    prompt = prompts(1)[0].tolist()
    params = {"max_new_tokens": 6, "top_k": 1, "temperature": 0.5}
    answer = post(url, {"input_ids": prompt, "sampling_params": params}).json()
    ids = answer["output_ids"]
    logged = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    np.testing.assert_allclose(logged, plain_log_probs(model, prompt, ids, 0.5), atol=5e-5)
    params = {**params, "top_k": -1, "top_p": 1e-6}
    again = post(url, {"input_ids": prompt, "sampling_params": params}).json()
    assert again["output_ids"] == ids, "a vanishing nucleus is greedy"


def test_prefixes_are_reused_between_turns_until_the_weights_change(served):
    engine, url = served
    prompt = prompts(1)[0].tolist()
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}
    first = post(url, body).json()
    follow = {**body, "input_ids": [*prompt, *first["output_ids"], 7, 8]}
    assert post(url, follow).json()["meta_info"]["cached_tokens"] == len(prompt) + 4
    engine.update_weights("17")
    answer = post(url, follow).json()["meta_info"]
    assert (answer["cached_tokens"], answer["weight_version"]) == (0, "17")


def test_stop_strings_end_the_output_and_stay_in_it(served, tokenizer):
    _, url = served
    prompt = prompts(1)[0].tolist()
    free = post(
        url,
        {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": 12, "top_k": 1, "ignore_eos": True},
        },
    ).json()
    stop = tokenizer.decode(free["output_ids"][4:6])
    params = {"max_new_tokens": 12, "top_k": 1, "ignore_eos": True, "stop": [stop]}
    answer = post(url, {"input_ids": prompt, "sampling_params": params}).json()
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    text = tokenizer.decode(answer["output_ids"])
    assert stop in text and stop not in tokenizer.decode(answer["output_ids"][:-1])


def test_scoring_gives_the_log_probs_of_given_tokens(served, model):
    _, url = served
    ids = prompts(1)[0]

    async def go():
        async with SGLangClient(url) as client:
            return await client.score(ids, 10)

    found = asyncio.run(go())
    expected = plain_log_probs(model, ids[:10].tolist(), ids[10:].tolist(), 1.0)
    np.testing.assert_allclose(found, expected, atol=5e-5)
    raw = post(
        url,
        {
            "input_ids": ids.tolist(),
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        },
    ).json()["meta_info"]
    assert raw["input_token_logprobs"][0] == [None, int(ids[0]), None]
    assert len(raw["input_token_logprobs"]) == ids.size and raw["completion_tokens"] == 0


@pytest.mark.parametrize("start", (12, 25, 30))
def test_scoring_from_a_cached_prefix_is_the_same(served, model, start):
    """What was sampled before is cached; the tokens to score may begin within or after it."""
    _, url = served
    prompt = np.arange(2, 22)
    body = {
        "input_ids": prompt.tolist(),
        "sampling_params": {"max_new_tokens": 8, "ignore_eos": True},
    }
    ids = np.array([*prompt, *post(url, body).json()["output_ids"], 5, 9, 7])

    async def go():
        async with SGLangClient(url) as client:
            return await client.score(ids, start)

    expected = plain_log_probs(model, ids[:start].tolist(), ids[start:].tolist(), 1.0)
    np.testing.assert_allclose(asyncio.run(go()), expected, atol=5e-5)


def test_scoring_before_the_first_token_is_refused():
    async def go():
        async with SGLangClient("http://127.0.0.1:9") as client:
            await client.score(np.array([1, 2]), 0)

    with pytest.raises(RecordError, match="start=0"):
        asyncio.run(go())


def test_a_client_that_disconnects_aborts_its_request(served):
    engine, url = served
    host, port = url.removeprefix("http://").split(":")
    ids = ",".join(map(str, prompts(1)[0]))
    body = f'{{"input_ids":[{ids}],"sampling_params":{{"max_new_tokens":3000,"ignore_eos":true}}}}'
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall((head + body).encode())
        wait_for(lambda: bool(engine.decoder.active))
    wait_for(lambda: not engine.decoder.active)
    assert (
        post(url, {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}).status_code == 200
    )


def wait_for(condition):
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("did not happen within 30 s")


BAD = [
    ({}, "input_ids: expected a non-empty flat list"),
    ({"input_ids": [[1]]}, "input_ids"),
    ({"input_ids": [1, -1]}, "input_ids"),
    ({"input_ids": [5, 99999]}, "token id 99999 is not in the model's vocabulary"),
    ({"input_ids": [1], "sampling_params": {"temprature": 1}}, "temprature not supported"),
    ([1, 2], "the request body is a list"),
    ({"input_ids": [1], "stream": True}, "stream: is not supported"),
    ({"input_ids": [1], "sampling_params": [1]}, "sampling_params: expected an object"),
    ({"input_ids": [1], "sampling_params": {"n": 4}}, "n not supported"),
    ({"input_ids": [1], "sampling_params": {"temperature": "1"}}, "temperature='1'"),
    ({"input_ids": [1], "sampling_params": {"top_k": "5"}}, "top_k='5': expected int"),
    ({"input_ids": [1], "sampling_params": {"stop": [5]}}, "stop=[5]: expected non-empty strings"),
    ({"input_ids": [1], "sampling_params": {"sampling_seed": 2**70}}, "sampling_seed="),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": 5000}}, "model's context of 4096"),
    ({"input_ids": [1], "logprob_start_len": "a"}, "logprob_start_len='a'"),
    ({"input_ids": [1], "sampling_params": {"temperature": 0}}, "temperature=0: must be above 0"),
    ({"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p=0"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens=-1"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, "logprob_start_len"),
    ({"input_ids": [1], "logprob_start_len": 1}, "logprob_start_len=1: the prompt has 1"),
]


@pytest.mark.parametrize(("body", "message"), BAD)
def test_bad_requests_name_the_field(served, body, message):
    answer = post(served[1], body)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_a_failing_model_fails_its_requests_and_the_engine_goes_on(served, monkeypatch):
    engine, url = served
    good = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}}
    with monkeypatch.context() as patch:
        patch.setattr(engine.decoder, "admit", lambda r: (_ for _ in ()).throw(MemoryError("full")))
        answer = post(url, good)
    assert answer.status_code == 500 and "MemoryError: full" in answer.json()["error"]["message"]
    assert post(url, good).status_code == 200


def test_clients_that_vanish_do_not_stop_the_worker(served):
    engine, url = served
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 50, "ignore_eos": True}}
    jobs = [engine.submit(body) for _ in range(3)]
    for job in jobs[:2]:
        job.future.cancel()
        job.aborted = True
    assert len(jobs[2].future.result(60)["output_ids"]) == 50
    assert post(url, {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}).is_success


def test_closing_fails_what_is_open_and_refuses_what_comes_after(model, tokenizer):
    engine = LocalEngine(Decoder(model, eos_ids=frozenset({EOS}), decode_text=tokenizer.decode))
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}}
    job = engine.submit(body)
    with pytest.raises(CampError, match="1 requests are open"):
        engine.update_weights("1")
    engine.close()
    with pytest.raises(CampError, match="closed before it answered"):
        job.future.result(60)
    with pytest.raises(CampError, match="the engine is closed"):
        engine.submit(body)


def test_a_model_that_ignores_its_cache_is_refused(model, tokenizer):
    class Deaf(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config = model.config

        def forward(self, input_ids, cache=None, **kwargs):
            return model(input_ids=input_ids, **kwargs)

    with pytest.raises(CampError, match="decoding with a KV cache differs"):
        Decoder(Deaf(), eos_ids=frozenset({EOS}), decode_text=tokenizer.decode)


def test_a_taken_port_is_named(served, model, tokenizer):
    engine, url = served
    port = int(url.rsplit(":", 1)[1])
    with (
        pytest.raises(CampError, match=f"could not listen on 127.0.0.1:{port}"),
        serve(engine, port=port),
    ):
        pass


def test_the_prefix_cache_is_bounded():
    cache = PrefixCache(10)
    kv = [(torch.zeros(1, 1, 6, 2), torch.zeros(1, 1, 6, 2))]
    a, b = np.arange(6), np.arange(10, 16)
    cache.put(a, kv)
    cache.put(b, kv)
    assert cache.longest(np.append(a, 9))[0] == 0, "the older one was dropped"
    assert cache.longest(np.append(b, 9))[0] == 6
    assert cache.longest(b)[0] == 5, "one token is left to compute"
