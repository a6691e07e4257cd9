"""The formulas give the worked values that are published for them, and behave as they must."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frun.account.plan import (
    CostModel,
    any_fails,
    daly_s,
    ettr_in_place,
    ettr_of_checkpoints,
    saxena_s,
    spares,
    state_survives,
    young_s,
)

LLAMA3_S, LLAMA3_FAULTS = 4_665_600, 419
RATE = LLAMA3_FAULTS / LLAMA3_S


def near(value: float) -> object:
    """Equal to the digits that are given."""
    return pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize(
    ("duration_s", "faults", "recovery_s", "checkpoint_s", "best_s", "least_s", "share"),
    [
        (86_400, 1, 2_915, 3, 720.0, 3_635.0, 0.042072),
        (86_400, 8, 2_915, 3, 254.558, 25_356.468, 0.293478),
        (86_400, 8, 600, 40, 929.516, 12_236.128, 0.141622),
        (LLAMA3_S, LLAMA3_FAULTS, 600, 40, 943.826, 646_862.909, 0.138645),
    ],
)
def test_the_papers_cost_model(
    duration_s: float, faults: float, recovery_s: float, checkpoint_s: float,
    best_s: float, least_s: float, share: float,
) -> None:  # fmt: skip
    """The best interval and the least cost, of a day and of Llama 3's 54 days."""
    model = CostModel(
        duration_s=duration_s, faults=faults, recovery_s=recovery_s, checkpoint_s=checkpoint_s
    )
    assert model.best_interval_s == pytest.approx(best_s, abs=6e-4)
    assert model.least_cost_s == near(least_s)
    assert model.least_cost_s / duration_s == pytest.approx(share, abs=6e-7)
    assert model.cost_s(model.best_interval_s) == pytest.approx(model.least_cost_s, rel=1e-12)


def test_rare_checkpoints_cost_more_than_half_a_day() -> None:
    """One every two hours, eight faults a day, recoveries as torch's time-outs make them; and in place."""
    model = CostModel(duration_s=86_400, faults=8, recovery_s=2_915, checkpoint_s=3)
    assert model.cost_s(7_200) == 52_156
    assert 8 * (123 + 24.5) == 1_180


@given(
    duration_s=st.floats(1e3, 1e8),
    faults=st.floats(0.1, 1e4),
    checkpoint_s=st.floats(0.1, 1e3),
    factor=st.floats(0.01, 100),
)
def test_no_interval_is_better_than_the_best(
    duration_s: float, faults: float, checkpoint_s: float, factor: float
) -> None:
    """F is convex, with its least value where it is said to be."""
    model = CostModel(
        duration_s=duration_s, faults=faults, recovery_s=60, checkpoint_s=checkpoint_s
    )
    assert model.cost_s(model.best_interval_s * factor) >= model.least_cost_s * (1 - 1e-9)


@pytest.mark.parametrize(
    ("mtbf_s", "checkpoint_s", "young", "daly", "waste"),
    [
        (11_124, 40, 943.36, 916.88, 0.0848),
        (11_124, 3, 258.35, 256.35, 0.0232),
        (10_800, 60, 1_138.42, 1_098.77, 0.1054),
        (28_440, 300, 4_130.86, 3_933.28, 0.1452),
        (6_480, 300, 1_971.80, 1_776.87, 0.3043),
        (6_480, 10, 360.00, 353.36, 0.0556),
    ],
)
def test_young_and_daly(
    mtbf_s: float, checkpoint_s: float, young: float, daly: float, waste: float
) -> None:
    """Intervals for the published times between faults, and the share that is lost at Young's."""
    assert young_s(mtbf_s, checkpoint_s) == pytest.approx(young, abs=6e-3)
    assert daly_s(mtbf_s, checkpoint_s) == pytest.approx(daly, abs=6e-3)
    assert math.sqrt(2 * checkpoint_s / mtbf_s) == pytest.approx(waste, abs=6e-5)


def test_daly_where_checkpoints_take_longer_than_faults() -> None:
    """Then one checkpoint is made for each fault."""
    assert daly_s(100, 200) == 100


def test_saxena() -> None:
    """A long recovery makes checkpoints rarer."""
    assert saxena_s(11_135, 40, 600) == pytest.approx(1_009.74, abs=6e-3)
    assert young_s(LLAMA3_S / LLAMA3_FAULTS, 40) == pytest.approx(943.826, abs=6e-4)


def test_effective_training_time() -> None:
    """Llama 3's rate with checkpoints, in place, and with torch's time-outs."""
    assert ettr_of_checkpoints(RATE, 600, 40, 943.8256) == pytest.approx(0.865269, abs=6e-7)
    assert ettr_in_place(RATE, 147.5) == pytest.approx(0.986754, abs=6e-7)
    model = CostModel(duration_s=LLAMA3_S, faults=LLAMA3_FAULTS, recovery_s=2_915, checkpoint_s=40)
    assert 1 - model.cost_s(3_600) / LLAMA3_S == pytest.approx(0.565452, abs=6e-7)


@given(
    rate=st.floats(0, 1e-3),
    unrecovered=st.floats(0.001, 1),
    interval_s=st.floats(10, 1e5),
)
def test_recovery_in_place_is_between_its_two_ends(
    rate: float, unrecovered: float, interval_s: float
) -> None:
    """The more faults find no replica, the more it is like going back to checkpoints."""
    mixed = ettr_in_place(
        rate, 10, unrecovered=unrecovered, recovery_s=600, checkpoint_s=5, interval_s=interval_s
    )
    worst = ettr_of_checkpoints(rate, 600, 5, interval_s)
    assert worst - 1e-12 <= mixed <= ettr_in_place(rate, 10) + 1e-12


@pytest.mark.parametrize(
    ("probability", "counts"),
    [(0.0012, (2, 2, 3, 4)), (0.001, (1, 2, 3, 4)), (0.002, (2, 3, 4, 6)),
     (0.00117, (2, 2, 3, 4)), (0.00125, (2, 2, 3, 4))],
)  # fmt: skip
def test_spares(probability: float, counts: tuple[int, ...]) -> None:
    """ByteRobust's standby machines, P99 of a day's failures."""
    assert tuple(spares(hosts, probability) for hosts in (128, 256, 512, 1024)) == counts


@given(hosts=st.integers(1, 3000), probability=st.floats(0, 1))
def test_spares_are_enough_and_not_more_than_hosts(hosts: int, probability: float) -> None:
    """The sum of the binomial's terms, whatever their size."""
    count = spares(hosts, probability)
    mean, deviation = hosts * probability, math.sqrt(hosts * probability * (1 - probability))
    assert 0 <= count <= hosts
    assert mean - deviation - 1 <= count <= mean + 10 * deviation + 1  # Chebyshev, for 1 in 100


def test_cards_and_replicas() -> None:
    """DLRover's thousand cards; GEMINI's groups."""
    assert any_fails(1000, 0.0027) == pytest.approx(0.93304, abs=6e-6)
    assert any_fails(3, 1.0) == 1.0
    assert state_survives(16, 2, 2) == near(14 / 15)
    assert state_survives(16, 2, 3) == near(0.8)
    assert state_survives(16, 4, 4) == pytest.approx(0.997802, abs=6e-7)
    assert state_survives(128, 2, 2) == pytest.approx(0.992126, abs=6e-7)
    assert state_survives(8, 2, 1) == 1.0
