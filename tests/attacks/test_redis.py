"""What a Redis may hold or answer on purpose, and who may reach it."""

from pathlib import Path

import pytest
import redis
from redis import exceptions

from outrider.client.valkey import EmbeddedValkey


def test_attack_19_the_embedded_valkey_serves_nobody_without_its_password() -> None:
    with EmbeddedValkey(durable=False) as server, EmbeddedValkey(durable=False) as another:
        assert redis.Redis.from_url(server.url).set("a", "1")
        for url in (f"redis://{server.address}/0", another.url_by(server.address)):
            with pytest.raises(exceptions.AuthenticationError), redis.Redis.from_url(url) as stranger:
                stranger.get("a")
        # What `ps` shows to every user, and what only this one may read.
        password = server.url.partition("@")[0].removeprefix("redis://:")
        assert len(password) >= 32
        assert password.encode() not in Path(f"/proc/{server.pid}/cmdline").read_bytes()
        server.kill()
        server.start()
        assert redis.Redis.from_url(server.url).ping()
