"""Calls and results as plain text, for chat templates that know no tools."""

import pytest

from orchestrator.text.messages import Call, Message
from orchestrator.text.tool_prompt import plain_messages

QUESTION = Message("user", "2 + 2?")
CALLED = Message("assistant", "", "", (Call("1", "add", "{}"),))
RESULT = Message("tool", "4", tool_call_id="1", name="add")
TOLD = "<tool_response>\n4\n</tool_response>"


@pytest.mark.parametrize(
    ("behind", "expected"),
    [
        ([RESULT], [("user", TOLD)]),
        ([RESULT, RESULT], [("user", f"{TOLD}\n{TOLD}")]),
        ([RESULT, RESULT, Message("user", "Sure?")], [("user", f"{TOLD}\n{TOLD}\nSure?")]),
        ([RESULT, Message("assistant", "4."), QUESTION], [("user", TOLD), ("assistant", "4."), ("user", "2 + 2?")]),
        # What the caller writes apart stays so.
        ([RESULT, Message("user", "a"), Message("user", "b")], [("user", f"{TOLD}\na"), ("user", "b")]),
    ],
)
def test_results_and_what_the_user_says_behind_them_are_one_message(
    behind: list[Message], expected: list[tuple[str, str]]
) -> None:
    plain = plain_messages([QUESTION, CALLED, *behind], [], has_system=True)
    assert plain[2:] == [Message(*message) for message in expected]
