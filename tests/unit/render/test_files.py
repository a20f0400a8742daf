"""The file set of a package: every status, what a write changes, and every refusal."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codegen.render import files
from codegen.render.files import Difference, Status
from codegen.util.errors import CodegenError
from tests.support.package_files import NEW, OLD, VARIANTS, judged, refused, tree


def stamps(root: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of change of every file and folder: equal only if nothing was written, not even the same bytes."""
    stats = {path.relative_to(root).as_posix(): path.stat() for path in root.rglob("*")}
    return {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in stats.items()}


# ------------------------------------------------------------------------------------------------------------ manifest


def test_manifest_is_canonical() -> None:
    text = files.with_manifest({"b.py": "b", "a.py": "a"}, {"z": 1, "y": 2})[files.MANIFEST]
    assert text == files.with_manifest({"a.py": "a", "b.py": "b"}, {"y": 2, "z": 1})[files.MANIFEST]
    assert text.endswith("}\n")
    manifest = json.loads(text)
    assert list(manifest) == ["files", "format", "source", "variants"]
    # sha256sum of the one-letter file
    assert manifest["files"]["a.py"] == "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"
    assert files.MANIFEST not in manifest["files"]


# ------------------------------------------------------------------------------------------------------------- compare


def test_everything_is_missing_from_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert judged(tmp_path / "none") == dict.fromkeys(NEW, Status.MISSING)


def test_nothing_differs_after_a_write(out: Path) -> None:
    assert files.compare(out, OLD) == []


def test_what_a_change_of_the_spec_does_to_each_file(out: Path) -> None:
    assert judged(out) == {
        "MANIFEST.json": Status.STALE,
        "alibi/fwd.py": Status.ORPHAN,
        "causal/fwd.py": Status.STALE,
        "full/bwd/dq.py": Status.MISSING,
    }


@pytest.mark.parametrize("path", ["__init__.py", "causal/fwd.py", "alibi/fwd.py"])
def test_a_hand_edit_is_seen_in_files_that_stay_change_or_go(out: Path, path: str) -> None:
    (out / path).write_text("by hand\n")
    assert judged(out)[path] is Status.EDITED


def test_an_edit_that_equals_the_fresh_text_is_no_difference(out: Path) -> None:
    (out / "causal/fwd.py").write_text(NEW["causal/fwd.py"])
    assert "causal/fwd.py" not in judged(out)


def test_a_file_nobody_rendered_is_an_orphan(out: Path) -> None:
    (out / "notes.txt").write_text("mine")
    assert files.compare(out, OLD) == [Difference(status=Status.ORPHAN, path="notes.txt", is_foreign=True)]
    assert not any(difference.is_foreign for difference in files.compare(out, NEW) if difference.path != "notes.txt")


def with_crlf(out: Path) -> None:
    """Change the line ends of all files, as Git does with core.autocrlf."""
    for path in out.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))


def test_other_line_ends_are_no_edits(out: Path) -> None:
    with_crlf(out)
    assert judged(out, OLD) == {
        "MANIFEST.json": Status.CRLF,
        "alibi/fwd.py": Status.CRLF,
        "causal/fwd.py": Status.CRLF,
    }, "an empty file has no line ends"
    # A change of the spec does to them what it does to other files.
    assert judged(out) == {
        "MANIFEST.json": Status.STALE,
        "alibi/fwd.py": Status.ORPHAN,
        "causal/fwd.py": Status.STALE,
        "full/bwd/dq.py": Status.MISSING,
    }


@pytest.mark.parametrize("fresh", [OLD, NEW], ids=["old", "new"])
def test_a_write_restores_line_ends(out: Path, fresh: dict[str, str]) -> None:
    with_crlf(out)
    files.write(out, fresh)
    assert files.compare(out, fresh) == []


def test_an_edit_with_other_line_ends_is_an_edit(out: Path) -> None:
    (out / "causal/fwd.py").write_bytes(b"by hand\r\n")
    assert judged(out, OLD) == {"causal/fwd.py": Status.EDITED}


