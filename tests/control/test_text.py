"""Text to ids and back: exact for any grouping of tokens, stop strings found wherever they lie."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from pdrt import config, demo
from pdrt.control.answer import Answer, Choice, Delta, Times
from pdrt.control.detokenize import Pieces, StopScanner, WindowPieces
from pdrt.control.http import Json
from pdrt.control.order import Chat
from pdrt.control.template import ChatTemplate
from pdrt.control.text import ByteText, ModelText, TextPool, open_text
from pdrt.control.toolcalls import Sink, ToolReader, joined
from pdrt.control.toolformats import HERMES, LLAMA, MISTRAL
from pdrt.errors import BadRequest, ConfigError, Overloaded, PdrtError
from pdrt.messages import Finish, Output, pack_tops
from tests.control.small_tokenizers import byte_level, metaspace, model_directory

HI = Chat(({"role": "user", "content": "hi"},), {})
BYTE_LEVEL, METASPACE = byte_level(), metaspace()
TOKENIZERS = {"byte level": BYTE_LEVEL, "metaspace": METASPACE}
TEXTS = st.text(alphabet="abc hello 你好é😀 end", max_size=20)


def said(pieces: Pieces, ids: Sequence[int]) -> str:
    return "".join([*(pieces.push(i) for i in ids), pieces.flush()])


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS)
def test_the_pieces_of_a_text_are_the_text(name: str, text: str) -> None:
    """CASES 94: multi-byte characters, which no single token holds, included."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = ModelText(tokenizer, None).pieces()
    assert said(pieces, ids) == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 2), max_size=30))
def test_bytes_that_are_no_text_come_out_as_the_tokenizer_has_them(ids: list[int]) -> None:
    pieces = ModelText(BYTE_LEVEL, None).pieces()
    assert said(pieces, ids) == BYTE_LEVEL.decode(ids)


@given(ids=st.lists(st.sampled_from([2, *range(259, METASPACE.get_vocab_size())]), max_size=30))
def test_words_keep_their_spaces_also_after_a_special_token(ids: list[int]) -> None:
    pieces = ModelText(METASPACE, None).pieces()
    assert said(pieces, ids) == METASPACE.decode(ids)


def test_half_a_character_is_held_back() -> None:
    for text in (ModelText(METASPACE, None), ByteText()):
        pieces = text.pieces()
        ids = text.encode("a你")
        told = [pieces.push(i) for i in ids]
        assert told[-3:] == ["", "", "你"], told
        assert pieces.flush() == ""


def test_half_a_character_at_the_end_is_told_as_a_replacement() -> None:
    pieces = ByteText().pieces()
    assert [pieces.push(i) for i in "你".encode()[:2]] == ["", ""]
    assert pieces.flush() == "\ufffd"


def test_a_run_of_bytes_without_end_is_not_held_for_ever() -> None:
    pieces = ModelText(METASPACE, None).pieces()
    assert "".join(pieces.push(3 + 0xFF) for _ in range(40)).startswith("\ufffd")


def test_an_added_token_is_written_as_it_is_and_a_special_one_not_at_all() -> None:
    ids = [BYTE_LEVEL.token_to_id(piece) for piece in ("<tool é>", "<|end|>", "Ġhello")]
    pieces = ModelText(BYTE_LEVEL, None).pieces()
    assert said(pieces, [i for i in ids if i is not None]) == "<tool é> hello"


def test_tokens_without_text_cost_nothing_however_many_come() -> None:
    """An answer with ignore_eos may be nothing but EOS."""
    seen = list[int]()

    def decode(ids: Sequence[int]) -> str:
        seen.append(len(ids))
        return METASPACE.decode(list(ids))

    pieces = WindowPieces(decode, {2}.__contains__)
    word = METASPACE.token_to_id("▁hello")
    assert word is not None
    assert said(pieces, [word, *[2] * 100, word]) == "hello hello"
    assert max(seen) <= 2


