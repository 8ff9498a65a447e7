"""What an answer needs of its prompt: the part that tells of it, and where the choices begin.

Prompts are long, so all of this is done beside the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pdrt.control.answer import Choice
from pdrt.control.call import Call
from pdrt.control.detokenize import StopScanner
from pdrt.control.likely import PromptPart, prompt_part, said
from pdrt.control.order import Order
from pdrt.control.text import TextPool
from pdrt.control.toolcalls import Sink, ToolFormat, ToolReader, call_id
from pdrt.control.toolformats import LISTED
from pdrt.errors import BadMessage, PdrtError
from pdrt.messages import Output, Submit, unpack_ids


async def choices_of(call: Call, submit: Submit, text: TextPool) -> list[Choice]:
    """Fresh ones; where the prompt is put before them, their text begins after it. Raises
    Overloaded when too many prompts wait for their text."""
    order = call.order
    with_odds = order.odds is not None
    is_after = order.echo or (call.leg is not None and call.leg.text_starts_after_prompt)
    before = 0
    if with_odds and is_after:
        before = len(await _echoed(order, unpack_ids(submit.tokens), text))
    readers = [_tools_of(call, index, text.tool_format) for index in range(order.drawn)]
    shown = text.tool_format.markers if order.calling and text.tool_format else ()
    return [
        Choice(
            text.pieces(shown),
            StopScanner(order.stop),
            with_odds,
            order.is_silent,
            before,
            tools=tools,
        )
        for tools in readers
    ]


def _tools_of(call: Call, index: int, form: ToolFormat | None) -> ToolReader | None:
    """A reader for one choice, which names its calls alike wherever the answer is taken up."""
    calling = call.order.calling
    if calling is None or form is None:
        return None
    sink = Sink(calling.names, partial(call_id, f"{call.request_id}/{index}", form))
    return ToolReader(LISTED if calling.must else form, sink, only_one=calling.only_one)


async def prompt_of(call: Call, submit: Submit, output: Output, text: TextPool) -> PromptPart:
    """`output` has the odds of the prompt's tokens where they are wanted. Raises PdrtError."""
    order, ids = call.order, unpack_ids(submit.tokens)
    scored = output.scored if order.scoring >= 0 else None
    shown = await _echoed(order, ids, text) if order.echo else ""
    try:
        return await text.run(partial(prompt_part, shown, ids, scored), text.pieces())
    except BadMessage as error:
        raise PdrtError(f"the worker told no odds of the prompt: {error}") from error


async def _echoed(order: Order, ids: Sequence[int], text: TextPool) -> str:
    """The prompt as the client wrote it, or the text of its tokens."""
    if isinstance(order.prompt, str):
        return order.prompt
    return await text.run(partial(said, ids), text.pieces())
