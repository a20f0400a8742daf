"""The studio's web server: Python's own, for one user on this machine.

Only requests to 127.0.0.1 or localhost are answered, by their Host header too, so that no page of another site can ask
through the browser. Bodies are bounded, errors are JSON, and one request at a time computes.
"""

from __future__ import annotations

import json
import sys
import threading
import webbrowser
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from codegen.studio import answers
from codegen.studio.entries import Json, RequestError
from codegen.util.errors import CodegenError

ADDRESS = "127.0.0.1"
HOSTS = (ADDRESS, "localhost")

LONGEST_BODY = 64 * 1024
"""Most bytes of a request's body."""

SECONDS = 20
"""How long a connection may keep the server waiting."""

PAGE = Path(__file__).parent / "page"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/studio.css": ("studio.css", "text/css; charset=utf-8"),
    "/studio.js": ("studio.js", "text/javascript; charset=utf-8"),
}
"""Path of a request -> file of the page and its type."""

QUESTIONS: dict[str, Callable[[Json], Json]] = {"/api/look": answers.look, "/api/kernels": answers.kernels}
"""Path of a POST -> the function that answers it."""

EXAMPLES = "/api/examples"

JSON_TYPE = "application/json"

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class RefusedError(Exception):
    """A request that is not answered, with its status."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        self.status = status
        super().__init__(message)


class Server(ThreadingHTTPServer):
    """Each connection is read in its own thread; the lock `computing` lets one request at a time compute."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        """`port` 0 is any that is free."""
        self.computing = threading.Lock()
        super().__init__((ADDRESS, port), Handler)

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{ADDRESS}:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    server: Server
    timeout = SECONDS
    server_version = "codegen-studio"
    sys_version = ""

    def do_GET(self) -> None:
        """The page, its files, and the examples."""
        self._answer(self._read_get)

    def do_POST(self) -> None:
        """The questions that the page asks."""
        self._answer(self._read_post)

    def _answer(self, read: Callable[[], tuple[str, bytes]]) -> None:
        try:
            self._check_host()
            kind, body = read()
            self._send(HTTPStatus.OK, kind, body)
        except RefusedError as error:
            self._fail(error.status, str(error))
        except RequestError as error:
            self._fail(HTTPStatus.BAD_REQUEST, str(error), error.field)
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            self.close_connection = True
        except Exception as error:
            # A fault of the generator must not end the server; the terminal has the details.
            self.log_error("%s: %s", type(error).__name__, error)
            self._fail(HTTPStatus.INTERNAL_SERVER_ERROR, f"a fault of the generator: {type(error).__name__}: {error}")

    def _check_host(self) -> None:
        port = self.server.server_address[1]
        allowed = {f"{host}:{port}" for host in HOSTS}
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if host not in allowed:
            raise RefusedError(
                HTTPStatus.FORBIDDEN, f"the studio answers only to {self.server.url}, got Host {host[:80]!r}"
            )
        if origin is not None and origin not in {f"http://{each}" for each in allowed}:
            raise RefusedError(
                HTTPStatus.FORBIDDEN, f"the studio answers only its own page, got Origin {origin[:80]!r}"
            )

    def _read_get(self) -> tuple[str, bytes]:
        path = self.path.partition("?")[0]
        if path in FILES:
            name, kind = FILES[path]
            return kind, (PAGE / name).read_bytes()
        if path == EXAMPLES:
            with self.server.computing:
                return JSON_TYPE, _encoded(answers.examples())
        if path in QUESTIONS:
            raise RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, f"{path} takes POST, got GET")
        raise RefusedError(HTTPStatus.NOT_FOUND, f"there is no {path[:80]!r}")

    def _read_post(self) -> tuple[str, bytes]:
        question = QUESTIONS.get(self.path)
        if question is None:
            known = self.path in FILES or self.path == EXAMPLES
            status = HTTPStatus.METHOD_NOT_ALLOWED if known else HTTPStatus.NOT_FOUND
            raise RefusedError(status, f"{self.path[:80]!r} takes GET" if known else f"there is no {self.path[:80]!r}")
        request = self._body()
        with self.server.computing:
            return JSON_TYPE, _encoded(question(request))

    def _body(self) -> Json:
        """The JSON object that the request carries."""
        if self.headers.get_content_type() != JSON_TYPE:
            raise RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"a request must be of type {JSON_TYPE}")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal() and len(length) < 20):
            raise RefusedError(HTTPStatus.LENGTH_REQUIRED, "a request must give its Content-Length")
        if int(length) > LONGEST_BODY:
            # The body stays unread and must not be taken for the next request.
            self.close_connection = True
            raise RefusedError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request has at most {LONGEST_BODY} bytes, got {length}"
            )
        try:
            request = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise RefusedError(HTTPStatus.BAD_REQUEST, "the request is no JSON") from None
        if not isinstance(request, dict):
            raise RefusedError(
                HTTPStatus.BAD_REQUEST, f"a request must be a JSON object, got a {type(request).__name__}"
            )
        return request

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _fail(self, status: HTTPStatus, message: str, field: str = "") -> None:
        self._send(status, JSON_TYPE, _encoded({"error": message, "field": field}))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Errors that the standard library finds, such as an unknown method, as JSON."""
        status = HTTPStatus(code)
        if status is HTTPStatus.NOT_IMPLEMENTED:
            status = HTTPStatus.METHOD_NOT_ALLOWED
        self.close_connection = True
        self._fail(status, message or explain or status.phrase)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the terminal shows faults only."""

    def log_error(self, format: str, *args: Any) -> None:
        """Report a fault."""
        print(f"studio: {format % args}", file=sys.stderr)


def _encoded(answer: Json) -> bytes:
    # Half of a surrogate pair in a request's text is escaped by `json.dumps`, so that it can be sent back.
    return json.dumps(answer).encode()


def serve(port: int, *, opens: bool) -> None:
    """Serve the page until interrupted; `opens`: open it in a browser.

    Raises `CodegenError` for a port that cannot be listened on, such as one that is in use.
    """
    try:
        server = Server(port)
    except OSError as error:
        raise CodegenError(
            f"--port: expected a free port of {ADDRESS}, got {port}: {error.strerror}; leave it out for any free one"
        ) from None
    with server:
        print(f"{server.url}  (stop with Ctrl-C)", flush=True)
        if opens:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
