# SPDX-License-Identifier: Apache-2.0
"""Checks of an op's arguments, before anything is launched. Works on shapes and names: no framework is imported."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from operator import index
from typing import Any, NoReturn, TypeGuard

from ..archs import MAX_HEAD_DIM, MAX_PAGED_HEAD_DIM, MIN_HEAD_DIM

FLOAT_DTYPES = ("float16", "bfloat16", "float32")
LAYOUTS = ("bhsd", "bshd")
PACKED = "packed"
# For each layout: its dims as error messages write them, its head axis and its sequence axis.
_DIMS = {"bhsd": ("[B, H, S, D]", 1, 2), "bshd": ("[B, S, H, D]", 2, 1), PACKED: ("[total, H, D]", 1, 0)}
# Positions, offsets and integer scalars are 32-bit in the kernels; half the range leaves room for their sums.
INT_LIMIT = 2**30
# Loop bounds add a scalar to the position of a row, and round the sum up to whole blocks.
OFFSET_LIMIT = 2**29
LARGEST_FLOAT = 3.4028234663852886e38
LARGEST_SCALE = 2.0**127
SEED_END = 2**63
# Dropout counts heads over all batch rows in one 32-bit word, which JAX carries as an int32.
HEADS_END = 2**31
_LONGEST_REPR = 200

DROPOUT_ROWS, DROPOUT_KEYS = 16, 32
"""Dropout draws its random words for tiles of so many rows and keys. A call must not begin inside such a tile."""


class ArgumentError(TypeError, ValueError):
    """A bad argument of an op. The message names the argument, what was expected and what was got."""


# An expected size: `n`, `(n,)` if a larger size is valid as well, or `(n, text)` with the formula that gave n.
Size = int | tuple[int] | tuple[int, str]


def at_least(n: int) -> Size:
    """A size that may also be larger."""
    return (n,)


def size_of(x: Any, axis: int) -> int | None:
    """The size of a tensor's axis, from which another tensor's dim is computed; None if the tensor lacks the axis.

    The tensor's own check then reports the error.
    """
    shape = getattr(x, "shape", ())
    return shape[axis] if axis < len(shape) else None


def computed(text: str, size: Callable[..., int], *values: Any) -> Size:
    """The size of a dim that the spec computes: `computed("2 * r + 1", lambda r: 2 * r + 1, 4)`.

    Any size is accepted if a value is not an int: then it is an argument that fails its own check, or a traced array.
    """
    if any(isinstance(value, bool) or not isinstance(value, int) for value in values):
        return at_least(1)
    try:
        return size(*values), text
    except (ArithmeticError, ValueError):  # a division by zero, a shift by a negative number
        return at_least(1)


def shown(value: object) -> str:
    """A wrong value in an error: an array by type, dtype and shape, anything else by the start of its repr."""
    if isinstance(value, int) and not isinstance(value, bool):
        # Dynamo prints a number that it traces as a symbol only as the int that it stands for.
        value = index(value)
    elif getattr(value, "is_nested", False):  # torch gives no shape of some nested tensors
        return f"a nested tensor of {value.dtype}"  # type: ignore[attr-defined]
    else:
        shape = getattr(value, "shape", None)
        if isinstance(shape, tuple) and shape and hasattr(value, "dtype"):
            return f"{type(value).__name__} of {value.dtype} {list(shape)}"
    text = repr(value)
    return text if len(text) <= _LONGEST_REPR else f"{text[:_LONGEST_REPR]}..."


def fail(op: str, argument: str, expected: str, got: object) -> NoReturn:
    """Raise the one error of an op's bad argument."""
    raise ArgumentError(f"{op}: {argument}: expected {expected}, got {got}")


_NO_GRADIENT = {
    "undeclared": 'variants.yaml declares it without a gradient: add "grad: true" to its entry, or detach it',
    "mask": "only the mask reads it, which has no gradient: detach it",
}
"""Why a float tensor of a variant has no gradient, and what to do."""


def refuse_gradient(op: str, argument: str, reason: str = "undeclared") -> NoReturn:
    """Refuse a tensor that requires grad although it has no gradient. `reason`: a key of `_NO_GRADIENT`."""
    raise ArgumentError(f"{op}: {argument}: it requires grad, but {_NO_GRADIENT[reason]}")


