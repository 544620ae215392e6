"""When one worker is left to send alone, and when the others are called back."""

import threading

from penstock.export.crew import KEEP, SOON, STALL, WINDOW, Crew
from penstock.testing import FakeClock, wait_until


class Shift:
    """A crew before a backlog, and sends at a given rate."""

    def __init__(self) -> None:
        self.clock = FakeClock(1000.0)
        self.waiting = 1000
        self.crew = Crew(self.clock, lambda: self.waiting)
        self.crew.sent(self.clock.monotonic())  # the first window begins

    def send(self, rate: float, windows: float = 1.0) -> None:
        count = round(rate * WINDOW * windows)
        for _ in range(count):
            self.clock.advance(WINDOW * windows * 1.001 / count)
            self.crew.sent(self.clock.monotonic())

    def try_alone(self, together: float, alone: float) -> None:
        self.send(together)
        assert self.crew.is_alone
        self.send(alone)

    def wait_for_a_try(self) -> float:
        """Seconds until one is left alone."""
        windows = 0
        while not self.crew.is_alone:
            self.send(4000)
            windows += 1
        return windows * WINDOW


def test_one_that_is_as_fast_as_all_of_them_goes_on_alone() -> None:
    shift = Shift()
    shift.try_alone(together=5600, alone=6000)
    assert shift.crew.is_alone


def test_all_come_back_where_one_alone_was_slower() -> None:
    shift = Shift()
    shift.try_alone(together=4000, alone=1000)
    assert not shift.crew.is_alone


def test_a_try_that_failed_is_repeated_after_longer_and_longer_times() -> None:
    shift = Shift()
    waits = []
    for _ in range(4):
        waits.append(shift.wait_for_a_try())
        shift.send(1000)
    assert waits[0] < SOON <= waits[1] + WINDOW < 2 * SOON <= waits[2] + WINDOW < 4 * SOON <= waits[3] + WINDOW


def test_after_a_second_alone_it_is_measured_again() -> None:
    shift = Shift()
    shift.try_alone(together=5600, alone=6000)
    shift.send(6000, KEEP / WINDOW / 2)
    assert shift.crew.is_alone
    modes = set()
    for _ in range(round(KEEP / WINDOW)):
        shift.send(6000)
        modes.add(shift.crew.is_alone)
    assert False in modes


def test_one_that_becomes_slower_gets_the_others_back_before_the_second_is_over() -> None:
    shift = Shift()
    shift.try_alone(together=5600, alone=6000)
    shift.send(6000, 3)
    assert shift.crew.is_alone
    shift.send(3000, 2)
    assert not shift.crew.is_alone


def test_a_single_slow_window_is_taken_for_chance() -> None:
    shift = Shift()
    shift.try_alone(together=5600, alone=6000)
    for _ in range(3):
        shift.send(3000)
        assert shift.crew.is_alone
        shift.send(6000)
    shift.send(3000, 2)
    assert not shift.crew.is_alone


def test_one_that_was_compared_with_a_lucky_window_is_compared_again_at_once() -> None:
    shift = Shift()
    shift.try_alone(together=6700, alone=6700)
    was_alone = []
    for rate, windows in ((6200, 2), (4000, 1), (6200, 10)):
        shift.send(rate, windows)
        was_alone.append(shift.crew.is_alone)
    assert was_alone == [False, True, True]


def test_one_that_falls_behind_each_time_is_compared_later_and_later() -> None:
    shift = Shift()
    waits = []
    for _ in range(4):
        waits.append(shift.wait_for_a_try())
        shift.send(4000)
        assert shift.crew.is_alone
        shift.send(2000, 2)
        assert not shift.crew.is_alone
    assert waits[0] == waits[1] < SOON <= waits[2] + WINDOW < 3 * SOON <= waits[3] + WINDOW


def test_after_a_whole_second_alone_it_is_forgotten_how_often_it_fell_behind() -> None:
    shift = Shift()
    waits = []
    for rate in (1000, 1000, 1000, 4000, 1000, 1000):
        waits.append(shift.wait_for_a_try())
        while shift.crew.is_alone:
            shift.send(rate)
    assert waits[3] >= 4 * SOON
    assert waits[4] < SOON <= waits[5] + WINDOW < 2 * SOON


def test_an_empty_queue_is_no_reason_to_try_later() -> None:
    shift = Shift()
    shift.try_alone(together=5600, alone=6000)
    shift.waiting = 0
    shift.send(6000)
    assert not shift.crew.is_alone
    shift.waiting = 1000
    shift.send(5600, 2)
    assert shift.crew.is_alone


def test_a_destination_that_has_to_be_waited_for_keeps_all_of_them() -> None:
    shift = Shift()
    shift.send(500, 10)
    assert not shift.crew.is_alone


def test_nothing_is_tried_while_little_waits() -> None:
    shift = Shift()
    shift.waiting = 3
    shift.send(6000, 5)
    assert not shift.crew.is_alone


def test_the_others_step_in_where_the_send_of_the_one_hangs() -> None:
    shift = Shift()
    shift.try_alone(together=5600, alone=6000)
    shift.clock.advance(2 * STALL)
    shift.crew.wait(0.01)
    assert not shift.crew.is_alone


def test_those_who_stand_by_are_called_at_once() -> None:
    shift = Shift()
    shift.try_alone(together=5600, alone=6000)
    back = threading.Event()

    def stand_by() -> None:
        while shift.crew.is_alone:
            shift.crew.wait(10.0)
        back.set()

    thread = threading.Thread(target=stand_by)
    thread.start()
    shift.crew.all_wanted()
    wait_until(back.is_set)
    thread.join()
