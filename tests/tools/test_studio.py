"""The studio in a browser, and the command that serves it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest

from codegen.cli.main import main
from codegen.studio.server import Server
from tests.support.browser import dumped, find_browser
from tests.support.paths import ROOT

ENTRY = """\
variants:
  mine:
    mask: causal and {window}(size)
    score: score + slope[h] * (kv_idx - q_idx)
    scalars: {{size: {{type: int, min: 1, example: 256}}}}
    tensors: {{slope: {{dims: [h], grad: true}}}}
"""

BROWSER = find_browser()
needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium or Chrome on this machine")


def page(entry: str, profile: Path, **view: str) -> str:
    """The studio's document for an entry in the address."""
    assert BROWSER is not None
    with Server(0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            fragment = urlencode({"entry": entry, **view}, quote_via=quote)
            return dumped(BROWSER, f"{server.url}#{fragment}", profile)
        finally:
            server.shutdown()
            thread.join()


@needs_browser
def test_the_page_shows_formulas_picture_calls_and_kernels(tmp_path: Path) -> None:
    dom = page(ENTRY.format(window="window"), tmp_path, q_len="512", kv_len="512")
    assert '<ul id="problems" role="status" hidden="">' in dom
    assert "<mi>slope</mi>" in dom
    assert re.search(r'<img id="pairs"[^>]* src="data:image/png;base64,', dom)
    assert re.search(r'<img id="blocks"[^>]* src="data:image/svg\+xml;base64,', dom)
    assert re.search(r"<b>5\d\.\d %</b> of the blocks are skipped", dom)
    assert "mine_ops.torch" in dom
    assert '<option value="hopper_bwd.py">' in dom
    assert "q_tile" in dom
    assert '<option value="natten_morton"' in dom
    # The form is filled from the address.
    assert '<div class="row scalars">' in dom


@needs_browser
def test_the_page_shows_errors_at_their_fields(tmp_path: Path) -> None:
    dom = page(ENTRY.format(window="windo"), tmp_path)
    message = "'windo' is no function of the expression language; did you mean 'window'? (column 12)"
    assert dom.count(message) == 2  # in the list, and at the field
    assert re.search(r'<div class="field wrong" data-field="mask">', dom)


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
