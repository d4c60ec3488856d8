"""Records that no client can break or forge, and that hold no text of theirs."""

import json
import logging
import sys

import pytest

from outrider.serving.telemetry import JsonFormatter, TextFormatter, escape_controls

FORGERY = "x\n2026 info forged\x1b[31m\u2028\x85"
FORMATTERS = [JsonFormatter, TextFormatter]


def record(message: str, error: Exception | None = None, **extra: object) -> logging.LogRecord:
    info = None
    if error is not None:
        try:
            raise error
        except type(error):
            info = sys.exc_info()
    made = logging.LogRecord("outrider.test", logging.INFO, __file__, 1, message, None, info)
    vars(made).update(extra)
    return made


@pytest.mark.parametrize("formatter", FORMATTERS)
def test_a_record_is_one_printable_line(formatter):
    line = formatter("told").format(record(FORGERY, session=FORGERY))
    assert line.isprintable()
    assert len(line.splitlines()) == 1


def test_json_keeps_message_and_fields():
    fields = json.loads(JsonFormatter("told").format(record(FORGERY, num_tokens=3)))
    assert (fields["message"], fields["num_tokens"], fields["service"]) == (FORGERY, 3, "told")
    assert fields["level"] == "info"


@pytest.mark.parametrize("formatter", FORMATTERS)
def test_an_exception_is_placed_but_not_quoted(formatter):
    failed = record("failed", ValueError("the prompt"))
    line = formatter("told").format(failed)
    assert "ValueError" in line
    assert "test_telemetry.py" in line
    assert "the prompt" not in line
    assert "the prompt" in formatter("told", with_messages=True).format(failed)


def test_controls_are_escaped_and_text_is_not():
    assert escape_controls("naïve\t\x1b\u2029") == "naïve\\t\\x1b\\u2029"
