"""Runs unchanged clients against a stack with HTTP, each in a process and an environment of its own: `make clients`.

It prints a table and ends with exit code 1 where any call fails, or a client reports none.
"""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from outrider.client import DraftOptions, StackOptions
from outrider.lm.byte_tokenizer import byte_tokenizer
from outrider.local.stack import LocalStack

FOLDER = Path(__file__).parent
ENVIRONMENT = Path(".venv-clients").resolve()
TARGET = "markov:text=1,seed=5"
MODEL, KEY = "markov", "key-of-a-tenant"
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Client:
    """A client, and the command that tries it.

    Attributes:
        name: as the table has it.
        interpreter: path in the clients' environment.
        script: in this folder.
    """

    name: str
    interpreter: str
    script: str


CLIENTS = (
    Client("openai (PyPI)", "bin/python", "use_openai.py"),
    Client("openai (npm)", "bin/node", "use_openai.mjs"),
    Client("ollama (PyPI)", "bin/python", "use_ollama.py"),
    Client("langchain-openai (PyPI)", "bin/python", "use_langchain.py"),
    Client("litellm (PyPI)", "bin/python", "use_litellm.py"),
    Client("aiperf (PyPI)", "load/bin/python", "use_aiperf.py"),
)


async def main(chosen: list[str]) -> int:
    """Run the clients, or those whose names contain one of the words; return the exit code."""
    clients = [item for item in CLIENTS if not chosen or any(word in item.script for word in chosen)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tenants = folder / "tenants.json"
        tenants.write_text(json.dumps({"tenant": {"tokens": [KEY]}}))
        options = StackOptions(
            model=TARGET,
            drafts=(DraftOptions("model", f"{TARGET},noise=0.2"),),
            target_threads=1,
            orchestrator_environment={
                "OUTRIDER_HTTP_ADDRESS": "127.0.0.1:0",
                "OUTRIDER_SERVED_MODEL_NAMES": MODEL,
                "OUTRIDER_TENANTS_FILE": str(tenants),
            },
        )
        async with LocalStack(options) as stack:
            given = {
                **os.environ,
                "URL": f"http://{stack.http_addresses[0]}",
                "MODEL": MODEL,
                "KEY": KEY,
                "NODE_FOLDER": str(ENVIRONMENT / "node"),
                "TOKENIZER": _tokenizer_folder(folder / "tokenizer"),
                "HF_HUB_OFFLINE": "1",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "LANGSMITH_TRACING": "false",
            }
            # The tree of the stack is not for the clients.
            given.pop("PYTHONPATH", None)
            results = [await _try(client, given) for client in clients]
    return _print(clients, results)


def _tokenizer_folder(folder: Path) -> str:
    folder.mkdir()
    for name, content in byte_tokenizer().files.items():
        (folder / name).write_bytes(content)
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    return str(folder)


async def _try(client: Client, environment: Mapping[str, str]) -> tuple[str, list[dict[str, object]]]:
    """Return the version of a client and how its calls went."""
    print(f"clients: {client.name}", flush=True)
    process = await asyncio.create_subprocess_exec(
        str(ENVIRONMENT / client.interpreter),
        str(FOLDER / client.script),
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return "?", [{"call": "all", "passed": False, "problem": f"not complete within {_TIMEOUT_S:g} s"}]
    lines = out.decode().splitlines()
    calls = [json.loads(line) for line in lines if line.startswith("{")]
    version = next((line for line in lines if not line.startswith("{")), "?")
    if process.returncode or not calls:
        calls.append({"call": "all", "passed": False, "problem": err.decode()[-1500:]})
    return version, calls


def _print(clients: list[Client], results: list[tuple[str, list[dict[str, object]]]]) -> int:
    failed = [
        (client.name, item)
        for client, (_, calls) in zip(clients, results, strict=True)
        for item in calls
        if not item["passed"]
    ]
    for name, item in failed:
        print(f"\n{name}: {item['call']}\n{item['problem']}")
    print("\n| client | version | calls | passed | failed |\n|---|---|---|---|---|")
    for client, (version, calls) in zip(clients, results, strict=True):
        passed = [str(item["call"]) for item in calls if item["passed"]]
        others = [str(item["call"]) for item in calls if not item["passed"]]
        print(f"| {client.name} | {version} | {len(calls)} | {'; '.join(passed)} | {'; '.join(others) or 'none'} |")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
