"""The tracker against a model of the broker, which closes the channel on any ack that it does not expect."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.consume.acknowledger import DeliveryAckTracker
from tests.examples import examples


class ModelBroker:
    """What RabbitMQ holds unacknowledged on one channel, and what it says to a wrong ack."""

    def __init__(self) -> None:
        self.unacked: list[int] = []
        self.acked: set[int] = set()

    def ack(self, tag: int, multiple: bool) -> None:
        assert tag in self.unacked, f"406 unknown delivery tag {tag}"
        done = [one for one in self.unacked if one <= tag] if multiple else [tag]
        self.acked.update(done)
        self.unacked = [one for one in self.unacked if one not in done]


def tracker_of(*tags: int) -> DeliveryAckTracker:
    tracker = DeliveryAckTracker()
    for tag in tags:
        tracker.delivered(tag)
    return tracker


@settings(max_examples=examples(60))
@given(st.data())
def test_any_order_of_settling_acknowledges_exactly_what_was_handled(data: st.DataObject) -> None:
    tracker, broker = DeliveryAckTracker(), ModelBroker()
    open_tags: list[int] = []
    handled: set[int] = set()
    delivered = 0

    def flush() -> None:
        newest, rest = tracker.take()
        if newest is not None:
            broker.ack(newest, multiple=True)
        for tag in rest:
            broker.ack(tag, multiple=False)
        assert broker.acked == handled
        assert sorted(broker.unacked) == sorted(open_tags)

    for action in data.draw(st.lists(st.sampled_from(["deliver", "deliver", "ack", "reject", "flush"]), max_size=60)):
        if action == "deliver":
            delivered += 1
            tracker.delivered(delivered)
            broker.unacked.append(delivered)
            open_tags.append(delivered)
        elif action == "flush":
            flush()
        elif open_tags:
            tag = open_tags.pop(data.draw(st.integers(0, len(open_tags) - 1)))
            tracker.settle(tag, action == "ack")
            if action == "ack":
                handled.add(tag)
            else:
                broker.unacked.remove(tag)
        assert tracker.outstanding == len(open_tags)
        assert broker.acked <= handled
    flush()


@given(st.permutations(range(1, 101)))
def test_everything_settled_takes_one_frame_whatever_the_order(order: list[int]) -> None:
    tracker = tracker_of(*range(1, 101))
    for tag in order:
        tracker.settle(tag, True)

    assert tracker.take() == (100, [])


def test_a_tag_that_the_client_library_swallowed_does_not_block_the_prefix() -> None:
    tracker = tracker_of(1, 3)
    tracker.settle(1, True)
    tracker.settle(3, True)

    assert tracker.outstanding == 0
    assert tracker.take() == (3, [])


@pytest.mark.parametrize("tag", [0, 1, 3])
def test_settling_what_is_not_outstanding_is_refused(tag: int) -> None:
    tracker = tracker_of(1, 2)
    tracker.settle(1, True)

    with pytest.raises(ValueError, match=f"delivery tag {tag} is not outstanding"):
        tracker.settle(tag, True)
    with pytest.raises(ValueError, match="came after"):
        tracker.delivered(2)
