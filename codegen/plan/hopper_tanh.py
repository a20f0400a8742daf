"""`tanh` of a multiple of the product in Hopper's kernels: one call, which spreads it over two units of the chip.

`runtime/device/gl_capped.py` says why.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from codegen.plan.code import Call, Code, Infix, Literal, Name, Prefix, call, rebuilt
from codegen.plan.kernel import Block
from codegen.plan.statements import rewritten

FUNCTION = "tanh_of_product"

REFERENCE = Name("REFERENCE")
"""What all logits of a bounded score are relative to, in a forward."""

_PRODUCT = Name("qk")


def with_split_tanh(block: Block, numbers: Set[str], *, relative: bool) -> Block:
    """The block with such calls. `numbers`: names of numbers that are known at run time.

    `relative`: the logit is to be relative to REFERENCE, if it is a multiple of such a call.
    """

    def changed(code: Code) -> Code:
        return rebuilt(code, lambda node: _call(node, numbers))

    logit = changed(block.logit)
    return replace(
        block,
        statements=[rewritten(statement, changed) for statement in block.statements],
        logit=_with_factor(logit, relative=relative),
        dscore=None if block.dscore is None else changed(block.dscore),
    )


def is_relative(logit: Code) -> bool:
    """True if a logit comes relative to REFERENCE."""
    return isinstance(logit, Call) and REFERENCE.name in logit.names


def without_reference(logit: Code) -> Code:
    """The same logit relative to 0."""
    return replace(logit, args=logit.args[:-1]) if isinstance(logit, Call) and is_relative(logit) else logit


def _with_factor(logit: Code, *, relative: bool) -> Code:
    """A literal times such a call, as one call."""
    if not (isinstance(logit, Infix) and logit.symbol == "*" and isinstance(logit.left, Literal)):
        return logit
    if not (isinstance(logit.right, Call) and logit.right.function == FUNCTION):
        return logit
    offset = [Prefix("-", REFERENCE)] if relative else []
    return call(FUNCTION, *logit.right.args, logit.left, *offset)


def _call(node: Code, numbers: Set[str]) -> Code | None:
    if not (isinstance(node, Call) and node.function == "tanh"):
        return None
    argument, hardware = node.args
    factor = _factor_of_product(argument, numbers)
    return None if factor is None else call(FUNCTION, _PRODUCT, factor, hardware)


def _factor_of_product(code: Code, numbers: Set[str]) -> Code | None:
    """The number by which `qk` is multiplied; None if the code is something else.

    >>> _factor_of_product(Infix("/", Infix("*", Name("scale"), Name("qk")), Name("cap")), {"scale", "cap"})
    Infix(symbol='/', left=Name(name='scale'), right=Name(name='cap'))
    """
    if not (isinstance(code, Infix) and code.symbol in ("*", "/")):
        return None
    if code.right == _PRODUCT and code.symbol == "*":
        return code.left if _is_number(code.left, numbers) else None
    factor = _factor_of_product(code.left, numbers)
    return None if factor is None or not _is_number(code.right, numbers) else replace(code, left=factor)


def _is_number(code: Code, numbers: Set[str]) -> bool:
    return all(isinstance(node, Infix | Literal | Name) for node in code.walk()) and code.names <= numbers
