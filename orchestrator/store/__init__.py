"""Sessions in Redis: records and token logs, changed by Lua scripts that check the fencing token."""
