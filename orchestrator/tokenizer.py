"""Text to token ids and back, with the tokenizer that the target serves. No model library is needed."""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

import grpc
import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers.decoders import DecodeStream

from outrider.errors import InvalidArgument
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

    def encode(self, text: str) -> list[int]:
        """Returns a prompt's token ids, with the special tokens that the tokenizer adds by itself."""
        return list(self._tokenizer.encode(text).ids)

    def encode_chat(self, messages: Sequence[tuple[str, str]], *, continues: bool, last_token: int | None) -> list[int]:
        """Returns the token ids of a conversation's messages, ready for the assistant's answer.

        Args:
            messages: (role, content), oldest first; at least one.
            continues: whether a session already holds the conversation up to an answer of the assistant; then only what
                the
                template puts behind that answer is returned.
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
        behind = self._render(before + conversation).rpartition(_SENTINEL)[2]
        token_ids = list(self._tokenizer.encode(behind, add_special_tokens=False).ids)
        return token_ids[1:] if token_ids and token_ids[0] == last_token else token_ids

    def detokenizer(self) -> "Detokenizer":
        """Returns a fresh incremental detokenizer."""
        return Detokenizer(self._tokenizer)

    def _render(self, conversation: list[dict[str, str]]) -> str:
        if self._template is None:
            raise InvalidArgument("the model has no chat template", "chat")
        try:
            return self._template.render(messages=conversation, add_generation_prompt=True, **self._special_tokens)
        except jinja2.TemplateError as error:
            raise InvalidArgument(f"the chat template refuses the messages: {error}", "chat") from error


class Detokenizer:
    """Turns output tokens into text piece by piece; a pure function of the tokens pushed so far.

    A piece is given out once it is certain: no character is split, so the pieces' concatenation is the text of all
    tokens, special tokens left out.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._token_ids: list[int] = []
        self._length = 0

    def push(self, token_id: int) -> str:
        """Returns the text that became certain with this token."""
        self._token_ids.append(token_id)
        piece = self._stream.step(self._tokenizer, token_id) or ""
        self._length += len(piece)
        return piece

    def flush(self) -> str:
        """Returns what the end makes certain: an incomplete character becomes U+FFFD."""
        whole = self._tokenizer.decode(self._token_ids, skip_special_tokens=True)
        return whole[self._length :]


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
    try:
        async for part in call:
            files[part.name] = files.get(part.name, b"") + part.content
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return None
        raise
    template = files.get("chat_template.jinja")
    special: dict[str, Any] = json.loads(files.get("special_tokens.json", b"{}"))
    return Tokenizer(files["tokenizer.json"].decode(), template.decode() if template else None, special)
