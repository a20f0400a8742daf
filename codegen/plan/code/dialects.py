"""The two dialects that kernels are written in, Triton (`tl`) and Gluon (`gl`), as printers of one tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from codegen.plan.code.statements import Assign, Comment, Statement
from codegen.plan.code.tree import (
    ATOM,
    CHOICE,
    COMPARE,
    UNARY,
    Arange,
    Broadcast,
    Builtin,
    Call,
    Cast,
    Choice,
    Code,
    DType,
    Group,
    Infix,
    Literal,
    Name,
    Prefix,
    literal_text,
)


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """Prints kernel code. `module` is the language's module; `helpers` are the functions of Triton's language that this
    dialect lacks, so that a kernel file defines them. A dialect with `layouts` prints the layout of a vector.

    >>> TL.text(Infix("+", Name("a"), Builtin("exp2", (Name("b"),))))
    'a + tl.exp2(b)'
    >>> GL.text(Cast(Arange("BLOCK_N"), "float32"))
    'gl.arange(0, BLOCK_N, layout=KEY).to(gl.float32)'
    """

    module: str
    jit: str
    helpers: frozenset[str] = frozenset()
    layouts: bool = False

    def text(self, code: Code) -> str:
        """An expression as source."""
        return self._operand(code, CHOICE)

    def line(self, statement: Statement) -> str:
        """A statement as one line of source."""
        if isinstance(statement, Comment):
            return f"# {statement.text}"
        return f"{', '.join(statement.targets)} = {', '.join(map(self.text, statement.values))}"

    def dtype(self, name: str) -> str:
        """An element type, or `constexpr`, as source."""
        return f"{self.module}.{name}"

    def _operand(self, code: Code, strength: int) -> str:
        """The source of an operand, in parentheses if it binds looser than `strength`."""
        text = self._print(code)
        return text if code.strength >= strength else f"({text})"

    def _print(self, code: Code) -> str:
        match code:
            case Name(name=name):
                return name
            case Literal(value=value):
                return literal_text(value)
            case Infix(symbol=symbol, left=left, right=right):
                # Comparisons do not chain: a comparison that is the left operand of another needs parentheses.
                own = code.strength
                return f"{self._operand(left, own + (own == COMPARE))} {symbol} {self._operand(right, own + 1)}"
            case Prefix(symbol=symbol, operand=operand):
                return f"{symbol}{self._operand(operand, UNARY)}"
            case Call():
                return self._call(code)
            case DType(name=name):
                return self.dtype(name)
            case Cast(value=value, dtype=dtype):
                return f"{self._operand(value, ATOM)}.to({self.dtype(dtype)})"
            case Broadcast(vector=vector, axis=axis):
                return f"{self._operand(vector, ATOM)}{'[None, :]' if axis else '[:, None]'}"
            case Arange(size=size, layout=layout):
                return f"{self.module}.arange(0, {size}{f', layout={layout}' if self.layouts else ''})"
            case Choice(value=value, condition=condition, otherwise=otherwise):
                parts = self._operand(value, COMPARE), self._operand(condition, COMPARE), self.text(otherwise)
                return "{} if {} else {}".format(*parts)
            case Group(inner=inner):
                return f"({self.text(inner)})"
        raise TypeError(f"no source for {code!r}")

    def _call(self, code: Call) -> str:
        own = isinstance(code, Builtin) and code.function not in self.helpers
        args = [*map(self.text, code.args), *(f"{name}={self.text(value)}" for name, value in code.keywords)]
        return f"{f'{self.module}.' if own else ''}{code.function}({', '.join(args)})"


TL = Dialect(module="tl", jit="triton")
GL = Dialect(module="gl", jit="gluon", helpers=frozenset({"sigmoid"}), layouts=True)


def _printer(dialect: Dialect) -> Callable[[Code | Statement], str]:
    def printed(code: Code | Statement) -> str:
        return dialect.line(code) if isinstance(code, Assign | Comment) else dialect.text(code)

    return printed


FILTERS = {"tl": _printer(TL), "gl": _printer(GL)}
"""Filters by which templates print code and statements."""
