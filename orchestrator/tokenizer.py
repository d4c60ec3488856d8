"""Prompts to token ids, with the tokenizer that the target serves. No model library is needed."""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

import grpc
import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from orchestrator.detokenizer import Detokenizer, unsettled_tokens_of
from outrider.errors import InvalidArgument
from outrider.serving.status import peer_errors
from outrider.v1 import worker_pb2
from outrider.v1.worker_pb2_grpc import WorkerServiceStub

ROLES: Final = ("system", "user", "assistant")
_TIMEOUT_S: Final = 30.0
_SENTINEL: Final = "\uf8ffprevious answer\uf8ff"


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

    def encode(self, text: str) -> list[int]:
        """Returns a prompt's token ids, with the special tokens that the tokenizer adds by itself."""
        return list(self._tokenizer.encode(text).ids)

    def encode_chat(self, messages: Sequence[tuple[str, str]], *, continues: bool, last_token: int | None) -> list[int]:
        """Returns the token ids of a conversation's messages, ready for the assistant's answer.

        Args:
            messages: (role, content), oldest first; at least one.
            continues: whether a session already holds the conversation up to an answer of the assistant; then only what
                the template puts behind that answer is returned.
            last_token: the session's last token, so that an end-of-text token that stands there is not repeated.

        Raises:
            InvalidArgument: the model has no chat template, a role is unknown, or the template refuses the messages.
        """
        for role, _ in messages:
            if role not in ROLES:
                raise InvalidArgument(f"role is {role!r}, must be one of {', '.join(ROLES)}", "role")
        conversation = [{"role": role, "content": content} for role, content in messages]
        if not continues:
            return list(self._tokenizer.encode(self._render(conversation), add_special_tokens=False).ids)
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SENTINEL}]
        _, sentinel, behind = self._render(before + conversation).partition(_SENTINEL)
        if not sentinel:
            raise InvalidArgument("the chat template hides earlier answers, so it cannot continue a session", "chat")
        token_ids = list(self._tokenizer.encode(behind, add_special_tokens=False).ids)
        is_repeated = token_ids[:1] == [last_token] and last_token in self._special_ids
        return token_ids[1:] if is_repeated else token_ids

    def detokenizer(self) -> "Detokenizer":
        """Returns a fresh incremental detokenizer."""
        return Detokenizer(self._tokenizer, self._unsettled_tokens)

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
    """Returns the tokenizer that a target serves; None where its model has none."""
    files: dict[str, bytes] = {}
    call = WorkerServiceStub(channel).GetTokenizer(worker_pb2.GetTokenizerRequest(), timeout=_TIMEOUT_S)
    with peer_errors():
        try:
            async for part in call:
                files[part.name] = files.get(part.name, b"") + part.content
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND):
                return None
            raise
    template = files.get("chat_template.jinja")
    special: dict[str, Any] = json.loads(files.get("special_tokens.json", b"{}"))
    return Tokenizer(files["tokenizer.json"].decode(), template.decode() if template else None, special)
