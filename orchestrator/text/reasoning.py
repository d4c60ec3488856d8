"""Whether an answer begins with reasoning: told by what the chat template writes ahead of it."""

from collections.abc import Mapping
from typing import Any, Final

from orchestrator.text.response_parser import ResponseParser
from orchestrator.text.tokenizer import Tokenizer
from outrider.errors import InvalidArgument

_DISABLED: Final = {"enable_thinking": False}


def expected_reasoning_end(tokenizer: Tokenizer, variables: Mapping[str, Any]) -> str:
    """Return the text that ends the reasoning with which an answer is expected to begin; empty for none.

    An answer begins with reasoning where the template has begun it; where it would write an empty one if thinking were
    disabled, which this request does not do; and where the checkpoint's own response template has reasoning that the
    template does not close.

    Args:
        tokenizer: of the model.
        variables: of the chat template.
    """
    form = tokenizer.output_format
    if not form.reasoning_end:
        return ""
    try:
        prefix = tokenizer.answer_prefix(variables)
        disabled = tokenizer.answer_prefix({**variables, **_DISABLED})
    except InvalidArgument:
        # The request itself will be refused, or its messages are what this template needs.
        return form.reasoning_end if form.is_own else ""
    parser = ResponseParser(form.template, {}, reasoning=True, calls=False)
    parser.prime(prefix)
    if parser.region is not None and parser.region.is_reasoning:
        return form.reasoning_end
    if form.reasoning_end in prefix:
        return ""
    return form.reasoning_end if form.is_own or form.reasoning_end in disabled else ""
