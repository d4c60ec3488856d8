"""The HTTP API: what clients of OpenAI, vLLM and Ollama call, in the process and event loop of the gRPC API.

A request runs through these parts, each in a file of its own:

1. `protocol` bounds a connection: the size of its headers, and the time until a request is complete.
2. `guard` bounds the body, checks Host, Origin and content type, finds the tenant, counts the request.
3. A route (`chat`, `completions`, `responses`, `ollama`, ...) reads the body into a model of `bodies`, and makes one
   message of generation.proto for each choice. What it cannot do is refused with the name of the field.
4. `answer` runs the choices through `orchestrator.api.service`, the same code that gRPC calls, and writes their events
   as one JSON object, as server-sent events or as lines of JSON. A client that leaves ends its generation; one that
   does not read is cut off after 60 s.

Every part of a stream names its position in an `id:` line, ID:OFFSET with an offset for each choice. A client whose
connection broke sends the same body again with the header `Last-Event-ID`, to any orchestrator, and gets the rest.
"""
