"""Streams an answer with OpenAI's own client. Any program that speaks OpenAI's API works the same way."""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"

# Where there are tenants, api_key is the tenant's token. Without tenants any text will do.
client = OpenAI(base_url=f"{url}/v1", api_key="-")

# The services run one model; this is its name.
model = client.models.list().data[0].id

stream = client.chat.completions.create(
    model=model,
    messages=[
        {"role": "system", "content": "You are a friendly guide. Answer in two sentences."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    max_tokens=80,
    stream=True,
    # The last chunk then has the number of tokens.
    stream_options={"include_usage": True},
)

for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage:
        print(f"\n\n{chunk.usage.completion_tokens} tokens by {model}")
