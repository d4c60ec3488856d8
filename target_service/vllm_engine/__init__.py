"""The target's engine on vLLM: its `LLMEngine` in this process, stepped by the engine's thread.

- `loading`: makes the `LLMEngine` and states the target's identity; `scheduler`: vLLM's scheduler with the
  orchestrator's proposals. Only these import vLLM.
- `engine`: the `TargetEngine`. It admits requests to vLLM, chooses the lines that a step verifies, steps, and turns
  outputs into verdicts (`rounds`).
- `requests`: open requests and the effects of commands; `parameters`: sampling parameters as vLLM names them.
- `steps`: what engine and scheduler exchange around a step.

A session's tokens stay in this process; its keys and values are vLLM's, which finds them by its prefix cache. So a span
that truncates aborts vLLM's request, and the session enters vLLM again as a new one. vLLM draws with noise of its own,
which is not keyed by the request: the rule is `engine`.
"""
