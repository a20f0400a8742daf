"""`codegen port`: makes entries from the mods of a file, and reports the mods that cannot be translated."""

from __future__ import annotations

import ast
import re
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from codegen.load.spec_file import library_macros, load
from codegen.port.entry import DeclarationError, Entry, Formula, make_entry, yaml_lines
from codegen.port.modules import Project
from codegen.port.same import fingerprint
from codegen.port.statements import FileReader, Issue
from codegen.port.values import (
    BlockMask,
    Closure,
    Kind,
    Mod,
    TranslationError,
    Unread,
    defaults_around,
    is_mod,
    is_score,
)
from codegen.spec.names import variant_problem
from codegen.util.errors import CodegenError, SpecError, did_you_mean

MOST_PASSES = 6
"""Most readings of a mod: each settles the kind of at least one more captured name, and more than two are rare."""

_VERBS = re.compile(r"^(generate|make|get|create|build)_")
_ENDINGS = re.compile(r"_(mask_mod|score_mod|mask|mod|fn)$")


@dataclass(frozen=True)
class Choice:
    """One entry to make; `parts` are the names of its mods in the file."""

    name: str
    parts: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class Report:
    """The spec that was made, and what could not be translated, as lines."""

    text: str
    failures: tuple[str, ...]
    ported: tuple[str, ...]


@dataclass
class _Result:
    entry: Entry | None = None
    issues: list[Issue] = field(default_factory=list)


def port(path: Path, functions: Sequence[str] = ()) -> Report:
    """The entries of a file's mods; `functions` names some of them, `mask+score` a pair that makes one entry.

    Raises `CodegenError` if the file is no Python, has no mods, or has none of the names.
    """
    try:
        tree = ast.parse(path.read_bytes())  # which finds the encoding as Python does
    except SyntaxError as error:
        place = path if error.lineno is None else f"{path}:{error.lineno}"
        raise CodegenError(f"{place}: this is no Python: {error.msg}") from None
    except (RecursionError, ValueError) as error:
        raise CodegenError(f"{path}: this cannot be parsed: {error}") from None
    project = Project(path, tree)
    reader = FileReader(project, {})
    choices = _named_choices(path, reader, functions) if functions else _choices(reader)
    macros = library_macros()
    if not functions:
        choices = [c for c in choices if not (_is_base(reader, c) and _translate(project, c, macros).issues)]
    choices = _unique(choices)
    if not choices:
        wanted = "mask_mod(b, h, q_idx, kv_idx) or score_mod(score, b, h, q_idx, kv_idx)"
        raise CodegenError(f"{path}: no function like {wanted} was found")
    blocks, failures, ported = [], [], []
    results = [(choice, _translate(project, choice, macros)) for choice in choices]
    _check(results, path)
    for choice, result in results:
        lines = [f"{issue.file}:{issue.line}: {choice.name}: {issue.reason}: {issue.code}" for issue in result.issues]
        failures += lines
        if result.entry is None:
            blocks.append("\n".join([f"  # {choice.name} is not ported:", *(f"  #   {line}" for line in lines)]))
        else:
            ported.append(choice.name)
            blocks.append("\n".join(yaml_lines(result.entry)))
    head = f"# Ported from {path.name} by `codegen port`. What a comment calls guessed is to be checked.\n"
    key = "variants:\n" if ported else "# No entry could be made.\n"
    return Report(head + key + "\n".join(blocks) + "\n", tuple(failures), tuple(ported))


def _choices(reader: FileReader) -> list[Choice]:
    """The pairs that calls of flex_attention use, and every other mod. A factory that the file itself calls is left
    out."""
    paired: set[str] = set()
    choices: list[Choice] = []
    for pair in reader.pairs:
        mask, score = pair.mask.mask if isinstance(pair.mask, BlockMask) else pair.mask, pair.score
        names = tuple(reader.name_of(mod) for mod in (mask, score) if is_mod(mod) and not isinstance(mod, Unread))
        parts = tuple(name for name in names if name is not None)
        if len(parts) == 2:
            if parts not in [choice.parts for choice in choices]:
                choices.append(Choice(_entry_name(reader, parts), parts, pair.line))
            paired |= set(parts)
    unread: set[str] = set()
    for found in {found.name: found for found in reader.found}.values():
        if found.name not in paired and found.made_by not in reader.instantiated:
            mod = fingerprint(found.mod)
            if isinstance(found.mod, Unread) and mod in unread:
                continue
            unread.add(mod)
            choices.append(Choice(_entry_name(reader, (found.name,)), (found.name,), found.line))
    return sorted(choices, key=lambda choice: choice.line)


def _named_choices(path: Path, reader: FileReader, functions: Sequence[str]) -> list[Choice]:
    known = {found.name: found for found in reader.found}
    choices = []
    for function in functions:
        parts = tuple(function.split("+"))
        for part in parts:
            if part not in known:
                hint = did_you_mean(part, known) or f"; it has {', '.join(known) or 'none'}"
                raise CodegenError(f"--function: {path} has no mask_mod or score_mod '{part}'{hint}")
        kinds = [is_score(known[part].mod) for part in parts]
        if len(parts) > 2 or len(set(kinds)) < len(kinds):
            raise CodegenError(f"--function: expected one mask and one score joined by '+', got {function!r}")
        choices.append(Choice(_entry_name(reader, parts), parts, known[parts[0]].line))
    return choices