@pytest.mark.parametrize("text", ["<<<<<<< ours\n{}", "[]", '{"format": 2, "files": {}}', '{"manifest_version": 3}'])
def test_an_unreadable_manifest_is_edited_and_explains_no_file(out: Path, text: str) -> None:
    (out / files.MANIFEST).write_text(text)
    assert judged(out) == {
        "MANIFEST.json": Status.EDITED,
        "alibi/fwd.py": Status.ORPHAN,
        "causal/fwd.py": Status.EDITED,
        "full/bwd/dq.py": Status.MISSING,
    }


def test_a_missing_manifest_is_missing(out: Path) -> None:
    (out / files.MANIFEST).unlink()
    assert judged(out, OLD) == {"MANIFEST.json": Status.MISSING}


def test_a_difference_reads_as_one_aligned_line() -> None:
    lines = [str(Difference(status=status, path="causal/fwd.py")) for status in Status]
    assert lines == [
        "MISSING  causal/fwd.py",
        "CRLF     causal/fwd.py",
        "STALE    causal/fwd.py",
        "ORPHAN   causal/fwd.py",
        "EDITED   causal/fwd.py",
    ]
    foreign = Difference(status=Status.ORPHAN, path="notes.txt", is_foreign=True)
    assert str(foreign) == "ORPHAN   notes.txt (not made by this generator)"


TEXTS = st.dictionaries(st.sampled_from(["a.py", "b.py", "c/d.py", "c/e.py", "f/g/h.py"]), st.sampled_from("xyz"))


@settings(deadline=None)  # the time that a disk takes says nothing about the code
@given(old=TEXTS, new=TEXTS)
def test_after_any_write_nothing_differs(tmp_path_factory: pytest.TempPathFactory, old: Any, new: Any) -> None:
    out = tmp_path_factory.mktemp("package")
    for texts in (old, new):
        fresh = files.with_manifest(texts, VARIANTS)
        expected = files.compare(out, fresh)
        summary = files.write(out, fresh)
        assert {d.path for d in expected} == {*summary.written, *summary.removed}
        assert {path: content for path, content in tree(out).items() if content is not None} == {
            path: text.encode() for path, text in fresh.items()
        }


# --------------------------------------------------------------------------------------------------------------- write


def test_write_makes_the_folder_and_its_parents(tmp_path: Path) -> None:
    out = tmp_path / "vendored" / "ops"
    summary = files.write(out, NEW)
    assert set(summary.written) == NEW.keys()
    assert str(summary) == "4 written, 0 unchanged, 0 removed"
    assert files.compare(out, NEW) == []


def test_write_changes_only_what_differs_and_leaves_what_is_not_its_own(out: Path) -> None:
    before = stamps(out)["__init__.py"]
    summary = files.write(out, NEW)
    assert summary.written == ("causal/fwd.py", "full/bwd/dq.py", "MANIFEST.json")
    assert summary.unchanged == ("__init__.py",)
    assert summary.removed == ("alibi/fwd.py",)
    assert stamps(out)["__init__.py"] == before
    assert sorted(path for path, content in tree(out).items() if content is not None) == sorted(
        [*NEW, "tuned/h100/causal.json", ".gitattributes"]
    )
    assert not (out / "alibi").exists(), "an empty folder would still import as a namespace package"


