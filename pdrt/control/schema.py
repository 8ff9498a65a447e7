"""The bodies that clients and legs may send, as models: each field is known or refused by name.

`order.py` makes one form of all dialects out of them. A list is read up to its first fault: to
explain each of a million would take minutes, and the loop stands still meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    ValidationError,
    model_validator,
)

from pdrt.control.http import Json
from pdrt.control.strict import Strict
from pdrt.control.structured import ResponseFormat, StructuredOutputs
from pdrt.control.turns import MAX_TOOLS, MAX_TURNS, Tool, ToolChoice, Turn, check_tools, small
from pdrt.errors import BadRequest
from pdrt.messages import Bias, Room, Sampling

MAX_N: Final = 128
MAX_PROMPTS: Final = 128  # of a batch
MAX_TOP: Final = 20  # alternatives beside a token
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_BIASES: Final = 1024
_DECIMAL: Final = re.compile("0|[1-9][0-9]{0,9}")


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _by_id(value: object) -> object:
    """JSON has no keys but strings; each token is written in one way, so none comes twice."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_BIASES:
        raise ValueError(f"has {len(value)} entries; it may have {MAX_BIASES}")
    for key in value:
        if not (isinstance(key, int) or _DECIMAL.fullmatch(key)):
            raise ValueError(f"{key[:20]!r} is no token id")
    return {int(key): bias for key, bias in value.items()}


def _prompt_kind(value: object) -> str | None:
    match value:
        case str():
            return "text"
        case []:
            return "ids"
        case [str(), *_]:
            return "texts"
        case [list(), *_]:
            return "lists"
        case [*_]:
            return "ids"
        case _:
            return None


TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[
    Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOPS)] | None,
    BeforeValidator(_listed),
]
Biases = Annotated[dict[TokenId, Bias], BeforeValidator(_by_id)]
StopIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=64)]
TextPrompt = Annotated[str, Field(min_length=1)]
IdsPrompt = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
Prompt = Annotated[
    Annotated[TextPrompt, Tag("text")]
    | Annotated[IdsPrompt, Tag("ids")]
    | Annotated[list[TextPrompt], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag("texts")]
    | Annotated[list[IdsPrompt], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag("lists")],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt_type",
        custom_error_message="must be a string, a list of token ids, or a list of either",
    ),
]
_TAGS: Final = frozenset({"text", "ids", "texts", "lists"})

Count = Annotated[int, Field(ge=1, lt=1 << 31)]
Top = Annotated[int, Field(ge=0, le=MAX_TOP)]
Chance = Annotated[float, Field(gt=0, le=1)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
Salt = Annotated[str, Field(min_length=1, max_length=512)]
Priority = Annotated[int, Field(ge=-1000, le=1000)]
Host = Annotated[str, Field(min_length=1, max_length=255)]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=86400)]


class Drawing(Strict):
    """How tokens are drawn: the fields that all dialects share; null means the default."""

    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Chance | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None  # -1 and 0: off
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    stop: Stops = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None
    seed: Seed | None = None
    logit_bias: Biases | None = None
    structured_outputs: StructuredOutputs | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None


class Envelope(Strict):
    """Fields about the request rather than the answer; pdrt's own, in every dialect."""

    model: str | None = None
    stream: bool | None = None
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/+=@-]{1,128}$")] | None = None
    cache_salt: Salt | None = None  # prefixes are shared with those alone that have the same
    priority: Priority | None = None  # higher first; 0 unless it is named
    timeout_s: Seconds | None = None
    bootstrap_room: Room | None = None  # an idempotency key, never the wire identity
    bootstrap_host: Host | None = None  # pins a registered prefill instance
    bootstrap_port: Port | None = None

    @model_validator(mode="after")
    def _pin_is_whole(self) -> Self:
        if (self.bootstrap_host is None) != (self.bootstrap_port is None):
            raise ValueError("bootstrap_host and bootstrap_port come together")
        return self


BestOf = Annotated[int, Field(ge=1, le=MAX_N)]


class GenerateDrawing(Drawing):
    best_of: BestOf | None = None  # so many are drawn, the n likeliest told
    logprobs: Top | None = None  # alternatives told beside each token; 0: its own odds alone
    prompt_logprobs: Top | None = None  # the same for the prompt


class GenerateRequest(Envelope):
    prompt: Prompt
    sampling_params: GenerateDrawing | None = None


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False


def _or_none(value: object) -> object:
    return None if value is False else value


class CompletionRequest(Envelope, Drawing):
    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    stream_options: StreamOptions | None = None
    logprobs: Annotated[Top | None, BeforeValidator(_or_none)] = None
    echo: bool | None = None
    best_of: BestOf | None = None  # so many are drawn, the n likeliest told
    response_format: ResponseFormat | None = None