def _entry_name(reader: FileReader, parts: Sequence[str]) -> str:
    """The name of an entry of one or two mods."""
    titles = {found.name: found.title or found.name for found in reader.found}
    return "_".join(dict.fromkeys(_short_name(titles[part]) for part in parts))


def _is_base(reader: FileReader, choice: Choice) -> bool:
    """True for a function that the file completes by `partial`, and may be no mod without these arguments."""
    mods = _mods(reader, choice)
    nodes = [found.mod.node for found in reader.found if isinstance(found.mod, Closure) and found.mod.bound]
    return all(isinstance(mod, Closure) and not mod.bound and mod.node in nodes for mod in mods)


def _unique(choices: Sequence[Choice]) -> list[Choice]:
    taken: set[str] = set()
    unique = []
    for choice in choices:
        name = choice.name
        for number in range(2, len(choices) + 2):
            if name.lower() not in taken:
                break
            name = f"{choice.name}_{number}"
        taken.add(name.lower())
        unique.append(Choice(name, choice.parts, choice.line))
    return unique


def _short_name(name: str) -> str:
    """The name of an entry.

    >>> _short_name("generate_sliding_window"), _short_name("_alibi_score_mod")
    ('sliding_window', 'alibi')
    """
    plain = name.strip("_")
    short = _ENDINGS.sub("", _VERBS.sub("", plain)) or plain
    return short if variant_problem(short) is None else f"own_{short}"


def _translate(project: Project, choice: Choice, macros: Collection[str]) -> _Result:
    guesses: dict[str, Kind] = {}
    for _ in range(MOST_PASSES):
        before = dict(guesses)
        reader = FileReader(project, dict(guesses))
        formula = _formula(reader, choice, guesses)
        if guesses == before:
            break
    if formula is None or reader.issues:
        return _Result(issues=reader.issues)
    doc = f"Ported from {' and '.join(choice.parts)} of {project.path.name}."
    try:
        entry = make_entry(choice.name, doc, formula, macros)
    except DeclarationError as conflict:
        return _Result(issues=[Issue(choice.line, " and ".join(choice.parts), str(conflict), project.path)])
    entry.notes += [f"nothing checks `{assertion}`; a scalar may have min and max" for assertion in reader.assertions]
    entry.notes += [f"{name} is taken to be given: where it is None, port a mod without it" for name in reader.given]
    defaults = {name: value for mod in _mods(reader, choice) for name, value in defaults_around(mod).items()}
    entry.notes += [
        f"argument {name}: its default, {value!r}, is written in; port a call of the factory for another value"
        for name, value in defaults.items()
        if name in reader.defaults_read
    ]
    for name, constant in reader.attributes_read.items():
        is_default = "; change the default in the file for another one" if constant.default_of else ""
        entry.notes.append(f"{name}: its value, {constant.value!r}, is written in{is_default}")
    if not (entry.mask or entry.score):
        entry.notes.append("every pair attends with its score unchanged")
    return _Result(entry=entry)


def _mods(reader: FileReader, choice: Choice) -> list[Mod]:
    return [{f.name: f for f in reader.found}[part].mod for part in choice.parts]


def _formula(reader: FileReader, choice: Choice, guesses: dict[str, Kind]) -> Formula | None:
    """The expressions of an entry; None if one of them has a problem, which the reader holds. What its mods say about
    the kinds of names, which `guesses` gets, and about captured values, goes before what the rest of the file says."""
    elsewhere, seen = reader.guesses, reader.seen
    reader.guesses, reader.seen, reader.attributes_read = guesses, {}, {}
    found: dict[bool, ast.expr] = {}
    mods = _mods(reader, choice)
    for mod in mods:
        node = reader.node_of(mod)
        with reader.strictly():
            try:
                found[is_score(mod)] = reader.expression(mod, node).node
            except TranslationError as error:
                reader.report(error)
    if len(found) < len(mods):
        return None
    return Formula(
        mask=found.get(False),
        score=found.get(True),
        guesses={**elsewhere, **guesses},
        seen={**seen, **reader.seen},
    )


def _check(results: Sequence[tuple[Choice, _Result]], path: Path) -> None:
    """Load the entries, and turn one that the loader refuses into an issue."""
    if _problem([result.entry for _, result in results if result.entry is not None]) is None:
        return
    for choice, result in results:
        entry = result.entry
        problem = None if entry is None else _problem([entry])
        if entry is not None and problem is not None:
            result.issues.append(Issue(choice.line, entry.score or entry.mask, problem, path))
            result.entry = None


def _problem(entries: Sequence[Entry]) -> str | None:
    """The loader's messages about entries, None if they load."""
    if not entries:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ported.yaml"
        path.write_text(
            "variants:\n" + "\n".join(line for entry in entries for line in yaml_lines(entry)) + "\n", encoding="utf-8"
        )
        try:
            load(path)
        except SpecError as error:
            messages = [problem.message for problem in error.problems]
            return f"the entry would not load: {'; '.join(messages)}"
    return None
