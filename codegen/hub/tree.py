"""The files of a kernel for the hub, made from a rendered package: path -> text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codegen.compile.packages import manifest_of
from codegen.hub.modules import accepted
from codegen.plan.ops.torch_modules import MODULE_NAMES, class_names, unused
from codegen.render.files import MANIFEST, TUNED, with_manifest
from codegen.render.formatting import format_files
from codegen.render.package import LICENCE, make_environment, templates_path
from codegen.util.errors import CodegenError

PACKAGE = "ops"
"""The folder of the package inside a build. In the kernel's own folder the folders of variants would hide the ops."""

BACKENDS = ("cuda", "cpu")
"""On CPU tensors the ops compute their references, so that a model can be tested anywhere."""

FLASH = "integrations/flash_attn.py"
FLASH_FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
"""Functions that transformers and other libraries look up in a kernel by these names."""

MODULES = {
    "nn": f"{PACKAGE}/torch/nn.py",
    "float8": f"{PACKAGE}/float8.py",
    "packing": f"{PACKAGE}/packing.py",
    "paging": f"{PACKAGE}/paging.py",
    "sdpa": f"{PACKAGE}/integrations/sdpa.py",
}
"""Name of a module in the kernel -> its path in a build. Modules that the package does not have are left out."""

_NAME = re.compile(r"[a-z][-a-z0-9]*[a-z0-9]")
_OWNER = re.compile(r"[A-Za-z0-9][-._A-Za-z0-9]*")
_PER_CALL = {"b", "q_idx", "kv_idx"}


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """How a kernel is published: the name and the owner of its repository, and the version of its interface."""

    name: str
    owner: str
    version: int
    backends: tuple[str, ...] = BACKENDS

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name in (PACKAGE, "layers"):
            raise CodegenError(
                "--name: expected lower-case letters, digits and dashes, two or more, a letter first and no dash last, "
                f"and neither '{PACKAGE}' nor 'layers', got {self.name!r}"
            )
        if not _OWNER.fullmatch(self.owner):
            raise CodegenError(f"--owner: expected letters, digits, '-', '_' and '.', got {self.owner!r}")

    @property
    def python_name(self) -> str:
        return self.name.replace("-", "_")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer of one variant without state.

    `inputs`: further arguments of a call, each with the op's name of it. `held`: name -> type of the attributes that it
    reads from the module whose forward it replaces; `arguments`: the op's name of each, but for the dropout.
    """

    name: str
    op: str
    doc: str
    inputs: Mapping[str, str]
    held: Mapping[str, str]
    arguments: Mapping[str, str]
    has_dropout: bool


def tree(package: Path, kernel: Kernel) -> dict[str, str]:
    """All files of the kernel, a manifest of their hashes included.

    Raises:
        CodegenError: the folder holds no rendered package, or a variant has a name that the kernel uses itself.
    """
    source = _read(package)
    manifest = json.loads(source.pop(MANIFEST))
    data = {path: text for path, text in source.items() if path.endswith(".json")}
    modules = accepted({path: text for path, text in source.items() if path.endswith(".py")})
    shipped = {**modules, **data}
    shipped[MANIFEST] = with_manifest(shipped, manifest["variants"])[MANIFEST]
    shipped["__init__.py"] += '\nNAMESPACE = __name__.rpartition(".")[0]\n'
    sources = {f"{PACKAGE}/{path}": text for path, text in shipped.items()}
    sources |= _interface(manifest["variants"], sources, kernel)
    files = {"build.toml": _fill("build.toml", kernel=kernel, licence=_licence())}
    for backend in kernel.backends:
        metadata = _metadata(kernel, backend, sources)
        folder = f"build/torch-{backend}"
        files |= {f"{folder}/{path}": text for path, text in sources.items()}
        files[f"{folder}/metadata.json"] = json.dumps(metadata, indent=2) + "\n"
    names = [layer.op for layer in layers_of(manifest["variants"])]
    files["build/CARD.md"] = _fill("card.md", kernel=kernel, licence=_licence(), variants=names)
    return with_manifest(files, {}, source=f"the kernel {kernel.name}")


def _read(package: Path) -> dict[str, str]:
    """The files of a rendered package, its manifest and its tuned files."""
    if not (package / MANIFEST).is_file():
        raise CodegenError(f"{package}: expected a rendered package, which has a {MANIFEST}")
    listed = manifest_of(package)["files"]
    paths = [package / path for path in (*listed, MANIFEST) if path.endswith((".py", ".json"))]
    paths += sorted((package / TUNED).rglob("*.json"))
    return {path.relative_to(package).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def _interface(variants: Mapping[str, Any], sources: Mapping[str, str], kernel: Kernel) -> dict[str, str]:
    """The modules that only the kernel has: its `__init__`, its layers, and the module that old releases of `kernels`
    look for."""
    own = {name: path for name, path in MODULES.items() if path in sources}
    flash = FLASH_FUNCTIONS if f"{PACKAGE}/{FLASH}" in sources else ()
    taken = [name for name in variants if name in {*own, *flash, "layers", PACKAGE}]
    if taken:
        raise CodegenError(
            f"variants.{taken[0]}: a kernel of the hub has another thing of that name: rename the variant"
        )
    layers = layers_of(variants)
    texts = {
        "__init__.py": _fill("init.py", layers=layers, modules=own, functions=flash, package=PACKAGE),
        "layers.py": _fill("layers.py", layers=layers, package=PACKAGE),
        f"{kernel.python_name}/__init__.py": _fill("by_name.py", kernel=kernel),
    }
    return format_files(texts)


def layers_of(variants: Mapping[str, Any]) -> list[Layer]:
    """The layers of a package's variants, by the names of their ops in order."""
    names = class_names(sorted(variants))
    return [_layer(name, names[name], entry) for name, entry in sorted(variants.items())]


