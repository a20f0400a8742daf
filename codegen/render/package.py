"""Spec to package: every file of `generated/` as formatted text, in memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jinja2

from codegen.analysis.call_modes import Mode
from codegen.analysis.gradients import is_deterministic
from codegen.analysis.token_order import by_row
from codegen.arch import chips, tile_rules
from codegen.arch.hopper import FAMILY
from codegen.ir.expr import TensorSpec
from codegen.ir.printers import FormulaPrinter
from codegen.plan import dialects, hopper
from codegen.plan.device import device_functions
from codegen.plan.frameworks import Framework
from codegen.plan.hopper_backward import BackwardPlan
from codegen.plan.hopper_forward import ForwardPlan
from codegen.plan.op import op_plan
from codegen.plan.op_source import OpSource
from codegen.plan.torch_modules import ModulePlan, module_plans
from codegen.plan.traits import VariantTraits, variant_traits
from codegen.plan.variant import VariantPlan, plan
from codegen.render.arch_tables import arch_tables, hopper_fields
from codegen.render.code_hash import HASH_LENGTH, kernel_hash
from codegen.render.formatting import format_files
from codegen.spec import symbols
from codegen.spec.model import Spec, Variant
from codegen.util.shipped import shipped_path
from codegen.util.text import comment, docstring

LICENCE = "# SPDX-License-Identifier: Apache-2.0"
"""The first line of every rendered Python file."""

_PLACEHOLDER = "0" * HASH_LENGTH


@dataclass(frozen=True, kw_only=True)
class FileHeader:
    """What the header lines of one generated file say. `entry` is the spec entry as comment lines."""

    template: str
    entry: str = ""
    hash: str = _PLACEHOLDER
    licence: str = LICENCE


def templates_path() -> Path:
    """The folder of the Jinja templates."""
    return shipped_path("templates")


def make_environment(folder: Path) -> jinja2.Environment:
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    env.filters |= {"docstring": docstring, "device_functions": device_functions}
    env.filters |= dialects.FILTERS | symbols.FILTERS
    env.tests["renamed_op"] = symbols.is_renamed
    return env


KERNELS = {"fwd": "fwd", "bwd_dq": "dq", "bwd_dkdv": "dkdv"}
"""File stem of each kernel -> the attribute of `VariantPlan` that holds its plan."""

HOPPER_KERNELS = {stem: f"hopper_{stem}" for stem in ("fwd", "bwd", "bwd_wide", "delta")}
"""The same of Hopper's family, whose files are `hopper_<stem>.py`."""

KERNELS_FILE = "_runtime/kernels.py"
"""The file that says which code each kernel is."""

INIT_FILES = {Framework.TORCH: "torch/__init__.py", Framework.JAX: "jax.py"}
"""The module of all ops of a framework; that of torch has the modules of `torch.nn` beside it."""

RUNTIME = "_runtime"
"""The folder of a package that holds what all its ops share."""


def render(spec: Spec) -> dict[str, str]:
    """All files of the package but its manifest: path inside the package -> text, sorted by path.

    The same spec always gives the same bytes.
    """
    env = make_environment(templates_path())
    files: dict[str, str] = {}
    traits: dict[str, VariantTraits] = {}
    modules = dict(zip(spec.variants, module_plans(spec.variants.values()), strict=True))
    for name, variant in spec.variants.items():
        plans = _plans(variant)
        files.update(_variant_files(env, name, plans, modules[name]))
        traits[name] = variant_traits(variant, plans)
    names = list(spec.variants)
    files["__init__.py"] = _fill(env, "host/package_init.py.jinja", variants=names)
    for framework in Framework:
        files[INIT_FILES[framework]] = _fill(env, f"host/{framework}_init.py.jinja", variants=names)
    files["torch/nn.py"] = _fill(env, "host/torch_nn.py.jinja", modules=list(modules.values()))
    files["_runtime/archs.py"] = _archs_file(env, spec)
    files |= _runtime_files()
    files["py.typed"] = ""
    formatted = format_files(files)
    hashes = {name: {mode.value: _kernel_hashes(formatted, name, mode) for mode in Mode} for name in names}
    fields = {name: list(asdict(of_variant).items()) for name, of_variant in traits.items()}
    formatted |= format_files({KERNELS_FILE: _fill(env, "host/kernels.py.jinja", hashes=hashes, traits=fields)})
    return {path: _sign(formatted[path]) for path in sorted(formatted)}


