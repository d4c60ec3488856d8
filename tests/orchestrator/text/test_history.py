"""Which messages a session does not hold yet."""

import pytest

from orchestrator.text.history import messages_behind
from orchestrator.text.messages import Call, Message, Tool
from orchestrator.text.tokenizer import Tokenizer
from outrider.errors import SessionConflict
from tests.orchestrator.text.templates import WITH_TOOLS
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


CALLED = Message("assistant", "", "", (Call("c", "add", '{"a": 1, "b": "x y"}'),))
RESULT = Message("tool", "3", tool_call_id="c")
KNOWING = byte_tokenizer(WITH_TOOLS + "{# <think> #}")
SAID = '<think>\nHm.\n</think>\n<tool_call>\n{"name":"add","arguments":{"a":1,"b":"x y"}}\n</tool_call>'


@pytest.mark.parametrize("tokenizer", [TOKENIZER, KNOWING], ids=["plain", "knowing"])
def test_calls_and_results_are_found_however_their_json_and_reasoning_are_written(tokenizer: Tokenizer) -> None:
    said = SAID if tokenizer is KNOWING else SAID.partition("</think>\n")[2]
    tools = [Tool("add", "Adds.", {"type": "object"})]
    prompt = tokenizer.encode_chat([USER], continues=False, last_token=None, max_tokens=ROOM, tools=tools)
    tokens = [*prompt, *tokenizer.encode(said + "<|im_end|>", ROOM)]
    for reasoning in ("", "Hm."):
        messages = [USER, CALLED._replace(reasoning=reasoning), RESULT]
        assert list(messages_behind(tokenizer, messages, tokens, {}, ROOM, tools)) == [RESULT]
    other = CALLED._replace(tool_calls=(Call("c", "add", '{"a": 2, "b": "x y"}'),))
    with pytest.raises(SessionConflict):
        messages_behind(tokenizer, [USER, other, RESULT], tokens, {}, ROOM, tools)
