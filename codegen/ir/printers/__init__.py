"""Printers: expressions as source text, one printer for each dialect.

`FormulaPrinter` prints the spec's own language, `NumberPrinter` plain Python, `torch_printer` and `jnp_printer` give
array code, `MathPrinter` MathML. Kernel code is printed from typed statements (`codegen.plan.code.dialects`).
"""

from codegen.ir.printers.array import ROWS, ArrayPrinter, jnp_printer, torch_printer
from codegen.ir.printers.base import Printer
from codegen.ir.printers.formula import FormulaPrinter, NumberPrinter
from codegen.ir.printers.mathml import MathPrinter

__all__ = [
    "ROWS",
    "ArrayPrinter",
    "FormulaPrinter",
    "MathPrinter",
    "NumberPrinter",
    "Printer",
    "jnp_printer",
    "torch_printer",
]
