"""Which of several workers gets the next session."""

from outrider.drafter_names import includes
from outrider.parameters import REPLAYABLE_RULES, AcceptanceRule
from outrider.v1 import worker_pb2
from outrider.workers.links import WorkerLink


def leaving(link: WorkerLink) -> str:
    """Return the reason why a connected worker gets no new sessions; empty where it does."""
    if link.load.draining:
        return "it is draining"
    # Read once: metrics are exposed by another thread.
    endpoint = link.endpoint
    if endpoint is None:
        return "it is no longer listed"
    return "it is terminating" if endpoint.is_terminating else ""


def fits(link: WorkerLink, drafter: str, rule: AcceptanceRule) -> bool:
    """Return whether a draft is of the required kind, where one is required, and drafts for an acceptance rule."""
    info = link.info
    if info is None or not includes(info.drafter, drafter):
        return False
    return rule.for_drafts in rules_of(info)


def rules_of(info: worker_pb2.GetInfoResponse) -> frozenset[AcceptanceRule]:
    """Return the rules that a worker serves, as far as this version has them; one that names none serves the oldest."""
    if not info.acceptance_rules:
        return frozenset(REPLAYABLE_RULES)
    return frozenset(rule for rule in AcceptanceRule if rule.value in info.acceptance_rules)


def load_of(link: WorkerLink) -> tuple[bool, int, int]:
    """Return the load by which workers are compared: the least loaded one gets the next session."""
    # A worker that is not ready, such as a full one, comes after all others.
    return not is_ready(link), max(link.num_sessions, link.load.num_active_sessions), link.num_sessions


def is_ready(link: WorkerLink) -> bool:
    """Return whether discovery lists a worker as ready."""
    endpoint = link.endpoint
    return endpoint is not None and endpoint.is_ready
