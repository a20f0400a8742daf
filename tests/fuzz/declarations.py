"""What a random variant declares: its tensors with their dims and how they are indexed, and its scalars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

EDGES = (0, 1, 2, 3, 5, 8, 15, 16, 17, 20, 31, 32, 33, 40, 48, 63, 64, 65, 100, 127, 128)
STEPS = (2, 3, 4, 5, 8, 16, 17, 32)

NAMES = (
    "span",
    "tile",
    "heads",
    "values",
    "block",
    "acc",
    "qk",
    "q_ptr",
    "row_sum",
    "start_m",
    "delta",
    "rows",
    "term",
)
"""What generated code itself calls something: a tensor or scalar may have these names, too."""

INDEX_DIMS = ("b", "h", "hkv", "q_idx", "kv_idx")


class Declarations:
    """Random tensors and scalars that an entry declares, and their elements as expressions read them."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.tensors: dict[str, dict[str, Any]] = {}
        self.scalars: dict[str, Any] = {}

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def pick(self, *options: str | Callable[[], str]) -> str:
        """One of the texts; a function is called only if it is chosen, as what it draws may declare something."""
        chosen = self.random.choice(options)
        return chosen if isinstance(chosen, str) else chosen()

    def scalar(self, kind: str) -> str:
        names = [name for name, type_ in self.scalars.items() if type_ == kind]
        if names and self.chance(0.6):
            return self.random.choice(names)
        name = self.new_name(f"n{len(self.scalars)}" if kind == "int" else f"x{len(self.scalars)}")
        self.scalars[name] = kind
        return name

    def new_name(self, usual: str) -> str:
        free = [name for name in NAMES if name not in {**self.tensors, **self.scalars}]
        return self.random.choice(free) if self.chance(0.15) else usual

    def dims(self, most: int = 3) -> list[str | int]:
        count = self.random.choice((0, 1, 1, 2, 2, 3, 4)[: most + 3])
        found: list[str | int] = []
        for _ in range(count):
            dim = self.pick("b", "h", "h", "hkv", "q_idx", "q_idx", "kv_idx", "kv_idx", "int", "m")
            if dim in ("b", "h", "hkv") and dim in found:
                continue
            found.append(self.random.choice((3, 8, 33)) if dim == "int" else dim)
        if "b" in found and self.chance(0.8):
            found.remove("b")
            found.insert(0, "b")
        return found

    def read(self, dtype: str, dims: Sequence[str | int] | None = None, *, grad: bool = False) -> str:
        """An element of a tensor: of a new one, or of one that is there."""
        same = [name for name, x in self.tensors.items() if x.get("dtype", "float32") == dtype and not grad]
        same += [name for name, x in self.tensors.items() if x.get("grad") and grad]
        if same and dims is None and self.chance(0.35):
            name = self.random.choice(same)
        else:
            if len(self.tensors) >= 4:
                return "1" if dtype.startswith("int") else "True" if dtype == "bool" else "0.5"
            name = self.declared(dtype, dims, grad=grad)
        return self.element(name)

    def declared(self, dtype: str, dims: Sequence[str | int] | None = None, *, grad: bool = False) -> str:
        """The name of a new tensor."""
        name = self.new_name(f"{ {'b': 's', 'i': 'i'}.get(dtype[0], 'w') }{len(self.tensors)}")
        declared: dict[str, Any] = {"dims": self.dims() if dims is None else list(dims)}
        declared |= {"dtype": dtype} if dtype != "float32" else {}
        self.tensors[name] = declared | ({"grad": True} if grad else {})
        return name

    def element(self, name: str) -> str:
        dims = self.tensors[name]["dims"]
        return f"{name}[{', '.join(self.index(dim) for dim in dims)}]" if dims else name

    def index(self, dim: str | int) -> str:
        """An index of a dim: mostly what it is declared as."""
        if dim in INDEX_DIMS and self.chance(0.66):
            return str(dim)
        c, step = self.random.choice(EDGES[:12]), self.random.choice(STEPS)
        positions = (
            *("q_len - 1 - q_idx", "kv_len - kv_idx", f"kv_idx >> {step % 5 or 1}", f"q_idx ^ {c}", f"kv_idx & {c}"),
            *("kv_idx", "q_idx", f"q_idx - kv_idx + {c}", f"q_idx - {c}", f"kv_idx + {c}", f"q_idx // {step}"),
            *(f"kv_idx // {step}", f"min(kv_idx, {c})", "max(q_idx - kv_idx, 0)", "abs(q_idx - kv_idx)"),
            *(f"(q_idx - kv_idx) // {step} + {c}", f"clamp(q_idx - kv_idx + {c}, 0, {2 * c})", "q_idx + kv_idx"),
        )
        if dim in ("q_idx", "kv_idx"):
            other = "kv_idx" if dim == "q_idx" else "q_idx"
            if self.chance(0.3):
                return other
            if self.chance(0.15) and len(self.tensors) < 4:
                return self.read("int32", [self.pick("m", "m", "kv_idx", "q_idx")])
            return self.pick(
                other, other, f"{dim} - 1", f"{dim} // {step}", f"min({dim}, {c})", "h", str(c), *positions
            )
        if dim in INDEX_DIMS:
            return self.pick(
                "b", "h", "hkv", f"h // {step}", f"h % {step}", f"{dim} + 1", "0", "h + 1", f"q_idx % {step}"
            )
        if self.chance(0.12) and len(self.tensors) < 4:
            return self.read("int32", [self.pick("m", "kv_idx", "q_idx")])
        if self.chance(0.08):
            return self.scalar("int")
        number = str(self.random.randrange(4))
        return self.pick("h", "b", f"q_idx % {step}", f"kv_idx % {step}", number, *positions)