def test_a_write_waits_for_another_one_into_the_same_folder(out: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    around = os.open(out.parent, os.O_RDONLY)
    try:
        fcntl.flock(around, fcntl.LOCK_EX)
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(files.write, out, NEW)
            with pytest.raises(TimeoutError):
                writing.result(timeout=0.2)
            assert files.compare(out, NEW)
            fcntl.flock(around, fcntl.LOCK_UN)
            assert writing.result(timeout=60).written
    finally:
        os.close(around)


def test_the_first_write_into_a_new_folder_holds_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process that comes while the folder is being made waits for the same lock."""
    fcntl = pytest.importorskip("fcntl")
    out = tmp_path / "vendored" / "ops"

    def staging(**kwargs: Any) -> Any:
        around = os.open(out.parent, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(around, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(around)
        return mkdtemp(**kwargs)

    mkdtemp = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", staging)
    files.write(out, NEW)
    assert not files.compare(out, NEW)


def test_a_second_write_touches_nothing(out: Path) -> None:
    before = stamps(out.parent)
    assert str(files.write(out, OLD)) == "up to date (4 files)"
    assert stamps(out.parent) == before


def test_write_accepts_a_folder_that_holds_only_hidden_files(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("*.log")
    files.write(tmp_path, NEW)
    assert (tmp_path / ".gitignore").read_text() == "*.log"


def test_a_file_can_become_a_folder(tmp_path: Path) -> None:
    files.write(tmp_path, files.with_manifest({"causal": "file"}, {}))
    fresh = files.with_manifest({"causal/fwd.py": "text"}, {})
    files.write(tmp_path, fresh)
    assert files.compare(tmp_path, fresh) == []


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, force: bool) -> None:
    out = tmp_path / "home"
    out.mkdir()
    (out / "thesis.tex").write_text("precious")
    assert refused(out, force=force) == (
        "OUT: not a folder this generator made: it is not empty and has no MANIFEST.json of ours; "
        "give --out a new folder, or restore MANIFEST.json from version control"
    )


def test_the_refusal_of_a_folder_is_known_before_a_write(out: Path) -> None:
    assert files.refusal(out, NEW) == files.refusal(out.parent / "none", NEW) == ""
    (out / "causal/fwd.py").write_text("by hand")
    assert files.refusal(out, NEW) == "", "that is about a file"
    (out / files.MANIFEST).unlink()
    assert files.refusal(out, NEW).replace(str(out), "OUT") == refused(out)


def test_a_file_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "file"
    out.write_text("precious")
    assert refused(out) == "OUT: not a folder; give --out the folder of the package"
    with pytest.raises(CodegenError, match="not a folder"):
        files.compare(out, NEW)


def test_hand_edits_and_foreign_files_are_refused_together(out: Path) -> None:
    (out / "causal/fwd.py").write_text("by hand")
    (out / "alibi/fwd.py").write_text("by hand")
    (out / "notes.txt").write_text("mine")
    assert refused(out) == (
        "OUT: nothing was written, because these files would be lost:\n"
        "  alibi/fwd.py (edited by hand)\n"
        "  causal/fwd.py (edited by hand)\n"
        "  notes.txt (not made by this generator)\n"
        f"Files edited by hand: {files.KEEP_EDITS}.\n"
        f"Files not made by this generator: {files.KEEP_FOREIGN}."
    )
    files.write(out, NEW, force=True)
    assert files.compare(out, NEW) == []


def test_a_manifest_that_points_outside_the_package_is_not_ours(out: Path) -> None:
    victim = out.parent / "victim"
    victim.write_text("precious")
    manifest = json.loads((out / files.MANIFEST).read_text())
    manifest["files"]["../victim"] = files.with_manifest({"x": "precious"}, {})[files.MANIFEST]
    (out / files.MANIFEST).write_text(json.dumps(manifest))
    assert "not a folder this generator made" in refused(out, force=True)


# -------------------------------------------------------------------------------------------------- links and tampering


@pytest.mark.parametrize("force", [False, True])
def test_a_subfolder_that_is_a_link_is_refused(out: Path, tmp_path: Path, force: bool) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "fwd.py").write_text("precious")
    shutil.rmtree(out / "causal")
    (out / "causal").symlink_to(elsewhere, target_is_directory=True)
    message = refused(out, force=force)
    assert message.startswith(f"OUT/causal: a link to {elsewhere}, through which files would be written elsewhere;")


def test_a_folder_that_is_itself_a_link_is_written(out: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(out, target_is_directory=True)
    files.write(tmp_path / "linked", NEW)
    assert files.compare(out, NEW) == []


TAMPERED = {
    "nested": "[" * 100_000,
    "nul": '{"format": 1, "files": {"a\\u0000b": ""}}',
    "surrogate": '{"format": 1, "files": {"a\\ud800b": ""}}',
    "itself": '{"format": 1, "files": {".": ""}}',
    "tuned": '{"format": 1, "files": {"tuned/h100/causal.json": ""}}',
    "absolute": '{"format": 1, "files": {"/etc/passwd": ""}}',
}


@pytest.mark.parametrize("text", TAMPERED.values(), ids=TAMPERED)
def test_a_tampered_manifest_is_not_ours(out: Path, text: str) -> None:
    (out / files.MANIFEST).write_text(text)
    assert "not a folder this generator made" in refused(out, force=True)
    assert judged(out)[files.MANIFEST] is Status.EDITED
