"""The HorizontalPodAutoscaler's algorithm, as Kubernetes publishes it for `autoscaling/v2` and metrics of pods.

https://kubernetes.io/docs/concepts/workloads/autoscaling/horizontal-pod-autoscale/, "Algorithm details" and
"Configurable scaling behavior"; where the text leaves something open, what its controller does
(pkg/controller/podautoscaler):

    desired = ceil(ratio * pods),  ratio = average of the pods' values / target

for each metric, of which the largest counts. Nothing changes where the ratio is within the tolerance of 1. Pods that
are going count for nothing. A pod without a value counts as the target itself where the ratio says fewer and as 0 where
it says more, and one that is pending counts as 0 where it says more; where that turns the ratio round, nothing changes.
Then `behavior`: a recommendation counts only as far as all of the stabilisation window agree, and policies bound how
many replicas come or go in a period. Values are whole thousandths, as the metrics API has them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from enum import Enum
from typing import Any, Final

from outrider.errors import InvalidArgument

SYNC_S: Final = 15.0
"""Seconds from one look to the next: the controller manager's default."""
_TOLERANCE: Final = Decimal("0.1")
_SUFFIXES: Final = {"n": "1e-9", "u": "1e-6", "m": "1e-3", "k": "1e3", "M": "1e6", "G": "1e9", "T": "1e12"} | {
    f"{letter}i": str(1 << shift) for letter, shift in (("K", 10), ("M", 20), ("G", 30), ("T", 40))
}
_DEFAULT_UP: Final = {
    "stabilizationWindowSeconds": 0,
    "policies": [
        {"type": "Percent", "value": 100, "periodSeconds": 15},
        {"type": "Pods", "value": 4, "periodSeconds": 15},
    ],
}
_DEFAULT_DOWN: Final = {
    "stabilizationWindowSeconds": 300,
    "policies": [{"type": "Percent", "value": 100, "periodSeconds": 15}],
}


def quantity(text: str | float) -> Decimal:
    """Returns the number that a Kubernetes quantity stands for, such as 0.75 for `750m`.

    Raises:
        InvalidArgument: it is none.
    """
    number = str(text)
    suffix = next((known for known in sorted(_SUFFIXES, key=len, reverse=True) if number.endswith(known)), "")
    try:
        return Decimal(number.removesuffix(suffix)) * Decimal(_SUFFIXES.get(suffix, "1"))
    except InvalidOperation:
        raise InvalidArgument(f"{text!r} is no quantity", "manifests") from None


@dataclass(frozen=True, slots=True)
class Policy:
    """How many replicas may come, or go.

    Attributes:
        kind: "Pods", or "Percent" of those at the period's begin.
        value: so many.
        period_s: seconds in which.
    """

    kind: str
    value: int
    period_s: float

    def __post_init__(self) -> None:
        if self.kind not in ("Pods", "Percent"):
            raise InvalidArgument(f"{self.kind!r} is no type of policy", "manifests")


