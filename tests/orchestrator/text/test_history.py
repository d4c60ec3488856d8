"""Which messages a session does not hold yet."""

from typing import Any

import pytest

from orchestrator.text.history import messages_behind
from orchestrator.text.messages import Call, Message, Tool
from orchestrator.text.tokenizer import Tokenizer
from outrider.errors import SessionConflict
from tests.orchestrator.answering import model_files, tokenizer_of
from tests.orchestrator.text.templates import CHANNELS, WITH_TOOLS
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


def user(content: str) -> str:
    return f"<|im_start|>user\n{content}<|im_end|>\n"


def said(content: str, *, complete: bool = True) -> str:
    return f"<|im_start|>assistant\n{content}" + ("<|im_end|>\n" if complete else "")


def behind(tokenizer: Tokenizer, messages: list[Any], text: str, tools: tuple[Tool, ...] = ()) -> list[Any]:
    return list(messages_behind(tokenizer, messages, tokenizer.encode(text, 10**5), {}, 10**5, tools))


ABOUT = [("user", "What is <think>?"), ("assistant", "A tag."), ("user", "B"), ("assistant", "C"), AGAIN]


@pytest.mark.parametrize("reasoning", ["", "<think>\nHm.\n</think>\n\n"])
def test_reasoning_ends_with_its_answer(reasoning: str) -> None:
    text = user("What is <think>?") + said(reasoning + "A tag.") + user("B") + said(reasoning + "C", complete=False)
    assert behind(KNOWING, ABOUT, text) == [AGAIN]
    for number in (0, 1, 2, 3):
        other = [*ABOUT[:number], (ABOUT[number][0], "Something else"), *ABOUT[number + 1 :]]
        with pytest.raises(SessionConflict):
            behind(KNOWING, other, text)


def test_reasoning_that_was_cut_short_is_no_part_of_later_turns() -> None:
    cut = user("Hi") + said("<think>Long thoughts", complete=False)
    for reasoning in ("", "Long thoughts"):
        messages = [USER, Message("assistant", "", reasoning), AGAIN]
        assert behind(KNOWING, messages, cut) == [AGAIN]
        for answer in ("Fine", "<think>ok</think>Fine"):
            later = cut + "<|im_end|>\n" + user(AGAIN[1]) + said(answer, complete=False)
            assert behind(KNOWING, [*messages, ("assistant", "Fine"), USER], later) == [USER]


def test_reasoning_and_content_may_be_two_answers() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
        "<|message|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    )
    marks = ("<|im_start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
    channels = {**CHANNELS, "start_anchor": "<|im_start|>assistant"}
    tokenizer = tokenizer_of(model_files(template, channels, marks))
    text = (
        "<|im_start|>user<|message|>Hi<|end|><|im_start|>assistant<|channel|>analysis<|message|>Well.<|end|>"
        "<|im_start|>assistant<|channel|>final<|message|>Hello!<|return|>"
    )
    assert behind(tokenizer, [USER, ANSWER, AGAIN], text) == [AGAIN]
    with pytest.raises(SessionConflict):
        behind(tokenizer, [USER, ("assistant", "Ho"), AGAIN], text)


def test_calls_are_compared_by_their_values_however_templates_write_them() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}\n<tool_call>\n"
        "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n"
        "</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{% if tools %}Tools{% endif %}"
    )
    tokenizer = byte_tokenizer(template)
    written = "<parameter=of>\nx\n</parameter>\n<parameter=deep>\ntrue\n</parameter>\n"
    text = user("Hi") + said(f"<tool_call>\n<function=find>\n{written}</function>\n</tool_call>", complete=False)
    called = Message("assistant", "", "", (Call("c", "find", '{"deep": true, "of": "x"}'),))
    assert behind(tokenizer, [USER, called, RESULT], text) == [RESULT]
    with pytest.raises(SessionConflict):
        behind(tokenizer, [USER, called._replace(tool_calls=(Call("c", "find", '{"deep": false}'),)), RESULT], text)


LOOKING_BACK = byte_tokenizer(
    "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('a result without a call') }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.name }}"
    "{% for c in m.tool_calls %}\n<tool_call>{{ c.function.name }}</tool_call>{% endfor %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{% if tools %}Tools{% endif %}"
)


@pytest.mark.parametrize(("results", "answer"), [([RESULT], CALLED), ([RESULT._replace(name="add")], None)])
def test_results_follow_the_calls_that_the_session_ends_with(results: list[Message], answer: Message | None) -> None:
    given: dict[str, Any] = {"continues": True, "max_tokens": ROOM, "answer": answer}
    eos = LOOKING_BACK.encode("<|im_end|>", ROOM)[0]
    expected = "\n<|im_start|>tool\nadd3<|im_end|>\n<|im_start|>assistant\n"
    assert LOOKING_BACK.decode(LOOKING_BACK.encode_chat(results, last_token=eos, **given)) == expected
    # An answer that was cut short is ended first.
    assert LOOKING_BACK.decode(LOOKING_BACK.encode_chat(results, last_token=1, **given)) == "<|im_end|>" + expected
