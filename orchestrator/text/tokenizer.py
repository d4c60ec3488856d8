"""Prompts to token ids, with the tokenizer that the target serves. No model library is needed.

What is encoded here may be long: call it in a thread (see `encoding`), in which it leaves the others to go on.
"""

import asyncio
import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

import grpc
import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from orchestrator.text.content import ContentGuard, encoded
from orchestrator.text.detokenizer import Detokenizer, unsettled_tokens_of
from outrider.errors import InvalidArgument, Unavailable
from outrider.serving.status import peer_errors
from outrider.v1 import worker_pb2
from outrider.v1.worker_pb2_grpc import WorkerServiceStub

ROLES: Final = ("system", "user", "assistant")
_TIMEOUT_S: Final = 10.0
_SENTINEL: Final = "\uf8ffprevious answer\uf8ff"
_MIN_CHARS_PER_TOKEN: Final = 16
"""Characters that a token may stand for at most, where the vocabulary has none longer: a tokenizer may shorten text
before it looks tokens up (NFC makes one character of three)."""
_USUAL_CHARS_PER_TOKEN: Final = 8
"""More than text has on average, in any language."""
_PIECE_CHARS: Final = 1 << 16


class Tokenizer:
    """A model's tokenizer and chat template.

    Args:
        definition: tokenizer.json.
        chat_template: Jinja source; None where the model has none.
        special_tokens: `bos_token` and `eos_token`, as templates refer to them.
    """

    def __init__(self, definition: str, chat_template: str | None, special_tokens: dict[str, str | None]) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_str(definition)
        self._special_tokens = {name: token or "" for name, token in special_tokens.items()}
        self._template = None if chat_template is None else _compiled(chat_template)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._unsettled_tokens = unsettled_tokens_of(self._tokenizer)
        self._content = ContentGuard(self._tokenizer)
        self._max_chars_per_token = max(_MIN_CHARS_PER_TOKEN, *map(len, self._tokenizer.get_vocab()))

    def check_length(self, num_chars: int, max_tokens: int) -> None:
        """Raises `InvalidArgument` where so many characters cannot be so few tokens; takes no time."""
        most = max_tokens * self._max_chars_per_token
        if num_chars > most:
            raise InvalidArgument(
                f"prompt has {num_chars} characters; the {max_tokens} tokens that fit have at most {most}", "prompt"
            )

    def encode(self, text: str, max_tokens: int) -> list[int]:
        """Returns a prompt's token ids, with the special tokens that the tokenizer adds by itself.

        Special tokens that are written in the text are read as such: raw text is the caller's whole prompt.

        Args:
            text: the prompt.
            max_tokens: that the session has room for; a few more may be returned.

        Raises:
            InvalidArgument: it has far more tokens, which is found out in the time that so many take.
        """
        self._check_fits(text, max_tokens)
        return list(encoded(self._tokenizer, text, add_special_tokens=True).ids)

    def encode_chat(
        self, messages: Sequence[tuple[str, str]], *, continues: bool, last_token: int | None, max_tokens: int
    ) -> list[int]:
        """Returns the token ids of a conversation's messages, ready for the assistant's answer.

        Special tokens that are written in contents are text (see `content`).

        Args:
            messages: (role, content), oldest first; at least one.
            continues: whether a session already holds the conversation up to an answer of the assistant; then only what
                the template puts behind that answer is returned.
            last_token: the session's last token, so that an end-of-text token that stands there is not repeated.
            max_tokens: as for `encode`.

        Raises:
            InvalidArgument: the model has no chat template, a role is unknown, the template refuses the messages, or
                they have far more tokens.
        """
        for role, _ in messages:
            if role not in ROLES:
                raise InvalidArgument(f"role is {role!r}, must be one of {', '.join(ROLES)}", "role")
        conversation = [{"role": role, "content": self._content.marked(content)} for role, content in messages]
        if not continues:
            return self._encode_rendered(self._render(conversation), max_tokens)
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SENTINEL}]
        _, sentinel, behind = self._render(before + conversation).partition(_SENTINEL)
        if not sentinel:
            raise InvalidArgument("the chat template hides earlier answers, so it cannot continue a session", "chat")
        token_ids = self._encode_rendered(behind, max_tokens)
        is_repeated = token_ids[:1] == [last_token] and last_token in self._special_ids
        return token_ids[1:] if is_repeated else token_ids

    def detokenizer(self) -> "Detokenizer":
        """Returns a fresh incremental detokenizer."""
        return Detokenizer(self._tokenizer, self._unsettled_tokens)

    def _encode_rendered(self, rendered: str, max_tokens: int) -> list[int]:
        self._check_fits(rendered, max_tokens)
        return self._content.encode(rendered)

    def _check_fits(self, text: str, max_tokens: int) -> None:
        """Raises `InvalidArgument` where a text has far more tokens; counts piece by piece, up to the limit."""
        if len(text) <= _USUAL_CHARS_PER_TOKEN * max_tokens:
            return
        num_tokens = 0
        for start in range(0, len(text), _PIECE_CHARS):
            piece = text[start : start + _PIECE_CHARS]
            num_tokens += len(encoded(self._tokenizer, piece, add_special_tokens=False))
            # Cutting adds tokens, but never as many as there are; what is close to the limit is counted as a whole.
            if num_tokens > 2 * max_tokens:
                raise InvalidArgument(
                    f"prompt has {len(text)} characters, far more than the {max_tokens} tokens that fit", "prompt"
                )

    def _render(self, conversation: list[dict[str, str]]) -> str:
        if self._template is None:
            raise InvalidArgument("the model has no chat template", "chat")
        try:
            return self._template.render(messages=conversation, add_generation_prompt=True, **self._special_tokens)
        except jinja2.TemplateError as error:
            raise InvalidArgument(f"the chat template refuses the messages: {error}", "chat") from error


def _compiled(source: str) -> jinja2.Template:
    # As transformers renders templates, so that their white space comes out the same.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


async def fetch_tokenizer(channel: grpc.aio.Channel) -> Tokenizer | None:
    """Returns the tokenizer that a target serves; None where its model has none.

    Raises:
        Unavailable: the target does not send it within 10 s.
    """
    files: dict[str, bytes] = {}
    call = WorkerServiceStub(channel).GetTokenizer(worker_pb2.GetTokenizerRequest(), timeout=_TIMEOUT_S)
    with peer_errors():
        try:
            async for part in call:
                files[part.name] = files.get(part.name, b"") + part.content
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND):
                return None
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                # The orchestrator's own bound, not the client's.
                raise Unavailable(f"the target does not send its tokenizer within {_TIMEOUT_S:g} s") from error
            raise
    template = files.get("chat_template.jinja")
    special: dict[str, Any] = json.loads(files.get("special_tokens.json", b"{}"))
    # In a thread: a large vocabulary takes a second.
    return await asyncio.to_thread(
        Tokenizer, files["tokenizer.json"].decode(), template.decode() if template else None, special
    )