@dataclass(frozen=True, slots=True)
class Rules:
    """How fast one direction may be taken.

    Attributes:
        stabilization_s: seconds in which all recommendations must agree.
        policies: bounds on the change.
        select: which policy counts: "Max", "Min", or "Disabled" where the direction is never taken.
        tolerance: deviation of the ratio from 1 that changes nothing.
    """

    stabilization_s: float
    policies: tuple[Policy, ...]
    select: str
    tolerance: float

    @classmethod
    def of(cls, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> "Rules":
        """Reads `scaleUp` or `scaleDown`; what is not given is as in `defaults`."""
        known = {**defaults, **given}
        policies = tuple(Policy(item["type"], item["value"], item["periodSeconds"]) for item in known["policies"])
        tolerance = float(quantity(known.get("tolerance", str(_TOLERANCE))))
        return cls(known["stabilizationWindowSeconds"], policies, known.get("selectPolicy", "Max"), tolerance)

    @property
    def longest_period_s(self) -> float:
        """Seconds that changes are remembered."""
        return max(policy.period_s for policy in self.policies)


@dataclass(frozen=True, slots=True)
class Scaler:
    """A HorizontalPodAutoscaler's specification.

    Attributes:
        least: replicas, at least.
        most: replicas, at most.
        targets: of each metric of pods, by its name, what its average should be, in thousandths.
        up: how fast replicas may come.
        down: how fast they may go.
    """

    least: int
    most: int
    targets: Mapping[str, int]
    up: Rules
    down: Rules

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> "Scaler":
        """Reads an object of `autoscaling/v2`.

        Raises:
            InvalidArgument: it goes by something else than averages of pods' metrics.
        """
        spec = manifest["spec"]
        targets = {}
        for metric in spec["metrics"]:
            if metric["type"] != "Pods" or metric["pods"]["target"]["type"] != "AverageValue":
                raise InvalidArgument("only AverageValue of metrics of type Pods can be simulated", "manifests")
            average = quantity(metric["pods"]["target"]["averageValue"])
            targets[metric["pods"]["metric"]["name"]] = math.ceil(1000 * average)
        behavior = spec.get("behavior", {})
        return cls(
            least=spec.get("minReplicas", 1),
            most=spec["maxReplicas"],
            targets=targets,
            up=Rules.of(behavior.get("scaleUp", {}), _DEFAULT_UP),
            down=Rules.of(behavior.get("scaleDown", {}), _DEFAULT_DOWN),
        )


class Phase(Enum):
    """What the autoscaler knows of a pod; readiness counts for metrics of the processor only."""

    PENDING = "pending"
    RUNNING = "running"
    TERMINATING = "terminating"


@dataclass(frozen=True, slots=True)
class SeenPod:
    """A pod as the autoscaler sees it.

    Attributes:
        phase: its phase.
        values: of its metrics, by name, in thousandths; what is missing is unknown.
    """

    phase: Phase
    values: Mapping[str, int]


def recommended(metric: str, target: int, pods: Sequence[SeenPod], current: int, scaler: Scaler) -> int | None:
    """Returns how many replicas a metric asks for, bounds and behaviour aside; None where no pod has a value.

    Args:
        metric: its name.
        target: what its average should be, in thousandths.
        pods: all that the workload has.
        current: replicas it is to have now.
        scaler: has the tolerances.
    """
    running = [pod for pod in pods if pod.phase is Phase.RUNNING]
    num_pending = sum(pod.phase is Phase.PENDING for pod in pods)
    values = [pod.values[metric] for pod in running if metric in pod.values]
    if not values:
        return None
    num_missing = len(running) - len(values)
    ratio = _ratio(values, target)
    has_pending = num_pending > 0 and ratio > 1
    if not has_pending and not num_missing:
        return current if _is_tolerated(ratio, scaler) else math.ceil(ratio * len(values))
    if ratio != 1:
        values += [target if ratio < 1 else 0] * num_missing
    if has_pending:
        values += [0] * num_pending
    again = _ratio(values, target)
    if _is_tolerated(again, scaler) or (ratio < 1 < again) or (again < 1 < ratio):
        return current
    num = math.ceil(again * len(values))
    is_turned = num > current if again < 1 else num < current
    return current if is_turned else num


def _ratio(values: Sequence[int], target: int) -> float:
    return (sum(values) // len(values)) / target


def _is_tolerated(ratio: float, scaler: Scaler) -> bool:
    return 1 - scaler.down.tolerance <= ratio <= 1 + scaler.up.tolerance


class Autoscaler:
    """Decides, look by look, how many replicas a workload is to have.

    Args:
        scaler: its specification.
        clock: gives seconds.
    """

    def __init__(self, scaler: Scaler, clock: Callable[[], float]) -> None:
        self._scaler = scaler
        self._clock = clock
        self._recommendations: list[tuple[float, int]] = []
        self._changes: list[tuple[float, int]] = []

    def look(self, current: int, pods: Sequence[SeenPod]) -> int:
        """Returns how many replicas there are to be from now on; whoever asks sees to it.

        Args:
            current: how many there are to be until now, as the last look said.
            pods: all that there are, those that are going too.
        """
        scaler, now = self._scaler, self._clock()
        if not self._recommendations:
            self._recommendations.append((now, current))
        if current > scaler.most or current < scaler.least:
            chosen = min(scaler.most, max(scaler.least, current))
        elif (wanted := self._wanted(current, pods)) is None:
            return current
        else:
            chosen = self._bounded(current, self._stabilized(current, wanted))
        if chosen != current:
            self._changes.append((now, chosen - current))
            longest_s = max(scaler.up.longest_period_s, scaler.down.longest_period_s)
            self._changes = [item for item in self._changes if item[0] > now - longest_s]
        return chosen

    def _wanted(self, current: int, pods: Sequence[SeenPod]) -> int | None:
        """Returns the most that a metric asks for; None where none can be read, or one cannot and others say fewer."""
        asked = [recommended(name, goal, pods, current, self._scaler) for name, goal in self._scaler.targets.items()]
        known = [num for num in asked if num is not None]
        if not known or (len(known) < len(asked) and max(known) < current):
            return None
        return max(known)

    def _stabilized(self, current: int, wanted: int) -> int:
        """Returns what all recommendations of the windows agree on, nearest to the current number; notes this one."""
        now, up, down = self._clock(), self._scaler.up, self._scaler.down
        fewest = min([wanted, *(num for at, num in self._recommendations if at > now - up.stabilization_s)])
        most = max([wanted, *(num for at, num in self._recommendations if at > now - down.stabilization_s)])
        longest_s = max(up.stabilization_s, down.stabilization_s)
        self._recommendations = [item for item in self._recommendations if item[0] > now - longest_s]
        self._recommendations.append((now, wanted))
        return min(most, max(fewest, current))

    def _bounded(self, current: int, wanted: int) -> int:
        """Returns the number nearest to the wanted one that policies, least and most allow."""
        if wanted > current:
            limit = max(current, self._limit(current, self._scaler.up, 1))
            return min(wanted, limit, self._scaler.most)
        if wanted < current:
            limit = min(current, self._limit(current, self._scaler.down, -1))
            return max(wanted, limit, self._scaler.least)
        return wanted

    def _limit(self, current: int, rules: Rules, sign: int) -> int:
        """Returns how far policies let the number of replicas go, up (1) or down (-1)."""
        if rules.select == "Disabled":
            return current
        limits = [self._policy_limit(current, policy, sign) for policy in rules.policies]
        return max(limits) if (rules.select == "Max") == (sign > 0) else min(limits)

    def _policy_limit(self, current: int, policy: Policy, sign: int) -> int:
        now = self._clock()
        before = current - sum(change for at, change in self._changes if at > now - policy.period_s)
        if policy.kind == "Pods":
            return before + sign * policy.value
        share = before * (1 + sign * policy.value / 100)
        return math.ceil(share) if sign > 0 else int(share)
