"""The bodies of Ollama's API, and its options as sampling parameters."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field

from orchestrator.api.prompts import MAX_MESSAGES
from orchestrator.http.bodies import GenerationBody, Sampling, listed
from orchestrator.http.body import Body
from orchestrator.http.ollama_messages import OllamaMessage
from orchestrator.http.requests import Prompts, parameters_of, speculation_of
from orchestrator.http.structure import Structure, made, refusal
from orchestrator.http.tools import ToolBody
from orchestrator.workers.model import Model
from outrider import wire
from outrider.v1 import generation_pb2, tokens_pb2

_RENAMED: Final = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict"}
_SAMPLING: Final = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "stop")
PARAMETER_NAMES: Final = {
    **{name: f"options.{name}" for name in (*_SAMPLING, "seed")},
    **{name: f"options.{own}" for name, own in _RENAMED.items()},
    "logprobs": "top_logprobs",
}
"""Ollama's names of generation.proto's fields."""
_WHOLE_CONTEXT: Final = -1


class Options(Body):
    """Ollama's options; those that are absent have the model's defaults, not Ollama's."""

    # How a model is loaded and run. `num_keep` is about contexts that overflow, which end here; `mirostat_*` mean
    # nothing without mirostat.
    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "num_thread",
            "num_gpu",
            "num_batch",
            "main_gpu",
            "use_mmap",
            "use_mlock",
            "numa",
            "low_vram",
            "f16_kv",
            "logits_all",
            "vocab_only",
            "num_keep",
            "mirostat_tau",
            "mirostat_eta",
        }
    )
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "mirostat": (0,),
        "tfs_z": (1, 1.0),
        "typical_p": (1, 1.0),
        "penalize_newline": (True,),
        "embedding_only": (False,),
    }

    num_ctx: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="At most the model's longest session."
    )
    num_predict: Annotated[int, Field(ge=-2, le=2**31 - 1)] | None = Field(
        default=None, description="-1 and -2, and absent: as many tokens as fit."
    )
    temperature: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = Field(default=None, description="-1: drawn.")
    stop: Annotated[list[str], Field(fail_fast=True), BeforeValidator(listed)] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Annotated[int, Field(ge=-1)] | None = Field(
        default=None, description="-1, the whole text. Any other is accepted only where no penalty is in force."
    )
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class OllamaBody(GenerationBody):
    """What requests for generation have in common."""

    ignored: ClassVar[frozenset[str]] = frozenset({"keep_alive"})
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        # Prompts that do not fit are refused, and an output that fills the context ends.
        "truncate": (False,),
        "shift": (False,),
    }

    options: Options | None = None
    format: Literal["", "json"] | dict[str, Any] | None = Field(default=None, description="A JSON schema, or json.")
    think: bool | Literal["low", "medium", "high"] | None = Field(
        default=None, description="False disables thinking where the chat template can."
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def streams(self) -> bool:
        """Whether the response is a stream, which it is by default."""
        return self.stream is not False

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template."""
        if self.think is None:
            return {}
        effort = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return {"enable_thinking": bool(self.think), **effort}

    @property
    def structure(self) -> Structure | None:
        """What the output must follow; None for free text."""
        if self.format is None or self.format == "":
            return None
        return made("format", json_object=True) if self.format == "json" else made("format", json_schema=self.format)

    def prompts(
        self, message: generation_pb2.GenerateRequest, model: Model, structure: Structure | None = None
    ) -> Prompts:
        """Return a prompt with the parameters of this body, and what its output must follow.

        Raises:
            HttpError: an option cannot be met.
        """
        options = self.options or Options()
        if options.num_ctx is not None and options.num_ctx > model.max_session_len:
            problem = f"options.num_ctx is {options.num_ctx}, sessions have at most {model.max_session_len} tokens"
            raise refusal(problem, "options.num_ctx")
        if options.num_predict == 0:
            raise refusal("options.num_predict is 0, must be at least 1, or -1 for all that fit", "options.num_predict")
        if self.top_logprobs and not self.logprobs:
            raise refusal("top_logprobs needs logprobs: true", "top_logprobs")
        parameters = _parameters(options, (self.top_logprobs or 0) if self.logprobs else None)
        _check_repeat_last_n(options, parameters, model)
        if structure is not None:
            parameters.constraint.CopyFrom(wire.constraint_to_message(structure.constraint))
        return Prompts([message], 1, parameters, speculation_of(self.speculation), self.session_id or "")


class OllamaChatBody(OllamaBody):
    """POST /api/chat; without messages it does nothing, which clients send to load a model."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Annotated[list[ToolBody], Field(fail_fast=True)] | None = None


class OllamaGenerateBody(OllamaBody):
    """POST /api/generate; without a prompt it does nothing, which clients send to load a model."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **OllamaBody.neutral,
        "suffix": ("",),
        "template": ("",),
        "context": ([],),
        "images": ([],),
        "width": (0,),
        "height": (0,),
        "steps": (0,),
    }

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = Field(default=None, description="Whether the prompt is the text as it is, without a template.")


class OllamaShowBody(Body):
    """POST /api/show."""

    ignored: ClassVar[frozenset[str]] = frozenset({"verbose"})

    model: str | None = None
    name: str | None = Field(default=None, description="An older name of `model`.")


def _parameters(options: Options, logprobs: int | None) -> tokens_pb2.SamplingParameters:
    given = {name: getattr(options, name) for name in _SAMPLING}
    seed = None if options.seed == -1 else options.seed
    sampling = Sampling(**given, seed=seed, repetition_penalty=options.repeat_penalty)
    # 0 stands for as many as fit.
    return parameters_of(sampling, max(0, options.num_predict or 0), logprobs)


def _check_repeat_last_n(options: Options, given: tokens_pb2.SamplingParameters, model: Model) -> None:
    """Refuse a window of the penalties, which here look at the whole text, where one of them is in force."""
    if options.repeat_last_n in (None, _WHOLE_CONTEXT):
        return
    complete = model.parameters(given, seed=0)
    if complete.repetition_penalty != 1 or complete.presence_penalty or complete.frequency_penalty:
        problem = "options.repeat_last_n is not supported with a penalty: it looks at the whole text, as with -1"
        raise refusal(problem, "options.repeat_last_n")
