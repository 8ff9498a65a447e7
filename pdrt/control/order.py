"""An order: what a client wants, in one form for all dialects, and as it is handed on to legs.

The promise: each field is honoured, or refused with a 400 that names it. Leg bodies are built
from an allow-list for each side, so what a client sends never reaches an instance unseen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, TypeAlias, cast

from pdrt.config import Role
from pdrt.control.http import Json
from pdrt.control.mustcall import grammar_of
from pdrt.control.schema import (
    IGNORED,
    TURN_UNSUPPORTED,
    UNSUPPORTED,
    ChatRequest,
    CompletionRequest,
    Drawing,
    Envelope,
    GenerateDrawing,
    GenerateRequest,
    LegFields,
    PrefillAgain,
    RebindRequest,
    checked,
    without,
)
from pdrt.control.turns import MAX_TURNS, ChosenTool, Turn
from pdrt.errors import BadRequest, TooLong
from pdrt.messages import Grammar, Sampling

Dialect: TypeAlias = Literal["generate", "completions", "chat"]

PATHS: Final[Mapping[str, Dialect]] = {
    "/generate": "generate",
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
}
TOKEN_PATHS: Final = ("/tokenize", "/detokenize")
_SEED_MASK: Final = (1 << 63) - 1


class Pin(NamedTuple):
    """The bootstrap server of the prefill instance that a client asks for."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, to be made a prompt by the model's template."""

    turns: tuple[Json, ...]
    options: Json
    tools: tuple[Json, ...] = ()  # as the client wrote them
    begins_answer: bool = True  # the template's words before an answer are put at the end
    continues_last: bool = False  # the answer goes on with the last turn


@dataclass(frozen=True, slots=True)
class Calling:
    """Which tools an answer may call; `must` when it is nothing but calls, of `names` alone."""

    names: frozenset[str]
    only_one: bool = False
    must: bool = False


@dataclass(frozen=True, slots=True)
class Order:
    """What a client wants. `body` is what it sent, checked; `prompt` is text, ids or a chat."""

    dialect: Dialect
    body: Json
    prompt: str | Sequence[int] | Chat
    drawing: Drawing
    max_tokens: int | None
    default_tokens: int | None  # when the client names no number; None: what fits
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    usage_always: bool
    model: str | None
    request_id: str | None
    salt: str
    priority: int
    timeout_s: float | None
    client_room: int | None
    pin: Pin | None
    grammar: Grammar | None = None  # what the answer must be
    odds: int | None = None  # alternatives told beside each token; None: no log-probabilities
    scoring: int = -1  # the same for the prompt's tokens; -1: none
    echo: bool = False  # the prompt's text comes before each answer
    best_of: int = 0  # so many are drawn and the n likeliest told; 0: n
    calling: Calling | None = None  # None: what it says is text
    prompts: tuple[str | Sequence[int], ...] = ()  # of a batch, which is answered in parts

    @property
    def n(self) -> int:
        """Answers told of each prompt."""
        return self.drawing.n or 1

    @property
    def drawn(self) -> int:
        """Answers drawn of each prompt."""
        return self.best_of or self.n

    def parts(self) -> Sequence[Order]:
        """A batch as an order a prompt, else this one."""
        if not self.prompts:
            return (self,)
        return [
            replace(self, body={**self.body, "prompt": prompt}, prompt=prompt, prompts=())
            for prompt in self.prompts
        ]

    @property
    def is_prompt_told(self) -> bool:
        """Whether the answer has a part that only who computes the prompt can say."""
        return self.echo or self.scoring >= 0

    @property
    def is_silent(self) -> bool:
        """Only the prompt is asked for; one token is drawn all the same, and dropped."""
        return self.max_tokens == 0

    def settle(self, prompt_tokens: int, limit: int, seed: int) -> Sampling:
        """The sampling for a prompt of this length. Raises TooLong when `limit` is too small."""
        room = limit - prompt_tokens
        if room < 1:
            raise TooLong(
                f"the prompt has {prompt_tokens} tokens; prompt and answer together"
                f" may have {limit}, at least one of them in the answer"
            )
        if self.max_tokens is not None and self.max_tokens > room:
            raise TooLong(
                f"the prompt's {prompt_tokens} tokens and max_tokens = {self.max_tokens}"
                f" are over the limit of {limit}"
            )
        count = self.max_tokens
        if count is None:
            count = min(room, self.default_tokens or room)
        drawn = self.seed if self.seed is not None else seed
        return _sampling(
            self.drawing,
            self.grammar,
            max_tokens=max(count, 1),
            seed=drawn & _SEED_MASK,
            n=self.drawn,
            top_logprobs=self.odds or 0,
        )


