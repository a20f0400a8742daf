"""A headless browser, where this machine has one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

SECONDS = 180


def find_browser() -> str | None:
    """The path of Chromium or Chrome."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


def dumped(browser: str, url: str, profile: Path, *, size: str = "1280,1000") -> str:
    """The document of a page as HTML, once its scripts and requests are done."""
    options = ["--headless", "--disable-gpu", "--no-first-run", f"--user-data-dir={profile}", f"--window-size={size}"]
    # Chromium refuses to run as root in its sandbox.
    options += ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    command = [browser, *options, "--virtual-time-budget=20000", "--dump-dom", url]
    result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    return result.stdout
