"""TLS with real handshakes: who gets in, who does not, and what a renewed certificate changes."""

from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.errors import InvalidArgument
from outrider.serving.channel import open_channel
from outrider.serving.server import Server
from outrider.serving.settings import ServingSettings, load_settings
from outrider.serving.tls import TlsFiles
from tests.serving.certificates import Authority

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "own")


def settings(files: TlsFiles, **more: object) -> ServingSettings:
    return ServingSettings(
        tls_certificate=files.certificate,
        tls_key=files.key,
        tls_authority=files.authority,
        drain_budget_s=1,
        **more,  # type: ignore[arg-type]
    )


async def health(address: str, tls: TlsFiles | None) -> int:
    credentials = None if tls is None else tls.channel_credentials()
    async with open_channel(address, credentials=credentials) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
        return answer.status


async def refused(address: str, tls: TlsFiles | None) -> bool:
    try:
        await health(address, tls)
    except grpc.aio.AioRpcError as error:
        return error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    return False


async def test_a_certificate_makes_the_address_speak_tls_only(authority: Authority, tmp_path: Path) -> None:
    server = Server(settings(authority.files("server", trusts=False)), name="test")
    address = await server.start()
    assert await health(address, TlsFiles(authority=authority.file)) == SERVING
    assert await refused(address, None)
    assert await refused(address, TlsFiles(authority=Authority(tmp_path / "other").file))
    await server.stop()


async def test_callers_without_a_certificate_of_the_authority_are_refused(authority: Authority, tmp_path: Path) -> None:
    server = Server(settings(authority.files("server")), name="test")
    address = await server.start()
    other = Authority(tmp_path / "other")
    assert await health(address, authority.files("client")) == SERVING
    assert await refused(address, TlsFiles(authority=authority.file))
    assert await refused(address, TlsFiles(*other.issue("client"), authority.file))
    assert await refused(address, None)
    await server.stop()


async def test_a_renewed_certificate_is_shown_without_a_restart(authority: Authority, tmp_path: Path) -> None:
    files = authority.files("server", trusts=False)
    server = Server(settings(files), name="test")
    address = await server.start()
    assert await health(address, TlsFiles(authority=authority.file)) == SERVING
    # From another authority, so that it can be told which one is shown.
    renewed = Authority(tmp_path / "own")
    renewed.issue("server")
    assert await health(address, TlsFiles(authority=renewed.file)) == SERVING
    # What cannot be read changes nothing.
    assert files.key is not None
    files.key.unlink()
    assert await health(address, TlsFiles(authority=renewed.file)) == SERVING
    await server.stop()


async def test_the_health_address_is_plain_and_answers_nothing_else(authority: Authority) -> None:
    server = Server(settings(authority.files("server"), health_address="127.0.0.1:0"), name="test")
    address = await server.start()
    assert await health(server.health_address, None) == SERVING
    assert await refused(address, None)
    async with open_channel(server.health_address) as channel:
        call = channel.unary_unary("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"", timeout=2)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await server.stop()
    assert await refused(server.health_address, None)


def test_files_that_do_not_go_together_are_refused(
    authority: Authority, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate, key = authority.issue("server")
    with pytest.raises(InvalidArgument, match="tls_key"):
        TlsFiles(certificate)
    with pytest.raises(InvalidArgument, match="cannot be read"):
        TlsFiles(authority=tmp_path / "nowhere").channel_credentials()
    with pytest.raises(InvalidArgument, match="needs a certificate"):
        TlsFiles().server_credentials()
    for arguments, problem in (
        (["--tls-certificate", str(certificate)], "go together"),
        (["--tls-authority", str(authority.file)], "needs tls_certificate"),
    ):
        with pytest.raises(SystemExit):
            load_settings(ServingSettings, arguments, program="test")
        assert problem in capsys.readouterr().err
    assert load_settings(
        ServingSettings, ["--tls-certificate", str(certificate), "--tls-key", str(key)], program="test"
    ).tls == TlsFiles(certificate, key)