@pytest.mark.slow
def test_a_real_models_text_comes_out_as_its_tokenizer_has_it_however_it_is_cut() -> None:
    """CASES 94."""
    path = demo.directory(config.cache_dir())
    if not path.exists():
        pytest.skip("the demo model is not prepared")
    text, tokenizer = open_text(str(path)), Tokenizer.from_file(str(path / "tokenizer.json"))

    @given(st.text(max_size=30), st.lists(st.integers(0, tokenizer.get_vocab_size() - 1)))
    def check(written: str, ids: list[int]) -> None:
        for tokens in (text.encode(written), ids):
            answer = Answer(1, [Choice(text.pieces(), StopScanner(["\u4e00"]))], Times(0.0))
            last = Output(room=1, finish="length")
            deltas = [
                answer.take(Output(room=1, tokens=(token,)), 1.0)
                for token in tokens
                if not answer.is_over
            ]
            if not answer.is_over:
                deltas.append(answer.take(last, 1.0))
            whole = tokenizer.decode(tokens)
            assert "".join(delta.text for delta in deltas) == whole.split("\u4e00")[0]

    check()


# Stop strings.


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop string begins that is completed first; of two, the longer one."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return min(starts)
    return None


@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=4), max_size=8),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
)
def test_the_stop_completed_first_ends_the_text_before_it_however_it_is_cut(
    pieces: list[str], stops: list[str]
) -> None:
    scanner, told, is_stopped = StopScanner(stops), "", False
    for piece in pieces:
        new, is_stopped = scanner.feed(piece)
        told += new
        if is_stopped:
            break
    whole = "".join(pieces)
    at = first_stop(whole, stops)
    assert is_stopped == (at is not None)
    assert told + ("" if is_stopped else scanner.rest()) == whole[:at]


def test_of_two_stop_strings_that_end_together_the_longer_one_counts() -> None:
    for stops in (["xab", "ab"], ["ab", "xab"]):
        assert StopScanner(stops).feed("1xab") == ("1", True)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    scanner = StopScanner(["STOP", "TOPS"])
    assert scanner.feed("a ST") == ("a ", False)
    assert scanner.feed("x") == ("STx", False)
    assert scanner.feed("STO") == ("", False)
    assert scanner.feed("P here") == ("", True)


# An answer.


# Of one choice, unless a test says more.


def answer_of(stops: Sequence[str] = (), prompt_tokens: int = 5) -> Answer:
    return Answer(prompt_tokens, [Choice(ByteText().pieces(), StopScanner(stops))], Times(0.0))


def out(text: str = "", finish: str | None = None, cached: int = 0, eos: bool = False) -> Output:
    tokens = (*text.encode(), *((256,) if eos else ()))
    return Output(room=1, tokens=tokens, finish=finish, cached_tokens=cached)  # type: ignore[arg-type]


def test_the_token_that_said_stop_is_an_id_but_no_text() -> None:
    """CASES 86: an ordinary token may be a stop id too."""
    answer = answer_of()
    assert answer.take(out("ab", "stop"), 1.0) == Delta("a", (97, 98), "stop")
    assert (answer.choices[0].text, answer.usage()["completion_tokens"]) == ("a", 2)


def test_a_stop_string_across_tokens_ends_the_text_and_the_counting() -> None:
    answer = answer_of(["END"])
    deltas = [answer.take(out(t), 1.0) for t in ("one E", "N")] + [answer.take(out("Dxyz"), 2.0)]
    assert [d.text for d in deltas] == ["one ", "", ""]
    assert deltas[-1].finish == "stop"
    assert bytes(answer.choices[0].ids) == b"one END"


def test_a_stop_string_wins_over_the_length_it_is_completed_by() -> None:
    answer = answer_of(["END"])
    assert answer.take(out("END", "length"), 1.0).finish == "stop"
    assert answer_of(["END"]).take(out("EN", "length"), 1.0) == Delta("EN", (69, 78), "length")


