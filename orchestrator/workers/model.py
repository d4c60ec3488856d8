"""The model that the targets in rotation share, and its tokenizer, which they serve."""

import asyncio
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc

from orchestrator.text.output import check_stop_strings
from orchestrator.text.tokenizer import Tokenizer
from outrider import wire
from outrider.errors import InvalidArgument, RuleUnsupported, Unavailable
from outrider.parameters import REPLAYABLE_RULES, AcceptanceRule, SamplingParameters
from outrider.serving.status import peer_errors
from outrider.v1 import tokens_pb2, worker_pb2
from outrider.v1.worker_pb2_grpc import WorkerServiceStub
from outrider.workers.links import WorkerLink

_TIMEOUT_S: Final = 10.0
_MAX_FETCHES: Final = 3
"""Targets that a tokenizer is fetched from, one after the other, while requests wait."""


@dataclass(frozen=True, slots=True)
class Model:
    """The properties of the targets that a request is checked against before one of them is chosen.

    Attributes:
        name: the model as the target was given it: a hub id, a folder, `embedded`.
        fingerprint: of the model; the same at all targets in rotation.
        tokenizer_fingerprint: of its tokenizer.
        tokenizer: its tokenizer; None where it has none.
        vocabulary_size: token ids are below it.
        max_session_len: tokens of the longest session that each of the targets takes, so that any may take over.
        eos_token_ids: token ids that end a text.
        defaults: sampling parameters in place of those that a request does not give.
        rules: acceptance rules that each of the targets serves.
        default_rule: rule of requests that name none, where the targets serve it.
        takes_constraints: whether each of the targets takes constraints.
    """

    name: str
    fingerprint: str
    tokenizer_fingerprint: str
    tokenizer: Tokenizer | None
    vocabulary_size: int
    max_session_len: int
    eos_token_ids: tuple[int, ...]
    defaults: tokens_pb2.SamplingParameters
    rules: frozenset[AcceptanceRule] = frozenset(REPLAYABLE_RULES)
    default_rule: AcceptanceRule = AcceptanceRule.COUPLED
    takes_constraints: bool = False

    def parameters(self, message: tokens_pb2.SamplingParameters, seed: int) -> SamplingParameters:
        """Return the parameters of a request, complete with this model's defaults.

        Args:
            message: what the client gave.
            seed: the seed in force.

        Raises:
            InvalidArgument: a parameter is out of range, or this model cannot follow it.
        """
        # The default may exceed a small model's limit: the end of the context ends the output anyway.
        if message.max_tokens > self.max_session_len:
            raise InvalidArgument(
                f"max_tokens is {message.max_tokens}, sessions have at most {self.max_session_len} tokens",
                "max_tokens",
            )
        complete = tokens_pb2.SamplingParameters()
        complete.CopyFrom(self.defaults)
        complete.MergeFrom(message)
        if complete.HasField("max_tokens") and not complete.max_tokens:
            complete.max_tokens = self.defaults.max_tokens or self.max_session_len
        parameters = wire.parameters_from_message(complete).with_seed(seed)
        parameters.check_vocabulary(self.vocabulary_size)
        check_stop_strings(self.tokenizer, parameters)
        return parameters

    def rule(self, named: AcceptanceRule | None, parameters: SamplingParameters) -> AcceptanceRule:
        """Return the acceptance rule of a request.

        Args:
            named: the rule that the request names; None for none.
            parameters: of the request.

        Raises:
            RuleUnsupported: the targets do not serve that rule.
        """
        rule = self.default_rule if named is None else named
        if rule in self.rules:
            return rule
        serve_engine_only = self.rules == {AcceptanceRule.ENGINE}
        if serve_engine_only and (named is None or parameters.is_greedy):
            return AcceptanceRule.ENGINE
        served = ", ".join(sorted(item.value for item in self.rules)) or "no common rule"
        problem = f"the targets serve {served}, not {rule.value}"
        if serve_engine_only:
            problem += ": they draw tokens with noise of their own, so that no text can be repeated"
        raise RuleUnsupported(problem)

    def stop_token_ids(self, parameters: SamplingParameters) -> tuple[int, ...]:
        """Return the token ids at which a request ends, in order."""
        eos = () if parameters.ignore_eos else self.eos_token_ids
        return tuple(sorted({*parameters.stop_token_ids, *eos}))


class TokenizerCache:
    """The tokenizers of targets, by fingerprint; each is fetched once, for all requests that wait for it."""

    def __init__(self) -> None:
        self._tokenizers: dict[str, Tokenizer | None] = {}
        self._fetches: dict[str, asyncio.Task[Tokenizer | None]] = {}

    async def get(self, fingerprint: str, sources: Callable[[], Sequence[WorkerLink]]) -> Tokenizer | None:
        """Return a tokenizer; None where the model has none.

        Args:
            fingerprint: of the tokenizer.
            sources: returns the targets to fetch it from, in order.

        Raises:
            Unavailable: none of the first three targets sends it.
        """
        if fingerprint in self._tokenizers:
            return self._tokenizers[fingerprint]
        fetch = self._fetches.get(fingerprint)
        if fetch is None:
            fetch = self._fetches[fingerprint] = asyncio.create_task(self._fetch(fingerprint, sources))
            fetch.add_done_callback(functools.partial(self._end_fetch, fingerprint))
        # A caller that is cancelled leaves the fetch to the others.
        return await asyncio.shield(fetch)

    def close(self) -> None:
        """Cancel all fetches."""
        for fetch in tuple(self._fetches.values()):
            fetch.cancel()

    async def _fetch(self, fingerprint: str, sources: Callable[[], Sequence[WorkerLink]]) -> Tokenizer | None:
        problem = Unavailable("no target sends its tokenizer")
        for link in sources()[:_MAX_FETCHES]:
            try:
                tokenizer = self._tokenizers[fingerprint] = await _fetched(link.channel)
                return tokenizer
            except Unavailable as error:
                problem = error
        raise problem

    def _end_fetch(self, fingerprint: str, fetch: "asyncio.Task[Tokenizer | None]") -> None:
        del self._fetches[fingerprint]
        # Retrieved, since all callers may have been cancelled.
        if not fetch.cancelled():
            fetch.exception()


async def _fetched(channel: grpc.aio.Channel) -> Tokenizer | None:
    """Return a target's tokenizer; None where its model has none.

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
    chat_template, response_template = (files.get(name) for name in ("chat_template.jinja", "response_template.json"))
    special: dict[str, Any] = json.loads(files.get("special_tokens.json", b"{}"))
    # In a thread: a large vocabulary takes a second.
    return await asyncio.to_thread(
        Tokenizer,
        files["tokenizer.json"].decode(),
        chat_template.decode() if chat_template else None,
        special,
        response_template.decode("utf-8", "replace") if response_template else None,
    )
