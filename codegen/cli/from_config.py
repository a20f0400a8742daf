"""`render --from-config`: the spec of a model of transformers, written into a file of the user's."""

from __future__ import annotations

import argparse
from pathlib import Path

from codegen import PACKAGE
from codegen.compile.packages import find_package, installed, read_model
from codegen.load.spec_file import load_text
from codegen.util.choices import check_config
from codegen.util.errors import CodegenError, naming


def write_spec(args: argparse.Namespace) -> Path:
    """Write the spec of the model of `--from-config`; returns its path: `--variants`, or beside `--out` by its name.

    Raises `CodegenError` if that file is there already, or if no spec can be made of the model.
    """
    config: Path = args.from_config
    if args.out is None:
        raise CodegenError("--from-config: expected --out DIR, the package of the model, got none")
    spec: Path = args.variants or args.out.with_name(f"{args.out.name}.yaml")
    if spec.exists():
        raise CodegenError(f"--from-config: {spec} is there: render that with --variants {spec}, or delete it")
    if not spec.absolute().parent.is_dir():
        raise CodegenError(f"--from-config: expected the spec {spec} in a folder that is there")
    check_config("--from-config", config)
    package = find_package(installed(PACKAGE, default=Path(PACKAGE))).name
    text = read_model(package, "spec_of", config, "--from-config")
    load_text(text, spec.name)
    with naming(spec):
        spec.write_text(text, encoding="utf-8")
    return spec
