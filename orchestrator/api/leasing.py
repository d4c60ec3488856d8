"""From a checked request to the lease of its session, in two round trips to Redis.

The first reads the session, beside whatever else is asked of Redis about the request; the second leases it. Nothing is
written before the lease, so a request that is refused on the way leaves nothing behind.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from orchestrator.api.encoding import EncodingThreads
from orchestrator.api.prompts import PromptTerms, check_prompt, prompt_tokens
from orchestrator.api.requests import CheckedRequest
from orchestrator.store.sessions import Begun, NewRequest, SessionEnd
from orchestrator.store.store import SessionStore
from orchestrator.workers.model import Model
from orchestrator.workers.replicas import Replicas
from outrider.errors import OutriderError
from outrider.v1 import generation_pb2


class Leasing:
    """Leases the sessions of requests.

    Args:
        store: has the sessions.
        replicas: the targets, whose model requests are for.
    """

    def __init__(self, store: SessionStore, replicas: Replicas) -> None:
        self._store = store
        self._replicas = replicas
        self._encoding = EncodingThreads()
        self._pending: set[asyncio.Task[Any]] = set()

    async def settle(self) -> None:
        """Returns when nothing that was asked of the store is under way any more; prompts are no longer encoded."""
        self._encoding.close()
        while self._pending:
            await asyncio.gather(*self._pending, return_exceptions=True)

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Has `settle` wait for a task."""
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    @asynccontextmanager
    async def looking(self, tenant: str, session_id: str) -> AsyncIterator[asyncio.Task[SessionEnd]]:
        """Begins to read a session, without waiting; what is not there when the context ends is not waited for."""
        looking = asyncio.create_task(self._store.look(tenant, session_id))
        # Looked at, as a request that is refused before it needs the session does not wait for it.
        looking.add_done_callback(lambda task: task.cancelled() or task.exception())
        self.keep(looking)
        try:
            yield looking
        finally:
            looking.cancel()

    async def begin(
        self,
        message: generation_pb2.GenerateRequest,
        checked: CheckedRequest,
        tenant: str,
        looking: asyncio.Task[SessionEnd],
    ) -> tuple[Begun, Model]:
        """Checks a request against the model and its session, encodes its prompt, and leases the session.

        Returns:
            What has begun, and the model that it is for.

        Raises:
            InvalidArgument: a parameter or the prompt does not fit the model or the session.
            Unavailable: no target is in rotation in time, or Redis does not answer within the bound.
            OutriderError: what else `SessionStore.look`, `EncodingThreads.run` and `SessionStore.begin` raise.
        """
        model = await self._model(checked, looking)
        model.check(message, checked.parameters)
        session = await looking
        is_resumed = checked.resume_offset is not None
        is_known = session.has_request(checked.request_id)
        prompt = () if is_known or is_resumed else await self._encoded(message, model, session)
        request = NewRequest(
            tenant=tenant,
            session_id=checked.session_id,
            request_id=checked.request_id,
            fingerprint=checked.fingerprint,
            model=model.fingerprint,
            tokenizer=model.tokenizer_fingerprint,
            parameters=checked.parameters,
            rule=checked.rule,
            prompt=prompt,
            expected_len=session.length,
            takes_over=is_resumed,
            must_exist=is_resumed or is_known,
            max_len=model.max_session_len,
        )
        return await self._leased(request), model

    async def _model(self, checked: CheckedRequest, looking: asyncio.Task[SessionEnd]) -> Model:
        """Returns the model that a request is for; a finished request needs no target that has it."""
        known = self._replicas.past_model
        if known is not None:
            await asyncio.wait((looking,))
            # Its error comes behind those of the request's own parameters.
            record = None if looking.exception() else looking.result().record
            if record is not None and record.has_finished(checked.request_id) and record.model == known.fingerprint:
                return known
        return await self._replicas.model()

    async def _encoded(
        self, message: generation_pb2.GenerateRequest, model: Model, session: SessionEnd
    ) -> tuple[int, ...]:
        terms = PromptTerms(
            tokenizer=model.tokenizer,
            vocabulary_size=model.vocabulary_size,
            # The output needs one.
            max_tokens=max(0, model.max_session_len - session.length - 1),
            continues=session.record is not None,
            last_token=session.last_token,
        )
        num_chars = check_prompt(message, terms)
        return await self._encoding.run(num_chars, functools.partial(prompt_tokens, message, terms))

    async def _leased(self, request: NewRequest) -> Begun:
        """Begins the request; the lease of a caller that is cancelled meanwhile is given back."""
        beginning = asyncio.create_task(self._store.begin(request))
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:
            self.keep(asyncio.create_task(self._give_back(beginning)))
            raise

    async def _give_back(self, beginning: asyncio.Task[Begun]) -> None:
        with contextlib.suppress(OutriderError):
            if (lease := (await beginning).lease) is not None:
                await self._store.release(lease)