def host_number(op: str, argument: str, value: Any) -> Any:
    """The number in a numpy scalar or in a torch tensor `[]` on the CPU; any other `value` as it is.

    Reading a tensor on a GPU would make the call wait for the device, so it is refused.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value).__module__ == "numpy":
        # torch.compile takes a numpy scalar for an array, and any array for a tensor.
        return value.item() if value.ndim == 0 else value
    if hasattr(value, "requires_grad") and value.ndim == 0:
        if value.device.type != "cpu":
            expected = "a number, or a tensor [] on the CPU: no call waits for the device"
            fail(op, argument, expected, f"a tensor [] on {value.device}; its item() waits")
        if value.requires_grad:
            fail(op, argument, "a number, which has no gradient", "a tensor [] that requires grad; detach it")
        try:
            return value.item()
        except RuntimeError as error:
            if "vmap" in str(error):
                expected = "a number that is the same in all elements of a torch.func.vmap"
                fail(op, argument, expected, "one that differs between them")
            raise
    return value


def is_choice(value: object, choices: Iterable[str]) -> TypeGuard[str]:
    """Whether a value is one of these names. Arrays are never compared: they compare element by element."""
    return isinstance(value, str) and value in choices


def check_choice(op: str, argument: str, value: object, choices: Iterable[str]) -> None:
    """Check an argument that is one of these names."""
    if not is_choice(value, choices):
        fail(op, argument, " or ".join(map(repr, choices)), shown(value))


def check_layout(op: str, layout: object) -> None:
    check_choice(op, "layout", layout, LAYOUTS)


def check_shapes(op: str, layout: str, q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> None:
    """Check the shapes of q, k and v, given in `layout`, which may be PACKED."""
    dims, head, seq = _DIMS[layout]
    rank = dims.count(",") + 1
    for name, shape in (("q", q), ("k", k), ("v", v)):
        if len(shape) != rank:
            fail(op, name, f"{rank} dimensions {dims}", f"{len(shape)} dimensions {list(shape)}")
    if layout != PACKED:
        for name, shape in (("k", k), ("v", v)):
            if shape[0] != q[0]:
                fail(op, name, f"batch size {q[0]}, that of q", f"{shape[0]} in {dims} = {list(shape)}")
    if v[head] != k[head]:
        fail(op, "v", f"{k[head]} heads, as many as k", f"{v[head]} in {dims} = {list(v)}")
    if v[seq] != k[seq]:
        fail(op, "v", f"sequence length {k[seq]}, that of k", f"{v[seq]} in {dims} = {list(v)}")
    if k[head] == 0 or q[head] == 0 or q[head] % k[head] != 0:
        fail(op, "q", f"a head count that is a multiple of k's {k[head]}", f"{q[head]} in {dims} = {list(q)}")
    if k[-1] != q[-1]:
        fail(op, "k", f"head_dim {q[-1]}, that of q", f"{k[-1]} in {dims} = {list(k)}")
    for name, shape in (("q", q), ("v", v)):
        if not MIN_HEAD_DIM <= shape[-1] <= MAX_HEAD_DIM:
            expected = f"a head_dim from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
            is_wide = name == "q" and MAX_HEAD_DIM < shape[-1] <= MAX_PAGED_HEAD_DIM
            elsewhere = f"; calls on paged caches take up to {MAX_PAGED_HEAD_DIM}" if is_wide else ""
            fail(op, name, expected, f"{shape[-1]} in {dims} = {list(shape)}{elsewhere}")


def sizes_text(sizes: Sequence[Size]) -> str:
    """Expected sizes as error messages write them: `[2, >=128]`."""
    return f"[{', '.join(map(_size_text, sizes))}]"


def _size_text(size: Size) -> str:
    if not isinstance(size, tuple):
        return str(size)
    return f">={size[0]}" if len(size) == 1 else f"{size[1]} = {size[0]}"


def _fits(size: int, expected: Size) -> bool:
    # A symbolic size of torch.export is no int.
    if not isinstance(expected, tuple):
        return size == expected
    return size >= expected[0] if len(expected) == 1 else size == expected[0]


def check_sizes(op: str, argument: str, shape: Sequence[int], expected: Sequence[Size]) -> None:
    """Check a tensor's shape against expected sizes."""
    if len(shape) != len(expected) or not all(map(_fits, shape, expected)):
        fail(op, argument, f"shape {sizes_text(expected)}", list(shape))


