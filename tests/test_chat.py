"""Conversations, streams, and what an `LLM` shows and frees."""

import gc
import io
import json
import weakref

import pytest
from IPython.lib.pretty import pretty
from tiny_models import tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from minivllm import LLM, SamplingParams
from minivllm.chat import ChatTemplate, as_conversations, load_template
from minivllm.loader import progress_bar

GREEDY = SamplingParams(temperature=0, max_tokens=6)
HELLO = [{"role": "user", "content": "w7 w8"}]
MARKED = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }} "
    "{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """A tiny Llama with a tokenizer that begins each text with <s>."""
    folder = tmp_path_factory.mktemp("talker")
    model = tiny("llama, three heads a group")
    model.reference.save_pretrained(folder)
    words = {"<s>": 1, "</s>": 2, "a": 3, "u": 4, "s": 5, "?": 0}
    words |= {f"w{i}": i for i in range(6, 101)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = TemplateProcessing("<s> $A", None, [("<s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def llm(talker):
    (talker / "chat_template.jinja").write_text(MARKED, encoding="utf-8")
    return LLM(talker, num_pages=64, page_size=4, dtype="float32", device="cpu")


# ---- The template --------------------------------------------------------------------


def test_it_renders_as_transformers_does(smollm2):
    """The default model's own template, with and without the beginning of an answer."""
    template = load_template(smollm2[0])
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), chat_template=template.source
    )
    turns = [
        {"role": "user", "content": "Hi & <b>"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "été"},
    ]
    for more in (True, False):
        expected = theirs.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=more
        )
        assert template.render(turns, more) == expected
        assert expected.endswith("assistant\n") == more


def test_a_chat_begins_once(llm):
    """f12: the template wrote <s>; the tokenizer adds none. Plain text gets one."""
    output = llm.chat(HELLO, GREEDY)[0]
    assert output.prompt_token_ids == [1, 4, 7, 8, 3]
    assert output.prompt == "<s>u w7 w8 a"
    assert llm.generate("w7", GREEDY)[0].prompt_token_ids == [1, 7]
    theirs = AutoTokenizer.from_pretrained(llm.model).apply_chat_template(
        HELLO, add_generation_prompt=True, return_dict=False
    )
    assert theirs == output.prompt_token_ids
    ours = llm.chat(HELLO, GREEDY, add_generation_prompt=False)[0]
    assert ours.prompt_token_ids == [1, 4, 7, 8]


def test_several_conversations_in_order(llm):
    two = [HELLO, [{"role": "system", "content": "w9"}, *HELLO]]
    alone = [llm.chat(each, GREEDY)[0].outputs[0].token_ids for each in two]
    assert [o.outputs[0].token_ids for o in llm.chat(two, GREEDY)] == alone


def test_a_second_turn_reuses_the_first(llm):
    first = llm.chat(HELLO, GREEDY)[0]
    answer = {"role": "assistant", "content": first.outputs[0].text}
    second = llm.chat([*HELLO, answer, *HELLO], GREEDY)[0]
    known = [*first.prompt_token_ids, *first.outputs[0].token_ids[:-1]]
    assert second.prompt_token_ids[: len(known)] == known
    assert second.num_cached_tokens == len(known) // 4 * 4 > 4


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"chat_template": "one"}}, "one"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "tool_use", "template": "no"},
                        {"name": "default", "template": "two"},
                    ]
                }
            },
            "two",
        ),
        ({"chat_template.json": {"chat_template": "three"}}, "three"),
        (
            {
                "chat_template.jinja": "four",
                "tokenizer_config.json": {"chat_template": "one"},
            },
            "four",
        ),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": "{{ bos_token }}{{ eos_token }}",
                    "bos_token": {"content": "<b>"},
                    "eos_token": "<e>",
                    "unk_token": None,
                }
            },
            "<b><e>",
        ),
        ({}, None),
    ],
)
def test_where_a_template_lies(files, expected, tmp_path):
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name).write_text(text, encoding="utf-8")
    template = load_template(tmp_path)
    assert (template and template.render(HELLO)) == expected


def test_a_broken_settings_file_is_one_line(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json cannot be read"):
        load_template(tmp_path)


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ("Hello", "a conversation is a list"),
        ([], "a conversation is a list"),
        ([[], HELLO], "a conversation is a list"),
        (["Hello"], "message 0 must have a role"),
        ([{"role": "bot", "content": "x"}], "message 0: role must be"),
        ([*HELLO, {"role": "user"}], "message 1: content must be text, not None"),
        ([{"role": "user", "content": 5}], "content must be text, not 5"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "image_url",
        ),
    ],
)
def test_bad_messages_are_named(messages, named, llm):
    with pytest.raises(ValueError, match=named):
        llm.chat(messages, GREEDY)
    assert not llm.engine.has_unfinished() and llm.stats()["lookups"] == 0


def test_parts_are_joined():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    template = ChatTemplate("{{ messages[0].content }}")
    assert template.render([{"role": "user", "content": parts}]) == "one\ntwo"
    assert as_conversations([HELLO, HELLO]) == [HELLO, HELLO]


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "chat template failed"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_what_a_template_refuses(source, named):
    with pytest.raises(ValueError, match=named):
        ChatTemplate(source).render(HELLO)


