"""The `/generate` client: parsing, refusals, retries."""

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from harness_bridges.errors import RecordError
from rollout_adapters import sglang
from rollout_adapters.sglang import EngineError, SGLangClient, parse_generation


def response(entries, **meta):
    return {"meta_info": {"output_token_logprobs": entries, **meta}}


# As a real SGLang server answers (0.5): log-prob, id, text.
REAL = response(
    [[-0.25, 11, None], [-1.5, 2, None]],
    id="x",
    finish_reason={"type": "stop", "matched": 2},
    prompt_tokens=3,
    completion_tokens=2,
    weight_version="default",
)


def test_parses_ids_and_log_probs():
    g = parse_generation(REAL)
    assert g.output_ids.tolist() == [11, 2] and g.output_logprobs.tolist() == [-0.25, -1.5]
    assert (g.finish_reason, g.weight_version) == ("stop", "default")


def test_case_44_lost_tokens_are_refused():
    with pytest.raises(RecordError, match=r"len\(output_token_logprobs\)=1, completion_tokens=2"):
        parse_generation(response([[-1.0, 5, None]], completion_tokens=2))
    with pytest.raises(RecordError, match="return_logprob"):
        parse_generation({"meta_info": {}})


class Flaky(BaseHTTPRequestHandler):
    """Fails as often as it is told, then answers."""

    failures, status, seen = 0, 503, 0

    def do_POST(self):
        cls = type(self)
        cls.seen += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        failed = cls.failures > 0
        cls.failures -= failed
        body = b"busy" if failed else __import__("json").dumps(REAL).encode()
        self.send_response(cls.status if failed else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(sglang, "_FIRST_DELAY_S", 0.001)
    Flaky.failures, Flaky.status, Flaky.seen = 0, 503, 0
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Flaky)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    httpd.server_close()


def generate(url):
    async def go():
        async with SGLangClient(url) as client:
            return await client.generate(np.array([1, 2]), max_new_tokens=2, temperature=1.0)

    return asyncio.run(go())


def test_a_busy_server_is_tried_again(server):
    Flaky.failures = 3
    assert generate(server).output_ids.tolist() == [11, 2]
    assert Flaky.seen == 4


def test_retries_are_bounded_and_the_last_problem_is_named(server):
    Flaky.failures = 99
    with pytest.raises(EngineError, match="failed 5 times; last: HTTP 503: busy"):
        generate(server)


def test_a_refusal_is_not_tried_again(server):
    Flaky.failures, Flaky.status = 99, 400
    with pytest.raises(EngineError, match="refused: busy"):
        generate(server)
    assert Flaky.seen == 1


def test_nobody_listens():
    with pytest.raises(EngineError, match="ConnectError"):
        generate("http://127.0.0.1:9")
