"""The studio's server: its answers, the requests that it refuses and with which status, and its JSON."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

from codegen.studio import answers, server
from codegen.studio.server import LONGEST_BODY, Server
from tests.support.studio import running_server

GOOD = {"entry": "variants: {mine: {mask: causal}}", "view": {"q_len": 128, "kv_len": 128}}


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with running_server() as found:
        yield found


def ask(
    running: Server, method: str, path: str, body: bytes | str | None = None, headers: dict[str, str] | None = None
) -> tuple[int, Any, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", running.server_address[1], timeout=60)
    try:
        own = {"Content-Type": "application/json"} if method == "POST" else {}
        connection.request(method, path, body, own | (headers or {}))
        response = connection.getresponse()
        text = response.read()
        is_json = response.headers.get_content_type() == "application/json"
        return response.status, json.loads(text) if is_json else text.decode(), response
    finally:
        connection.close()


@pytest.mark.parametrize("path", ["/", "/studio.css", "/studio.js", "/?x=1"])
def test_the_page_is_served(running: Server, path: str) -> None:
    status, text, response = ask(running, "GET", path)
    assert status == 200
    assert len(text) > 1000
    assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    assert response.headers["X-Content-Type-Options"] == "nosniff"


def test_a_page_names_no_other_host() -> None:
    for file, _ in server.FILES.values():
        text = (server.PAGE / file).read_text(encoding="utf-8")
        assert "https://" not in text
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")


def test_questions_are_answered(running: Server) -> None:
    status, answer, _ = ask(running, "POST", "/api/look", json.dumps(GOOD))
    assert (status, answer["problems"], answer["name"]) == (200, [], "mine")
    status, answer, _ = ask(running, "GET", "/api/examples")
    assert status == 200
    assert len(answer["examples"]) > 70
    status, answer, _ = ask(running, "POST", "/api/kernels", json.dumps(GOOD))
    assert (status, answer["file"]) == (200, "portable.py")


def test_problems_of_an_entry_are_an_answer(running: Server) -> None:
    status, answer, _ = ask(running, "POST", "/api/look", json.dumps({"entry": "variants: {mine: {mask: causl}}"}))
    assert status == 200
    assert [problem["field"] for problem in answer["problems"]] == ["mask"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/../server.py", 404),
        ("GET", "/%2e%2e/server.py", 404),
        ("GET", "/api/look", 405),
        ("POST", "/", 405),
        ("POST", "/api/examples", 405),
        ("POST", "/api/nothing", 404),
        ("PUT", "/api/look", 405),
        ("DELETE", "/", 405),
        ("OPTIONS", "/api/look", 405),
    ],
)
def test_wrong_paths_and_methods(running: Server, method: str, path: str, status: int) -> None:
    got, answer, _ = ask(running, method, path, "{}" if method == "POST" else None)
    assert got == status
    assert answer["error"]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("{", 400, "the request is no JSON"),
        ("[" * 30_000, 400, "the request is no JSON"),
        (b"\xff\xfe", 400, "the request is no JSON"),
        ("[]", 400, "a request must be a JSON object, got a list"),
        ("x" * (LONGEST_BODY + 1), 413, f"a request has at most {LONGEST_BODY} bytes"),
        (json.dumps({"entry": GOOD["entry"], "file": "../fwd.py"}), 400, "the variant has no file '../fwd.py'"),
        (json.dumps({"entry": "variants: {mine: {mask: causl}}"}), 400, "did you mean 'causal'?"),
    ],
)
def test_wrong_bodies(running: Server, body: bytes | str, status: int, message: str) -> None:
    got, answer, _ = ask(running, "POST", "/api/kernels", body)
    assert got == status
    assert message in answer["error"]


@pytest.mark.parametrize(
    ("headers", "status", "message"),
    [
        ({"Host": "example.com"}, 403, "got Host 'example.com'"),
        ({"Host": "127.0.0.1:1"}, 403, "got Host"),
        ({"Origin": "https://example.com"}, 403, "got Origin 'https://example.com'"),
        ({"Origin": "null"}, 403, "got Origin"),
        ({"Content-Type": "text/plain"}, 415, "application/json"),
        ({"Content-Length": "-1"}, 411, "Content-Length"),
        ({"Content-Length": "9" * 30}, 411, "Content-Length"),
    ],
)
def test_wrong_headers(running: Server, headers: dict[str, str], status: int, message: str) -> None:
    got, answer, _ = ask(running, "POST", "/api/look", json.dumps(GOOD), headers)
    assert got == status
    assert message in answer["error"]


def test_the_page_may_be_asked_for_as_localhost(running: Server) -> None:
    host = f"localhost:{running.server_address[1]}"
    assert ask(running, "GET", "/", headers={"Host": host, "Origin": f"http://{host}"})[0] == 200


def test_a_fault_of_the_generator_is_an_answer(running: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_request: object) -> dict[str, Any]:
        raise ZeroDivisionError("by zero")

    monkeypatch.setitem(server.QUESTIONS, "/api/look", broken)
    status, answer, _ = ask(running, "POST", "/api/look", json.dumps(GOOD))
    assert (status, answer["error"]) == (500, "a fault of the generator: ZeroDivisionError: by zero")
    monkeypatch.setitem(server.QUESTIONS, "/api/look", answers.look)
    assert ask(running, "POST", "/api/look", json.dumps(GOOD))[0] == 200
