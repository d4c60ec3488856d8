"""Whether an answer begins with reasoning: told by the end of its prompt, which the chat template wrote."""

from collections.abc import Sequence
from typing import Final

from orchestrator.text.response_parser import ResponseParser
from orchestrator.text.tokenizer import Tokenizer

MAX_PROMPT_TOKENS: Final = 512
"""Tokens at the prompt's end in which an answer that the chat template began is looked for."""


def expected_reasoning_end(tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
    """Return the text that ends the reasoning with which an answer is expected to begin; empty for none.

    An answer begins with reasoning where its prompt has begun it. Where its prompt has not ended it either, it does so
    if the template would write an empty one with thinking disabled, or if the checkpoint's own response template has
    reasoning.

    Args:
        tokenizer: of the model.
        prompt: token ids of the request's own prompt, or the end of them.
    """
    form = tokenizer.output_format
    if not (end := form.reasoning_end):
        return ""
    text = tokenizer.decode(prompt[-MAX_PROMPT_TOKENS:])
    parser = ResponseParser(form.template, {}, reasoning=True, calls=False)
    begun = parser.prime(text)
    if parser.is_reasoning:
        return end
    if end in begun or (not form.is_own and text.rstrip().endswith(end)):
        return ""
    return end if form.is_own or tokenizer.closes_reasoning else ""
