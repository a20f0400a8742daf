"""Spec to package: every file of `generated/` as formatted text, in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from codegen.analysis.call_modes import Mode
from codegen.analysis.token_order import by_row
from codegen.arch import chips, tile_rules
from codegen.arch.hopper import FAMILY
from codegen.ir.syntax import TOO_DEEP
from codegen.plan import kernel_files
from codegen.plan.code import dialects
from codegen.plan.code.device import device_functions
from codegen.plan.hopper.backward import BackwardPlan
from codegen.plan.hopper.forward import ForwardPlan
from codegen.plan.hopper.fp8 import Fp8ForwardPlan
from codegen.plan.hopper.roles import joined_imports
from codegen.plan.hopper.split import SplitKeysPlan, SplitRowsPlan
from codegen.plan.ops.frameworks import Framework
from codegen.plan.ops.op import op_plan
from codegen.plan.ops.source import OpSource
from codegen.plan.ops.torch_modules import ModulePlan, module_plans
from codegen.plan.paged.hopper import paged_hopper_plan
from codegen.plan.paged.kernels import PagedPlan, paged_plan
from codegen.plan.paged.latent import latent_plan
from codegen.plan.traits import VariantTraits, variant_traits
from codegen.plan.variant import VariantPlan, plan
from codegen.plan.work import work_source
from codegen.render.arch_tables import arch_tables, hopper_fields
from codegen.render.code_hash import HASH_LENGTH, kernel_hash
from codegen.render.formatting import format_files
from codegen.spec import symbols
from codegen.spec.model import Spec, Variant
from codegen.util.collection import without_collection
from codegen.util.errors import CodegenError
from codegen.util.shipped import shipped_path
from codegen.util.text import comment, docstring

LICENCE = "# SPDX-License-Identifier: Apache-2.0"
"""The first line of every rendered Python file."""

_PLACEHOLDER = "0" * HASH_LENGTH

_ORIGIN = "# Generated from variants.yaml;"
"""The beginning of a header's second line, with the name that spec files usually have."""


@dataclass(frozen=True, kw_only=True)
class FileHeader:
    """The contents of the header lines of one generated file. `entry` is the spec entry as comment lines."""

    template: str
    entry: str = ""
    hash: str = _PLACEHOLDER
    licence: str = LICENCE


def templates_path() -> Path:
    """The folder of the Jinja templates."""
    return shipped_path("templates")


@cache
def make_environment(folder: Path) -> jinja2.Environment:
    """The environment of a folder of templates. A process makes one for each folder, because compiling templates takes
    most of the time of a render. A template that changes is compiled anew."""
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


KERNELS_FILE = "_runtime/kernels.py"
"""The file with the code hash of each kernel, and with the traits of each variant."""

INIT_FILES = {Framework.TORCH: "torch/__init__.py", Framework.JAX: "jax.py"}
"""The module of all ops of a framework; that of torch has the modules of `torch.nn` beside it."""

RUNTIME = "_runtime"
"""The folder of a package that holds what all its ops share."""

INTEGRATIONS = "integrations"
"""The folder of hooks into other libraries, in a checkout and in a package."""


@without_collection()
def render(spec: Spec) -> dict[str, str]:
    """All files of the package but its manifest: path inside the package -> text, sorted by path.

    The same spec always gives the same bytes.
    """
    env = make_environment(templates_path())
    files: dict[str, str] = {}
    traits: dict[str, VariantTraits] = {}
    modules = dict(zip(spec.variants, module_plans(spec.variants.values()), strict=True))
    plans = {name: _plans(variant) for name, variant in spec.variants.items()}
    deltas = {name: _deltas(env, own) for name, own in plans.items()}
    for name, variant in spec.variants.items():
        files.update(_variant_files(env, plans[name], deltas[name], modules[name]))
        traits[name] = variant_traits(variant, plans[name])
    names = list(spec.variants)
    files["__init__.py"] = _fill(env, "host/package_init.py.jinja", variants=names)
    for framework in Framework:
        files[INIT_FILES[framework]] = _fill(env, f"host/{framework}_init.py.jinja", variants=names)
    files["torch/nn.py"] = _fill(env, "host/torch_nn.py.jinja", modules=list(modules.values()))
    files["_runtime/archs.py"] = _archs_file(env, spec)
    files |= _runtime_files()
    files["py.typed"] = ""
    formatted = format_files(files)
    hashes = {
        name: {mode.value: _kernel_hashes(formatted, own, mode, deltas[name][mode]) for mode in own}
        for name, own in plans.items()
    }
    for name, own in plans.items():
        if (paged := paged_plan(own[Mode.DENSE].written)) is not None:
            hashes[name][kernel_files.PAGED] = _paged_hashes(formatted, name, paged)
    fields = {name: list(asdict(of_variant).items()) for name, of_variant in traits.items()}
    formatted |= format_files({KERNELS_FILE: _fill(env, "host/kernels.py.jinja", hashes=hashes, traits=fields)})
    return {path: _sign(formatted[path], Path(spec.path).name) for path in sorted(formatted)}