def render_variant(variant: Variant) -> dict[str, str]:
    """The kernels and ops of one variant, formatted: path inside the package -> text. They are the files that `render`
    writes, but for the hashes of what all variants share."""
    (module,) = module_plans([variant])
    files = format_files(_variant_files(make_environment(templates_path()), variant.name, _plans(variant), module))
    return {path: _sign(files[path]) for path in sorted(files)}


def _archs_file(env: jinja2.Environment, spec: Spec) -> str:
    """Chips, the rules for tiles, and the tiles of the spec and of each variant that has its own."""
    return _fill(
        env,
        "host/archs.py.jinja",
        archs=arch_tables(spec.archs),
        variant_archs={name: arch_tables(v.archs) for name, v in spec.variants.items() if v.archs},
        chips=chips,
        limits=tile_rules,
        hopper_family=hopper_fields(FAMILY),
    )


def _runtime_files() -> dict[str, str]:
    """The runtime's modules, licensed: `runtime/package/` goes to the top of the package, all else to `_runtime/`."""
    root = shipped_path("runtime")
    sources = {path.relative_to(root): path for path in sorted(root.rglob("*.py"))}
    targets = {name.name if name.parts[0] == "package" else f"{RUNTIME}/{name.as_posix()}": name for name in sources}
    return {target: f"{LICENCE}\n{sources[name].read_text(encoding='utf-8')}" for target, name in targets.items()}


def _plans(variant: Variant) -> dict[Mode, VariantPlan]:
    try:
        return {mode: plan(variant, mode) for mode in Mode}
    except Exception as error:
        error.add_note(f"while planning the kernels of the variant '{variant.name}'")
        raise


def _variant_files(
    env: jinja2.Environment, name: str, plans: Mapping[Mode, VariantPlan], module: ModulePlan
) -> dict[str, str]:
    files: dict[str, str] = {}
    context = _context(plans[Mode.DENSE])
    for mode, planned in plans.items():
        files.update(_kernel_files(env, _mode_folder(name, mode), planned))
    for path in _copies(files, plans):
        del files[path]
    # The plan whose hopper_delta a mode runs.
    deltas = {mode: plans[mode if _delta_path(name, mode) in files else Mode.DENSE] for mode in plans}
    for mode, planned in plans.items():
        files[f"{_mode_folder(name, mode)}/__init__.py"] = _mode_init_file(env, planned, deltas[mode])
    for framework in Framework:
        ops = {mode: OpSource.of(op_plan(planned, framework)) for mode, planned in plans.items()}
        if framework is Framework.TORCH:
            # Launches are the same in every framework.
            for mode, planned in plans.items():
                files[f"{_mode_folder(name, mode)}/launch.py"] = _launch_file(env, planned, ops[mode], deltas[mode])
        given = {"op": ops[Mode.DENSE], **{f"{mode}_op": ops[mode] for mode in (Mode.PACKED, Mode.SEGMENTED)}}
        for stem in (f"{framework}_op", f"{framework}_reference"):
            files[f"{name}/{stem}.py"] = _fill(env, f"host/{stem}.py.jinja", module=module, **given, **context)
    return files


