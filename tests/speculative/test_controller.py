# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The length of blocks that pays: found from times and acceptance, and followed when they change."""

import pytest
import torch
from harness import rollout_of
from models import ragged_prompts, tiny_model
from speculative_cases import ScriptedDrafter, figures, script_of, speculative_rollout, tiny_draft

from deepspeed_hybrid import RolloutRequest, SamplingConfig
from deepspeed_hybrid.speculative.controller import (
    KEEP,
    MEMORY,
    PATIENCE,
    PERIOD,
    PRIOR,
    PROBE_PERIODS,
    SURE,
    FixedBlock,
    PayingBlock,
)

LENGTHS = (1, 4, 8, 16)
GOOD = [0.95] * 16
POOR = [0.3] * 16


class Machine:
    """Steps of so many ms by length over so many rows, whose drafts are right at so many rates."""

    def __init__(self, times: dict[int, float], rates: list[float], lanes: int = 4, rows: int = 256):
        self.rows = rows
        self.times, self.rates, self.lanes, self.now = times, rates, lanes, 0.0
        self.controller = PayingBlock(LENGTHS, clock=lambda: self.now)
        self.chance = torch.Generator().manual_seed(0)
        self.reached = {length: torch.zeros(length, dtype=torch.int64) for length in times}
        self.used: list[int] = []

    def begin(self) -> None:
        """A call."""
        for counts in self.reached.values():
            counts.zero_()
        self.controller.begin()

    def run(self, steps: int) -> list[int]:
        """The lengths that were used."""
        first = len(self.used)
        for _ in range(steps):
            tokens = self.controller.tokens(self.lanes)
            self.now += self.times[tokens]
            right = torch.rand(self.rows, tokens - 1, generator=self.chance) < torch.tensor(self.rates[: tokens - 1])
            self.reached[tokens][0] += self.rows
            self.reached[tokens][1:] += right.long().cumprod(dim=1).sum(dim=0)
            self.controller.record(self.lanes, tokens, self.reached[tokens])
            self.used.append(tokens)
        return self.used[first:]

    def best(self) -> int:
        """By the table itself."""

        def speed(tokens: int) -> float:
            expected, chance = 1.0, 1.0
            for rate in self.rates[: tokens - 1]:
                chance *= rate
                expected += chance
            return expected / self.times[tokens]

        return max(LENGTHS, key=speed)


TABLES = {
    "blocks are almost free": dict(zip(LENGTHS, (1.0, 1.1, 1.2, 1.4), strict=True)),
    "long ones cost": dict(zip(LENGTHS, (1.0, 1.2, 2.0, 4.0), strict=True)),
    "blocks cost by the token": dict(zip(LENGTHS, (1.0, 3.9, 7.8, 15.6), strict=True)),
}


