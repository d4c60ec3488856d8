"""The bodies of requests: fields, their ranges, and what is accepted of fields that this server does not have.

Three kinds of fields: those with a meaning; those without an effect on the text (`ignored`), which clients send as a
matter of course; and those that are accepted at the value that asks for nothing (`neutral`), and refused at any other.
Every other field is refused by its name.
"""

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from orchestrator.http.body import Body
from orchestrator.http.messages import ChatMessage, TextPart
from orchestrator.http.structure import Structured
from orchestrator.http.tools import ChoiceOfTool, ToolBody
from outrider.parameters import MAX_LOGIT_BIASES

_MAX_UINT32: Final = 2**32 - 1
MAX_CHOICES: Final = 128
"""Choices of a request, all prompts together."""
Count = Annotated[int, Field(ge=0, le=_MAX_UINT32)]
Tokens = Annotated[int, Field(ge=1, le=2**31 - 1)]


def listed(value: Any) -> Any:
    """Return a text as a list of one, and anything else as it is."""
    return [value] if isinstance(value, str) else value


def bounded(most: int) -> Callable[[Any], Any]:
    """Return a check that an object has no more entries; pydantic would collect an error for each that is wrong."""

    def checked(values: Any) -> Any:
        if isinstance(values, dict) and len(values) > most:
            raise PydanticCustomError("too_many", "may have at most {num} entries", {"num": most})
        return values

    return checked


def few_prompts(prompt: Any) -> Any:
    """Refuse more prompts than choices before each is looked at: 100,000 would hold the event loop for a second."""
    if isinstance(prompt, list) and len(prompt) > MAX_CHOICES and isinstance(prompt[0], str | list):
        raise PydanticCustomError("too_many", "may have at most {num} prompts", {"num": MAX_CHOICES})
    return prompt


class SpeculationOptions(Body):
    """How a request speculates; see SpeculationParameters in generation.proto."""

    disabled: bool | None = None
    num_speculative_tokens: Count | None = None
    acceptance_rule: Literal["coupled", "rejection", "engine"] | None = None
    drafter: str | None = None
    draft_at: Literal["service", "target"] | None = None
    max_nodes: Count | None = None
    lookahead: Count | None = None
    draft_min: Count | None = None
    draft_p_min: float | None = None
    report: bool | None = Field(
        None,
        description="Whether chunks have a key `speculation`: the origin of each token, its drafter where a "
        "draft combines several, notices (a target replaced, a draft lost, tokens recomputed), and the statistics so "
        "far.",
    )


class StreamOptions(Body):
    """Options of a stream."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "include_obfuscation": (False,),
    }

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        default=None, description="With `include_usage`: whether each chunk has the usage of its choice so far."
    )


class Sampling(Body):
    """The sampling parameters, under the names that OpenAI and vLLM share."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(default=None, description="0 and -1 keep all.")
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(bounded(MAX_LOGIT_BIASES))] | None = None
    stop: Annotated[list[str], Field(fail_fast=True), BeforeValidator(listed)] | None = None
    stop_token_ids: Annotated[list[Count], Field(fail_fast=True)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None


class GenerationBody(Body):
    """What requests for generation share."""

    model: str | None = None
    stream: bool | None = None
    # Empty is not the same as none: the service would draw an id that the response does not carry.
    request_id: Annotated[str, Field(min_length=1)] | None = None
    session_id: Annotated[str, Field(min_length=1)] | None = None
    speculation: SpeculationOptions | None = None

    @property
    def streams(self) -> bool:
        """Whether the response is a stream."""
        return bool(self.stream)


class Common(Sampling, Structured, GenerationBody):
    """What requests for completions of both kinds share."""

    ignored: ClassVar[frozenset[str]] = Structured.ignored | frozenset(
        {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    )
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **Structured.neutral,
        "best_of": (1,),
        "use_beam_search": (False,),
        "length_penalty": (
            1,
            1.0,
        ),
        "early_stopping": (False,),
        "include_stop_str_in_output": (False,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "truncate_prompt_tokens": (),
        "prompt_logprobs": (),
        "allowed_token_ids": (),
        "bad_words": ([],),
        "logits_processors": (),
        "return_tokens_as_token_ids": (False,),
        "return_token_ids": (False,),
        "priority": (0,),
        "cache_salt": (),
        "kv_transfer_params": (),
        "vllm_xargs": ({},),
    }

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Tokens | None = None
    stream_options: StreamOptions | None = None


class PredictionBody(Body):
    """What the answer is expected to be."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        """The content; parts follow each other."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(Common):
    """POST /v1/chat/completions."""

    ignored: ClassVar[frozenset[str]] = Common.ignored | frozenset({"prompt_cache_options"})
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **Common.neutral,
        "store": (False,),
        "echo": (False,),
        "functions": ([],),
        "function_call": (
            "none",
            "auto",
        ),
        "modalities": (["text"],),
        "audio": (),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "web_search_options": (),
        "continue_final_message": (False,),
        "add_special_tokens": (False,),
        "chat_template": (),
        "documents": ([],),
        "mm_processor_kwargs": (),
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    prediction: PredictionBody | None = None
    tools: Annotated[list[ToolBody], Field(fail_fast=True)] | None = None
    tool_choice: ChoiceOfTool | None = None
    parallel_tool_calls: bool | None = Field(default=None, description="False ends the output with its first call.")
    include_reasoning: bool | None = Field(default=None, description="False leaves the reasoning out of the response.")


class CompletionBody(Common):
    """POST /v1/completions."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **Common.neutral,
        "suffix": ("",),
        "store": (False,),
        "add_special_tokens": (True,),
    }

    prompt: Annotated[
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[Count], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[Count], Field(fail_fast=True)]], Field(fail_fast=True)],
        BeforeValidator(few_prompts),
    ]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None


class TokenizeBody(Body):
    """POST /tokenize: a prompt or messages."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "add_special_tokens": (True,),
        "continue_final_message": (False,),
    }

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[ToolBody], Field(fail_fast=True)] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Count], Field(fail_fast=True)]


def variables_of(values: Mapping[str, Any] | None) -> str:
    """Return variables of the chat template as generation.proto has them."""
    return json.dumps(dict(values)) if values else ""
