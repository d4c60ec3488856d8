import asyncio
import socket
import threading
from collections.abc import Sequence

import pytest

from outrider.discovery.dns import DnsName, SystemResolver
from outrider.discovery.endpoints import DnsPlace, Endpoint


async def test_a_real_name_is_resolved() -> None:
    assert "127.0.0.1:80" in await SystemResolver()("localhost", 80)


async def test_a_name_that_is_none_is_an_error() -> None:
    resolver = SystemResolver()
    for _ in range(50):
        with pytest.raises(OSError, match=r"not known|No address|resolution"):
            await resolver("no-such-host.invalid", 80)


async def test_a_question_that_hangs_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    is_asked, may_end = threading.Event(), threading.Event()

    def hang(*args: object, **kwargs: object) -> list[object]:
        is_asked.set()
        may_end.wait(10)
        return [(socket.AF_INET, None, None, None, ("10.0.0.1", 80))]

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    resolver = SystemResolver()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await resolver("slow", 80)
    assert is_asked.wait(10)
    with pytest.raises(OSError, match="no answer yet"):
        await resolver("slow", 80)
    may_end.set()
    resolver._is_answered.wait()
    assert await resolver("slow", 80) == {"10.0.0.1:80"}


async def test_changes_are_told_and_failures_change_nothing() -> None:
    answers: list[Sequence[str] | OSError] = [["b:1", "a:1"], ["a:1", "b:1"], OSError("no such name"), ["c:1"]]
    is_over = asyncio.Event()

    async def answer(host: str, port: int) -> Sequence[str]:
        assert (host, port) == ("target", 1)
        if not answers:
            is_over.set()
            return ["c:1"]
        found = answers.pop(0)
        if isinstance(found, OSError):
            raise found
        return found

    told: list[Sequence[Endpoint]] = []
    task = asyncio.create_task(DnsName(DnsPlace("target", 1), 0.0, answer).run(told.append))
    async with asyncio.timeout(10):
        await is_over.wait()
    task.cancel()
    assert told == [[Endpoint("a:1"), Endpoint("b:1")], [Endpoint("c:1")]]
