"""Which messages a session does not hold yet."""

import pytest

from orchestrator.text.history import messages_behind
from outrider.errors import SessionConflict
from tests.orchestrator.text.test_output import ROOM, byte_tokenizer

TOKENIZER = byte_tokenizer()
# Strips contents, as templates of several models do.
STRIPPING = byte_tokenizer(
    "{% for message in messages %}<|im_start|>{{ message['role'] }}<|im_end|>{{ message['content'] | trim }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|im_end|>{% endif %}"
)
USER, AGAIN, ANSWER = ("user", "Hi"), ("user", "And now?"), ("assistant", "Hello!")


def held(tokenizer=TOKENIZER, messages=(USER,), answer=ANSWER[1], *, complete=True) -> list[int]:
    """What a session holds after an answer."""
    tokens = tokenizer.encode_chat(list(messages), continues=False, last_token=None, max_tokens=ROOM)
    end = tokenizer.encode("<|im_end|>", ROOM) if complete else []
    return [*tokens, *tokenizer.encode(answer, ROOM), *end]


@pytest.mark.parametrize("complete", [True, False])
def test_a_history_ends_with_the_answer_that_ends_the_session(complete: bool) -> None:
    tokens = held(complete=complete)
    for behind in ([AGAIN], [AGAIN, ("assistant", "Later"), USER], []):
        assert list(messages_behind(TOKENIZER, [USER, ANSWER, *behind], tokens, {}, ROOM)) == behind


def test_messages_without_an_answer_are_new() -> None:
    assert messages_behind(TOKENIZER, [USER], held(), {}, ROOM) == [USER]


def test_of_many_answers_the_right_one_is_found() -> None:
    turns = [("user", "Hi"), ("assistant", "x")] * 40
    for num in (2, 40, 80):
        tokens = held(messages=turns[: num - 1], answer="x")
        assert list(messages_behind(TOKENIZER, [*turns, AGAIN], tokens, {}, 10**5)) == [*turns[num:], AGAIN]


def test_white_space_that_the_template_strips_does_not_count() -> None:
    tokens = held(STRIPPING, answer=" Hello! ")
    assert list(messages_behind(STRIPPING, [USER, ("assistant", " Hello! "), AGAIN], tokens, {}, ROOM)) == [AGAIN]


@pytest.mark.parametrize(
    "messages",
    [
        [("user", "Ho"), ANSWER, AGAIN],
        [USER, ("assistant", "Hello"), AGAIN],
        [USER, ("assistant", "Hello! And more"), AGAIN],
        [("system", "x"), USER, ANSWER, AGAIN],
        [ANSWER, AGAIN],
    ],
)
def test_a_contradiction_is_told(messages: list[tuple[str, str]]) -> None:
    with pytest.raises(SessionConflict):
        messages_behind(TOKENIZER, messages, held(), {}, ROOM)