def render_variant(variant: Variant, spec_file: str = "variants.yaml") -> dict[str, str]:
    """The kernels and ops of one variant, formatted: path inside the package -> text. `render` gives the same files for
    the variant, and besides them those that all variants share, such as the one with the hashes of kernels."""
    (module,) = module_plans([variant])
    env, plans = make_environment(templates_path()), _plans(variant)
    files = format_files(_variant_files(env, plans, _deltas(env, plans), module))
    return {path: _sign(files[path], Path(spec_file).name) for path in sorted(files)}


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
    """The files that are copied below a licence line: `runtime/package/` to the top of the package, the rest of
    `runtime/` to `_runtime/`, and `integrations/` to the folder of that name."""
    files = {}
    for room, folder in (("runtime", RUNTIME), (INTEGRATIONS, INTEGRATIONS)):
        root = shipped_path(room)
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root)
            target = name.name if name.parts[0] == "package" else f"{folder}/{name.as_posix()}"
            files[target] = f"{LICENCE}\n{path.read_text(encoding='utf-8')}"
    return files


def _plans(variant: Variant) -> dict[Mode, VariantPlan]:
    try:
        return {mode: plan(variant, mode) for mode in Mode}
    except RecursionError:
        raise CodegenError(f"variants.{variant.name}: {TOO_DEEP}") from None
    except Exception as error:
        error.add_note(f"while planning the kernels of the variant '{variant.name}'")
        raise


def _variant_files(
    env: jinja2.Environment,
    plans: Mapping[Mode, VariantPlan],
    deltas: Mapping[Mode, VariantPlan],
    module: ModulePlan,
) -> dict[str, str]:
    files: dict[str, str] = {}
    context, name = _context(plans[Mode.DENSE]), plans[Mode.DENSE].variant.name
    for mode, planned in plans.items():
        files.update(_kernel_files(env, _mode_folder(name, mode), planned, owns_delta=deltas[mode] is planned))
        files[f"{_mode_folder(name, mode)}/__init__.py"] = _mode_init_file(env, planned, deltas[mode])
    files[f"{name}/work.py"] = _fill(env, "host/work.py.jinja", work=work_source(plans[Mode.DENSE]), **context)
    paged = paged_plan(plans[Mode.DENSE].written)
    of_framework = {
        framework: {mode: OpSource.of(op_plan(planned, framework)) for mode, planned in plans.items()}
        for framework in Framework
    }
    for mode, planned in plans.items():
        # Launches are the same in every framework: the plan of either op says what they pass.
        op = of_framework[Framework.TORCH][mode]
        files[f"{_mode_folder(name, mode)}/launch.py"] = _launch_file(env, planned, op, deltas[mode])
    if paged is not None:
        files |= _paged_files(env, name, paged, of_framework[Framework.TORCH][Mode.DENSE])
    for framework, ops in of_framework.items():
        given = {"op": ops[Mode.DENSE], **{f"{mode}_op": ops[mode] for mode in (Mode.PACKED, Mode.SEGMENTED)}}
        for stem in (f"{framework}_op", f"{framework}_reference"):
            files[f"{name}/{stem}.py"] = _fill(
                env, f"host/{stem}.py.jinja", module=module, paged=paged, **given, **context
            )
    return files


def _paged_files(env: jinja2.Environment, name: str, planned: PagedPlan, op: OpSource) -> dict[str, str]:
    """The kernels on paged caches and their launches."""
    context = _context(planned) | {"runtime": _runtime_of(Mode.PACKED), "paged": planned, "op": op}
    hopper, latent = paged_hopper_plan(planned.written), latent_plan(planned)
    modules = {
        kernel_files.PORTABLE: _fill(env, "paged/portable.py.jinja", **context),
        "launch": _fill(env, "host/paged_launch.py.jinja", hopper=hopper, latent=latent, **context),
    }
    title = ", paged caches"
    if hopper is not None:
        given = context | {
            "kernel": hopper.kernel,
            "forward": hopper,
            "forward_imports": hopper.imports,
            "title": title,
        }
        modules[kernel_files.FORWARD] = _fill(env, "hopper/fwd.py.jinja", **given)
    if latent is not None:
        modules[kernel_files.LATENT] = _fill(env, "paged/hopper_latent.py.jinja", latent=latent, **context)
    names = {".": sorted(modules)}
    modules["__init__"] = _fill(env, "host/variant_init.py.jinja", modules=names, title=title, **context)
    return {f"{name}/{kernel_files.PAGED}/{stem}.py": text for stem, text in modules.items()}


