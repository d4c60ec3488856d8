"""Prompts to token ids, with the target's tokenizer and chat template, without a model library.

Prompts may be long: call `encode` and `encode_chat` in a thread (see `orchestrator.api.encoding_threads`). They release
the GIL.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import jinja2
import tokenizers

from orchestrator.text.byte_fallback import unsettled_tokens_of
from orchestrator.text.chat_template import compiled_template
from orchestrator.text.content import ContentGuard, encoded
from orchestrator.text.messages import (
    Message,
    Messages,
    Tool,
    answer_to,
    checked_messages,
    template_messages,
    template_tools,
)
from orchestrator.text.tool_formats import output_format
from orchestrator.text.tool_prompt import plain_messages
from outrider.errors import InvalidArgument

_SENTINEL: Final = "\uf8ffprevious answer\uf8ff"
_QUESTION: Final = Message("user", "?")
_PROBE: Final = Tool("probe", "?", {"type": "object", "properties": {}})
_MIN_CHARS_PER_TOKEN: Final = 16
"""Longest text of a token in characters, where the vocabulary has no longer one: a tokenizer may shorten text before it
looks tokens up (NFC makes one character of three)."""
_USUAL_CHARS_PER_TOKEN: Final = 8
"""More than the average of text in any language."""
_PIECE_CHARS: Final = 1 << 16
_FAILURES: Final = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
"""What a template raises that reckons with values of other types."""


class Tokenizer:
    """A model's tokenizer and chat template.

    Args:
        definition: tokenizer.json.
        chat_template: Jinja source; None where the model has none.
        special_tokens: `bos_token` and `eos_token`, as templates refer to them.
        response_template: the checkpoint's own, as JSON text; None where it has none.

    Attributes:
        backend: the tokenizer of the library `tokenizers`.
        chat_template: as given.
        unsettled_tokens: see `unsettled_tokens_of`.
        special_tokens: their texts.
        knows_tools: whether the chat template has a place for tools.
        output_format: how the model writes reasoning and calls of tools.
        closes_reasoning: whether the chat template writes an empty reasoning where `enable_thinking` is false.
        marker_tokens: special tokens, by their id, that the output format looks for.
    """

    def __init__(
        self,
        definition: str,
        chat_template: str | None,
        special_tokens: dict[str, str | None],
        response_template: str | None = None,
    ) -> None:
        self.backend = tokenizers.Tokenizer.from_str(definition)
        self.chat_template = chat_template
        self._special_variables = {name: token or "" for name, token in special_tokens.items()}
        self._template = None if chat_template is None else compiled_template(chat_template)
        added = self.backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_tokens = tuple(token.content for token in added.values() if token.special and token.content)
        self.unsettled_tokens = unsettled_tokens_of(self.backend)
        self._content = ContentGuard(self.backend)
        self._max_chars_per_token = max(_MIN_CHARS_PER_TOKEN, *map(len, self.backend.get_vocab()))
        # Until it is known better: the probes render what they are given.
        self.knows_tools = self._has_system = True
        self.knows_tools, self._has_system = self._renders_tools(), self._renders_system()
        self.output_format = output_format(response_template, chat_template, knows_tools=self.knows_tools)
        self.closes_reasoning = self._writes_empty_reasoning()
        self.marker_tokens: Mapping[int, str] = {
            token_id: token.content
            for token_id, token in added.items()
            if token.special and token.content and self.output_format.template.mentions(token.content)
        }

    def check_length(self, num_chars: int, max_tokens: int) -> None:
        """Raise `InvalidArgument` where so many characters cannot be so few tokens; in constant time."""
        most = max_tokens * self._max_chars_per_token
        if num_chars > most:
            raise InvalidArgument(
                f"prompt has {num_chars} characters; the {max_tokens} tokens that fit have at most {most}", "prompt"
            )

    def encode(self, text: str, max_tokens: int) -> list[int]:
        """Return a prompt's token ids, with the special tokens that the tokenizer adds by itself.

        Special tokens in the text are encoded as such: raw text is the caller's whole prompt.

        Args:
            text: the prompt.
            max_tokens: room of the session; a few more tokens may be returned.

        Raises:
            InvalidArgument: the text has far more tokens; the check takes no longer than encoding `max_tokens`.
        """
        self._check_fits(text, max_tokens)
        return list(encoded(self.backend, text, add_special_tokens=True).ids)

    def encode_answer(self, text: str, max_tokens: int) -> list[int]:
        """Return the token ids of a text as an answer has it; special tokens in it are text. Otherwise as `encode`."""
        return self._encode_rendered(self._content.marked(text), max_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return self.backend.decode(list(token_ids), skip_special_tokens=False)

    def encode_chat(
        self,
        messages: Messages,
        *,
        continues: bool,
        last_token: int | None,
        max_tokens: int,
        variables: Mapping[str, Any] = MappingProxyType({}),
        prompts: bool = True,
        tools: Sequence[Tool] = (),
        answer: Message | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation's messages, ready for the assistant's answer.

        Special tokens in messages and tools are text (see `content`).

        Args:
            messages: oldest first; at least one.
            continues: whether a session already holds the conversation up to an answer of the assistant; then only the
                template's text after that answer is encoded.
            last_token: the session's last token, so that an end-of-text token there is not repeated.
            max_tokens: as for `encode`.
            variables: further variables of the template; special tokens in them are text.
            prompts: whether the template ends with the beginning of the assistant's answer.
            tools: that the model may call; where the template has no place for them, a system message tells of them.
            answer: that the session ends with, where it is known: templates look back from results to their calls.

        Raises:
            InvalidArgument: the model has no chat template, a message is wrong, the template refuses the messages, or
                they have far more tokens.
        """
        if not continues:
            return self._encode_rendered(self._render(messages, tools, variables, prompts=prompts), max_tokens)
        behind = self._behind_answer(messages, answer or answer_to(messages), tools, variables, prompts=prompts)
        token_ids = self._encode_rendered(behind, max_tokens)
        is_repeated = token_ids[:1] == [last_token] and last_token in self._special_ids
        return token_ids[1:] if is_repeated else token_ids

    def encode_history(
        self, messages: Messages, variables: Mapping[str, Any], max_tokens: int, tools: Sequence[Tool] = ()
    ) -> list[int]:
        """Return the token ids of a conversation that ends with an answer; errors as for `encode_chat`."""
        return self._encode_rendered(self._render(messages, tools, variables, prompts=False), max_tokens)

    def text_behind_answer(self, messages: Messages, variables: Mapping[str, Any], tools: Sequence[Tool] = ()) -> str:
        """Return what the template writes behind an answer to these messages; errors as for `encode_chat`."""
        answer = Message("assistant", _SENTINEL)
        return self._behind_sentinel(self._render([*messages, answer], tools, variables, prompts=False))

    def answer_begin(self, variables: Mapping[str, Any]) -> str:
        """Return what the template writes ahead of an answer, without reasoning; errors as for `encode_chat`."""
        without, whole = (self._render([_QUESTION], (), variables, prompts=prompts) for prompts in (False, True))
        begun = whole.removeprefix(without) if whole.startswith(without) else ""
        if not begun.strip():
            # The end of the question is the beginning of the answer.
            begun = whole[max((whole.rfind(token) for token in self.special_tokens), default=-1) :]
        reasoning = self.output_format.reasoning_begin
        return (begun.partition(reasoning)[0] if reasoning else begun).rstrip()

    def _behind_answer(
        self,
        messages: Messages,
        answer: Message | None,
        tools: Sequence[Tool],
        variables: Mapping[str, Any],
        *,
        prompts: bool,
    ) -> str:
        """Return what the template writes behind an answer, of what ends it and of the messages that follow."""
        if answer is not None and answer.tool_calls:
            before = [_QUESTION, answer._replace(reasoning="")]
            known = self._render(before, tools, variables, prompts=False)
            whole = self._render([*before, *messages], tools, variables, prompts=prompts)
            if whole.startswith(known):
                end = self.text_behind_answer([_QUESTION], variables, tools)
                return (end if known.endswith(end) else "") + whole[len(known) :]
        before = [_QUESTION, Message("assistant", _SENTINEL)]
        return self._behind_sentinel(self._render([*before, *messages], tools, variables, prompts=prompts))

    @staticmethod
    def _behind_sentinel(rendered: str) -> str:
        _, sentinel, behind = rendered.partition(_SENTINEL)
        if not sentinel:
            raise InvalidArgument("the chat template hides earlier answers, so it cannot continue a session", "chat")
        return behind

    def _encode_rendered(self, rendered: str, max_tokens: int) -> list[int]:
        self._check_fits(rendered, max_tokens)
        return self._content.encode(rendered)

    def _check_fits(self, text: str, max_tokens: int) -> None:
        """Raise `InvalidArgument` where a text has far more tokens; count piece by piece, up to the limit."""
        if len(text) <= _USUAL_CHARS_PER_TOKEN * max_tokens:
            return
        num_tokens = 0
        for start in range(0, len(text), _PIECE_CHARS):
            piece = text[start : start + _PIECE_CHARS]
            num_tokens += len(encoded(self.backend, piece, add_special_tokens=False))
            # Cutting adds tokens, but never doubles them; a text close to the limit is counted as a whole.
            if num_tokens > 2 * max_tokens:
                raise InvalidArgument(
                    f"prompt has {len(text)} characters, far more than the {max_tokens} tokens that fit", "prompt"
                )

    def _render(self, messages: Messages, tools: Sequence[Tool], variables: Mapping[str, Any], *, prompts: bool) -> str:
        conversation, marked = checked_messages(messages), self._content.marked
        told = template_tools(tools, marked)
        if not self.knows_tools:
            conversation, told = plain_messages(conversation, told, has_system=self._has_system), []
        own = {
            "messages": template_messages(conversation, marked, self.chat_template or ""),
            "add_generation_prompt": prompts,
            **({"tools": told} if told else {}),
            **self._special_variables,
        }
        if taken := sorted((own.keys() | {"tools"}) & variables.keys()):
            raise InvalidArgument(f"{taken[0]} is not the caller's to set", "template_variables")
        return self._rendered(own, {name: self._without_special(value) for name, value in variables.items()})

    def _rendered(self, own: Mapping[str, Any], variables: Mapping[str, Any]) -> str:
        if self._template is None:
            raise InvalidArgument("the model has no chat template", "chat")
        try:
            return self._template.render({**variables, **own})
        except (jinja2.TemplateError, *_FAILURES) as error:
            is_told = isinstance(error, jinja2.TemplateError)
            has_values = bool(variables) or "tools" in own
            if is_told and not (has_values and isinstance(error, jinja2.UndefinedError)):
                raise InvalidArgument(f"the chat template refuses the messages: {error}", "chat") from error
            if not has_values:
                raise
            # Templates reckon with values as they come.
            field = "template_variables" if variables else "tools"
            raise InvalidArgument(f"the chat template fails with these {field}: {error}", field) from error

    def _renders_tools(self) -> bool:
        """Return whether the chat template does something with tools."""
        if self._template is None:
            return False
        try:
            without, whole = (self._render([_QUESTION], tools, {}, prompts=True) for tools in ((), [_PROBE]))
        except (InvalidArgument, *_FAILURES):
            # One that fails at so plain a conversation has a place for tools where it speaks of them.
            return "tools" in (self.chat_template or "")
        return whole != without

    def _renders_system(self) -> bool:
        """Return whether the chat template, if any, takes system messages."""
        try:
            self._render([Message("system", "?"), Message("user", "?")], (), {}, prompts=True)
        except (InvalidArgument, *_FAILURES):
            return False
        return True

    def _writes_empty_reasoning(self) -> bool:
        end = self.output_format.reasoning_end
        try:
            prompt = self._render([_QUESTION], (), {"enable_thinking": False}, prompts=True)
        except (InvalidArgument, *_FAILURES):
            return False
        return bool(end) and prompt.rstrip().endswith(end)

    def _without_special(self, value: Any) -> Any:
        """Return a variable whose texts have no special tokens; its keys are the template's."""
        match value:
            case str():
                return self._content.marked(value)
            case list():
                return [self._without_special(item) for item in value]
            case dict():
                return {name: self._without_special(item) for name, item in value.items()}
        return value
