"""Several rounds a dispatch where the host needs longer for one than the device, and only there."""

from __future__ import annotations

import pytest

from jaxspec.scheduling.pace import Pace, may_pay


def simulate(pace: Pace, host: float, device: float, dispatches: int, fixed: float = 0.7) -> list[int]:
    """Rounds of each dispatch, on a clock of our own.

    Args:
      host: seconds for a dispatch of one round, of which a share of 1 - `fixed` comes once for each round more.
    """
    chosen = []
    for _ in range(dispatches):
        rounds = pace.repeats().rounds
        busy, work = host * (fixed + (1 - fixed) * rounds), device * rounds
        pace.took("chain-3 at 4", rounds, max(busy, work), max(0.0, work - busy))
        chosen.append(rounds)
    return chosen


@pytest.mark.parametrize(
    ("host", "device", "several"),
    [(1e-3, 0.5e-3, True), (0.8e-3, 1e-3, True), (0.3e-3, 1e-3, False), (4e-3, 3e-3, False), (1e-3, 30e-3, False)],
)
def test_a_host_that_is_too_slow_gets_more_time(host: float, device: float, several: bool):
    """Too little is gained where it is quick; too late would come what takes long."""
    chosen = simulate(Pace(4, measured=True), host, device, 400)
    assert chosen[:8] == [1] * 8, "measured first"
    assert (chosen.count(4) > 380) == several and (chosen.count(4) == 0) != several


def test_the_hosts_part_is_measured_again_and_again():
    pace = Pace(4, measured=True)
    assert simulate(pace, 1e-3, 0.8e-3, 400)[-200:].count(1) <= 2
    assert simulate(pace, 0.1e-3, 0.8e-3, 9000)[-1000:].count(4) < 10, "the host got quicker"
    assert simulate(pace, 1e-3, 0.8e-3, 400)[-1] == 4


def test_each_kind_of_round_has_its_own():
    pace = Pace(4, measured=True)
    simulate(pace, 1e-3, 0.8e-3, 100)
    for _ in range(9):  # the first of which is read after several
        pace.took("off at 1", 1, 1e-3, 0.9e-3)
    assert pace.repeats().rounds == 1
    pace.took("chain-3 at 4", 1, 1e-3, 0.0)
    assert pace.repeats().rounds == 4


def test_a_kind_that_is_only_tried_runs_like_the_others():
    """Its host's part is measured once it has run for long, and never several rounds that would take too long."""
    pace = Pace(4, measured=True)
    simulate(pace, 1e-3, 0.8e-3, 100)
    for _ in range(20):  # now and then
        pace.took("off at 4", 4, 3e-3, 1e-3)
        assert pace.repeats().rounds == 4
        pace.took("chain-3 at 4", 4, 3.2e-3, 1e-3)
    for _ in range(8):
        assert pace.repeats().rounds == 4
        pace.took("off at 4", 4, 3e-3, 1e-3)
    assert pace.repeats().rounds == 1
    for _ in range(9):
        pace.took("off at 4", 1, 1e-3, 0.2e-3)
    assert pace.repeats().rounds == 4
    pace.took("chain-3 at 64", 4, 44e-3, 43e-3)
    assert pace.repeats().rounds == 1
    for quiet in [False] * 30:  # of which no mean is known, for requests come and go all the time
        pace.took("chain-3 at 16", 4, 5e-3, 3e-3, quiet=quiet)
    assert pace.repeats().rounds == 1


def test_a_number_is_kept_whatever_is_measured():
    assert set(simulate(Pace(3, measured=False), 1e-6, 1.0, 50)) == {3}
    assert set(simulate(Pace(1, measured=True), 1.0, 1e-6, 50)) == {1}


def test_what_cannot_pay_is_not_compiled():
    gigabyte = 1 << 30
    assert all(may_pay(int(2.3 * gigabyte), bucket) for bucket in (1, 16, 64))
    assert not any(may_pay(15 * gigabyte, bucket) for bucket in (1, 16, 64, 128))


def test_what_several_rounds_save_is_measured_and_little_before():
    """So that they are tried where that costs little; forgotten where only single rounds ran for long."""
    pace = Pace(4, measured=True)
    for _ in range(9):
        pace.took("off at 4", 1, 1e-3, 0.2e-3)
    assert pace.repeats() == (4, 0.05, 1.0, 0.0)
    for _ in range(8):
        pace.took("off at 4", 4, 3.6e-3, 2e-3)
    assert pace.repeats().saved == pytest.approx(0.1)
    for _ in range(260):
        pace.took("off at 4", 1, 1e-3, 0.2e-3)
    assert pace.repeats().saved == 0.05


def test_what_requests_cost_that_begin_or_end_is_no_rounds():
    pace = Pace(4, measured=True)
    simulate(pace, 1e-3, 0.8e-3, 20)
    saved = pace.repeats().saved
    for _ in range(40):
        pace.took("chain-3 at 4", 1, 5e-3, 0.0, quiet=False)
    assert pace.repeats().saved == saved


def test_what_rounds_give_and_how_many_texts_stop_are_means():
    pace = Pace(4, measured=True)
    simulate(pace, 1e-3, 0.8e-3, 20)
    for dispatch in range(400):
        pace.gave("chain-3 at 4", 32, 64, int(dispatch % 10 == 0))
    assert pace.repeats().tokens == pytest.approx(2.0)
    assert pace.repeats().stops == pytest.approx(1 / 320, rel=0.1)
    pace.gave("chain-3 at 4", 0, 0, 0)
    assert pace.repeats().tokens == pytest.approx(2.0), "rows that were over say nothing"
