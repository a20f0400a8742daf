"""The studio in a browser, and the command that serves it."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest

from codegen.cli.main import main
from codegen.studio.server import Server
from tests.support.browser import Page, find_browser
from tests.support.paths import ROOT
from tests.support.studio import running_server

ENTRY = """\
variants:
  mine:
    mask: causal and window(size)
    score: score + slope[h] * (kv_idx - q_idx)
    scalars: {size: {type: int, min: 1, example: 256}}
    tensors: {slope: {dims: [h], grad: true}}
"""

BROWSER = find_browser()
needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium or Chrome on this machine")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server() as found:
        yield found


def address(server: Server, **state: str) -> str:
    return f"{server.url}#{urlencode(state, quote_via=quote)}"


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_an_entry_is_edited_and_seen(server: Server, tmp_path: Path, width: int, dark: bool) -> None:
    assert BROWSER is not None
    url = address(server, entry=ENTRY, q_len="512", kv_len="512")
    with Page(BROWSER, url, tmp_path, width=width, dark=dark) as page:
        # The address holds the entry: its formulas, picture, calls and kernels are shown.
        page.wait_for("document.querySelector('#source .k')")
        assert page.value("document.querySelector('#problems').hidden") is True
        assert "slope" in page.value(
            "document.querySelector('#formulas math').parentElement.parentElement.nextSibling.textContent"
        )
        assert page.value("[...document.querySelectorAll('figure img')].every((i) => i.complete && i.naturalWidth > 0)")
        assert page.value("document.querySelector('#schedule').textContent").startswith("53.1 % of the blocks")
        assert page.value("document.querySelector('#f-mask').value") == "causal and window(size)"
        # Nothing is wider than the window, on a phone too.
        assert page.value("document.documentElement.scrollWidth") <= width
        # A mistake is shown at its field, and the message goes away when it is corrected.
        page.type_into("#f-mask", "causal and windo(size)")
        page.wait_for("document.querySelector('[data-field=mask] .problem')")
        message = page.value("document.querySelector('[data-field=mask] .problem').textContent")
        assert message.startswith("'windo' is no function of the expression language; did you mean 'window'?")
        page.type_into("#f-mask", "window(size)")
        page.wait_for("document.querySelector('#schedule').textContent.startsWith('9.4 % of the blocks')")
        assert page.value("document.querySelector('.problem')") is None
        # The YAML and the address follow.
        assert "mask: window(size)" in page.value("document.querySelector('#f-yaml').value")
        assert "mask: window(size)" in page.value("new URLSearchParams(location.hash.slice(1)).get('entry')")
        assert page.errors == []


def choose(page: Page, selector: str, value: str) -> None:
    """Choose an option as a user does."""
    field = f"document.querySelector('{selector}')"
    page.value(f"{field}.value = '{value}'; {field}.dispatchEvent(new Event('change'))")


@needs_browser
def test_other_files_examples_and_sizes(server: Server, tmp_path: Path) -> None:
    assert BROWSER is not None
    with Page(BROWSER, server.url, tmp_path) as page:
        page.wait_for(
            "document.querySelector('#source .k') && document.querySelector('#examples [value=sigmoid_attention]')"
        )
        choose(page, "#files", "hopper_bwd.py")
        page.wait_for("document.querySelector('#source').textContent.includes('hopper/bwd.py.jinja')")
        choose(page, "#examples", "natten_morton")
        page.wait_for("document.querySelector('#f-name').value === 'natten_morton'")
        page.wait_for("document.querySelector('#source').textContent.includes('natten_morton')")
        page.type_into("[data-view=q_len]", "99999")
        page.wait_for("document.querySelector('[data-field=\"view.q_len\"] .problem')")
        page.value("document.querySelector('[data-code=jax]').click()")
        assert "jax.numpy" in page.value("document.querySelector('#call').textContent")
        assert page.errors == []


def test_the_command_serves_until_it_is_interrupted() -> None:
    command = [sys.executable, "-m", "codegen", "studio", "--no-open", "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        with urllib.request.urlopen(url, timeout=60) as response:
            assert "studio" in response.read().decode()
    finally:
        process.terminate()
        process.wait(timeout=60)


@pytest.mark.parametrize("port", ["-1", "65536", "x"])
def test_a_port_that_is_none(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["studio", f"--port={port}"])
    assert f"expected a port from 0 to 65535, got {port!r}" in capsys.readouterr().err


def test_a_port_in_use_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with Server(0) as server:
        port = server.server_address[1]
        assert main(["studio", "--no-open", "--port", str(port)]) == 2
    expected = f"error: --port: expected a free port of 127.0.0.1, got {port}: "
    assert capsys.readouterr().err.startswith(expected)