def test_a_stop_string_wins_over_the_eos_after_it() -> None:
    answer = answer_of(["b"])
    assert answer.take(out("ab", "stop", eos=True), 1.0) == Delta("a", (97, 98), "stop")


def test_cached_tokens_are_never_more_than_the_prompt_and_counted_once() -> None:
    """CASES 93."""
    answer = answer_of(prompt_tokens=5)
    answer.take(out("a", cached=4), 1.0)
    answer.take(out("b", cached=4), 1.0)
    assert answer.usage()["cached_tokens"] == 4
    answer.take(out("c", cached=9), 1.0)
    assert answer.usage()["cached_tokens"] == 5


@given(
    text=st.text(alphabet="ab你é", max_size=12),
    cuts=st.lists(st.integers(1, 5), max_size=12),
    stops=st.lists(st.text(alphabet="ab你", min_size=1, max_size=2), max_size=2),
)
def test_grouping_changes_nothing(text: str, cuts: list[int], stops: list[str]) -> None:
    """CASES 94, 89: the chunks of a stream add up to the whole answer; each token has its odds."""
    tokens = text.encode()
    whole, streamed = with_odds(stops), with_odds(stops)
    whole.take(likely(tokens, 0, "length"), 1.0)
    (one,), (other,) = whole.choices, streamed.choices
    at, deltas = 0, list[Delta]()
    for cut in cuts:
        if other.finish is None:
            deltas.append(streamed.take(likely(tokens[at : at + cut], at), 1.0))
            at += cut
    if other.finish is None:
        deltas.append(streamed.take(likely(tokens[at:], at, "length"), 1.0))
    assert "".join(d.text for d in deltas) == one.text
    assert [i for d in deltas for i in d.ids] == one.ids
    assert [o for d in deltas for o in d.odds] == one.odds
    assert [o.token for o in one.odds] == one.ids
    assert [o.logprob for o in one.odds] == [-float(i) for i in range(len(one.ids))]
    assert all(o.top == ((o.token, o.logprob), (7, -99.0)) for o in one.odds)
    assert (other.finish, streamed.usage()) == (one.finish, whole.usage())


def with_odds(stops: Sequence[str] = ()) -> Answer:
    choice = Choice(ByteText().pieces(), StopScanner(stops), with_odds=True)
    return Answer(5, [choice], Times(0.0))


def likely(tokens: bytes, at: int, finish: Finish | None = None) -> Output:
    """Token i of the answer has log-probability -i."""
    logprobs = tuple(-float(at + i) for i in range(len(tokens)))
    tops = pack_tops([((t, p), (7, -99.0)) for t, p in zip(tokens, logprobs, strict=True)])
    return Output(room=1, tokens=tuple(tokens), logprobs=logprobs, tops=tops, finish=finish)


def test_each_token_begins_where_its_text_does() -> None:
    answer = with_odds()
    answer.take(likely("a你b".encode(), 0), 1.0)
    answer.take(replace(likely(b"cX", 5), finish="stop"), 1.0)
    assert [o.at for o in answer.choices[0].odds] == [0, 1, 1, 1, 2, 3, 4]
    assert answer.choices[0].text == "a你bc"


@pytest.mark.parametrize(
    "output",
    [
        Output(room=1, tokens=(97, 98)),
        Output(room=1, tokens=(97, 98), logprobs=(-1.0,)),
        Output(room=1, tokens=(97, 98), logprobs=(-1.0, -2.0), tops=b"123"),
    ],
)
def test_a_worker_that_tells_no_odds_is_an_error_and_not_a_shorter_list(output: Output) -> None:
    """CASES 89."""
    with pytest.raises(PdrtError, match="odds"):
        with_odds().take(output, 1.0)