def _copies(files: Mapping[str, str], plans: Mapping[Mode, VariantPlan]) -> list[str]:
    """The kernel files of segmented calls that differ from the file of dense calls in their kernels' names alone."""
    dense, segmented = plans[Mode.DENSE], plans[Mode.SEGMENTED]
    path = _delta_path(segmented.variant.name, Mode.SEGMENTED)
    renamed = files[path].replace(f"def {segmented.symbol}_", f"def {dense.symbol}_")
    renamed = renamed.replace(f"from {_runtime_of(Mode.SEGMENTED)}.", f"from {_runtime_of(Mode.DENSE)}.")
    renamed = renamed.replace(f"`{_TITLES[Mode.SEGMENTED]}", "`")
    return [path] if renamed == files[_delta_path(dense.variant.name, Mode.DENSE)] else []


def _delta_path(name: str, mode: Mode) -> str:
    return f"{_mode_folder(name, mode)}/hopper_delta.py"


def _mode_folder(name: str, mode: Mode) -> str:
    return name if mode is Mode.DENSE else f"{name}/{mode.value}"


def _runtime_of(mode: Mode) -> str:
    """The package that the files of a mode's folder import shared code from."""
    return f".{'.' if mode is Mode.DENSE else '..'}{RUNTIME}"


_TITLES = {Mode.DENSE: "", Mode.PACKED: ", packed sequences", Mode.SEGMENTED: ", with segment ids"}


def _context(planned: VariantPlan) -> dict[str, Any]:
    title, entry = _TITLES[planned.mode], _entry(planned.variant)
    return {"variant": planned.variant, "symbol": planned.symbol, "title": title, "entry": entry}


def _entry(variant: Variant) -> str:
    return comment(f"variant: {variant.entry}")


def _launch_file(env: jinja2.Environment, planned: VariantPlan, op: OpSource, delta: VariantPlan) -> str:
    """The launches of one mode's kernels. `delta`: of which mode the kernel `hopper_delta` is."""
    dense = planned.mode is Mode.DENSE
    given = {"op": op, "plan": planned, "runtime": _runtime_of(planned.mode)}
    # Whose modules the kernels are: the folder that the launches lie in.
    folder = planned.variant.name if dense else planned.mode.value
    given |= {"folder": folder, "delta_symbol": delta.symbol}
    return _fill(env, "host/launch.py.jinja", **given, **_context(planned))


def _mode_init_file(env: jinja2.Environment, planned: VariantPlan, delta: VariantPlan) -> str:
    """The package of a mode, by which launches and kernels are imported when they are first needed."""
    runtime = _runtime_of(planned.mode)
    own = [*KERNELS, *(f"hopper_{stem}" for stem in HOPPER_KERNELS), "launch"]
    if planned.lists is not None:
        own.append(planned.lists.module)
    modules: dict[str, list[str]] = {".": own}
    if delta.mode is not planned.mode:
        own.remove("hopper_delta")
        modules[".."] = ["hopper_delta"]
    if planned.variant.decay:
        # The cumulative sums of a segmented call are those of a dense one.
        modules.setdefault(".." if planned.mode is Mode.SEGMENTED else ".", []).append("decay")
    if planned.mode is Mode.SEGMENTED and by_row(planned.written) is not None:
        modules[f"{runtime}.core"] = ["token_order"]
    # In the order of imports: the packages farthest up first.
    listed = {package: sorted(modules[package]) for package in sorted(modules, key=lambda x: (-x.count("."), x))}
    return _fill(env, "host/variant_init.py.jinja", modules=listed, runtime=runtime, **_context(planned))


