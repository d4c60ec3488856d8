import random

from outrider.speculation.prediction import Prediction

TEXT = [*range(10, 40)]


def followed(output: list[int], text: list[int] | None = None) -> Prediction:
    prediction = Prediction(TEXT if text is None else text)
    prediction.follow(output)
    return prediction


def test_a_prediction_is_expected_from_its_beginning_to_its_end() -> None:
    assert followed([]).position == 0
    assert (followed(TEXT[:5]).position, followed(TEXT[:5]).num_agreeing) == (5, 5)
    whole = followed(TEXT)
    assert (whole.position, whole.num_accepted) == (30, 30)
    beyond = followed([*TEXT, 1])
    assert (beyond.position, beyond.num_accepted) == (None, 30)


def test_it_goes_on_behind_what_was_changed_inserted_and_left_out() -> None:
    for output in (
        [*TEXT[:10], 1, *TEXT[11:16]],  # changed
        [*TEXT[:10], 1, 2, 3, *TEXT[10:16]],  # inserted
        [*TEXT[:10], *TEXT[13:16]],  # left out
    ):
        prediction = followed(output)
        assert prediction.position == 16
        assert prediction.num_agreeing >= 3


def test_it_goes_on_where_a_text_was_moved() -> None:
    assert followed([*TEXT[20:], *TEXT[5:9]]).position == 9


def test_of_several_places_the_next_is_taken() -> None:
    text = [1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3, 6]
    assert followed([1, 2, 3, 4, 7, 1, 2, 3], text).position == 8
    assert followed([1, 2, 3, 4, 9, 1, 2, 3, 5, 7, 1, 2, 3], text).position == 13


def test_an_empty_or_short_prediction_expects_nothing_more() -> None:
    assert followed([1, 2, 3], []).position is None
    assert followed([1, 2], [1]).position is None


def test_the_place_follows_from_the_output_however_it_comes() -> None:
    draw = random.Random(5)
    for _ in range(200):
        text = [draw.randrange(4) for _ in range(draw.randrange(30))]
        output = [draw.randrange(4) for _ in range(draw.randrange(60))]
        once, bit_by_bit = followed(output, text), Prediction(text)
        for token_id in output:
            bit_by_bit.follow([token_id])
        assert (once.position, once.num_accepted) == (bit_by_bit.position, bit_by_bit.num_accepted)
        if once.position is not None:
            num = once.num_agreeing
            assert text[once.position - num : once.position] == output[len(output) - num :]
        assert once.num_accepted <= len(output)