def test_the_choices_of_an_answer_grow_and_end_by_themselves() -> None:
    choices = [Choice(ByteText().pieces(), StopScanner(["END"])) for _ in range(2)]
    answer = Answer(5, choices, Times(0.0))
    assert answer.take(replace(out("one E"), index=1), 1.0).index == 1
    assert answer.take(out("NDabc", "length"), 1.0).finish == "length"
    assert (choices[0].text, answer.is_over) == ("NDabc", False)
    assert answer.take(replace(out("ND"), index=1), 1.0) == Delta("", tuple(b"ND"), "stop", 1)
    assert (choices[1].text, answer.is_over) == ("one ", True)
    assert answer.usage()["completion_tokens"] == 5 + 7


def test_a_choice_that_nobody_asked_for_says_nothing_and_ends() -> None:
    """The prompt alone was wanted (echo with max_tokens 0)."""
    choice = Choice(ByteText().pieces(), StopScanner(()), with_odds=True, is_silent=True)
    assert choice.take(likely(b"a", 0, "length")) == Delta("", (), "length")
    assert (choice.ids, choice.odds) == ([], [])


def test_half_a_character_at_the_end_of_an_answer_is_not_lost() -> None:
    answer = answer_of(["\ufffd!"])
    half = Output(room=1, tokens=tuple("a你".encode()[:3]), finish="length")
    assert answer.take(half, 1.0).text == "a\ufffd"
    stopped = answer_of(["\ufffd"])
    assert stopped.take(half, 1.0) == Delta("a", half.tokens, "stop")


def test_times_are_the_clocks() -> None:
    answer = answer_of()
    answer.times.tokenised = 0.25
    answer.take(out("a"), 0.5)
    answer.take(out("b", "length"), 2.0)
    assert answer.times.json() == {
        "tokenise": 250.0,
        "first_token": 500.0,
        "token_mean": 1500.0,
        "token_max": 1500.0,
        "total": 2000.0,
    }


# Templates and files.

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>"}, lambda: datetime(2026, 12, 1))


def test_a_models_template_makes_the_prompt(tmp_path: Path) -> None:
    text = open_text(str(model_directory(tmp_path, METASPACE, TEMPLATE)))
    ids = text.encode_chat(HI)
    rendered = "<s>[user]hi</s>\n[assistant]"  # it has its own <s>: no second one is added
    assert ids == METASPACE.encode(rendered, add_special_tokens=False).ids


def test_a_template_file_wins_and_a_named_default_is_found(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "listed"}]
    model_directory(tmp_path, METASPACE, None, chat_template=named)
    found = ChatTemplate.read(tmp_path)
    assert found is not None
    assert found.render(HI) == "listed"
    (tmp_path / "chat_template.jinja").write_text("from a file 你")
    found = ChatTemplate.read(tmp_path)
    assert found is not None
    assert found.render(HI) == "from a file 你"


def test_the_extras_that_templates_use_are_there() -> None:
    source = (
        "{%- for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}"
        "{% break %}{% endfor %} {{ strftime_now('%Y') }} {{ thinking }}"
    )
    chat = Chat(({"role": "user", "content": "<é>"},), {"thinking": False})
    assert template(source).render(chat) == '{"role": "user", "content": "<é>"} 2026 False'


def test_blocks_leave_no_lines_of_their_own() -> None:
    source = (
        "{% for m in messages %}\n    {% if m %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}"
    )
    assert template(source).render(HI) == "hi\n"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages[7].role.x }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 'a' * thinking }}",
    ],
)
def test_what_a_template_refuses_or_must_not_do_is_a_bad_request(source: str) -> None:
    with pytest.raises(BadRequest, match="chat template"):
        template(source).render(Chat(HI.turns, {"thinking": "x"}))


@pytest.mark.parametrize("name", ["messages", "bos_token", "tools"])
def test_options_cannot_replace_what_the_template_is_given(name: str) -> None:
    with pytest.raises(BadRequest, match=f"{name} is not yours to set"):
        template("").render(Chat(HI.turns, {name: "x"}))


# Tools.

CALLS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}{% endfor %};"
    "{% endfor %}{{ tools | tojson }}"
)
TOOL = {"type": "function", "function": {"name": "f"}}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"a":  1}'}}],
}