def _kernel_files(env: jinja2.Environment, folder: str, planned: VariantPlan) -> dict[str, str]:
    """The kernels of one mode."""
    context = _context(planned) | {"runtime": _runtime_of(planned.mode)}
    files = {
        f"{folder}/{stem}.py": _fill(env, f"portable/{stem}.py.jinja", kernel=getattr(planned, attribute), **context)
        for stem, attribute in KERNELS.items()
    }
    hopper_plans: dict[str, dict[str, Any]] = {
        "fwd": {"forward": ForwardPlan(planned.hopper_fwd, planned.variant)},
        "bwd": {"backward": BackwardPlan(planned.hopper_bwd, planned.variant, is_wide=False)},
        "bwd_wide": {"backward": BackwardPlan(planned.hopper_bwd_wide, planned.variant, is_wide=True)},
        "delta": {},
    }
    fuses = hopper.fuses_backward(planned)
    files |= {
        f"{folder}/hopper_{stem}.py": _fill(
            env,
            f"hopper/{stem}.py.jinja",
            kernel=getattr(planned, attribute),
            fuses_backward=fuses,
            **hopper_plans[stem],
            **context,
        )
        for stem, attribute in HOPPER_KERNELS.items()
    }
    if planned.lists is not None:
        stem = planned.lists.module
        files[f"{folder}/{stem}.py"] = _fill(env, f"portable/{stem}.py.jinja", lists=planned.lists, **context)
    if planned.variant.decay and planned.mode is not Mode.SEGMENTED:
        files[f"{folder}/decay.py"] = _fill(env, "portable/decay.py.jinja", layout=planned.layout, **context)
    return files


def _kernel_hashes(files: Mapping[str, str], name: str, mode: Mode) -> dict[str, str]:
    """Pass -> hash of its kernel's code and of what it imports, for the kernels of one mode."""
    own = (hopper.FORWARD, hopper.BACKWARD, hopper.WIDE_BACKWARD, hopper.DELTA)
    stems = KERNELS | {stem: stem for stem in own}
    # A file that the mode lacks is the dense mode's.
    folders = (_mode_folder(name, mode), _mode_folder(name, Mode.DENSE))
    paths = {pass_name: [f"{folder}/{stem}.py" for folder in folders] for stem, pass_name in stems.items()}
    found = {pass_name: next(filter(files.__contains__, each), "") for pass_name, each in paths.items()}
    return {pass_name: kernel_hash(path, files) for pass_name, path in found.items() if path}


def _fill(env: jinja2.Environment, template: str, **context: Any) -> str:
    header = FileHeader(template=template, entry=context.pop("entry", ""))
    try:
        return env.get_template(template).render(file=header, **context)
    except Exception as error:
        error.add_note(f"while filling the template {template} for {header.entry.removeprefix('# ') or 'the package'}")
        raise


def _sign(text: str) -> str:
    """Put the hash of a file's own text into its header."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]
    return text.replace(f"# hash: {_PLACEHOLDER}", f"# hash: {digest}", 1)


def manifest_entries(spec: Spec) -> dict[str, Any]:
    """What the manifest says of each variant, for tests, tuners and benchmarks."""
    return {
        name: {
            "doc": v.doc,
            "mask": v.mask_text,
            "score": v.score_text,
            "tensors": {t.name: _tensor_entry(t) for t in v.tensors.values()},
            "scalars": {s.name: s.type.value for s in v.scalars.values()},
            "scalar_ranges": {s.name: [s.minimum, s.maximum] for s in v.scalars.values()},
            "scalar_examples": {s.name: s.example for s in v.scalars.values()},
            "sink": v.sink,
            "decay": v.decay,
            "deterministic": is_deterministic(v),
            "dropout": v.dropout,
            "head_dims": list(spec.defaults.head_dims),
            "dtypes": list(spec.defaults.dtypes),
            "hash": _entry_hash(v.entry),
        }
        for name, v in spec.variants.items()
    }


def _tensor_entry(tensor: TensorSpec) -> dict[str, Any]:
    example = "" if tensor.example is None else FormulaPrinter().text(tensor.example)
    return {"dims": list(tensor.dims), "dtype": tensor.dtype, "grad": tensor.grad, "example": example}


def _entry_hash(entry: str) -> str:
    return hashlib.sha256(json.dumps(entry).encode()).hexdigest()[:HASH_LENGTH]