def _deltas(env: jinja2.Environment, plans: Mapping[Mode, VariantPlan]) -> dict[Mode, VariantPlan]:
    """Mode -> the plan whose `hopper_delta` its calls run; segmented calls run the dense one if only names differ."""
    part = env.get_template("portable/parts/delta.jinja")

    def text(planned: VariantPlan) -> str:
        context = _context(planned) | {"fuses_backward": kernel_files.fuses_backward(planned)}
        return part.render(kernel=planned.hopper_delta, **context).replace(f"def {planned.symbol}_", "def ")

    dense, segmented = plans[Mode.DENSE], plans[Mode.SEGMENTED]
    # The segmented package imports the dense one by its name.
    is_shared = text(dense) == text(segmented) and dense.symbol not in _modules(segmented)
    return {**plans, Mode.SEGMENTED: dense if is_shared else segmented}


def _modules(planned: VariantPlan) -> list[str]:
    """The modules of a mode's own folder."""
    own = [kernel_files.PORTABLE, kernel_files.FORWARD, kernel_files.BACKWARD, "launch"]
    own += [] if planned.hopper_fwd_fp8 is None else [kernel_files.FORWARD_FP8]
    own += [] if planned.hopper_split_keys is None else [kernel_files.SPLIT]
    return own if planned.lists is None else [*own, planned.lists.module]


def _mode_folder(name: str, mode: Mode) -> str:
    return name if mode is Mode.DENSE else f"{name}/{mode.value}"


def _runtime_of(mode: Mode) -> str:
    """The package that the files of a mode's folder import shared code from."""
    return f".{'.' if mode is Mode.DENSE else '..'}{RUNTIME}"


_TITLES = {Mode.DENSE: "", Mode.PACKED: ", packed sequences", Mode.SEGMENTED: ", with segment ids"}


def _context(planned: VariantPlan | PagedPlan) -> dict[str, Any]:
    found = {"variant": planned.variant, "entry": _entry(planned.variant)}
    if isinstance(planned, PagedPlan):
        return found
    return found | {"symbol": planned.symbol, "title": _TITLES[planned.mode]}


def _entry(variant: Variant) -> str:
    return comment(f"variant: {variant.entry}")


def _launch_file(env: jinja2.Environment, planned: VariantPlan, op: OpSource, delta: VariantPlan) -> str:
    """The launches of one mode's kernels. `delta`: the plan whose kernel `hopper_delta` they launch."""
    dense = planned.mode is Mode.DENSE
    given = {"op": op, "plan": planned, "runtime": _runtime_of(planned.mode)}
    # The folder of the launches: its modules have the kernels.
    folder = planned.variant.name if dense else planned.mode.value
    package = "" if delta is planned else f"{planned.variant.name}."
    given |= {"folder": folder, "delta_kernels": f"{package}{kernel_files.PORTABLE}.{delta.symbol}"}
    return _fill(env, "host/launch.py.jinja", **given, **_context(planned))


def _mode_init_file(env: jinja2.Environment, planned: VariantPlan, delta: VariantPlan) -> str:
    """The package of a mode, by which launches and kernels are imported when they are first needed."""
    runtime = _runtime_of(planned.mode)
    modules: dict[str, list[str]] = {".": _modules(planned)}
    if delta is not planned:
        # The package of dense calls, whose kernels these calls run, too.
        modules["..."] = [planned.variant.name]
    if planned.variant.decay:
        # A segmented call runs the kernel for cumulative sums of dense calls.
        modules.setdefault(".." if planned.mode is Mode.SEGMENTED else ".", []).append("decay")
    if planned.mode is Mode.SEGMENTED and by_row(planned.written) is not None:
        modules[f"{runtime}.core"] = ["token_order"]
    # In the order of imports: the packages farthest up first.
    packages = sorted(modules, key=lambda package: (len(package.lstrip(".")) - len(package), package))
    listed = {package: sorted(modules[package]) for package in packages}
    return _fill(env, "host/variant_init.py.jinja", modules=listed, runtime=runtime, **_context(planned))


