"""Checks names on the command line against the known ones, and paths of configs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from codegen.util.errors import CodegenError, did_you_mean


def checked_names(option: str, names: Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    """`names` without repetition, in their order; raises `CodegenError` for one that is not `known`.

    >>> checked_names("--passes", ["dq", "fwd", "dq"], ["fwd", "dkdv", "dq"])
    ('dq', 'fwd')
    >>> checked_names("--passes", ["fwdd"], ["fwd", "dkdv", "dq"])
    Traceback (most recent call last):
    codegen.util.errors.CodegenError: --passes: expected one of fwd, dkdv, dq, got 'fwdd'; did you mean 'fwd'?
    """
    known = tuple(known)
    found = tuple(dict.fromkeys(names))
    for name in found:
        if name not in known:
            hint = did_you_mean(name, known)
            raise CodegenError(f"{option}: expected one of {', '.join(known)}, got '{name}'{hint}")
    return found


def listed_names(option: str, text: str | None, known: Iterable[str]) -> tuple[str, ...]:
    """The names of a list such as `sm_80,sm_90`, checked; empty if the option was not given.

    >>> listed_names("--arch", "sm_80,sm_90", ["sm_80", "sm_89", "sm_90"]), listed_names("--arch", None, ["sm_80"])
    (('sm_80', 'sm_90'), ())
    """
    return () if text is None else checked_names(option, text.split(","), known)


def check_config(option: str, config: Path) -> None:
    """Check that a path is that of a model's config, or of a folder with a `config.json`; else raise `CodegenError`."""
    if config.is_file() or (config / "config.json").is_file():
        return
    problem = "which holds none" if config.is_dir() else "which does not exist"
    raise CodegenError(f"{option}: expected a config.json, or a folder that holds one, got {config}, {problem}")
