"""Sessions in Redis: records and token logs, changed by Lua scripts that check the fencing token.

A lease gives its holder a fencing token higher than any before; `append.lua` takes tokens only under the current one
and at the log's end, so two orchestrators can never write one session. A request that is new, continued or resumed
takes two serial round trips before the first frame for a worker; a server that has lost its scripts costs one more,
once.

**Lost writes.** A commit that Redis cannot take because it lost what came before is not the end. The orchestrator
that streams the session holds its tokens since the request began, and writes record and log again (`restore.lua`),
provided that no higher fencing token is on record, that the session was not deleted (deleting leaves a mark), and
that what is left of the log agrees. A client that comes back with an offset beyond the log of a session that is
not streamed gets DATA_LOSS; from the log's own end the same text can be made again.
"""
