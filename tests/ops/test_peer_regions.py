"""Regions of a buffer that messages take in turn."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from generated._runtime.core.peer_regions import Regions

ROOM = 64


@given(st.lists(st.integers(1, ROOM // 2), max_size=60))
def test_no_region_is_taken_before_its_last_message_is_done(sizes: list[int]) -> None:
    regions, in_use, done = Regions(ROOM), [], 0
    for number, size in enumerate(sizes, start=1):
        begin, last = regions.take(size, number)
        assert 0 <= begin and begin + size <= ROOM
        assert last < number
        done = max(done, last)
        in_use = [each for each in in_use if each[0] > done]
        assert all(high <= begin or begin + size <= low for _, low, high in in_use)
        in_use.append((number, begin, begin + size))


def test_two_messages_of_half_the_room_do_not_wait_for_each_other() -> None:
    regions = Regions(ROOM)
    assert [regions.take(ROOM // 2, number)[1] for number in (1, 2, 3, 4)] == [0, 0, 1, 2]