def chat_of(*turns: Json, tools: tuple[Json, ...] = (TOOL,)) -> Chat:
    return Chat(turns or HI.turns, {}, tools)


def test_a_template_is_given_tools_and_calls_with_their_arguments_as_objects() -> None:
    result = {"role": "tool", "content": "7", "tool_call_id": "c"}
    said = template(CALLS).render(chat_of(CALLED, result))
    assert said.startswith('assistant:<tool_call>{"a": 1};tool:7;')
    assert json.loads(said.rpartition(";")[2]) == [TOOL]
    assert template(CALLS).tool_format is HERMES


def test_a_template_that_joins_arguments_to_text_gets_them_as_they_were_written() -> None:
    source = (
        "{{ tools }}<tool_call>{% for m in messages %}"
        "{{ '>' + m.tool_calls[0]['function']['arguments'] + '<' }}{{ m['content'] is none }}"
        "{% endfor %}"
    )
    assert template(source).render(chat_of(CALLED)).endswith('>{"a":  1}<True')


def test_arguments_that_are_no_json_are_named() -> None:
    function = {"name": "f", "arguments": "{"}
    chat = chat_of({**CALLED, "tool_calls": [{"function": function}]})
    with pytest.raises(BadRequest, match=r"messages\.0\.tool_calls\.0\.function\.arguments: no"):
        template(CALLS).render(chat)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ messages }} <tool_call>", "takes none"),
        ("{{ tools }}", "not known here"),
        ("{% if x %}{% set tools = x %}{% endif %}{{ tools }}<function=", "not known here"),
    ],
)
def test_tools_that_a_template_cannot_offer_are_refused(source: str, said: str) -> None:
    with pytest.raises(BadRequest, match=f"tools: not supported, .*{said}"):
        template(source).render(chat_of())
    assert template(source).render(HI) is not None


def test_a_template_may_set_tools_itself() -> None:
    source = "{% if x is defined %}{% set tools = x %}{% endif %}{{ tools }}<|python_tag|>"
    assert template(source).tool_format is LLAMA


def test_a_model_may_have_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools[0].type }}<tool_call>"},
    ]
    model_directory(tmp_path, METASPACE, None, chat_template=named)
    found = ChatTemplate.read(tmp_path)
    assert found is not None
    assert (found.render(HI), found.render(chat_of())) == ("plain", "function<tool_call>")
    files = tmp_path / "additional_chat_templates"
    files.mkdir()
    (files / "tool_use.jinja").write_text("{{ tools }}[TOOL_CALLS]")
    again = ChatTemplate.read(tmp_path)
    assert again is not None
    assert again.tool_format is MISTRAL


def test_a_developer_is_the_system_where_the_template_knows_none() -> None:
    turn = {"role": "developer", "content": "x"}
    assert template("{{ messages[0].role }}").render(Chat((turn,), {})) == "system"
    source = "{{ messages[0].role }}{# developer #}"
    assert template(source).render(Chat((turn,), {})) == "developer"


@pytest.mark.parametrize("last", ["So I", "So I ", " So I\n"])
def test_the_last_turn_can_be_gone_on_with(last: str) -> None:
    turns = (*HI.turns, {"role": "assistant", "content": last})
    chat = Chat(turns, {}, begins_answer=False, continues_last=True)
    assert template(TEMPLATE).render(chat) == f"<s>[user]hi\n[assistant]{last}"
    trimming = TEMPLATE.replace("m.content", "m.content | trim")
    assert template(trimming).render(chat) == "<s>[user]hi\n[assistant]So I"
    with pytest.raises(BadRequest, match="continue_final_message"):
        template("{{ messages[0].content }}").render(chat)
    assert bytes(ByteText().encode_chat(chat)).decode() == f"user: hi\nassistant: {last}"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_special_tokens_are_text_only_where_a_format_needs_them(name: str) -> None:
    tokenizer = Tokenizer.from_str(TOKENIZERS[name].to_str())
    tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    text = ModelText(tokenizer, None)
    ids = tokenizer.encode("hello[TOOL_CALLS]你好 world", add_special_tokens=False).ids
    shown = said(text.pieces(["[TOOL_CALLS]", "no such token"]), ids)
    assert shown == "hello[TOOL_CALLS]你好 world"
    assert said(text.pieces(), ids) == tokenizer.decode(ids)


