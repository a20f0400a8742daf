"""Printers: expressions as source text, one printer for each dialect.

`FormulaPrinter` prints the spec's own language, `NumberPrinter` plain Python, `torch_printer` and `jnp_printer` give
array code, `TritonPrinter` kernel code.
"""

from codegen.ir.printers.array import ROWS, ArrayPrinter, jnp_printer, torch_printer
from codegen.ir.printers.base import Printer
from codegen.ir.printers.formula import FormulaPrinter, NumberPrinter
from codegen.ir.printers.triton import TRITON_FUNCTIONS, TRITON_HELPERS, WIDE_INDICES, TritonPrinter

__all__ = [
    "ROWS",
    "TRITON_FUNCTIONS",
    "TRITON_HELPERS",
    "WIDE_INDICES",
    "ArrayPrinter",
    "FormulaPrinter",
    "NumberPrinter",
    "Printer",
    "TritonPrinter",
    "jnp_printer",
    "torch_printer",
]
