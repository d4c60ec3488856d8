"""A stack whose processes trust nobody without a certificate, and no client without a token."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from outrider.client import DraftOptions, GenerationRequest, LocalStack, OutriderClient, StackOptions, TlsFiles
from outrider.client.retry import RetryPolicy
from outrider.errors import Unauthenticated, Unavailable
from outrider.parameters import SamplingParameters
from tests.served.stacks import GOOD_DRAFT, TARGET
from tests.serving.certificates import Authority

TOKEN = "a-token-for-tests"
NUM_TOKENS = 200
"""More than the window, and a second's work: the target cannot be done before the draft has proposed."""
REQUEST = GenerationRequest(token_ids=(1, 2, 3), parameters=SamplingParameters(seed=3, max_tokens=NUM_TOKENS))


@dataclass(frozen=True)
class Secured:
    """A running stack, and what a client needs."""

    stack: LocalStack
    authority: Authority

    def client(self, token: str = TOKEN, *, tls: bool = True) -> OutriderClient:
        files = TlsFiles(authority=self.authority.file) if tls else None
        return OutriderClient(self.stack.addresses, token=token, tls=files, retry=RetryPolicy(max_attempts=2))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def secured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    authority = Authority(folder / "certificates")
    tenants = folder / "tenants.json"
    tenants.write_text(json.dumps({"acme": {"tokens": [TOKEN], "max_streams": 4}}))

    def shown(name: str, *, mutual: bool) -> dict[str, str]:
        certificate, key = authority.issue(name)
        own = {"OUTRIDER_TLS_CERTIFICATE": str(certificate), "OUTRIDER_TLS_KEY": str(key)}
        return own | ({"OUTRIDER_TLS_AUTHORITY": str(authority.file)} if mutual else {})

    options = StackOptions(
        model=f"{TARGET},step_s=0.005",
        drafts=(DraftOptions("model", GOOD_DRAFT, environment=shown("draft", mutual=True)),),
        target_threads=1,
        target_environment=shown("target", mutual=True),
        orchestrator_environment={
            **shown("orchestrator", mutual=False),
            "OUTRIDER_WORKER_TLS_AUTHORITY": str(authority.file),
            "OUTRIDER_TENANTS_FILE": str(tenants),
        },
    )
    async with LocalStack(options) as stack:
        yield Secured(stack, authority)


async def test_a_generation_over_mutual_tls(secured: Secured) -> None:
    async with secured.client() as client, asyncio.timeout(60):
        while not all(worker.in_rotation for worker in (await client.list_models()).workers):
            await asyncio.sleep(0.05)
        generation = await client.complete(REQUEST)
        assert len(generation.token_ids) == NUM_TOKENS
        assert generation.statistics.num_proposed_nodes > 0


async def test_fault_45_without_token_or_tls_nothing_is_served(secured: Secured) -> None:
    async with secured.client(token="") as client:
        with pytest.raises(Unauthenticated):
            await client.complete(REQUEST)
    async with secured.client(tls=False) as client:
        with pytest.raises(Unavailable):
            await client.complete(REQUEST)


async def test_fault_45_workers_refuse_callers_without_a_certificate(secured: Secured, tmp_path: Path) -> None:
    strangers = (
        None,
        TlsFiles(authority=secured.authority.file),
        TlsFiles(*Authority(tmp_path).issue("stranger"), secured.authority.file),
    )
    for process in (*secured.stack.targets, *secured.stack.drafts):
        for tls in strangers:
            async with OutriderClient(process.address, tls=tls, retry=RetryPolicy(max_attempts=1)) as client:
                with pytest.raises(Unavailable):
                    await client.list_models()


async def test_the_command_line_shows_its_token(secured: Secured) -> None:
    environment = {
        **os.environ,
        "OUTRIDER_TOKEN": TOKEN,
        "OUTRIDER_TLS_AUTHORITY": str(secured.authority.file),
    }
    arguments = ("generate", "1 2 3", "--token-ids", "--json", "--address", secured.stack.addresses[0])
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from outrider.cli.main import main; main()", *arguments),
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, problem = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, problem.decode()
    assert json.loads(output)["token_ids"]
