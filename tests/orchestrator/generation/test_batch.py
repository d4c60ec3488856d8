"""What is known of each token of a batch stays beside it, whatever its verdicts have."""

from orchestrator.generation.batch import Batch
from orchestrator.text.output import Absorbed
from outrider.parameters import FinishReason
from outrider.v1 import target_pb2, tokens_pb2

ACCEPTED, BONUS = tokens_pb2.TOKEN_ORIGIN_ACCEPTED, tokens_pb2.TOKEN_ORIGIN_BONUS


def verdict_of(token_ids: list[int], drafters: list[str]) -> target_pb2.Verdict:
    origins = [ACCEPTED] * (len(token_ids) - 1) + [BONUS]
    return target_pb2.Verdict(token_ids=token_ids, origins=origins, drafters=drafters)


def test_verdicts_without_drafters_stand_beside_those_with_them() -> None:
    batch = Batch()
    batch.add(verdict_of([1], []), Absorbed(1, "a", stopped=False))
    batch.add(verdict_of([2, 3, 4], ["eagle3", "eagle3+suffix", ""]), Absorbed(3, "bcd", stopped=False))
    batch.add(verdict_of([5, 6], []), Absorbed(2, "ef", stopped=False))
    assert batch.known_drafters == ["", "eagle3", "eagle3+suffix", "", "", ""]
    assert batch.token_ids == [1, 2, 3, 4, 5, 6]
    assert batch.origins == [BONUS, ACCEPTED, ACCEPTED, BONUS, ACCEPTED, BONUS]
    assert (batch.text, batch.stopped, batch.finish_reason) == ("abcdef", False, None)


def test_what_a_stop_string_cuts_off_has_no_drafter() -> None:
    batch = Batch()
    batch.add(verdict_of([1], []), Absorbed(1, "a", stopped=False))
    batch.add(verdict_of([2, 3, 4], ["eagle3", "suffix", ""]), Absorbed(1, "b", stopped=True))
    assert batch.known_drafters == ["", "eagle3"]
    assert (batch.token_ids, batch.stopped, batch.finish_reason) == ([1, 2], True, FinishReason.STOP)


def test_a_batch_without_a_name_has_no_drafters() -> None:
    batch = Batch()
    batch.add(verdict_of([1, 2], []), Absorbed(2, "ab", stopped=False))
    # The only token that names one is cut off.
    batch.add(verdict_of([3, 4, 5], ["", "suffix", ""]), Absorbed(1, "c", stopped=True))
    assert batch.known_drafters == []


def test_a_list_that_is_too_short_moves_no_name_to_another_token() -> None:
    batch = Batch()
    batch.add(verdict_of([1, 2, 3], ["suffix"]), Absorbed(3, "abc", stopped=False))
    batch.add(verdict_of([4], ["eagle3", "eagle3"]), Absorbed(1, "d", stopped=False))
    assert batch.known_drafters == ["suffix", "", "", "eagle3"]