def parse(dialect: Dialect, body: Json, leg: LegFields | None = None) -> Order:
    """The order in a client's body, or a leg's. Raises BadRequest that names the field."""
    match dialect:
        case "generate":
            return _generate(body)
        case "completions":
            return _completion(body, is_echoed=leg is not None and leg.text_starts_after_prompt)
        case "chat":
            return _chat(body)


def _generate(body: Json) -> Order:
    params = body.get("sampling_params")
    if isinstance(params, dict):
        served = GenerateDrawing.model_fields
        params = without(params, UNSUPPORTED, "sampling_params.", served)
        body = {**body, "sampling_params": params}
    request = checked(GenerateRequest, body)
    prompts = _listed(request.prompt)
    drawing = request.sampling_params or GenerateDrawing()
    order = _order("generate", body, request, drawing, prompts[0])
    scoring = -1 if drawing.prompt_logprobs is None else drawing.prompt_logprobs
    return replace(
        order,
        odds=drawing.logprobs,
        scoring=scoring,
        best_of=_best_of(order, drawing.best_of, "sampling_params."),
        prompts=prompts if prompts[0] is not request.prompt else (),
    )


def _completion(body: Json, *, is_echoed: bool) -> Order:
    body = _openai(body, CompletionRequest)
    request = checked(CompletionRequest, body)
    prompts = _listed(request.prompt)
    order, odds = _order("completions", body, request, request, prompts[0]), request.logprobs
    scoring = odds if request.echo and odds is not None else -1
    if request.max_tokens == 0 and not (request.echo or is_echoed):
        raise BadRequest("max_tokens: 0 is only for echo = true")
    return replace(
        order,
        odds=odds,
        scoring=scoring,
        echo=bool(request.echo),
        best_of=_best_of(order, request.best_of),
        prompts=prompts if len(prompts) > 1 else (),
    )


