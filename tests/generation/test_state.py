# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The buffers of the rows in flight: fixed addresses, lanes that are views, rows that go to their slots."""

from dataclasses import fields

import pytest
import torch
from models import Tokenizer

from deepspeed_hybrid import SamplingConfig
from deepspeed_hybrid.generation.requests import SamplingPlan, check_sampling
from deepspeed_hybrid.generation.state import STOP_ID_BUCKET, DecodeState
from deepspeed_hybrid.ops.decode_step import LENGTH, RUNNING, STOPPED

SLOTS, COLUMNS, VOCAB = 6, 10, 32
CPU = torch.device("cpu")


def plan(**options) -> SamplingPlan:
    return check_sampling(SamplingConfig(**{"max_new_tokens": 5, "seed": 1, **options}), VOCAB, None, Tokenizer())


def tensors(state: DecodeState) -> dict[str, torch.Tensor]:
    named = {field.name: getattr(state, field.name) for field in fields(state)}
    return {name: value for name, value in named.items() if value is not None}


def filled(rows: int, columns: int, value: int) -> DecodeState:
    """Every buffer at one value that can be told from that of an empty state."""
    state = DecodeState.empty(rows, columns, CPU)
    state.track_seen(VOCAB)
    for tensor in tensors(state).values():
        tensor.fill_(value)
    return state


def test_an_empty_state_is_parked_and_harmless():
    state = DecodeState.empty(SLOTS, COLUMNS, CPU)
    assert state.parked.all() and bool((state.finish == RUNNING).all())
    assert bool((state.temperature == 1).all()) and bool((state.penalty == 1).all())
    assert bool((state.stop_ids == -1).all()) and state.seen is None
    assert state.tokens.shape == state.logprobs.shape == (SLOTS, COLUMNS)
    assert state.bytes() == sum(tensor.numel() * tensor.element_size() for tensor in tensors(state).values())


@pytest.mark.parametrize("count", [1, 4, SLOTS])
def test_lanes_are_views(count):
    state = DecodeState.empty(SLOTS, COLUMNS, CPU)
    state.track_seen(VOCAB)
    state.parked.fill_(False)
    lanes = state.lanes(count)
    for name, lane in tensors(lanes).items():
        whole = getattr(state, name)
        assert lane.data_ptr() == whole.data_ptr(), name
        assert lane.shape[0] == (whole.shape[0] if name == "stop_ids" else count), name
        lane.fill_(1)
        assert bool((whole[: lane.shape[0]] == 1).all()), name
        if name != "stop_ids" and name not in ("temperature", "penalty"):
            assert not whole[count:].any(), name


def test_rows_go_to_their_slots_and_nowhere_else():
    state = filled(SLOTS, COLUMNS, 0)
    addresses = {name: tensor.data_ptr() for name, tensor in tensors(state).items()}
    rows = filled(2, 4, 1)
    rows.token.copy_(torch.tensor([21, 22]))

    state.store(torch.tensor([4, 1]), rows)

    for name, tensor in tensors(state).items():
        assert tensor.data_ptr() == addresses[name]
        if name == "stop_ids":
            assert not tensor.any(), "stop ids belong to all rows"
            continue
        columns = slice(None, 4) if name in ("tokens", "logprobs") else slice(None)
        assert not tensor[[0, 2, 3, 5]].any(), name
        if tensor.dim() == 2:
            assert tensor[[1, 4], columns].all() and not tensor[[1, 4], 4:].any() or name == "seen", name
    assert state.token.tolist() == [0, 22, 0, 0, 21, 0]
    assert state.seen[[1, 4]].all()


def test_rows_without_seen_leave_seen_alone():
    state = filled(SLOTS, COLUMNS, 1)
    state.parked.fill_(False)
    state.store(torch.tensor([2]), DecodeState.empty(1, COLUMNS, CPU))
    assert state.seen.all() and state.parked.tolist() == [slot == 2 for slot in range(SLOTS)]