def with_tools(*, only_one: bool = False, odds: bool = False) -> Answer:
    sink = Sink(frozenset({"f", "g"}), str)
    reader = ToolReader(HERMES, sink, only_one=only_one)
    choice = Choice(ByteText().pieces(), StopScanner(["STOP"]), odds, tools=reader)
    return Answer(5, [choice], Times(0.0))


TWO = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n' * 2


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_an_answer_that_calls_ends_so_however_its_tokens_were_grouped(size: int) -> None:
    answer, data = with_tools(), f"Hm. {TWO}".encode()
    deltas = [
        answer.take(Output(room=1, tokens=tuple(data[at : at + size])), 1.0)
        for at in range(0, len(data), size)
    ]
    deltas.append(answer.take(out("", "stop", eos=True), 2.0))
    (choice,) = answer.choices
    assert (choice.text, choice.finish, deltas[-1].finish) == ("Hm.", "tool_calls", "tool_calls")
    assert [(c.id, c.name, c.arguments) for c in joined(choice.calls)] == [
        ("0", "f", '{"a": 1}'),
        ("1", "f", '{"a": 1}'),
    ]
    assert "".join(delta.text for delta in deltas) == choice.text
    assert "".join(c.arguments for d in deltas for c in d.calls) == '{"a": 1}' * 2


@pytest.mark.parametrize("size", [1, 1000])
def test_an_answer_that_may_call_once_ends_with_its_call(size: int) -> None:
    answer, data = with_tools(only_one=True), TWO.encode()
    for at in range(0, len(data), size):
        if answer.take(Output(room=1, tokens=tuple(data[at : at + size])), 1.0).finish:
            break
    (choice,) = answer.choices
    assert bytes(choice.ids).decode() == TWO[: TWO.index("</")], "what follows does not count"
    assert (choice.finish, len(joined(choice.calls))) == ("tool_calls", 1)


@pytest.mark.parametrize("end", ["length", "STOP"])
def test_a_call_that_is_cut_keeps_what_there_is_of_it(end: str) -> None:
    answer, begun = with_tools(), '<tool_call>{"name": "f", "arguments": {"a": 1'
    answer.take(out(begun), 1.0)
    last = out("", "length") if end == "length" else out("STOP")
    assert answer.take(last, 1.0).finish == ("length" if end == "length" else "tool_calls")
    assert joined(answer.choices[0].calls)[0].arguments == '{"a": 1'


def test_without_a_template_chat_is_refused_and_text_is_served(tmp_path: Path) -> None:
    text = open_text(str(model_directory(tmp_path, BYTE_LEVEL)))
    with pytest.raises(BadRequest, match="no chat template"):
        text.encode_chat(HI)
    assert text.encode("hello") == BYTE_LEVEL.encode("hello").ids


def test_a_plain_prompt_gets_the_tokens_that_the_model_wants(tmp_path: Path) -> None:
    text = open_text(str(model_directory(tmp_path, METASPACE)))
    assert text.encode("hello") == [1, *METASPACE.encode("hello", add_special_tokens=False).ids]