@pytest.mark.parametrize("times", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("rates", [GOOD, POOR], ids=["good", "poor"])
def test_it_settles_on_the_tables_best(times, rates):
    machine = Machine(times, rates)
    assert machine.run(PERIOD * len(LENGTHS)) == [length for length in LENGTHS for _ in range(PERIOD)]
    settle(machine)
    assert set(machine.run(PERIOD * (PROBE_PERIODS - 1))) == {machine.best()}


def settle(machine: Machine) -> None:
    for _ in range(len(LENGTHS) * SURE):
        if machine.controller.settled(machine.lanes) is None:
            machine.run(PERIOD)
    assert machine.controller.settled(machine.lanes) is not None


def test_a_first_time_that_was_too_long_does_not_decide():
    """Of lengths that are close to one another: as many drafts as there are rows say little of a time."""
    times = dict(zip(LENGTHS, (3.74, 9.93, 15.9, 27.8), strict=True))
    machine = Machine(times, [0.86] * 16, rows=64)
    machine.run(PERIOD)
    machine.times = {**times, 4: 10.9}
    machine.run(PERIOD)
    machine.times = times
    settle(machine)
    assert machine.best() == 4 == machine.controller.settled(4)


def test_speculation_goes_off_where_it_does_not_pay_and_on_again():
    machine = Machine(TABLES["long ones cost"], [0.05] * 16)
    machine.run(PERIOD * len(LENGTHS))
    assert set(machine.run(PERIOD * 5)) == {1}
    machine.rates = GOOD
    later = machine.run(PERIOD * PROBE_PERIODS * 12)
    assert later[-PERIOD * 4] == machine.best() != 1


def test_a_small_gain_is_no_reason_to_change():
    times = dict(zip(LENGTHS, (1.0, 10.0, 2.0, 20.0), strict=True))
    machine = Machine(times, [1.0] * 16)
    machine.run(PERIOD * (len(LENGTHS) + 1))
    assert machine.used[-1] == 8
    machine.controller.seconds[4, 16] = 3.96  # 16 / 3.96 is 1 % more than 8 / 2
    assert machine.run(PERIOD)[0] == 8
    machine.controller.seconds[4, 16] = 3.6
    assert machine.run(PERIOD)[0] == 16
    assert machine.controller.settled(4) == 16 and machine.controller.settled(3) is None


def test_numbers_of_lanes_are_apart():
    machine = Machine(TABLES["blocks are almost free"], GOOD)
    machine.run(PERIOD * 5)
    assert machine.used[-1] == 16
    machine.lanes, machine.times = 64, TABLES["blocks cost by the token"]
    machine.run(PERIOD * 5)
    assert machine.used[-1] == 1
    machine.lanes, machine.times = 4, TABLES["blocks are almost free"]
    assert machine.run(1) == [16]


def test_what_is_between_calls_is_not_measured():
    machine = Machine(TABLES["long ones cost"], GOOD)
    for _ in range(PERIOD * len(LENGTHS) * 2):
        machine.run(PERIOD // 2)
        machine.now += 1000.0
        machine.begin()
    assert not machine.controller.seconds  # no call was long enough
    machine.run(PERIOD)
    assert machine.controller.seconds == {(4, 1): pytest.approx(1.0)}


@pytest.mark.parametrize("step", [0, PERIOD])
def test_the_first_step_of_a_length_is_not_measured(step):
    """Kernels are compiled in it."""
    machine = Machine(TABLES["blocks cost by the token"], POOR)
    machine.run(step)
    machine.times = {length: time + 1000.0 for length, time in machine.times.items()}
    machine.run(1)
    machine.times = TABLES["blocks cost by the token"]
    machine.run(PERIOD * len(LENGTHS))
    assert set(machine.run(PERIOD * 4)) == {1}


def test_what_was_queued_before_steps_is_not_measured():
    """On a GPU the host is ahead of prompts when it asks for the first steps behind them."""
    machine = Machine(TABLES["long ones cost"], GOOD)
    machine.run(PERIOD * len(LENGTHS))
    known = dict(machine.controller.seconds)
    for start in (machine.begin, machine.controller.disturb) * 3:
        start()
        machine.times = {length: time + 1000.0 for length, time in machine.times.items()}
        machine.run(1)
        machine.times = TABLES["long ones cost"]
        machine.run(PERIOD - 1)
    assert machine.controller.seconds == pytest.approx(known)


def test_a_change_of_length_is_not_measured():
    """A graph that has not run for a while takes longer to begin."""
    machine = Machine(TABLES["long ones cost"], GOOD)
    for _ in range(PERIOD * PROBE_PERIODS * 4):
        before = machine.used[-1:]
        tokens = machine.controller.tokens(machine.lanes)
        machine.now += 5.0 * (before != [tokens])
        machine.run(1)
    known = {length: machine.controller.seconds[4, length] for length in LENGTHS}
    assert known == pytest.approx(machine.times)


def test_within_one_length_every_step_is_measured():
    machine = Machine(TABLES["long ones cost"], GOOD)
    settle(machine)
    machine.run(-len(machine.used) % PERIOD)
    start, waits = machine.now, []
    counts = machine.reached[machine.best()]
    machine.reached[machine.best()] = Watched(counts, waits)
    machine.run(3 * PERIOD)
    assert machine.now > start and len(waits) == 3  # at the end of each


class Watched:
    """Counts that say when the host looks at them."""

    def __init__(self, counts: torch.Tensor, waits: list):
        self.counts, self.waits = counts, waits

    def __getitem__(self, place):
        return self.counts[place]

    def __setitem__(self, place, value) -> None:
        self.counts[place] = value

    def tolist(self) -> list[int]:
        self.waits.append(1)
        return self.counts.tolist()


def test_a_longer_time_is_believed_slowly_and_a_shorter_one_at_once():
    machine = Machine(TABLES["blocks are almost free"], GOOD)
    machine.run(PERIOD * len(LENGTHS))
    known = machine.controller.seconds
    for time, believed in ((2.8, KEEP * 1.4 + (1 - KEEP) * 2.8), (0.7, 0.7)):
        machine.times = {**machine.times, 16: time}
        assert machine.run(PERIOD) == [16] * PERIOD
        assert known[4, 16] == pytest.approx(believed)


def test_shares_of_right_drafts_are_of_the_last_ones():
    machine = Machine(TABLES["blocks are almost free"], GOOD)
    machine.run(PERIOD * (len(LENGTHS) + 1))
    assert machine.controller.expected(2) == pytest.approx(1 + GOOD[0], abs=0.03)
    machine.rates = POOR
    assert 256 * PERIOD == MEMORY  # what a period sees of the first place is all that is remembered
    assert machine.run(PERIOD) == [16] * PERIOD
    assert machine.controller.expected(2) == pytest.approx(1 + POOR[0], abs=0.03)


def test_a_place_is_as_good_as_the_one_before_until_more_is_known():
    controller = PayingBlock(LENGTHS)
    assert controller.expected(4) == 1.0
    controller.drafts[1], controller.right[1] = 100.0, 50.0
    assert controller.expected(4) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    controller.drafts[2], controller.right[2] = 2.0, 2.0  # next to nothing
    rate = (2 + PRIOR * 0.5) / (2 + PRIOR)
    assert controller.expected(3) == pytest.approx(1 + 0.5 + 0.5 * rate)


def test_one_lane_settles_on_the_best_length_too():
    """A period of one lane has eight drafts at the first place: no share by itself."""
    times = dict(zip(LENGTHS, (2.33, 3.12, 3.25, 3.72), strict=True))
    settled = []
    for seed in range(20):
        machine = Machine(times, [0.86] * 16, lanes=1, rows=1)
        machine.chance.manual_seed(seed)
        machine.run(600)
        settled.append(machine.controller.settled(1))
    assert machine.best() == 16 and settled.count(16) >= 19


def test_one_accident_is_not_for_ever():
    machine = Machine(TABLES["blocks cost by the token"], POOR)
    machine.run(3)
    machine.now += 1000.0
    machine.run(PERIOD * PROBE_PERIODS * 10)
    assert machine.used[-1] == 1


def test_other_numbers_of_lanes_take_no_probe_away():
    """Numbers that take turns, as in a tail, and of which each would be probed at the same place of one count."""
    machine = Machine(TABLES["long ones cost"], GOOD)
    tail = (64, 16, 4, 1)
    for call in range(120):
        machine.begin()
        for lanes in tail:
            machine.lanes = lanes
            if lanes == 64 and not call:  # an accident at its best length
                machine.times = {**machine.times, machine.best(): 1000.0}
                machine.run(PERIOD * len(LENGTHS))
                machine.times = TABLES["long ones cost"]
            machine.run(PERIOD * (PROBE_PERIODS + 1))
    machine.lanes = 64
    assert machine.run(PERIOD * 4).count(machine.best()) >= PERIOD * 3


def test_what_comes_between_steps_is_not_measured():
    machine = Machine(TABLES["blocks cost by the token"], POOR)
    machine.run(PERIOD // 2)
    machine.now += 1000.0
    machine.controller.disturb()
    machine.run(PERIOD // 2)
    assert not machine.controller.seconds
    machine.run(PERIOD * len(LENGTHS))
    assert set(machine.run(PERIOD * 2)) == {1}
    assert machine.controller.seconds[4, 1] == pytest.approx(1.0)


def test_where_something_always_comes_between_it_still_settles():
    machine = Machine(TABLES["blocks cost by the token"], POOR)
    for _ in range(PERIOD * len(LENGTHS) * (PATIENCE + 1) * 2):
        machine.run(PERIOD // 2)
        machine.controller.disturb()
    assert machine.used[-1] == 1 and len(machine.controller.seconds) == len(LENGTHS)


def test_prompts_and_callers_are_said_to_come_between():
    target = tiny_model()
    rollout = speculative_rollout(target, tiny_draft(target))
    controller, said = rollout._speculation.controller, []
    controller.disturb = lambda: said.append(1)
    request = RolloutRequest(*ragged_prompts([5, 2, 3]))
    rollout.generate(request, SamplingConfig(max_new_tokens=12, temperature=0.0, continuous_batch_size=1))
    assert len(said) == 1 + 3
    said.clear()
    list(rollout.generate_iter(request, SamplingConfig(max_new_tokens=12, temperature=0.0, continuous_batch_size=1)))
    assert len(said) == 4 + 3


def test_a_fixed_block_is_fixed():
    assert [FixedBlock(8).tokens(lanes) for lanes in (1, 64)] == [8, 8]


def test_answers_are_the_plain_paths_whatever_it_chooses():
    target, prompts = tiny_model(), ragged_prompts([5, 2])
    sampling = SamplingConfig(max_new_tokens=80, temperature=0.0)
    plain = rollout_of(target).generate(RolloutRequest(*prompts), sampling)
    rollout = speculative_rollout(target, tiny_draft(target, block_size=12), draft_block_size="auto")
    assert rollout._speculation.controller.lengths == (1, 4, 8, 12)
    rollout._speculation.drafter = ScriptedDrafter(script_of(plain), lambda *_: 1)
    batch = rollout.generate(RolloutRequest(*prompts), sampling)
    assert torch.equal(batch.input_ids, plain.input_ids)
    steps = figures(rollout)["steps"]
    assert set(steps) >= {1, 4, 8, 12} and sum(steps.values()) == rollout.get_last_profile()["num_decode_forwards"]
    assert "whichever pays most" in rollout.describe()