def test_a_model_without_a_template(talker):
    """f11: one line, which says what to do."""
    (talker / "chat_template.jinja").unlink(missing_ok=True)
    plain = LLM(talker, num_pages=8, device="cpu")
    with pytest.raises(ValueError, match="no chat template: use generate"):
        plain.chat(HELLO)


# ---- Streams -------------------------------------------------------------------------


def test_a_stream_grows_to_the_answer(llm):
    """f9: and says from the beginning how much was cached, as the whole answer does."""
    llm.generate("w7 w8 w9", GREEDY)
    whole = llm.generate("w7 w8 w9", GREEDY)[0]
    seen = list(llm.stream("w7 w8 w9", GREEDY))
    cached = {o.num_cached_tokens for o in seen}
    assert cached == {whole.num_cached_tokens} and whole.num_cached_tokens > 0
    assert [len(o.outputs[0].token_ids) for o in seen] == [1, 2, 3, 4, 5, 6]
    assert [o.finished for o in seen] == [False] * 5 + [True]
    assert seen[-1].outputs[0].token_ids == whole.outputs[0].token_ids
    assert seen[-1].prompt == "w7 w8 w9"
    asked = list(llm.stream(HELLO, GREEDY))[-1]
    assert asked.outputs[0].token_ids == llm.chat(HELLO, GREEDY)[0].outputs[0].token_ids


def test_a_closed_stream_aborts(llm):
    stream = llm.stream([7, 8, 9, 7, 8], SamplingParams(temperature=0, max_tokens=50))
    next(stream)
    assert llm.stats()["running"] == 1
    with pytest.raises(ValueError, match="a stream"):
        llm.generate("w7")
    stream.close()
    stats = llm.stats()
    assert stats["running"] == stats["pages_private"] == stats["pages_pinned"] == 0
    assert llm.generate("w7", GREEDY)


def test_a_stream_checks_at_once_and_submits_late(llm):
    with pytest.raises(ValueError, match="token id 999"):
        llm.stream([999])
    llm.stream([7, 8])  # never asked for anything
    assert not llm.engine.has_unfinished()


@pytest.mark.parametrize(
    ("ask", "named"),
    [
        (lambda llm: llm.generate(["w7"], [5]), "must be SamplingParams, not 5"),
        (lambda llm: llm.generate(["w7"], {"n": 1}), "must be SamplingParams, not {"),
        (lambda llm: llm.generate(["w7"], [GREEDY] * 2), "2 SamplingParams for 1"),
        (lambda llm: llm.chat(HELLO, "cold"), "must be SamplingParams, not 'cold'"),
        (lambda llm: llm.stream([7], {"n": 1}), "must be SamplingParams, not {"),
        (lambda llm: llm.stream(None), "a prompt is text or .* not NoneType"),
        (lambda llm: llm.stream(5), "a prompt is text or .* not int"),
    ],
)
def test_another_kind_of_thing_is_named(ask, named, llm):
    with pytest.raises(ValueError, match=named):
        ask(llm)
    assert not llm.engine.has_unfinished()


# ---- Memory, tables, bars ------------------------------------------------------------


def test_a_closed_llm_is_freed(talker):
    with LLM(talker, num_pages=8, device="cpu") as llm:
        weights = weakref.ref(llm.engine.runner.model.embed_tokens.weight)
        memory = weakref.ref(llm.engine.runner.memory[0])
        stream = llm.stream([7, 8], GREEDY)
        next(stream)
    assert weights() is None and memory() is None
    for use in (lambda: llm.generate("w7"), llm.stats, lambda: llm.stream("w7")):
        with pytest.raises(ValueError, match="closed"):
            use()
    assert "closed" in llm._repr_html_()
    llm.close()  # again: nothing to do
    gc.collect()


def test_a_notebook_shows_tables(llm):
    outputs = llm.generate(["w7 & <b>", [7, 8]], GREEDY)
    shown = outputs._repr_html_()
    assert "w7 &amp; &lt;b&gt;" in shown and "2 token ids" in shown
    assert shown.count("<tr>") == 3 and "length" in shown
    assert isinstance(outputs, list)
    told = pretty(outputs)
    assert told.count("\n") == 2 and "\nw7 & <b> | " in told and "metrics" not in told
    assert repr(llm).startswith("model | ") and " at 0x" not in repr(llm)
    about = llm._repr_html_()
    assert (
        '<th scope="row">page_size</th><td>4</td>' in about
    )  # chosen otherwise than usual
    assert '<th scope="row">lookups</th><td>2</td>' in about and "eviction" not in about


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "wanted", "slow", "drawn"),
    [
        (Terminal(), True, True, True),
        (Terminal(), True, False, False),
        (Terminal(), False, True, False),
        (io.StringIO(), True, True, False),
    ],
)
def test_a_bar_is_for_long_work_on_a_terminal(stream, wanted, slow, drawn, monkeypatch):
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr("minivllm.progress.PATIENCE_S", -1 if slow else 60)
    with progress_bar("requests", 2, wanted) as advance:
        advance(1)
        advance(1)
    assert ("requests" in stream.getvalue()) == drawn
