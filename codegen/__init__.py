"""Render attention variants from `variants.yaml` into specialised Triton kernels and framework ops."""

__version__ = "0.1.0"

PACKAGE = __name__.rpartition(".")[0] or "generated"
"""The rendered package that comes with the generator: `generated` in a checkout, `attention_codegen` in a wheel."""

PROGRAM = "python -m codegen" if PACKAGE == "generated" else "codegen"
"""How the command line is started: a wheel has a console script, a checkout may have none."""
