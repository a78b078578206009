# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The scheduler against the plainest model of it: a queue of rows and a dict of who is where."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_hybrid.generation.scheduler import SlotScheduler

CALM = settings(max_examples=200, deadline=None, derandomize=True, database=None)


@CALM
@given(rows=st.integers(0, 30), slots=st.integers(1, 9), data=st.data())
def test_any_order_of_endings(rows, slots, data):
    scheduler = SlotScheduler(rows, slots)
    queue, seated, ended = list(range(rows)), {}, []
    while scheduler.busy:
        placed = scheduler.admit()

        free = [slot for slot in range(slots) if slot not in seated]
        assert placed == list(zip(free, queue, strict=False))
        for slot, row in placed:
            seated[slot] = queue.pop(0)
            assert seated[slot] == row
        assert scheduler.occupants == [seated.get(slot) for slot in range(slots)]
        assert scheduler.running == len(seated) == min(slots, rows - len(ended))
        assert scheduler.admissions == len(ended) + len(seated)
        assert scheduler.admit() == []

        ending = data.draw(st.lists(st.sampled_from(sorted(seated)), min_size=1, unique=True))
        for slot in ending:
            row = scheduler.retire(slot)
            assert row == seated.pop(slot)
            ended.append(row)
            assert scheduler.occupants[slot] is None
    assert sorted(ended) == list(range(rows))
    assert (scheduler.running, scheduler.admit(), scheduler.admissions) == (0, [], rows)


@pytest.mark.parametrize("rows, slots", [(1, 1), (5, 2), (2, 5)])
def test_rows_start_in_order(rows, slots):
    """First come, first served, whatever slot becomes free."""
    scheduler, started = SlotScheduler(rows, slots), []
    while scheduler.busy:
        started += [row for _, row in scheduler.admit()]
        scheduler.retire(max(slot for slot, row in enumerate(scheduler.occupants) if row is not None))
    assert started == list(range(rows))


def test_a_free_slot_cannot_be_retired():
    scheduler = SlotScheduler(2, 3)
    scheduler.admit()
    with pytest.raises(ValueError, match="slot 2"):
        scheduler.retire(2)
    scheduler.retire(0)
    with pytest.raises(ValueError, match="slot 0"):
        scheduler.retire(0)
    assert scheduler.occupants == [None, 1, None]


def test_a_scheduler_without_rows_is_done():
    scheduler = SlotScheduler(0, 2)
    assert not scheduler.busy and scheduler.admit() == []
