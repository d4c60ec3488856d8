"""Loses its connection in the middle of a stream, and goes on at the next token.

Every part of a stream has a line `id:`. The same request with the last of them as the header Last-Event-ID continues
behind it, at any orchestrator: nothing is missing, and nothing comes twice. Outrider's own Python client does this by
itself.
"""

import json
import sys
from collections.abc import Generator

import httpx

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
body = {"prompt": "Once upon a time", "max_tokens": 48, "seed": 7, "stream": True}


def parts(last_id: str = "") -> Generator[tuple[str, str], None, None]:
    """Yield the id and the text of each part of the stream, from the start or behind `last_id`."""
    headers = {"Last-Event-ID": last_id} if last_id else {}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60) as response:
        response.raise_for_status()
        event_id = ""
        for line in response.iter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                event_id = value
            elif name == "data" and value != "[DONE]":
                chunk = json.loads(value)
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                yield event_id, "".join(choice["text"] for choice in chunk["choices"])


# Read some parts, then leave: closing the generator closes the connection.
text, last_id = "", ""
stream = parts()
for event_id, piece in stream:
    text, last_id = text + piece, event_id
    if len(text) >= 20:
        break
stream.close()
print(f"{text!r}\n... the connection broke behind {last_id} ...")

# The same body once more, with the id of the last part that came.
rest = "".join(piece for _, piece in parts(last_id))
print(repr(rest))

# The same seed gives the same text, so that a stream that never broke shows whether anything is missing.
whole = "".join(piece for _, piece in parts())
print(f"\nthe same text as without a break: {'yes' if text + rest == whole else 'NO'}")