def check_scale(op: str, scale: object) -> None:
    if abs(check_finite(op, "scale", scale, "a finite number or None", lambda _: True)) > LARGEST_SCALE:
        # Kernels multiply it by log2(e), which float32 must hold.
        fail(op, "scale", "a number between -2**127 and 2**127, or None", shown(scale))


def check_finite(op: str, argument: str, value: Any, expected: str, fits: Callable[[float], bool]) -> float:
    """A finite number that float32 holds and that `fits`, checked. `expected`: such numbers in words."""
    value = host_number(op, argument, value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not abs(value) < float("inf") or not fits(value):
        fail(op, argument, expected, shown(value))
    if abs(value) > LARGEST_FLOAT:
        fail(op, argument, "a number that float32 holds", value if isinstance(value, float) else "a larger int")
    return float(value)


def check_factor(op: str, argument: str, value: Any) -> float:
    """A number by which a call multiplies queries, keys or values of 8 bits or of a cache, checked."""
    return check_finite(op, argument, value, "a finite number of at least 0.0", lambda x: x >= 0)


def range_text(minimum: float | None, maximum: float | None) -> str:
    """A range as error messages write it: `from 1 to 8`, `of at least 1`, or nothing."""
    if minimum is None and maximum is None:
        return ""
    if minimum is None:
        return f" of at most {maximum}"
    return f" of at least {minimum}" if maximum is None else f" from {minimum} to {maximum}"


def in_range(value: float, minimum: float | None, maximum: float | None) -> bool:
    """Whether a number lies in its declared range; NaN lies in none."""
    return (minimum is None or value >= minimum) and (maximum is None or value <= maximum)


def check_int(
    op: str,
    argument: str,
    value: Any,
    minimum: int | None = None,
    maximum: int | None = None,
    *,
    nonzero: bool = False,
) -> int:
    """An integer argument of the kernels, checked. `torch.export` gives a symbolic one for a size that is dynamic."""
    value = host_number(op, argument, value)
    is_int = isinstance(value, int) or type(value).__name__ == "SymInt"
    if isinstance(value, bool) or not is_int or not in_range(value, minimum, maximum):
        fail(op, argument, f"an int{range_text(minimum, maximum)}", shown(value))
    if not -INT_LIMIT <= value <= INT_LIMIT:
        fail(op, argument, "an int of at most 2**30 either way", shown(value))
    if nonzero and value == 0:
        fail(op, argument, "an int other than 0, as it divides", value)
    number: int = value
    return number


def check_offset(op: str, q_offset: Any) -> int:
    """The position of the first query row, checked."""
    return check_int(op, "q_offset", q_offset, -OFFSET_LIMIT, OFFSET_LIMIT)


def check_float(
    op: str, argument: str, value: Any, minimum: float | None = None, maximum: float | None = None
) -> float:
    """A floating-point argument of the kernels, checked, as a Python float: Triton takes an int for an integer."""
    value = host_number(op, argument, value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not in_range(value, minimum, maximum):
        fail(op, argument, f"a number{range_text(minimum, maximum)}", shown(value))
    if value != value:
        fail(op, argument, "a number that is not NaN", shown(value))
    if LARGEST_FLOAT < abs(value) < float("inf"):
        fail(op, argument, "a number that float32 holds", value if isinstance(value, float) else "a larger int")
    return float(value)


def check_flag(op: str, argument: str, value: Any) -> bool:
    """An argument that is True or False, checked: any other value, such as "no", may have been meant as either."""
    if value is True or value is False:
        return value
    found = host_number(op, argument, value)
    if not isinstance(found, bool):
        fail(op, argument, "True or False", shown(value))
    return found


def check_deterministic(op: str, deterministic: object) -> None:
    """Check whether a call asks for gradients of equal bits: by a bool, or None for the default."""
    found = host_number(op, "deterministic", deterministic)
    if found is not None and not isinstance(found, bool):
        fail(op, "deterministic", "None, True or False", shown(deterministic))


def check_padding_id(op: str, padding_id: object) -> int:
    """The segment id of padding, checked: any number that an int32 tensor can hold."""
    padding_id = host_number(op, "padding_id", padding_id)
    if isinstance(padding_id, bool) or not isinstance(padding_id, int) or not -(2**31) <= padding_id < 2**31:
        fail(op, "padding_id", "an int of 32 bits", shown(padding_id))
    return padding_id


def check_dropout_p(op: str, dropout_p: object) -> float:
    """The probability of dropout, checked."""
    dropout_p = host_number(op, "dropout_p", dropout_p)
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)) or not 0 <= dropout_p < 1:
        fail(op, "dropout_p", "a number from 0 to below 1", shown(dropout_p))
    return float(dropout_p)


