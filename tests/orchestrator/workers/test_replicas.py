"""Which worker a session gets; links are real, but never connected."""

import time

import pytest

from orchestrator.settings import OrchestratorSettings
from orchestrator.workers.replicas import Replicas
from outrider.errors import Unavailable
from outrider.parameters import AcceptanceRule
from outrider.serving.frames import FrameOutbox
from outrider.v1 import target_pb2, worker_pb2
from outrider.workers.links import WorkerLink

COUPLED = AcceptanceRule.COUPLED


def come_up(link: WorkerLink, name: str, *, num_active: int = 0, **info: object) -> None:
    """Makes a link look connected."""
    known = {"model_fingerprint": "m", "tokenizer_fingerprint": "t"} | info
    link.info = worker_pb2.GetInfoResponse(replica=name, **known)  # type: ignore[arg-type]
    link.load = worker_pb2.GetLoadResponse(num_active_sessions=num_active)
    link.problem = ""
    link._outbox = FrameOutbox(lambda frames: target_pb2.VerifyRequest(frames=frames))


async def replicas_of(**more: object) -> Replicas:
    return Replicas(
        OrchestratorSettings(
            **{
                "targets": ("a:1", "b:1", "c:1"),
                "drafts": ("d:1", "e:1"),
                "failover_timeout_s": 0.1,
                "draft_retry_s": 0.05,
                **more,
            }  # type: ignore[arg-type]
        )
    )


async def test_the_warm_target_goes_before_the_least_loaded() -> None:
    replicas = await replicas_of()
    for link, name, load in zip(replicas.targets, "abc", (5, 1, 3), strict=True):
        come_up(link, name, num_active=load)
    one, other, third = replicas.targets
    assert await replicas.target("") is other
    assert await replicas.target("c") is third
    assert await replicas.target("unknown") is other
    # Not where it has just failed, as long as there is another one.
    assert await replicas.target("b", ["b:1"]) is third
    assert await replicas.target("b", ["a:1", "b:1", "c:1"]) is other
    other.load.draining = True
    assert await replicas.target("b") is third
    assert "draining" in replicas.target_problem(other)
    assert one.is_up


async def test_a_target_with_another_model_is_out() -> None:
    replicas = await replicas_of()
    come_up(replicas.targets[0], "a", num_active=9)
    come_up(replicas.targets[1], "b", model_fingerprint="other")
    assert await replicas.target("b") is replicas.targets[0]
    assert "other" in replicas.target_problem(replicas.targets[1])


async def test_the_model_is_what_every_target_can_take_and_is_remembered() -> None:
    replicas = await replicas_of()
    assert replicas.past_model is None
    replicas._tokenizers._tokenizers["t"] = None  # fetched before
    one, other, third = replicas.targets
    come_up(one, "a", max_session_len=20, vocabulary_size=5, eos_token_ids=[3, 1])
    come_up(other, "b", max_session_len=10, vocabulary_size=5, eos_token_ids=[3, 1])
    come_up(third, "c", max_session_len=5, model_fingerprint="other")
    model = await replicas.model()
    assert (model.fingerprint, model.tokenizer_fingerprint, model.tokenizer) == ("m", "t", None)
    assert (model.vocabulary_size, model.max_session_len, model.eos_token_ids) == (5, 10, (3, 1))
    assert replicas.past_model is None
    for link in replicas.targets:
        link._outbox, link.problem = None, "gone"
    assert replicas.past_model == model
    with pytest.raises(Unavailable):
        await replicas.model()


@pytest.mark.parametrize("targets", [(), ("a:1", "b:1")])
async def test_no_target_is_an_error_within_the_bound(targets: tuple[str, ...]) -> None:
    replicas = await replicas_of(targets=targets)
    began = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        await replicas.target("")
    assert time.monotonic() - began < 5
    assert ("a:1" if targets else "none is configured") in caught.value.message


async def test_drafts_are_chosen_by_drafter_rule_and_load() -> None:
    replicas = await replicas_of()
    one, other = replicas.drafts
    assert replicas.draft("", COUPLED) is None
    come_up(one, "d", num_active=4, drafter="model")
    come_up(other, "e", drafter="ngram", acceptance_rules=["coupled"])
    assert replicas.draft("", COUPLED) is other
    assert replicas.draft("model", COUPLED) is one
    assert replicas.draft("layers", COUPLED) is None
    assert replicas.draft("", AcceptanceRule.REJECTION) is one
    assert replicas.draft("ngram", AcceptanceRule.ENGINE) is other, "drafts for an engine propose by coupled"


async def test_a_combination_is_taken_for_its_drafters_where_there_is_no_other() -> None:
    replicas = await replicas_of()
    combined, alone = replicas.drafts
    come_up(combined, "d", drafter="eagle3+suffix")
    assert replicas.draft("eagle3", COUPLED) is combined
    assert replicas.draft("suffix", COUPLED) is combined
    assert replicas.draft("model", COUPLED) is None
    come_up(alone, "e", num_active=4, drafter="eagle3")
    assert replicas.draft("eagle3", COUPLED) is alone
    assert replicas.draft("eagle3+suffix", COUPLED) is combined
    assert replicas.draft("", COUPLED) is combined


async def test_a_draft_with_another_tokenizer_is_out_and_both_fingerprints_are_named() -> None:
    replicas = await replicas_of()
    come_up(replicas.targets[0], "a", tokenizer_fingerprint="of-target")
    come_up(replicas.drafts[0], "d", tokenizer_fingerprint="of-draft")
    come_up(replicas.drafts[1], "e", tokenizer_fingerprint="")  # any vocabulary fits
    assert replicas.draft("", COUPLED) is replicas.drafts[1]
    (reason,) = (status.reason for status in replicas.statuses() if status.address == "d:1")
    assert "of-target" in reason
    assert "of-draft" in reason


@pytest.mark.parametrize(
    ("draft", "problem"),
    [
        ({"target_fingerprint": "other"}, "made for target other, not for w"),
        ({"feature_layers": [1, 2], "hidden_size": 32}, "takes features of 32 numbers, the target's have 16"),
        ({"feature_layers": [1, 9], "hidden_size": 16}, "needs layer 9, the target has 4"),
    ],
)
async def test_a_draft_that_does_not_fit_the_target_is_out(draft: dict[str, object], problem: str) -> None:
    replicas = await replicas_of()
    come_up(replicas.targets[0], "a", hidden_size=16, num_layers=4, weights_fingerprint="w")
    come_up(replicas.drafts[0], "d", **draft)
    come_up(replicas.drafts[1], "e", target_fingerprint="w", feature_layers=[0, 4], hidden_size=16)
    assert replicas.draft("", COUPLED) is replicas.drafts[1]
    (reason,) = (status.reason for status in replicas.statuses() if status.address == "d:1")
    assert problem in reason


async def test_the_circuit_of_a_draft_that_failed_opens_and_one_session_tries_it() -> None:
    replicas = await replicas_of(drafts=("d:1",), draft_retry_s=0.2)
    (draft,) = replicas.drafts
    come_up(draft, "d")
    assert replicas.draft("", COUPLED) is draft
    replicas.record_failure(draft)
    assert replicas.draft("", COUPLED) is None
    assert "circuit open" in replicas.draft_problem(draft)
    while replicas.draft_problem(draft):
        time.sleep(0.01)
    assert replicas.draft("", COUPLED) is draft
    assert replicas.draft("", COUPLED) is None
    replicas.record_success(draft)
    assert replicas.draft("", COUPLED) is draft
    assert replicas.draft("", COUPLED) is draft