def _chat(body: Json) -> Order:
    body = _openai(body, ChatRequest)
    turns = body.get("messages")
    if isinstance(turns, list):
        if len(turns) > MAX_TURNS:
            raise BadRequest(f"messages: {len(turns)} of them; the limit is {MAX_TURNS}")
        body = {**body, "messages": [_plain_turn(turn, i) for i, turn in enumerate(turns)]}
    request = checked(ChatRequest, body)
    both = (request.max_tokens, request.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise BadRequest("max_tokens and max_completion_tokens differ; give one of them")
    chat = Chat(
        turns=tuple(map(_turn, request.messages)),
        options=request.chat_template_kwargs or {},
        tools=tuple(body["tools"]) if request.tools and request.tool_choice != "none" else (),
        begins_answer=request.add_generation_prompt is not False
        and not request.continue_final_message,
        continues_last=bool(request.continue_final_message),
    )
    order = _order("chat", body, request, request, chat)
    order = replace(order, odds=(request.top_logprobs or 0) if request.logprobs else None)
    return _calling(order, request) if chat.tools else order


def _calling(order: Order, request: ChatRequest) -> Order:
    """The order of an answer that may call, or must."""
    if order.grammar is not None:
        raise BadRequest("tools: an answer that has a grammar of its own cannot call them")
    choice, functions = request.tool_choice or "auto", [t.function for t in request.tools or ()]
    if isinstance(choice, ChosenTool):
        functions = [each for each in functions if each.name == choice.function.name]
    only_one = request.parallel_tool_calls is False or isinstance(choice, ChosenTool)
    names = frozenset(each.name for each in functions)
    if choice == "auto":
        return replace(order, calling=Calling(names, only_one))
    if request.ignore_eos:
        raise BadRequest("ignore_eos: an answer that must call ends where its calls do")
    try:
        grammar = grammar_of(functions, only_one=only_one)
    except ValueError as error:
        raise BadRequest(f"tools: what they take {error}") from error
    return replace(order, calling=Calling(names, only_one, must=True), grammar=grammar)


def _openai(body: Json, kind: type[Envelope]) -> Json:
    body = without(body, UNSUPPORTED, served=kind.model_fields)
    ignored = IGNORED - kind.model_fields.keys()
    return {k: v for k, v in body.items() if k not in ignored}


def _plain_turn(turn: object, index: int) -> object:
    if not isinstance(turn, dict):
        return turn
    return without(turn, TURN_UNSUPPORTED, f"messages.{index}.")


def _turn(turn: Turn) -> Json:
    """A message as templates know it, with its text in one piece."""
    said: Json = {"role": turn.role, "content": turn.text}
    if turn.name:
        said["name"] = turn.name
    if turn.tool_call_id:
        said["tool_call_id"] = turn.tool_call_id
    if turn.tool_calls:
        said["tool_calls"] = [call.model_dump(exclude={"index"}) for call in turn.tool_calls]
    return said


def _listed(
    prompt: str | list[int] | list[str] | list[list[int]],
) -> tuple[str | Sequence[int], ...]:
    """The prompts of a batch, or the one there is."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return (prompt,)  # pydantic has looked at each id
    return tuple(cast("list[str | list[int]]", prompt))


def _best_of(order: Order, best_of: int | None, where: str = "") -> int:
    if best_of is None or best_of == order.n:
        return 0
    if best_of < order.n:
        raise BadRequest(f"{where}best_of: {best_of} is less than n = {order.n}")
    if order.stream:
        raise BadRequest(f"{where}best_of: a stream cannot tell which answers are the best")
    return best_of


def _order(
    dialect: Dialect,
    body: Json,
    request: GenerateRequest | CompletionRequest | ChatRequest,
    drawing: Drawing,
    prompt: str | Sequence[int] | Chat,
) -> Order:
    options = None if isinstance(request, GenerateRequest) else request.stream_options
    if options is not None and not request.stream:
        raise BadRequest("stream_options is only for stream = true")
    max_tokens = drawing.max_tokens
    if isinstance(request, ChatRequest):
        max_tokens = max_tokens or request.max_completion_tokens
    host, port = request.bootstrap_host, request.bootstrap_port
    defaults: dict[Dialect, int | None] = {"generate": 128, "completions": 16, "chat": None}
    return Order(
        dialect=dialect,
        body=body,
        prompt=prompt,
        drawing=drawing,
        max_tokens=max_tokens,
        default_tokens=defaults[dialect],
        seed=drawing.seed,
        stop=tuple(drawing.stop or ()),
        stream=bool(request.stream),
        include_usage=options is not None and options.include_usage,
        usage_always=options is not None and options.continuous_usage_stats,
        model=request.model,
        request_id=request.request_id,
        salt=request.cache_salt or "",
        priority=request.priority or 0,
        timeout_s=request.timeout_s,
        client_room=request.bootstrap_room,
        pin=Pin(host, port) if host is not None and port is not None else None,
        grammar=_grammar(request, drawing),
    )


def _grammar(
    request: GenerateRequest | CompletionRequest | ChatRequest, drawing: Drawing
) -> Grammar | None:
    """What the answer must be, named in one way or the other."""
    wanted = None if isinstance(request, GenerateRequest) else request.response_format
    first = None if wanted is None else wanted.grammar()
    if drawing.structured_outputs is None:
        found = first
    elif first is not None:
        raise BadRequest("response_format and structured_outputs are two ways to say one thing")
    else:
        found = drawing.structured_outputs.grammar()
    if found is not None and drawing.ignore_eos:
        raise BadRequest("ignore_eos: an answer with a grammar ends where the grammar does")
    return found


_SAMPLING_FIELDS: Final = {
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
}


def _sampling(
    drawing: Drawing,
    grammar: Grammar | None,
    *,
    max_tokens: int,
    seed: int,
    n: int,
    top_logprobs: int,
) -> Sampling:
    return Sampling(
        max_tokens=max_tokens,
        seed=seed,
        n=n,
        top_logprobs=top_logprobs,
        top_k=max(drawing.top_k or 0, 0),
        stop_token_ids=tuple(drawing.stop_token_ids or ()),
        logit_bias=tuple((drawing.logit_bias or {}).items()),
        grammar=grammar,
        **drawing.model_dump(include=_SAMPLING_FIELDS, exclude_none=True),
    )


# Legs: what the router sends, and what leaders read.

_LEG_MARK: Final = "transfer_token"  # no client's body has it
_ROUTING: Final = frozenset(Envelope.model_fields) - {"model", "stream", "cache_salt", "priority"}
_STREAMING: Final = frozenset({"stream", "stream_options"})
_OF_ANSWER: Final = frozenset({"path", "resumed"})
_OF_PROMPT: Final = frozenset({"echo", "prompt_logprobs"})  # decode has no prompt hidden states
_MODELS: Final[Mapping[Dialect, type[Envelope]]] = {
    "generate": GenerateRequest,
    "completions": CompletionRequest,
    "chat": ChatRequest,
}


def leg_body(side: Role, order: Order, leg: LegFields, seed: int) -> Json:
    """What one leader is sent: the fields of the client's that it needs, and the leg's.

    `seed` is used when the client gave none, the same for both legs: they draw alike.
    """
    allowed = _MODELS[order.dialect].model_fields.keys() - _ROUTING
    if side == "prefill":
        allowed -= _STREAMING
    elif side == "decode":
        allowed -= _OF_PROMPT
    body = {name: order.body[name] for name in allowed & order.body.keys()}
    if side == "decode" and order.dialect == "generate" and order.scoring >= 0:
        params = body["sampling_params"]
        body["sampling_params"] = {k: v for k, v in params.items() if k not in _OF_PROMPT}
    if order.seed is None and order.dialect == "generate":
        body["sampling_params"] = {**(body.get("sampling_params") or {}), "seed": seed}
    elif order.seed is None:
        body["seed"] = seed
    unasked = {"text_starts_after_prompt", "marks", *(_OF_ANSWER if side == "prefill" else ())}
    fields = leg.model_dump(exclude_none=True, exclude=unasked)
    if leg.marks and side != "prefill":
        fields["marks"] = True
    if side == "hybrid":
        fields.pop("disagg_prefill_dp_rank")
    elif side == "decode" and order.echo:
        fields["text_starts_after_prompt"] = True
    return body | fields


def split_leg(body: Json) -> tuple[Json, LegFields | None]:
    """A leader's body as the client's fields and the leg's, if it is one. Raises BadRequest."""
    if _LEG_MARK not in body:
        return body, None
    names = LegFields.model_fields.keys()
    leg = checked(LegFields, {k: v for k, v in body.items() if k in names})
    return {k: v for k, v in body.items() if k not in names}, leg


def parse_rebind(body: Json) -> RebindRequest:
    return checked(RebindRequest, body)


def parse_prefill_again(body: Json) -> PrefillAgain:
    return checked(PrefillAgain, body)
