"""NVIDIA's AIPerf, a load generator: 40 streams, 4 at once, usage as the server reports it."""

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from report import call, expect

MODEL, KEY, URL, TOKENIZER = (os.environ[name] for name in ("MODEL", "KEY", "URL", "TOKENIZER"))


def run(streams: bool) -> None:
    # Offline it looks for every tokenizer in the cache of the hub, also for one that is a folder.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).with_name("aiperf")), "profile", "--model", MODEL, "--url", URL]
        command += ["--endpoint-type", "chat", "--api-key", KEY, "--tokenizer", TOKENIZER, "--ui-type", "none"]
        command += ["--request-count", "40", "--concurrency", "4", "--artifact-dir", folder]
        command += ["--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16", "--use-server-token-count"]
        # It counts an answer without text as an error; one in some hundred would end at once.
        command += ["--extra-inputs", "min_tokens:4"]
        command += ["--no-gpu-telemetry", *(["--streaming"] if streams else [])]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        expect(done.returncode == 0, done.stdout[-1200:] + done.stderr[-1200:])
        found = next(Path(folder).rglob("profile_export_aiperf.json"))
        figures = json.loads(found.read_text())
        expect(figures["request_count"]["avg"] == 40, figures["request_count"], figures.get("error_summary"))
        expect(not figures.get("error_summary"), figures.get("error_summary"))
        expect(figures["output_sequence_length"]["avg"] > 0, sorted(figures))
        if streams:
            expect(figures["time_to_first_token"]["avg"] > 0, sorted(figures))


print(version("aiperf"))
call("40 chats", lambda: run(False))
call("40 streams, 4 at once", lambda: run(True))
