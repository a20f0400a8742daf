"""Random variants: entries of a spec as a user would write them, of the whole language.

Constants lie around the edges of tiles. Scores stay where float32 is well conditioned: of a size near 1, and away from
poles.
"""

from __future__ import annotations

import re
from random import Random
from typing import Any

from tests.fuzz.declarations import EDGES, STEPS, Declarations

Entry = dict[str, Any]

COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
ORDERS = ("<", "<=", ">", ">=")


def draw_entry(random: Random) -> Entry:
    """One variant. Most have a mask, two of three a score; some a sink, a decay or dropout."""
    return _Draw(random).entry()


def cleaned(entry: Entry) -> Entry:
    """Without declarations that nothing reads."""
    words = set(re.findall(r"\w+", f"{entry.get('mask')} {entry.get('score')}"))
    found = dict(entry)
    for key in ("tensors", "scalars"):
        kept = {name: x for name, x in found.pop(key, {}).items() if name in words}
        found |= {key: kept} if kept else {}
    return found


class _Draw(Declarations):
    def entry(self) -> Entry:
        entry: Entry = {}
        if self.chance(0.85):
            entry["mask"] = self.mask(self.random.choice((0, 1, 1, 2, 2, 3)))
        if self.chance(0.7) or not entry:
            entry["score"] = self.score()
        entry = cleaned(entry | {"tensors": self.tensors, "scalars": self.scalars})
        entry |= {"sink": True} if self.chance(0.15) else {}
        entry |= {"decay": True} if self.chance(0.22) else {}
        return entry | ({"dropout": True} if self.chance(0.06) else {})

    # ------------------------------------------------------------------------------------------------------------ masks

    def mask(self, depth: int) -> str:
        if depth == 0:
            return self.atom()
        if self.chance(0.12):
            return self.pick(self.bounded_union, self.bounded_union, self.ranges)
        a, b = self.mask(depth - 1), self.mask(self.random.randrange(depth))
        kind = self.random.random()
        if kind < 0.4:
            return f"({a} and {b})"
        if kind < 0.78:
            return f"({a} or {b})"
        if kind < 0.84:
            return f"(not {a})"
        if kind < 0.88:
            return f"(({a}) {self.pick('&', '|', '^')} ({self.pick('', '~')}({b})))"
        if kind < 0.9:
            return f"(({a}) {self.pick('==', '!=')} ({b}))"
        if kind < 0.94:
            return f"where({self.mask(0)}, {a}, {b})"
        return f"({a} if {self.mask(0)} else {b})"

    def atom(self) -> str:
        kinds = (
            *(self.affine, self.affine, self.affine, self.edge, self.edge, self.named, self.named),
            *(self.step, self.modular, self.modular, self.heads, self.table, self.table, self.numbers),
            *(self.bits, self.lengths, self.lengths, self.member, self.member, self.grid, self.grid),
        )
        return self.random.choice(kinds)()

    def bounded_union(self) -> str:
        """What has holes, beside a bound of one position: rows visit all blocks, of which some are whole."""
        kinds = self.modular, self.table, self.heads, self.step, self.bits, self.member, self.grid
        holes = self.random.choice(kinds)()
        union = self.pick(f"({self.edge()} or {holes})", f"({holes} or {self.edge()})")
        return self.pick(union, union, f"(causal and {union})")

    def ranges(self) -> str:
        """Ranges that begin and end with either position, some of them beyond the call's lengths."""
        return f"(({self.affine()} and ({self.edge()} or {self.edge()})) or {self.edge()})"

    def constant(self) -> str:
        """A bound: a number, or what is the same for all pairs of a head, a batch row or a call."""
        if self.chance(0.1):
            return self.pick(
                *("(4 * h + 3)", "(8 * (hkv + 1))", "(h // 2 * 16)", "(b + 2)", "(7 - 3 * b)"),
                *("(kv_len - 5)", "(kv_len // 3 + h)", "(q_len - 1)", "(kv_len - q_len + 2)"),
            )
        c = self.random.choice(EDGES)
        return self.scalar("int") if self.chance(0.15) else str(-c if self.chance(0.2) else c)

    def affine(self) -> str:
        c = self.constant()
        order = self.pick(*ORDERS)
        return self.pick(
            f"q_idx {order} kv_idx + {c}",
            f"q_idx - kv_idx {self.pick(*COMPARISONS)} {c}",
            f"0 <= q_idx - kv_idx {self.pick('<', '<=')} {c}",
            f"2 * kv_idx {order} q_idx + {c}",
            f"kv_idx {order} 3 * q_idx - {c}",
            f"abs(q_idx - kv_idx) {self.pick('<', '<=', '>')} {c.removeprefix('-')}",
            f"q_idx + kv_idx {order} {c}",
            f"min(q_idx, kv_idx) {order} {c}",
            f"(q_idx - kv_idx) / 64 {order} 0.25",
        )

    def edge(self) -> str:
        """A comparison of one position, from either side."""
        position, c = self.pick("kv_idx", "kv_idx", "q_idx"), self.constant()
        op = self.pick(*ORDERS, *ORDERS, "==", "!=")
        return self.pick(f"{position} {op} {c}", f"{c} {op} {position}", f"not ({position} {op} {c})")

    def named(self) -> str:
        c = self.random.choice(EDGES[2:])
        return self.pick("causal", "causal", f"window({c})", f"prefix({c})", f"symmetric_window({c})", f"chunk({c})")

    def step(self) -> str:
        step, c = self.random.choice(STEPS), self.random.choice(EDGES[:6])
        op = self.pick("==", "==", *ORDERS)
        return self.pick(
            f"q_idx // {step} {op} kv_idx // {step}",
            f"(q_idx + {c}) // {step} {op} kv_idx // {step} + {self.random.randrange(2)}",
            f"kv_idx // {step} {self.pick(*COMPARISONS)} {c}",
            f"(q_idx - kv_idx) // {step} {self.pick(*COMPARISONS)} {c}",
        )

    def modular(self) -> str:
        m = self.random.choice(STEPS)
        op = self.pick(*COMPARISONS)
        r = self.random.randrange(op == "<", m - (op == ">"))
        return self.pick(
            f"kv_idx % {m} {op} {r}",
            f"q_idx % {m} {op} {r}",
            f"(q_idx - kv_idx) % {m} {op} {r}",
            f"(q_idx + 3 * kv_idx) % {m} {op} {r}",
            f"q_idx % {m} {self.pick(*ORDERS)} kv_idx % {m}",
        )

    def heads(self) -> str:
        return self.pick("h % 2 == 0", "b == 0", "hkv < 1", "h < q_idx", "kv_idx >= b", "b + h < kv_idx", "h != 1")

    def table(self) -> str:
        """A comparison of what tensors hold, or a bool tensor."""
        if self.chance(0.35):
            return self.read("bool")
        dtype = self.pick("int32", "int32", "int32", "int64")
        op, order = self.pick(*COMPARISONS), self.pick(*ORDERS)
        kind = self.random.random()
        if kind < 0.3:
            dim = self.pick("kv_idx", "q_idx", "m")
            dims = self.random.choice((["b", dim], [dim], ["h", dim]))
            lead = f"{dims[0]}, " if len(dims) == 2 else ""
            first = self.read(dtype, dims).split("[")[0]
            if first not in self.tensors:
                return self.edge()
            return f"{first}[{lead}q_idx] {self.pick('==', '==', order)} {first}[{lead}kv_idx]"
        x = self.read(dtype)
        return self.pick(
            f"{x} {order} {self.pick('q_idx', 'kv_idx', 'q_idx - kv_idx')}",
            f"{x} {op} {self.random.randrange(4)}",
            f"q_idx + {x} {order} kv_idx",
            f"(q_idx // {self.random.choice(STEPS)}) {op} {x}",
            f"20 * {x} {order} kv_idx",
        )

    def bits(self) -> str:
        """Comparisons of bits of positions, and of what tensors hold."""
        c, by, op = self.random.choice(EDGES[1:]), self.random.randrange(5), self.pick("==", "!=", *ORDERS)
        return self.pick(
            f"((q_idx ^ kv_idx) & {c}) {op} {self.random.randrange(3)}",
            f"(kv_idx & {c}) {self.pick('==', '!=')} (q_idx & {c})",
            f"(kv_idx | {c}) {op} q_idx",
            f"(q_idx ^ kv_idx) {self.pick(*ORDERS)} {c}",
            f"q_idx >> {by} {op} kv_idx >> {by}",
            f"1 << (q_idx - kv_idx) {op} {c}",
            f"(~q_idx & kv_idx) {op} {self.random.randrange(2)}",
            f"~kv_idx {self.pick(*ORDERS)} -{c}",
            lambda: f"(({self.read('int32')} >> (kv_idx % {self.random.choice(STEPS)})) & 1) {self.pick('==', '!=')} 1",
            lambda: f"(kv_idx & (1 << {self.scalar('int')})) {self.pick('==', '!=')} 0",
        )

    def lengths(self) -> str:
        """Masks of how many queries and keys there are."""
        c, order = self.random.choice(EDGES[:12]), self.pick(*ORDERS)
        return self.pick(
            f"q_idx + kv_len - q_len {order} kv_idx",
            f"kv_idx {order} kv_len - {c}",
            f"q_idx {order} q_len - {c}",
            f"q_len - 1 - q_idx {order} kv_idx",
            f"kv_len {order} {16 * c}",
            f"kv_idx % max(q_len // {self.random.choice(STEPS)}, 1) {self.pick('==', '!=')} 0",
        )

    def member(self) -> str:
        """Whether a position, or a block of them, is in a list."""
        step, c = self.random.choice(STEPS), self.random.randrange(6)
        x = self.pick("kv_idx", "q_idx", f"kv_idx // {step}", f"q_idx // {step}", "q_idx - kv_idx", f"kv_idx % {step}")
        word = self.pick("in", "in", "in", "not in")
        if self.chance(0.3) or len(self.tensors) >= 4:
            return f"{x} {word} {self.pick(f'({c}, {c + 1})', f'({c},)', f'({c}, {c + 3}, {c + 16})', '(1, 2)')}"
        name = self.new_name(f"i{len(self.tensors)}")
        drawn = self.dims(most=1)
        dims: list[str | int] = [*filter(lambda dim: not isinstance(dim, int), drawn)][:3]
        dtype = self.pick("int32", "int32", "int64")
        self.tensors[name] = {"dims": [*dims, self.random.choice((2, 3, 4, 8))], "dtype": dtype}
        indices = [f"q_idx // {step}" if dim == "m" and self.chance(0.5) else self.index(dim) for dim in dims]
        return f"{x} {word} {name}[{', '.join(indices)}]" if dims else f"{x} {word} {name}"

    def grid(self) -> str:
        """What a tensor holds for a run of queries and a run of keys."""
        if len(self.tensors) >= 4:
            return self.edge()
        dtype = self.pick("bool", "bool", "float32", "float16", "int32", "int64")
        axes = [self.run("q_idx"), self.run("kv_idx")]
        dims: list[str | int] = ["q_runs", "kv_runs"]
        if self.chance(0.2):
            axes.reverse()
        for dim in self.random.choice(([], ["h"], ["b"], ["h", "b"], ["hkv", "b"])):
            axes.insert(0, self.index(dim))
            dims.insert(0, dim)
        x = f"{self.declared(dtype, dims)}[{', '.join(axes)}]"
        if dtype == "bool":
            return self.pick(x, x, f"not {x}")
        limit = self.pick("0.3", "0.0", "-0.2") if dtype.startswith("float") else str(self.random.randrange(3))
        return self.pick(f"{x} {self.pick(*COMPARISONS)} {limit}", f"{x} {self.pick(*ORDERS)} {self.pick(limit, 'h')}")

    def run(self, position: str) -> str:
        """The number of the run of positions that a position lies in."""
        length, c = self.random.choice((8, 16, 16, 20, 32, 64)), self.random.choice(EDGES[:9])
        return self.pick(
            *(f"{position} // {length}", f"{position} // {length}", f"({position} + {c}) // {length}"),
            *(f"min({position} // {length}, 2)", f"{position} // {length} + 1", f"{position} // {length} % 3"),
            f"{position} >> 4",
            lambda: f"{position} // max({self.scalar('int')}, 16)",
        )

    def numbers(self) -> str:
        """A condition on what has neither position."""
        kind = self.random.random()
        if kind < 0.3:
            dims = self.random.choice((["h"], ["b"], ["hkv"], ["b", "h"], []))
            return f"{self.read('float32', dims)} {self.pick('>=', '<')} 0.3"
        if kind < 0.7:
            return f"{self.scalar('int')} {self.pick(*ORDERS)} {self.random.choice(EDGES)}"
        return self.read("bool", self.random.choice(([], ["h"], ["b"])))

    # ----------------------------------------------------------------------------------------------------------- scores

    def score(self) -> str:
        """Functions of the score, each of a size near that of its argument, and what is added or multiplied."""
        if self.chance(0.04):
            return self.bias()
        text = "score"
        for _ in range(self.random.choice((1, 1, 1, 2, 2, 3))):
            text = self.random.choice((self.function, self.add, self.add, self.times, self.choice))(text)
        if self.chance(0.1):
            condition = self.random.choice((self.atom, self.edge, self.affine))()
            return self.pick(f"where({condition}, {text}, -inf)", f"(-inf if {condition} else {text})")
        return text

    def function(self, x: str) -> str:
        c = self.pick("3.0", "5.0", "20.0")
        return self.pick(
            f"{c} * tanh({x} / {c})",
            f"0.5 * ({x})",
            f"({x} + 0.3)",
            f"({x}) / (1 + abs({x}))",
            f"log(1.0 + exp(min({x}, 8.0)))",
            f"sqrt(1.0 + ({x}) ** 2)",
            f"(1.0 + abs({x})) ** {self.pick('-1', '-0.5', '1.5', '-2', '-1.3')}",
            f"0.3 * clamp({x}, 0.0, 3.0) ** {self.pick('1.5', '2.5', '1.3')}",
            f"0.3 * exp(min({x}, 2.0))",
            f"2.0 * sigmoid({x})",
            self.pick("silu", "gelu", "relu", "erf", "sin", "cos") + f"({x})",
            f"log2(1.5 + exp2(min({x}, 8.0)))",
            f"log1p({self.pick(f'abs({x})', f'({x}) ** 2', f'exp2(min({x}, 6.0))')})",
            f"0.3 * exp2(min({x}, 2.0))",
            f"tan({self.pick(f'tanh({x})', f'0.7 * sin({x})', f'clamp({x}, -0.9, 1.1)')})",
            f"({x} + {self.pick('floor', 'ceil', 'round')}({x}) / 4)",
            f"({x}) - 0.3 * {self.pick('floor', 'ceil', 'round')}(2.0 * ({x}))",
            f"clamp({x}, -1.3, {self.pick('0.7', '2.1')})",
            f"max({x}, {self.pick('0.1', '-0.4')})",
            f"min({x}, 1.7, 0.2 * ({x}) + 1.0)",
            f"abs({x})",
            f"({x}) * abs({x}) / 4",
            f"({x} - 0.1 * ({x}) ** 2)",
        )

    def add(self, x: str) -> str:
        return f"({x} {self.pick('+', '+', '-')} {self.term()})"

    def term(self) -> str:
        kind = self.random.random()
        if kind < 0.5:
            return self.bias()
        if kind < 0.75:
            return f"{self.bias()} * {self.distance()}"
        if kind < 0.85:
            return self.distance()
        return self.pick(
            "0.01 * kv_idx", "0.25", "log1p(max(kv_idx, 0))", "0.02 * (q_idx % 7)", "sqrt(2.0 + abs(q_idx))"
        )

    def distance(self) -> str:
        return self.pick(
            *("(kv_idx - q_idx) / 32", "(q_idx - kv_idx) / 64", "0.03 * abs(q_idx - kv_idx)"),
            *("log2(1.0 + abs(q_idx - kv_idx))", "(kv_idx / max(kv_len, 1))", "(q_idx - q_len) / max(kv_len, 8)"),
            *("round((q_idx - kv_idx) / 4) / 8", "floor(kv_idx / 8) / 4", "((q_idx ^ kv_idx) & 7) / 8"),
            *("exp2(-abs(q_idx - kv_idx) / 16)", "log1p(max(kv_idx, 0))", "(1 << (kv_idx & 3)) / 8"),
            *("log(1.0 + abs(q_idx - kv_idx))", "(q_idx % 3)", "(kv_idx % 5) / 5", "((q_idx - kv_idx) // 8 * 0.1)"),
        )

    def bias(self) -> str:
        dtype = self.pick("float32", "float32", "float32", "float16", "bfloat16")
        return self.read(dtype, grad=self.chance(0.7))

    def times(self, x: str) -> str:
        return self.pick(
            lambda: f"({x}) * {self.bias()}",
            lambda: f"({x}) * (1.0 + 0.5 * {self.bias()})",
            f"({x}) * log(1.0 + max(q_idx, 0)) / 3",
            f"({x}) * log(2.0 + abs(q_idx - kv_idx)) / 3",
            lambda: f"({x}) / (1.0 + abs({self.bias()}))",
            lambda: f"{self.scalar('float')} * ({x})",
            f"({x}) * (1.0 if h % 2 == 0 else 0.5)",
        )

    def choice(self, x: str) -> str:
        other = self.pick(
            *(f"0.5 * ({x})", f"({x}) + 0.7", self.bias, lambda: f"({x}) - {self.term()}", "0.25", "-1.0")
        )
        condition = self.pick(
            *(self.atom, self.atom, f"{x} > {self.pick('0.1', '-0.3')}", lambda: f"{self.bias()} > 0.2", "h % 2 == 0")
        )
        return self.pick(f"where({condition}, {x}, {other})", f"({x} if {condition} else {other})")
