"""Leases of sessions for checked requests, in two round trips to Redis.

The first reads the session, concurrently with the quota of its tenant; the second leases it. Nothing is written before
the lease, so a request that is refused before it leaves nothing behind.
"""

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

from orchestrator.api.constraints import ConstraintChecks
from orchestrator.api.encoding_threads import EncodingThreads
from orchestrator.api.prompts import (
    EncodedPrompt,
    PromptTerms,
    check_chat,
    check_prompt,
    encoded_prompt,
    may_repeat_session,
    parsing_of,
    prediction_chars,
    prediction_tokens,
)
from orchestrator.api.requests import CheckedRequest
from orchestrator.store.sessions import Begun, NewRequest, SessionEnd
from orchestrator.store.store import SessionStore
from orchestrator.text.output_parts import Parsing
from orchestrator.text.reasoning import expected_reasoning_end
from orchestrator.workers.model import Model
from orchestrator.workers.replicas import Replicas
from outrider.errors import OutriderError
from outrider.parameters import SamplingParameters
from outrider.speculation.prediction import Prediction
from outrider.v1 import generation_pb2

_NEW: Final = SessionEnd(None, None)


class Leased(NamedTuple):
    """A request that has begun.

    Attributes:
        begun: its lease and its session.
        model: of the targets.
        prediction: of its output; None without one.
        parsing: how its output is taken apart; None for not at all.
    """

    begun: Begun
    model: Model
    prediction: Prediction | None
    parsing: Parsing | None


