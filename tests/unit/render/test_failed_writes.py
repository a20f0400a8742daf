"""A write of a package that fails or is killed half way: all or none of it is there, and any spec renders after it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from codegen.render import files
from codegen.render.files import Status
from codegen.util.errors import CodegenError
from tests.support.package_files import NEW, OLD, VARIANTS, judged, refused, tree
from tests.support.paths import ROOT

# ---------------------------------------------------------------------------------------------------------- all or none


def failing(real: Callable[..., Any], at: int, failure: BaseException, after: bool) -> Callable[..., Any]:
    """`real`, but its call number `at` raises: before the work, or, as an interrupt may, just after it."""
    calls = iter(range(10_000))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) != at:
            return real(*args, **kwargs)
        if after:
            real(*args, **kwargs)
        raise failure

    return call


# From OLD to NEW one file is removed, two are exchanged, and one is new.
REPLACES = 4
FAILURES = [OSError(28, "No space left on device"), PermissionError(13, "Permission denied"), KeyboardInterrupt()]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
@pytest.mark.parametrize("at", range(REPLACES))
def test_a_failure_at_any_rename_leaves_the_old_package(
    out: Path, monkeypatch: pytest.MonkeyPatch, at: int, failure: BaseException, after: bool
) -> None:
    before = tree(out.parent)
    monkeypatch.setattr(os, "replace", failing(os.replace, at, failure, after))
    with pytest.raises(type(failure)):
        files.write(out, NEW)
    assert tree(out.parent) == before


def test_the_renames_counted_above_are_all_there_are(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", failing(os.replace, REPLACES, OSError(), after=False))
    files.write(out, NEW)
    assert files.compare(out, NEW) == []


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
@pytest.mark.parametrize("at", range(3))
def test_a_failure_while_staging_leaves_the_old_package(
    out: Path, monkeypatch: pytest.MonkeyPatch, at: int, failure: BaseException
) -> None:
    before = tree(out.parent)
    monkeypatch.setattr(Path, "write_bytes", failing(Path.write_bytes, at, failure, after=True))
    with pytest.raises(type(failure)):
        files.write(out, NEW)
    assert tree(out.parent) == before


def test_a_full_disk_is_an_error_that_names_the_folder(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(Path, "write_bytes", failing(Path.write_bytes, 0, full, after=True))
    with pytest.raises(OSError, match="No space left on device") as error:
        files.write(out, NEW)
    assert error.value.filename == str(out)


def test_a_file_written_to_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(Path, "write_text", failing(Path.write_text, 0, full, after=True))
    with pytest.raises(OSError, match="No space left on device") as error:
        files.write_atomically(tmp_path / "results.json", "{}")
    assert error.value.filename == str(tmp_path / "results.json")
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("at", range(len(NEW)))
def test_a_failed_first_render_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    monkeypatch.setattr(os, "replace", failing(os.replace, at, KeyboardInterrupt(), after=True))
    with pytest.raises(KeyboardInterrupt):
        files.write(tmp_path / "vendored" / "ops", NEW)
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("at", range(2))
def test_a_failure_while_a_file_becomes_a_folder_restores_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    files.write(tmp_path, files.with_manifest({"causal": "file"}, {}))
    before = tree(tmp_path)
    monkeypatch.setattr(os, "replace", failing(os.replace, at, OSError(28, "full"), after=True))
    with pytest.raises(OSError, match="full"):
        files.write(tmp_path, files.with_manifest({"causal/fwd.py": "text"}, {}))
    assert tree(tmp_path) == before


def test_old_files_that_cannot_be_put_back_are_kept_and_named(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.replace, iter(range(100))

    def broken_from_the_second_on(*args: Any) -> None:
        if next(calls) > 0:
            raise PermissionError(13, "Permission denied")
        real(*args)

    monkeypatch.setattr(os, "replace", broken_from_the_second_on)
    with pytest.raises(CodegenError, match="could not be put back") as error:
        files.write(out, NEW)
    (stage,) = out.glob(".render-*")
    assert str(stage / "old") in str(error.value)
    assert (stage / "old" / "alibi/fwd.py").read_text() == OLD["alibi/fwd.py"]
    monkeypatch.undo()
    files.write(out, NEW)
    assert (stage / "old" / "alibi/fwd.py").is_file(), "a later render removed the only copy"


@pytest.mark.parametrize("failure", [OSError(38, "no links here"), NotImplementedError()], ids=["disk", "platform"])
def test_without_hard_links_the_old_files_are_copied(
    out: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    before = tree(out.parent)
    monkeypatch.setattr(os, "link", failing(os.link, 0, failure, after=False))
    monkeypatch.setattr(os, "replace", failing(os.replace, REPLACES - 1, KeyboardInterrupt(), after=False))
    with pytest.raises(KeyboardInterrupt):
        files.write(out, NEW)
    assert tree(out.parent) == before


# -------------------------------------------------------------------------------------------------------------- kill -9

# Writes NEW as another process, which kills itself at its call number `at` of a function: before the work or after it.
KILLED = """
import json, os, signal, sys
from pathlib import Path
from codegen.render import files
out, fresh, name, at, after = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5]
owner = Path if name == "write_bytes" else os
real, calls = getattr(owner, name), iter(range(10_000))
def call(*args, **kwargs):
    last = next(calls) == at
    if last and after == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    real(*args, **kwargs)
    if last:
        os.kill(os.getpid(), signal.SIGKILL)
setattr(owner, name, call)
files.write(out, fresh)
"""
KILLS = [("write_bytes", at) for at in (0, 2)] + [("link", at) for at in range(2)]
KILLS += [("replace", at) for at in range(REPLACES)] + [("rmdir", 0)]
with_kills = pytest.mark.parametrize(("name", "at"), KILLS, ids=lambda value: str(value))

CHANGED = files.with_manifest({"__init__.py": "", "causal/fwd.py": "third\n", "window/fwd.py": "window\n"}, VARIANTS)


def kill(out: Path, name: str, at: int, after: str) -> None:
    """Write NEW in a process that is killed while it writes."""
    command = [sys.executable, "-c", KILLED, str(out), json.dumps(NEW), name, str(at), after]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="the platform has no kill -9")
@pytest.mark.parametrize("after", ["before", "after"])
@with_kills
def test_after_a_kill_any_spec_renders(out: Path, name: str, at: int, after: str) -> None:
    kill(out, name, at, after)
    assert (out / files.MANIFEST).is_file(), "at no moment a package is without its manifest"
    files.write(out, CHANGED)
    assert files.compare(out, CHANGED) == []
    assert list(out.glob(".render-*")) == []


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="the platform has no kill -9")
@pytest.mark.parametrize("at", range(len(NEW)))
def test_after_a_killed_first_render_any_spec_renders(tmp_path: Path, at: int) -> None:
    out = tmp_path / "package"
    kill(out, "replace", at, "after")
    files.write(out, CHANGED)
    assert files.compare(out, CHANGED) == []
    assert list(out.glob(".render-*")) == []


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="the platform has no kill -9")
def test_a_hand_edit_after_a_kill_is_seen(out: Path) -> None:
    kill(out, "replace", 1, "after")
    assert judged(out, CHANGED)["causal/fwd.py"] is Status.STALE
    (out / "causal/fwd.py").write_text("by hand")
    assert judged(out, CHANGED)["causal/fwd.py"] is Status.EDITED
    assert "causal/fwd.py (edited by hand)" in refused(out, CHANGED)