def test_moved_rows_bring_all_and_leave_parked_slots():
    state = filled(SLOTS, COLUMNS, 0)
    for name, tensor in tensors(state).items():
        if name not in ("stop_ids", "parked"):
            tensor.copy_(
                (torch.arange(SLOTS) % 2 if name == "seen" else torch.arange(SLOTS)).view(
                    -1, *[1] * (tensor.dim() - 1)
                )
            )
    state.move(torch.tensor([4, 5]), torch.tensor([1, 0]))
    for name, tensor in tensors(state).items():
        if name not in ("stop_ids", "parked"):
            rows = tensor.flatten(1)[:, 0] if tensor.dim() > 1 else tensor
            assert rows.tolist() == ([1, 0, 0, 1, 0, 1] if name == "seen" else [5, 4, 2, 3, 4, 5]), name
    assert state.parked.tolist() == [False] * 4 + [True] * 2


def test_parking():
    state = filled(SLOTS, COLUMNS, 1)
    state.parked.fill_(False)
    state.finish.copy_(torch.tensor([RUNNING, STOPPED, LENGTH, RUNNING, STOPPED, LENGTH]))
    state.park()
    assert state.parked.all() and bool((state.finish == RUNNING).all())
    assert state.tokens.all()


def test_starting_rows():
    options = plan(
        temperature=0.7, top_k=4, top_p=0.9, min_p=0.05, repetition_penalty=1.3, stop_token_ids=[3, 9], seed=-5
    )
    state = DecodeState.starting([4, 6, 6], [0, 0, 1], [7, 1, 1], options, 5, CPU)
    assert state.position.tolist() == [6, 0, 0] and state.length.tolist() == [0, 0, 0]
    assert state.request.tolist() == [4, 6, 6] and state.sample.tolist() == [0, 0, 1]
    assert not state.parked.any() and state.limit.tolist() == [5] * 3 and state.seed.tolist() == [-5] * 3
    for name, value in dict(temperature=0.7, top_p_tail=1 - 0.9, min_p=0.05, penalty=1.3).items():
        assert torch.equal(getattr(state, name), torch.full((3,), value)), name
    assert state.top_k.tolist() == [4] * 3
    assert state.stop_ids.tolist() == [3, 9] + [-1] * (STOP_ID_BUCKET - 2)


def test_starting_greedy_rows_divides_by_one():
    assert DecodeState.starting([0], [0], [3], plan(temperature=0.0), 5, CPU).temperature.tolist() == [1.0]


def test_stop_ids_stay_in_place_while_they_fit():
    state = DecodeState.empty(SLOTS, COLUMNS, CPU)
    address = state.stop_ids.data_ptr()
    for ids in [(1, 2, 3), tuple(range(STOP_ID_BUCKET)), (), (7,)]:
        state.set_stop_ids(ids)
        assert state.stop_ids.data_ptr() == address
        assert state.stop_ids.tolist() == [*ids, *[-1] * (STOP_ID_BUCKET - len(ids))]


def test_stop_ids_grow_and_then_stay():
    state = DecodeState.empty(SLOTS, COLUMNS, CPU)
    many = tuple(range(100, 100 + STOP_ID_BUCKET + 1))
    state.set_stop_ids(many)
    assert state.stop_ids.tolist() == [*many, *[-1] * (STOP_ID_BUCKET - 1)]
    assert state.lanes(2).stop_ids.data_ptr() == state.stop_ids.data_ptr()
    address = state.stop_ids.data_ptr()
    state.set_stop_ids((5,))
    assert state.stop_ids.tolist() == [5, *[-1] * (2 * STOP_ID_BUCKET - 1)]
    assert state.stop_ids.data_ptr() == address


def test_seen_is_made_once():
    state = DecodeState.empty(SLOTS, COLUMNS, CPU)
    state.track_seen(VOCAB)
    address = state.seen.data_ptr()
    assert state.seen.shape == (SLOTS, VOCAB) and state.seen.dtype == torch.bool
    state.track_seen(VOCAB)
    assert state.seen.data_ptr() == address
