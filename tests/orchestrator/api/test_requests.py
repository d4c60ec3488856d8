import pytest

from orchestrator.api.requests import check_id, check_request
from orchestrator.settings import OrchestratorSettings
from outrider.errors import InvalidArgument
from outrider.parameters import AcceptanceRule
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import tokens_pb2
from tests.orchestrator.stage import asking

SETTINGS = OrchestratorSettings(num_speculative_tokens=4)


def test_what_is_left_open_is_filled_in() -> None:
    checked = check_request(asking(), "default", SETTINGS)
    assert checked.speculation.num_speculative_tokens == 4
    assert checked.rule is None
    assert checked.seed >= 0
    assert checked.request_id
    assert checked.session_id
    assert checked.resume_offset is None


def test_the_session_of_a_request_without_one_is_the_same_each_time_and_for_each_tenant_another() -> None:
    first = check_request(asking(request_id="r"), "one", SETTINGS)
    assert check_request(asking(request_id="r"), "one", SETTINGS).session_id == first.session_id
    assert check_request(asking(request_id="r"), "other", SETTINGS).session_id != first.session_id


def test_disabled_speculation_beats_a_number() -> None:
    request = asking(plain=True)
    request.speculation.num_speculative_tokens = 7
    assert check_request(request, "default", SETTINGS).speculation.num_speculative_tokens == 0


def test_a_resumption_asks_for_the_same() -> None:
    first = check_request(asking(request_id="r"), "default", SETTINGS)
    resumed = check_request(asking(request_id="r", resume_offset=3), "default", SETTINGS)
    assert resumed.fingerprint == first.fingerprint
    assert resumed.resume_offset == 3
    other = check_request(asking(request_id="r", temperature=0.5), "default", SETTINGS)
    assert other.fingerprint != first.fingerprint


def test_a_resumption_may_give_the_ids_that_were_drawn() -> None:
    first = check_request(asking(), "default", SETTINGS)
    given = asking(request_id=first.request_id, session_id=first.session_id, resume_offset=3)
    resumed = check_request(given, "default", SETTINGS)
    assert (resumed.fingerprint, resumed.session_id) == (first.fingerprint, first.session_id)
    assert not resumed.counted_session
    assert check_request(asking(), "default", SETTINGS).request_id != first.request_id


def test_a_resumption_names_its_request() -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_request(asking(session_id="s", resume_offset=0), "default", SETTINGS)
    assert caught.value.field == "request_id"


def test_an_unknown_rule() -> None:
    request = asking()
    request.speculation.acceptance_rule = 77  # type: ignore[assignment]
    with pytest.raises(InvalidArgument) as caught:
        check_request(request, "default", SETTINGS)
    assert caught.value.field == "acceptance_rule"
    request.speculation.acceptance_rule = tokens_pb2.ACCEPTANCE_RULE_REJECTION
    assert check_request(request, "default", SETTINGS).rule is AcceptanceRule.REJECTION


@pytest.mark.parametrize("value", ["", "x" * 129, "a b", "a\n", "{a}", "ä", "a/b", "a\0b"])
def test_ids_cannot_hold_anything_else(value: str) -> None:
    with pytest.raises(InvalidArgument):
        check_id("session_id", value)


def test_a_missing_prompt() -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_request(pb.GenerateRequest(), "default", SETTINGS)
    assert caught.value.field == "prompt"