class Leasing:
    """The way of checked requests to leases of their sessions.

    Args:
        store: has the sessions.
        replicas: the targets, whose model the requests use.
    """

    def __init__(self, store: SessionStore, replicas: Replicas) -> None:
        self._store = store
        self._replicas = replicas
        self._encoding = EncodingThreads()
        self._constraints = ConstraintChecks()
        self._pending: set[asyncio.Task[Any]] = set()

    async def settle(self) -> None:
        """Return when no call of the store is in flight; prompts are no longer encoded, nor constraints checked."""
        self._encoding.close()
        self._constraints.close()
        while self._pending:
            await asyncio.gather(*self._pending, return_exceptions=True)

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Let `settle` wait for a task."""
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    @asynccontextmanager
    async def reading(self, tenant: str, session_id: str) -> AsyncIterator[asyncio.Task[SessionEnd]]:
        """Begin to read a session, without waiting; cancel a read that has not ended when the context ends."""
        reading = asyncio.create_task(self._store.read_end(tenant, session_id))
        # Retrieved, since a request that is refused before it needs the session does not await the task.
        reading.add_done_callback(lambda task: task.cancelled() or task.exception())
        self.keep(reading)
        try:
            yield reading
        finally:
            reading.cancel()

    async def begin(
        self,
        message: generation_pb2.GenerateRequest,
        checked: CheckedRequest,
        tenant: str,
        reading: asyncio.Task[SessionEnd],
        *,
        awaits_reasoning: bool = False,
    ) -> Leased:
        """Check a request against the model and its session, encode its prompt, and lease the session.

        Args:
            message: the request.
            checked: the same.
            tenant: its owner.
            reading: of its session.
            awaits_reasoning: see `GenerationService.generate`.

        Returns:
            The request that has begun, its model and its prediction.

        Raises:
            InvalidArgument: a parameter, the constraint, the prompt or the prediction does not fit the model or the
                session.
            RuleUnsupported: the targets do not serve the acceptance rule that it names.
            Unavailable: no target is in rotation in time, or Redis does not answer within the bound.
            OutriderError: as `SessionStore.read_end`, `ConstraintChecks.check`, `EncodingThreads.run` and
                `SessionStore.begin` raise.
        """
        model = await self._model(checked, reading)
        parameters = model.parameters(message.parameters, checked.seed)
        session = await reading
        is_resumed = checked.resume_offset is not None
        is_known = session.has_request(checked.request_id)
        is_new = not (is_known or is_resumed)
        if is_new:
            prompt, parameters = await self._checked_prompt(message, model, session, parameters, awaits_reasoning)
        else:
            prompt = EncodedPrompt((), await self.parsing(message))
        request = NewRequest(
            tenant=tenant,
            session_id=checked.session_id,
            request_id=checked.request_id,
            fingerprint=checked.fingerprint,
            model=model.fingerprint,
            tokenizer=model.tokenizer_fingerprint,
            parameters=parameters,
            rule=model.rule(checked.rule, parameters),
            prompt=prompt.token_ids,
            expected_len=session.length,
            takes_over=is_resumed,
            must_exist=not is_new,
            max_len=model.max_session_len,
        )
        prediction = await self._prediction(message, model)
        return Leased(await self._leased(request), model, prediction, prompt.parsing)

    async def _model(self, checked: CheckedRequest, reading: asyncio.Task[SessionEnd]) -> Model:
        """Return the model for a request; a finished request needs no target."""
        known = self._replicas.past_model
        if known is not None:
            await asyncio.wait((reading,))
            # Its error is raised after those of the request's own parameters.
            record = None if reading.exception() else reading.result().record
            if record is not None and record.has_finished(checked.request_id) and record.model == known.fingerprint:
                return known
        return await self._replicas.model()

    async def _prediction(self, message: generation_pb2.GenerateRequest, model: Model) -> Prediction | None:
        """Return the prediction of a request's output, None without one; raise as `encode` does."""
        if (num_chars := prediction_chars(message, model.tokenizer, model.max_session_len)) == 0:
            return None
        terms = (message, model.tokenizer, model.vocabulary_size, model.max_session_len)
        return await self._encoding.run(num_chars, lambda: Prediction(prediction_tokens(*terms)))

    async def encode(
        self, message: generation_pb2.GenerateRequest, model: Model, session: SessionEnd = _NEW
    ) -> EncodedPrompt:
        """Return a prompt as it is added to its session; raise as `check_prompt` and `EncodingThreads.run`."""
        held: list[int] = []
        if session.record is not None and may_repeat_session(message):
            held = await self._store.read_tokens(session.record.tenant, session.record.session_id, 0, session.length)
        terms = PromptTerms(
            tokenizer=model.tokenizer,
            vocabulary_size=model.vocabulary_size,
            # The output needs at least one.
            max_tokens=max(0, model.max_session_len - session.length - 1),
            continues=session.record is not None,
            last_token=session.last_token,
            held=held,
        )
        num_chars = check_prompt(message, terms)
        return await self._encoding.run(num_chars, functools.partial(encoded_prompt, message, terms))

    async def _checked_prompt(
        self,
        message: generation_pb2.GenerateRequest,
        model: Model,
        session: SessionEnd,
        parameters: SamplingParameters,
        awaits_reasoning: bool,
    ) -> tuple[EncodedPrompt, SamplingParameters]:
        """Return the prompt of a new request, and its parameters with a constraint that the targets take."""
        prompt = await self.encode(message, model, session)
        if awaits_reasoning and message.HasField("chat"):
            parameters = _behind_reasoning(parameters, model, prompt.token_ids)
        await self._constraints.check(parameters.constraint, model)
        return prompt, parameters

    async def parsing(self, message: generation_pb2.GenerateRequest) -> Parsing | None:
        """Return how the output of a request is taken apart that has begun before; raise as `encode`."""
        if not message.chat.HasField("output_parsing"):
            return None
        return await self._encoding.run(check_chat(message.chat), functools.partial(parsing_of, message.chat))

    async def _leased(self, request: NewRequest) -> Begun:
        """Begin the request; release the lease where the caller is cancelled meanwhile."""
        beginning = asyncio.create_task(self._store.begin(request))
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:
            self.keep(asyncio.create_task(self._release(beginning)))
            raise

    async def _release(self, beginning: asyncio.Task[Begun]) -> None:
        with contextlib.suppress(OutriderError):
            if (lease := (await beginning).lease) is not None:
                await self._store.release(lease)


def _behind_reasoning(parameters: SamplingParameters, model: Model, prompt: tuple[int, ...]) -> SamplingParameters:
    """Return parameters whose constraint holds from behind the reasoning on that the answer is expected to have."""
    if parameters.constraint is None or model.tokenizer is None:
        return parameters
    end = expected_reasoning_end(model.tokenizer, prompt)
    return parameters.replace(constraint=dataclasses.replace(parameters.constraint, reasoning_end=end))
