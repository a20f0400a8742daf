"""A headless browser, if this machine has one, driven by the DevTools protocol over a pair of pipes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

SECONDS = 60
"""How long a page may take to become what a test waits for."""

_COMMANDS, _EVENTS = 3, 4
"""The file descriptors on which the browser reads commands and writes answers."""


def find_browser() -> str | None:
    """The path of Chromium or Chrome, or None. Also None on Windows, where pipes have no numbers."""
    return next((path for path in map(shutil.which, NAMES) if path), None) if os.name == "posix" else None


class Page:
    """One page of a browser that is started for it and ends with it.

    `errors` are exceptions of the page's scripts and what the browser logged as an error.
    """

    def __init__(self, browser: str, url: str, profile: Path, *, width: int = 1280, dark: bool = False) -> None:
        options = ["--headless", "--disable-gpu", "--no-first-run", f"--user-data-dir={profile}"]
        # Chromium refuses to run as root in its sandbox.
        options += ["--no-sandbox"] if os.geteuid() == 0 else []
        to_browser, self._commands = os.pipe()
        self._answers, from_browser = os.pipe()
        ends = (os.dup(to_browser), os.dup(from_browser))
        # A duplicate may itself have one of the two numbers: then it is duplicated again.
        while {_COMMANDS, _EVENTS} & set(ends):
            ends = (os.dup(ends[0]), os.dup(ends[1]))

        def connect() -> None:
            os.dup2(ends[0], _COMMANDS)
            os.dup2(ends[1], _EVENTS)

        self._process = subprocess.Popen(
            [browser, *options, "--remote-debugging-pipe", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=connect,
        )
        for end in (to_browser, from_browser, *ends):
            os.close(end)
        self._session, self._number, self._buffer = "", 0, b""
        self.errors: list[str] = []
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self._ask(f"{domain}.enable")
        self._ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])
        self._ask("Page.navigate", url=url)

    def __enter__(self) -> Page:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def value(self, script: str) -> Any:
        """What an expression of JavaScript gives; a promise is awaited."""
        found = self._ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until an expression of JavaScript holds."""
        script = f"""new Promise((resolve) => {{
            const end = Date.now() + {SECONDS * 1000};
            const look = () => {{
                let holds = false;
                try {{ holds = Boolean({condition}); }} catch (error) {{ /* the element is not there yet */ }}
                if (holds || Date.now() > end) resolve(holds); else setTimeout(look, 50);
            }};
            look();
        }})"""
        assert self.value(script), f"never came true: {condition}"

    def type_into(self, selector: str, text: str) -> None:
        """Replace the text of a field by keystrokes."""
        self.value(f"(() => {{ const f = document.querySelector({selector!r}); f.focus(); f.select(); }})()")
        self._ask("Input.insertText", text=text)

    def _ask(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        command = {"id": self._number, "method": method, "params": parameters, **session}
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            message = self._read()
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                return message["result"]
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(message["params"]["exceptionDetails"]))
            if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.errors.append(str(message["params"]["entry"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._answers, 1 << 16)
            assert part, "the browser ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found