@pytest.mark.parametrize("template_text", ["{% for %}", "{% nonsense %}"])
def test_a_broken_template_is_a_start_up_error(tmp_path: Path, template_text: str) -> None:
    model_directory(tmp_path, BYTE_LEVEL, template_text)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        open_text(str(tmp_path))


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_missing_or_broken_tokenizer_is_a_start_up_error(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        open_text(str(tmp_path))


def test_a_tokenizer_never_cuts_a_prompt(tmp_path: Path) -> None:
    """CASES 55: a limit that a tokenizer's file sets must not make a long prompt a short one."""
    cutting = Tokenizer.from_str(BYTE_LEVEL.to_str())
    cutting.enable_truncation(3)
    cutting.enable_padding(length=64)
    text = open_text(str(model_directory(tmp_path, cutting)))
    assert len(text.encode("xyzzyx")) == 6


def test_bytes_stand_for_themselves_on_the_null_device() -> None:
    text = open_text("null")
    assert text.encode("é") == [0xC3, 0xA9]
    assert bytes(text.encode_chat(HI)) == b"user: hi\nassistant: "
    assert said(text.pieces(), [104, 256, 105, 9999]) == "hi"


def test_the_settings_of_a_tokenizer_are_json(tmp_path: Path) -> None:
    """The decoder's kind is read from it, so its form matters to us."""
    assert json.loads(BYTE_LEVEL.to_str())["decoder"]["type"] == "ByteLevel"


# Threads.


LONG = "ab" * 500
IDS = [97, 98] * 500


class GatedText(ByteText):
    """Encodes when the test says so, and tells in which thread."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.threads: set[str] = set()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        self.threads.add(threading.current_thread().name)
        assert self.gate.wait(10)
        return super().encode(text)


async def test_encoding_runs_beside_the_loop_and_only_so_many_wait() -> None:
    text = GatedText()
    pool = TextPool(text, threads=1, depth=2)
    try:
        asked = [asyncio.ensure_future(pool.ids(LONG)) for _ in range(2)]
        await asyncio.sleep(0)
        assert pool.waiting == 2
        with pytest.raises(Overloaded):
            await pool.ids(LONG)
        assert await pool.ids([1, 2]) == [1, 2]  # nothing to encode, nothing to wait for
        text.gate.set()
        assert await asyncio.gather(*asked) == [IDS] * 2
        assert (pool.waiting, pool.most_waiting) == (0, 2)
        assert all(name.startswith("tokenise") for name in text.threads)
    finally:
        text.gate.set()
        pool.close()


async def test_what_is_short_takes_no_thread() -> None:
    text = GatedText()
    text.gate.set()
    pool = TextPool(text, threads=1, depth=0)
    assert await pool.ids("ab") == [97, 98]
    assert text.threads == {threading.current_thread().name}
    pool.close()


async def test_who_leaves_the_queue_makes_place() -> None:
    text = GatedText()
    pool = TextPool(text, threads=1, depth=2)
    try:
        first, second = (asyncio.ensure_future(pool.ids(LONG)) for _ in range(2))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        assert pool.waiting == 1
        text.gate.set()
        assert await first == IDS
    finally:
        text.gate.set()
        pool.close()


# A token by itself.


def test_a_token_is_written_as_it_is_special_or_not() -> None:
    byte_level_, metaspace_ = ModelText(BYTE_LEVEL, None), ModelText(METASPACE, None)

    def written(text: ModelText, tokenizer: Tokenizer, piece: str) -> bytes:
        token = tokenizer.token_to_id(piece)
        assert token is not None
        return text.bytes_of(token)

    assert written(byte_level_, BYTE_LEVEL, "Ġhello") == b" hello"
    assert written(byte_level_, BYTE_LEVEL, "<|end|>") == b"<|end|>"
    assert written(metaspace_, METASPACE, "▁hello") == b" hello"
    assert written(metaspace_, METASPACE, "<0xE4>") == b"\xe4"
    assert written(metaspace_, METASPACE, "</s>") == b"</s>"
    assert (ByteText().bytes_of(97), ByteText().bytes_of(256)) == (b"a", b"<eos>")
    assert [text.bytes_of(10**6) for text in (byte_level_, metaspace_, ByteText())] == [b""] * 3


@given(text=TEXTS)
def test_the_bytes_of_a_texts_tokens_are_the_texts(text: str) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    words = ModelText(BYTE_LEVEL, None)
    assert b"".join(map(words.bytes_of, ids)).decode(errors="replace") == BYTE_LEVEL.decode(ids)
