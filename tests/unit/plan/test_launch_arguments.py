"""The groups that a launch's arguments are printed in."""

from __future__ import annotations

import pytest

from codegen.plan.code.host import host, listed
from codegen.plan.kernels.kernel import ArgGroup, KernelPlan, numbers, pointers
from codegen.plan.ops.launch_arguments import LaunchGroup, launch_groups


def strides(name: str, function: str = "strides") -> ArgGroup:
    return ArgGroup(names=(f"stride_{name}h",), host=host(f"*{function}({{}})", name))


def kernel(*args: ArgGroup) -> KernelPlan:
    return KernelPlan(name="fwd", args=args, constants=())


def texts(*args: ArgGroup) -> list[str]:
    return [group.text for group in launch_groups(kernel(*args))]


def test_pointers_strides_and_numbers_are_groups() -> None:
    found = texts(pointers("q", "k"), numbers("q_offset"), strides("q"), numbers("q_len"), numbers("scale"))
    assert found == ["(q, k, q_offset)", "strides(q)", "(q_len, scale)"]


def test_one_call_gives_the_strides_of_tensors_that_follow_each_other() -> None:
    found = texts(strides("q", "unit_strides"), strides("k", "unit_strides"), strides("o"))
    assert found == ["(*unit_strides(q, k), *strides(o))"]


def test_buffers_of_a_list_are_passed_as_the_list() -> None:
    args = (pointers("ids"), pointers("ids_min"), pointers("ids_max"), pointers("ranges"))
    (group,) = launch_groups(kernel(*args), ["ids_min", "ids_max"])
    assert group.text == "(ids, *block_extremes, ranges)"
    with pytest.raises(AssertionError):
        launch_groups(kernel(*args), ["ids_max", "ids_min"])


def test_a_long_group_is_cut() -> None:
    lines = texts(*(pointers(f"tensor_{i}_of_many") for i in range(10)))
    assert len(lines) == 2
    assert all(len(line) < 104 for line in lines)


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (host("{}", "q"), "(q,)"),
        (host("*{}.stride()", "slope"), "(*slope.stride(),)"),
        (listed([host("row_stride({})", "a"), host("row_stride({})", "b")]), "(row_stride(a), row_stride(b))"),
        (host("*packed_strides({})", listed(["dk", "dv"])), "packed_strides(dk, dv)"),
    ],
)
def test_a_group_of_one_part_is_a_tuple(part: object, text: str) -> None:
    assert LaunchGroup((part,)).text == text  # type: ignore[arg-type]
