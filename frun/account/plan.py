"""What faults cost and how to answer them: FlashRecovery's cost model, intervals of checkpoints, spares.

Plain arithmetic, seconds in and seconds out. Sources: the cost model is the paper's (arXiv 2509.03047,
section on modelling); Young 1974; Daly 2006 (higher-order estimate); Saxena et al. 2024 (arXiv 2410.18124).
All of them assume that faults come at random, at one rate, and seldom within each other's recoveries.
"""

import math
from dataclasses import dataclass

P99 = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """The paper's model of a training of `duration_s` that `faults` interrupt.

    The duration is taken as fixed although lost time lengthens it: a good account while the cost is a small
    share of it.
    """

    duration_s: float
    faults: float
    recovery_s: float
    """s0: detection and restart, per fault."""
    checkpoint_s: float
    """k0: how long one checkpoint holds training."""

    def cost_s(self, interval_s: float) -> float:
        """Return F(t) = m (s0 + t/2) + (d/t) k0: recoveries, steps done again, checkpoints."""
        return self.faults * (self.recovery_s + interval_s / 2) + (
            self.duration_s / interval_s * self.checkpoint_s
        )

    @property
    def best_interval_s(self) -> float:
        """t* = sqrt(2 d k0 / m), where F is least."""
        return math.sqrt(2 * self.duration_s * self.checkpoint_s / self.faults)

    @property
    def least_cost_s(self) -> float:
        """F(t*) = m s0 + sqrt(2 d k0 m)."""
        return self.faults * self.recovery_s + math.sqrt(
            2 * self.duration_s * self.checkpoint_s * self.faults
        )


def young_s(mtbf_s: float, checkpoint_s: float) -> float:
    """Return Young's interval between checkpoints."""
    return math.sqrt(2 * mtbf_s * checkpoint_s)


def daly_s(mtbf_s: float, checkpoint_s: float) -> float:
    """Return Daly's interval, also for checkpoints that take long beside the time between faults."""
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    share = checkpoint_s / (2 * mtbf_s)
    return young_s(mtbf_s, checkpoint_s) * (1 + math.sqrt(share) / 3 + share / 9) - checkpoint_s


def saxena_s(mtbf_s: float, checkpoint_s: float, recovery_s: float) -> float:
    """Return the interval that makes availability the best when a recovery takes long."""
    return checkpoint_s + math.sqrt(2 * (mtbf_s + recovery_s) * checkpoint_s + checkpoint_s**2)


def ettr_of_checkpoints(
    rate: float, recovery_s: float, checkpoint_s: float, interval_s: float
) -> float:
    """Return the expected effective training time ratio of going back to checkpoints.

    `rate` is faults per second of wall time. First order: a fault costs its recovery and half an interval.
    """
    lost = rate * (recovery_s + (interval_s + checkpoint_s) / 2)
    return max(0.0, (1 - lost) / (1 + checkpoint_s / interval_s))


def ettr_in_place(
    rate: float,
    in_place_s: float,
    *,
    unrecovered: float = 0.0,
    recovery_s: float = 0.0,
    checkpoint_s: float = 0.0,
    interval_s: float = math.inf,
) -> float:
    """Return the same for recoveries in place, of which each costs `in_place_s` (s0' + s1').

    A share `unrecovered` of the faults finds no replica and goes back to a checkpoint all the same. Without
    such faults no checkpoint is needed.
    """
    lost = rate * (1 - unrecovered) * in_place_s
    if unrecovered == 0:
        return max(0.0, 1 - lost)
    lost += rate * unrecovered * (recovery_s + (interval_s + checkpoint_s) / 2)
    return max(0.0, (1 - lost) / (1 + checkpoint_s / interval_s))


def spares(hosts: int, probability: float, quantile: float = P99) -> int:
    """Return the fewest spares that are enough with this probability.

    `probability` is that of one host to fail before a spare that was used is replaced (ByteRobust).
    """
    if probability in (0.0, 1.0):
        return hosts if probability else 0
    enough = 0.0
    for count in range(hosts):
        # In logarithms: the first terms of many hosts are too small for a float.
        enough += math.exp(
            math.lgamma(hosts + 1)
            - math.lgamma(count + 1)
            - math.lgamma(hosts - count + 1)
            + count * math.log(probability)
            + (hosts - count) * math.log1p(-probability)
        )
        if enough >= quantile:
            return count
    return hosts


def any_fails(count: int, probability: float) -> float:
    """Return how likely at least one of `count` fails."""
    return -math.expm1(count * math.log1p(-probability)) if probability < 1 else 1.0


def state_survives(hosts: int, replicas: int, lost: int) -> float:
    """Return how likely a copy of everything is left when `lost` hosts go at once (GEMINI).

    Hosts are in groups of `replicas` that hold the same; all is left unless a whole group is lost. Exact, by
    counting the ways in which whole groups can be among the lost.
    """
    groups = hosts // replicas
    ways = sum(
        (-1) ** whole
        * math.comb(groups, whole)
        * math.comb(hosts - whole * replicas, lost - whole * replicas)
        for whole in range(min(groups, lost // replicas) + 1)
    )
    return float(ways / math.comb(hosts, lost))
