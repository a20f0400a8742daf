"""Weights that are exponentials of a capped product, in one call that two units of a Hopper chip share.

`runtime/device/gl_capped.py` says why.
"""

from __future__ import annotations

from dataclasses import replace

from codegen.plan.code.tree import Call, Code, Infix, Literal, Name, Prefix, call

FUNCTION = "exp2_of_tanh"

_PRODUCT = Name("qk")


def exponentials(logit: Code, reference: Code) -> Code | None:
    """The weights relative to `reference`, of a logit that is a literal times the tanh of a multiple of the product;
    None for other logits.

    >>> half = Infix("*", Infix("*", Literal(0.5), Name("scale")), Name("qk"))
    >>> found = exponentials(Infix("*", Literal(3.0), call("tanh", half, Name("HARDWARE_TANH"))), Name("REFERENCE"))
    >>> [type(arg).__name__ for arg in found.args]
    ['Name', 'Infix', 'Name', 'Literal', 'Prefix']
    """
    if not (isinstance(logit, Infix) and logit.symbol == "*" and isinstance(logit.left, Literal)):
        return None
    if not (isinstance(logit.right, Call) and logit.right.function == "tanh"):
        return None
    argument, hardware = logit.right.args
    factor = _factor_of_product(argument)
    return None if factor is None else call(FUNCTION, _PRODUCT, factor, hardware, logit.left, Prefix("-", reference))


def _factor_of_product(code: Code) -> Code | None:
    """The number by which the product is multiplied; None if the code is something else.

    >>> _factor_of_product(Infix("/", Infix("*", Name("scale"), Name("qk")), Literal(3.0)))
    Infix(symbol='/', left=Name(name='scale'), right=Literal(value=3.0))
    """
    if not (isinstance(code, Infix) and code.symbol in ("*", "/")):
        return None
    if code.right == _PRODUCT and code.symbol == "*":
        return code.left if _is_number(code.left) else None
    factor = _factor_of_product(code.left)
    return None if factor is None or not _is_number(code.right) else replace(code, left=factor)


def _is_number(code: Code) -> bool:
    return all(isinstance(node, Infix | Literal | Name) for node in code.walk()) and code.names <= {"scale"}