def _layer(op: str, name: str, entry: Mapping[str, Any]) -> Layer:
    per_call = [x for x, tensor in entry["tensors"].items() if _PER_CALL & set(tensor["dims"])]
    own = {x: "Tensor" for x in entry["tensors"] if x not in per_call}
    own |= {"sink": "Tensor"} if entry["sink"] else {}
    own |= entry["scalars"]
    # A module has attributes of its own, such as `training`, and a method's body reads `self` and its op.
    attributes = {x: unused(x, MODULE_NAMES) for x in own}
    held = {attributes[x]: kind for x, kind in own.items()} | ({"dropout_p": "float"} if entry["dropout"] else {})
    inputs = (*per_call, *(["g"] if entry["decay"] else []))
    return Layer(
        name=name,
        op=op,
        doc=entry["doc"],
        inputs={unused(x, {"self", op}): x for x in inputs},
        held=held,
        arguments={attribute: x for x, attribute in attributes.items()},
        has_dropout=entry["dropout"],
    )


def _metadata(kernel: Kernel, backend: str, sources: Mapping[str, str]) -> dict[str, Any]:
    """The contents of `metadata.json`. The id names the module and the namespace of its operators; equal files have
    equal ids."""
    digests = {path: hashlib.sha256(text.encode()).digest() for path, text in sorted(sources.items())}
    whole = hashlib.sha256(b"".join(path.encode() + digest for path, digest in digests.items())).hexdigest()
    return {
        "name": kernel.name,
        "id": f"_{kernel.python_name}_{backend}_{whole[:10]}",
        "version": kernel.version,
        "license": _licence(),
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {
            "algorithm": "sha256",
            "files": {path: base64.b64encode(digest).decode() for path, digest in digests.items()},
        },
    }


def _licence() -> str:
    """The licence of rendered files in the hub's spelling."""
    return LICENCE.rpartition(" ")[2].lower()


def _fill(template: str, **context: Any) -> str:
    return (
        make_environment(templates_path()).get_template(f"hub/{template}.jinja").render(licence_line=LICENCE, **context)
    )
