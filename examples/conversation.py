"""Talks over several turns in one session.

The service keeps the turns, and the KV cache of what was said: only the new message travels, and only it is computed.
"""

import sys

from outrider import Client, SamplingParameters

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50050"
parameters = SamplingParameters(max_tokens=60)

with Client(address) as client:
    chat = client.conversation(system="Answer in one sentence.", parameters=parameters)
    for question in ("My name is Ada, and I write programs.", "What could I write next?"):
        print(f"> {question}")
        print(chat.ask(question).text)
    session_id = chat.session_id

# Whoever has the id goes on, from any process and at any orchestrator; by default for a day.
with Client(address) as client:
    chat = client.conversation(session_id=session_id, parameters=parameters)
    print("> What is my name?")
    answer = chat.ask("What is my name?")
    print(answer.text)
    print(f"\nsession {session_id}: {answer.statistics.num_cached_prompt_tokens} tokens were still in the KV cache")

    # Ends the session: its turns, and its KV cache.
    client.delete_session(session_id)