def check_prune(op: str, prune: object) -> float:
    """The share of a row's weight that a call may leave out, checked."""
    prune = host_number(op, "prune", prune)
    if isinstance(prune, bool) or not isinstance(prune, (int, float)) or not 0 < prune < 1:
        fail(op, "prune", "a number between 0 and 1, such as 2**-24, or None", shown(prune))
    return float(prune)


def check_whole(op: str, prune: object) -> None:
    """Refuse to prune a call on paged caches."""
    if prune is not None:
        fail(op, "prune", "None beside page_table: calls on paged caches visit every key", shown(prune))


def check_unscheduled(op: str, schedule: object) -> None:
    """Refuse a schedule beside `prune`."""
    if schedule is not None:
        fail(op, "schedule", "None beside prune: which blocks are visited follows from q, k and g", "a schedule")


def is_seed(x: object) -> bool:
    """Whether a value is a number that may seed dropout."""
    return type(x) is int and 0 <= x < SEED_END


def check_seed(op: str, seed: object) -> int:
    """The seed of dropout, checked. It has 63 of the generator's 64 bits, because operators carry signed integers."""
    seed = host_number(op, "seed", seed)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < SEED_END:
        fail(op, "seed", "an int from 0 to 2**63 - 1 or None", shown(seed))
    return seed


def dropout_coordinates(op: str, origin: Any, heads: int) -> tuple[Any, Any, Any, Any]:
    """The coordinates from which dropout counts a call's probabilities, computed from its `dropout_origin`.

    They are the index of the first head, counted over all batch rows of the whole call, the number of heads of the
    whole call, the first row and the first key. Elements of the origin may be arrays `[]` whose values are not known.
    """
    if origin is None:
        return 0, heads, 0, 0
    expected = "None, (batch row, head, heads) or (batch row, head, heads, row, key)"
    if not isinstance(origin, tuple) or len(origin) not in (3, 5):
        fail(op, "dropout_origin", expected, shown(origin))
    origin = tuple([host_number(op, "dropout_origin", x) for x in origin])
    if not all(map(_counts_from_0, origin)):
        fail(op, "dropout_origin", f"{expected}, integers from 0 on", shown(origin))
    batch_row, head, all_heads, row, key = (*origin, 0, 0)[:5]
    if all(isinstance(x, int) for x in origin[:3]):
        if head + heads > all_heads:
            fail(op, "dropout_origin", f"a head and heads with room for q's {heads}", shown(origin))
        if batch_row * all_heads + head >= HEADS_END:
            fail(op, "dropout_origin", "a batch row times heads, plus head, below 2**31", shown(origin))
    for name, x, unit in (("row", row, DROPOUT_ROWS), ("key", key, DROPOUT_KEYS)):
        if isinstance(x, int) and x % unit:
            fail(op, "dropout_origin", f"a {name} that is a multiple of {unit}", shown(origin))
    return batch_row * all_heads + head, all_heads, row, key


def _counts_from_0(x: Any) -> bool:
    """Whether it is an int from 0 on, or an array `[]` of integers, which JAX may be tracing."""
    if getattr(x, "ndim", None) == 0:
        return "int" in str(x.dtype)
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x < INT_LIMIT


def keep_numbers(dropout_p: float) -> tuple[int, float]:
    """The least 32-bit random word that keeps a probability, and the factor that preserves the mean.

    Both are computed from `dropout_p` rounded to a multiple of 2**-32.
    """
    threshold = min(round(dropout_p * 2**32), 2**32 - 1)
    return threshold, 2**32 / (2**32 - threshold)


def keywords(**names: str) -> Callable[[Callable[..., Any]], Any]:
    """Rename a function's parameters for its callers. `names`: new name -> the parameter's name in the function.

    A new name that one of the function's parameters already has is ignored: it still passes that parameter.
    """

    def renamed(function: Callable[..., Any]) -> Any:
        signature = inspect.signature(function)
        own = {name: to for name, to in names.items() if name not in signature.parameters}
        public = {to: name for name, to in own.items()}

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **{own.get(name, name): value for name, value in kwargs.items()})

        parameters = [x.replace(name=public.get(x.name, x.name)) for x in signature.parameters.values()]
        call.__dict__["__signature__"] = signature.replace(parameters=parameters)
        return call

    return renamed