def _kernel_files(env: jinja2.Environment, folder: str, planned: VariantPlan, *, owns_delta: bool) -> dict[str, str]:
    """The kernels of one mode. `owns_delta`: the kernel `hopper_delta` is not that of dense calls."""
    fused = BackwardPlan(planned.hopper_bwd, planned.variant, is_wide=False)
    wide = BackwardPlan(planned.hopper_bwd_wide, planned.variant, is_wide=True)
    context = _context(planned) | {"runtime": _runtime_of(planned.mode), "plan": planned}
    context |= {"fuses_backward": kernel_files.fuses_backward(planned), "owns_delta": owns_delta}
    whole = ForwardPlan(planned.hopper_fwd, planned.variant, planned.hopper_fwd_of_terms)
    forward = {"kernel": planned.hopper_fwd, "forward": whole}
    forward |= {"forward_imports": joined_imports(whole.imports, whole.consumers.imports)}
    backward = {"kernel": planned.hopper_bwd, "backward": fused, "wide": wide}
    backward |= {"backward_imports": joined_imports(fused.imports, wide.imports)}
    files = {
        f"{folder}/{kernel_files.PORTABLE}.py": _fill(env, "portable/portable.py.jinja", **context),
        f"{folder}/{kernel_files.FORWARD}.py": _fill(env, "hopper/fwd.py.jinja", **forward, **context),
        f"{folder}/{kernel_files.BACKWARD}.py": _fill(env, "hopper/bwd.py.jinja", **backward, **context),
    }
    if planned.hopper_fwd_fp8 is not None:
        own = Fp8ForwardPlan(planned.hopper_fwd_fp8, planned.variant)
        given = context | {"kernel": own.kernel, "forward": own, "forward_imports": own.imports}
        files[f"{folder}/{kernel_files.FORWARD_FP8}.py"] = _fill(env, "hopper/fwd.py.jinja", **given)
    if planned.hopper_split_keys is not None and planned.hopper_split_rows is not None:
        keys = SplitKeysPlan(planned.hopper_split_keys, planned.variant, is_wide=True)
        rows = SplitRowsPlan(planned.hopper_split_rows, planned.variant)
        given = context | {"kernel": keys.kernel, "backward": keys, "split_rows": rows}
        given |= {"split_imports": joined_imports(keys.imports, rows.imports)}
        files[f"{folder}/{kernel_files.SPLIT}.py"] = _fill(env, "hopper/split.py.jinja", **given)
    if planned.lists is not None:
        stem = planned.lists.module
        files[f"{folder}/{stem}.py"] = _fill(env, f"portable/{stem}.py.jinja", lists=planned.lists, **context)
    if planned.variant.decay and planned.mode is not Mode.SEGMENTED:
        files[f"{folder}/decay.py"] = _fill(env, "portable/decay.py.jinja", layout=planned.layout, **context)
    return files


def _kernel_hashes(
    files: Mapping[str, str], plans: Mapping[Mode, VariantPlan], mode: Mode, delta: VariantPlan
) -> dict[str, str]:
    """Pass -> hash of its kernel's code and of what it uses, for the kernels that calls of one mode run."""

    def hashed(name: str, owner: VariantPlan) -> str:
        stem, kernels = kernel_files.measured_kernels(owner)[name]
        return kernel_hash(f"{_mode_folder(owner.variant.name, owner.mode)}/{stem}.py", kernels, files)

    planned = plans[mode]
    own = kernel_files.measured_kernels(planned)
    found = {name: hashed(name, delta if name == kernel_files.DELTA else planned) for name in own}
    runs = kernel_files.kernels_of_runs(planned)
    return found | {f"{kernel_files.RUNS}{name}": hashed(name, plans[Mode.PACKED]) for name in runs}


def _paged_hashes(files: Mapping[str, str], name: str, planned: PagedPlan) -> dict[str, str]:
    """Kernel -> hash of its code and of what it uses, for the kernels that a step on paged caches runs."""
    return {
        kernel: kernel_hash(f"{RUNTIME if kernel == 'merge' else name}/{file}", kernels, files)
        for kernel, (file, kernels) in kernel_files.measured_paged_kernels(planned).items()
    }


def _fill(env: jinja2.Environment, template: str, **context: Any) -> str:
    header = FileHeader(template=template, entry=context.pop("entry", ""))
    try:
        return env.get_template(template).render(file=header, **context)
    except Exception as error:
        error.add_note(f"while filling the template {template} for {header.entry.removeprefix('# ') or 'the package'}")
        raise


def _sign(text: str, spec_name: str) -> str:
    """Put the name of the spec file and the hash of a file's own text into its header."""
    text = text.replace(_ORIGIN, f"# Generated from {' '.join(spec_name.split())};", 1)
    digest = hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]
    return text.replace(f"# hash: {_PLACEHOLDER}", f"# hash: {digest}", 1)