class ChatRequest(Envelope, Drawing):
    messages: Annotated[list[Turn], Field(fail_fast=True, min_length=1, max_length=MAX_TURNS)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, JsonValue], AfterValidator(small)] | None = None

    @model_validator(mode="after")
    def _is_sound(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is only for logprobs = true")
        check_tools(self.tools, self.tool_choice)
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise ValueError(
                    "continue_final_message: an answer is continued or begun, not both"
                )
            if self.messages[-1].role != "assistant" or not self.messages[-1].text:
                raise ValueError("continue_final_message: the last message is no assistant's text")
        return self


class Told(Strict):
    """What a client has of one of its sequences."""

    ids: Annotated[list[TokenId], Field(fail_fast=True)]
    finish: Literal["stop", "length", "tool_calls"] | None = None


class Resumed(Strict):
    """An answer that another instance began, as far as its client has read it."""

    choices: Annotated[list[Told], Field(min_length=1, max_length=MAX_N)]
    cached_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    elapsed_s: Annotated[float, Field(ge=0, le=1 << 20)] = 0.0  # since its first leg was sent ...
    first_s: Annotated[float, Field(ge=0, le=1 << 20)] = 0.0  # ... and its first token after that


Path = Annotated[str, Field(pattern=r"^(disagg|local|fallback:[a-z_]{1,64})$")]


class LegFields(Strict):
    """What the router adds for the leaders; `bootstrap_room` is the wire identity here."""

    bootstrap_room: Room
    attempt: Annotated[int, Field(ge=0, lt=1 << 32)]
    time_left_s: Seconds
    transfer_token: Annotated[str, Field(max_length=256)]
    request_id: Annotated[str, Field(min_length=1, max_length=128)]
    client_room: Room | None = None  # echoed to the client
    bootstrap_host: Host | None = None  # decode: who prefills
    bootstrap_port: Port | None = None
    disagg_prefill_dp_rank: Annotated[int, Field(ge=-1, lt=1 << 20)] = -1
    created: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None  # both parts of an answer say it
    text_starts_after_prompt: bool = False  # decode: the router puts the prompt before its answer
    path: Path | None = None  # what the answer says of the path that served it
    marks: bool = False  # of a stream: say which tokens each event tells (see marks.py)
    resumed: Resumed | None = None


class RebindRequest(Strict):
    """POST /internal/rebind: this room's prompt is being computed anew, there."""

    bootstrap_room: Room
    attempt: Annotated[int, Field(ge=0, lt=1 << 32)]
    bootstrap_host: Host
    bootstrap_port: Port
    disagg_prefill_dp_rank: Annotated[int, Field(ge=-1, lt=1 << 20)] = -1
    transfer_token: Annotated[str, Field(max_length=256)]


class PrefillAgain(BaseModel):
    """POST /internal/prefill: a retracted room wants prompt and output computed once more."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bootstrap_room: Room
    attempt: Annotated[int, Field(ge=0, lt=1 << 32)]
    input_ids: IdsPrompt
    prompt_tokens: Count
    sampling: Sampling
    time_left_s: Seconds
    transfer_token: Annotated[str, Field(max_length=256)]
    request_id: Annotated[str, Field(min_length=1, max_length=128)] = "retracted"
    cache_salt: Annotated[str, Field(max_length=512)] = ""
    disagg_prefill_dp_rank: Annotated[int, Field(ge=-1, lt=1 << 20)] = -1
    priority: Priority = 0


# OpenAI's fields that this version does not serve, with the values that ask for nothing; in
# dialects that have a field of the name it is served.

UNSUPPORTED: Final[Mapping[str, Sequence[object]]] = {
    "best_of": (1,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "web_search_options": (),
}
IGNORED: Final = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
TURN_UNSUPPORTED: Final[Mapping[str, Sequence[object]]] = {
    "function_call": (),
    "audio": (),
    "refusal": (),
    "annotations": ([],),
}


def without(
    body: Json,
    unsupported: Mapping[str, Sequence[object]],
    where: str = "",
    served: Collection[str] = (),
) -> Json:
    """The body without unsupported fields that ask for nothing. Raises BadRequest for others."""
    found = (body.keys() & unsupported.keys()).difference(served)
    for name in sorted(found):
        value = body[name]
        if value is not None and not any(_same(value, n) for n in unsupported[name]):
            raise BadRequest(f"{where}{name} is not supported in this version")
    return {k: v for k, v in body.items() if k not in found} if found else body


def _same(value: object, neutral: object) -> bool:
    return type(value) is type(neutral) and value == neutral  # so that 0 is not False


M = TypeVar("M", bound=BaseModel)


def checked(kind: type[M], body: Mapping[str, Any]) -> M:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        lines = [_explain(kind, dict(problem)) for problem in found[:5]]
        raise BadRequest("; ".join(lines)) from None


def _explain(kind: type[BaseModel], problem: Mapping[str, Any]) -> str:
    place = list(problem["loc"])
    if place[:1] == ["prompt"] and place[1:2] and place[1] in _TAGS:
        del place[1]  # which kind of prompt it was taken for
    field = ".".join(str(part) for part in place)
    match problem["type"]:
        case "extra_forbidden":
            return f"{field} is not a known field{_hint(kind, place)}"
        case "missing":
            return f"{field} is missing"
        case "string_too_short" | "too_short" if field in ("prompt", "messages"):
            return f"{field} is empty"
        case _:
            text = str(problem["msg"]).removeprefix("Value error, ")
            return f"{field}: {text}" if field else text


_ELSEWHERE: Final = {  # what other servers call it
    "inputs": "prompt",
    "input_ids": "prompt",
    "max_new_tokens": "max_tokens",
    "parameters": "sampling_params",
    "text": "prompt",
}
_LONGEST_NAME: Final = 30  # no field's is longer, and to compare with a long one is work


def _hint(kind: type[BaseModel], place: Sequence[int | str]) -> str:
    """/generate has most fields one level down, and many come from servers that name them anew."""
    *outer, name = map(str, place)
    levels = {"": kind.model_fields}
    if kind is GenerateRequest:
        levels["sampling_params"] = GenerateDrawing.model_fields
    if ".".join(outer) not in levels or len(name) > _LONGEST_NAME:
        return ""
    name = _ELSEWHERE.get(name, name)
    meant = [
        f"{level}.{near}".removeprefix(".")
        for level, fields in levels.items()
        for near in get_close_matches(name, fields, 1, cutoff=0.8)
    ]
    return f"; did you mean {meant[0]}?" if meant else ""
