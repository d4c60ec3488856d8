"""Names that workers send cannot add series without end."""

from orchestrator.counted_names import MAX_NAMES, OTHER, CountedNames
from orchestrator.metrics import OrchestratorMetrics, RequestStatistics
from outrider.parameters import AcceptanceRule
from outrider.serving.metrics import new_registry
from outrider.v1 import target_pb2


def test_the_first_names_keep_theirs() -> None:
    names = CountedNames()
    first = [f"drafter{number}" for number in range(MAX_NAMES)]
    assert [names.counted(name) for name in first] == first
    assert [names.counted(name) for name in ("late", "later")] == [OTHER, OTHER]
    assert [names.counted(name) for name in first] == first


def test_metrics_and_statistics_count_the_rest_together() -> None:
    registry = new_registry("orchestrator")
    metrics = OrchestratorMetrics(registry)
    sent = [f"drafter{number}" for number in range(MAX_NAMES + 5)]
    verdict = target_pb2.Verdict(drafters=[*sent, ""], num_accepted_tokens=len(sent), num_draft_tokens=len(sent))
    statistics = RequestStatistics(metrics, AcceptanceRule.COUPLED)
    statistics.record_verdict(verdict, len(sent) + 1)
    expected = {**dict.fromkeys(sent[:MAX_NAMES], 1), OTHER: 5}
    assert statistics.message().num_accepted_tokens_by_drafter == expected
    # Another request has its own names; the process goes on with those it has.
    other = RequestStatistics(metrics, AcceptanceRule.COUPLED)
    other.record_verdict(target_pb2.Verdict(drafters=["new", ""], num_accepted_tokens=1, num_draft_tokens=1), 2)
    assert other.message().num_accepted_tokens_by_drafter == {"new": 1}
    (family,) = [item for item in registry.collect() if item.name.endswith("num_accepted_tokens_by_drafter")]
    assert {sample.labels["drafter"]: sample.value for sample in family.samples} == {**expected, OTHER: 6}
