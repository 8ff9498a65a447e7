"""What a conversation is made of: turns, the tools it may use, and whether it must."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from pdrt.control.strict import Strict
from pdrt.control.structured import check_size

MAX_TURNS: Final = 4096
MAX_TOOLS: Final = 128


def _as_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def small(value: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError when it is too deep or too large."""
    check_size(value)
    return value


Name: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
CallId: TypeAlias = Annotated[str, Field(min_length=1, max_length=256)]
Schema: TypeAlias = Annotated[dict[str, Any], AfterValidator(small)]


class Part(Strict):
    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str = ""  # JSON, as the model wrote it


class ToolCall(Strict):
    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # streams have it, and some clients send it back


class Turn(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[list[Part], Field(fail_fast=True)] | None, BeforeValidator(_as_parts)
    ] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_call_id: CallId | None = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls are the assistant's")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id is for the role tool, which needs it")
        if self.content is None and self.role != "assistant":  # clients send its empty turns back
            raise ValueError(f"content is missing, which the role {self.role} needs")
        return self

    @property
    def text(self) -> str | None:
        if self.content is None:
            return None
        return "\n".join(part.text for part in self.content)


class Function(Strict):
    name: Name
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class _Named(Strict):
    name: Name


class ChosenTool(Strict):
    type: Literal["function"]
    function: _Named


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | ChosenTool


def check_tools(tools: list[Tool] | None, choice: ToolChoice | None) -> None:
    """Raises ValueError for a choice that its tools do not offer."""
    names = [tool.function.name for tool in tools or ()]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"tools: {min(twice)} is there twice")
    if isinstance(choice, ChosenTool) and choice.function.name not in names:
        raise ValueError(f"tool_choice: {choice.function.name} is not among the tools")
    if choice == "required" and not names:
        raise ValueError("tool_choice: required is only for a request with tools")
