"""The default model on its real weights: parity with transformers, and the API."""

from itertools import pairwise

import pytest
import torch

from minivllm import SamplingParams
from minivllm.batch import Chunk
from minivllm.request import encode_ids
from minivllm.runner import ModelRunner
from minivllm.tokenizer import load_tokenizer

TEXT = (
    "A lighthouse keeper on a small island writes down the weather every evening, and "
    "the ships that pass. One night in November he writes that a ship without lights "
    "came from the north, "
)
PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "1, 2, 3, 4,",
    TEXT,
    TEXT + "and nobody",
    TEXT * 3,
    "def fibonacci(n):",
    "Water boils at",
]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def reference(smollm2_path):
    """transformers' own reading of the same file."""
    from transformers import AutoModelForCausalLM

    folder, file = str(smollm2_path.parent), smollm2_path.name
    return AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return load_tokenizer(smollm2[0])


def continue_greedily(reference, ids, num_tokens):
    """transformers' greedy continuation, and whether each choice was clear."""
    out = reference.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    margins = [(x := logits[0].topk(2).values)[0] - x[1] for logits in out.logits]
    return out.sequences[0, len(ids) :].tolist(), [m.item() > 1e-3 for m in margins]


def test_logits_over_prompt_and_32_decoded_steps(smollm2, reference, tokenizer):
    """Paged prefill in chunks, 32 decode steps, against a dense pass: within 2e-4."""
    ids = tokenizer.encode(TEXT * 2).ids
    answer, _ = continue_greedily(reference, ids, 32)
    known = encode_ids(ids + answer)
    with torch.inference_mode():
        expected = reference(torch.tensor([list(known)])).logits[0]
    runner = ModelRunner(smollm2[1], num_pages=16, page_size=16)
    pages = [11, 3, 7, 0, 14, 9, 1, 12, 5]
    cuts = [0, 20, 21, 50, len(ids), *range(len(ids) + 1, len(known) + 1)]
    for start, end in pairwise(cuts):
        logits = runner.logits(
            [Chunk("0", known[start:end], start, pages, 0, samples=True)]
        )
        assert (logits[0] - expected[end - 1]).abs().max() <= 2e-4


def test_logits_of_hits_on_real_weights(smollm2, reference, tokenizer):
    """a15, a16: a prefix of another request, a full hit and a decode, in one batch."""
    first = encode_ids(tokenizer.encode(TEXT).ids)
    second = first[:32] + encode_ids(tokenizer.encode("everybody slept.").ids)
    assert len(first) > 33
    aligned = first[:32]
    with torch.inference_mode():
        expected = [
            reference(torch.tensor([list(ids)])).logits[0, -1]
            for ids in (first, second, aligned)
        ]
    runner = ModelRunner(smollm2[1], num_pages=12, page_size=16)
    cold = [
        runner.logits([Chunk("0", ids, 0, pages, 0, samples=True)])[0]
        for ids, pages in [(first, [5, 0, 9]), (second, [3, 7, 1]), (aligned, [2, 8])]
    ]
    end = len(first) - 1
    hits = runner.logits(
        [
            Chunk("1", first[end:], end, [5, 0, 9], 0, samples=True),
            Chunk("2", second[32:], 32, [5, 0, 4], 2, samples=True),
            Chunk("3", aligned[31:], 31, [5, 0], 2, samples=True),
        ]
    )
    for hit, alone, wanted in zip(hits, cold, expected, strict=True):
        assert (hit - alone).abs().max() <= 1e-4
        assert (hit - wanted).abs().max() <= 2e-4


def test_the_whole_prompts_logits(smollm2, reference, tokenizer):
    """Every position of a prompt, not only the last of each chunk."""
    ids = encode_ids(tokenizer.encode(TEXT).ids)
    runner = ModelRunner(smollm2[1], num_pages=8, page_size=16)
    with torch.inference_mode():
        expected = reference(torch.tensor([list(ids)])).logits[0]
    for end in range(1, len(ids) + 1):
        logits = runner.logits(
            [Chunk("0", ids[end - 1 : end], end - 1, range(8), 0, samples=True)]
        )
        assert (logits[0] - expected[end - 1]).abs().max() <= 2e-4


@pytest.fixture(scope="module")
def continuations(reference, tokenizer):
    """What transformers makes of each prompt."""
    ids = {prompt: tokenizer.encode(prompt).ids for prompt in PROMPTS}
    return {prompt: continue_greedily(reference, ids[prompt], 12) for prompt in PROMPTS}


@pytest.mark.parametrize("index", ["radix", "hash", "none"])
def test_greedy_tokens_together_and_alone(index, make_llm, continuations):
    """Eight prompts of mixed length equal transformers, in a batch and one by one."""
    llm = make_llm(index=index, max_batch_tokens=64)
    together = llm.generate(PROMPTS, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    for prompt, batched, single in zip(PROMPTS, together, alone, strict=True):
        expected, clear = continuations[prompt]
        sure = clear.index(False) if False in clear else len(clear)
        assert batched.prompt == prompt
        assert batched.outputs[0].token_ids[:sure] == expected[:sure]
        assert single.outputs[0].token_ids[:sure] == expected[:sure]
    cached = [output.num_cached_tokens for output in alone]
    pages = [(len(output.prompt_token_ids) - 1) // 16 * 16 for output in alone]
    assert cached == ([0] * 8 if index == "none" else pages)
    llm.engine.scheduler.cache.check()


def test_tokenizer_equals_transformers(smollm2_path, tokenizer):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(
        str(smollm2_path.parent), gguf_file=smollm2_path.name
    )
    chat = "<|im_start|>user\nHow are you?<|im_end|>\n"
    for text in [
        *PROMPTS,
        chat,
        "  two  spaces\n\n\ttab",
        "été 😀 it's I'LL",
        "x=12345.678",
    ]:
        assert tokenizer.encode(text).ids == theirs.encode(text)
        assert (
            tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)
            == text
        )


def test_the_puzzle(make_llm):
    """Cold twins under publish=finish reuse 0 and 0, the third its full pages."""
    llm = make_llm(publish="finish", single_flight="none")
    params = SamplingParams(temperature=0, max_tokens=2)
    ids = llm.tokenizer.encode(TEXT * 3).ids
    first, second = llm.generate([ids, ids], params)
    third = llm.generate(ids, params)[0]
    cached = [o.num_cached_tokens for o in (first, second, third)]
    assert cached == [0, 0, len(ids) // 16 * 16]
    texts = {o.outputs[0].text for o in (first, second, third)}
    assert len(texts) == 1


def test_generate_takes_what_vllm_takes(make_llm):
    llm = make_llm(block_size=8, max_num_seqs=4, max_num_batched_tokens=128)
    assert (llm.options.page_size, llm.options.max_running) == (8, 4)
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (1, 3)]
    one, two = llm.generate(["Hello", [504, 3575, 282]], params)
    assert len(one.outputs[0].token_ids) == 1 and len(two.outputs[0].token_ids) == 3
    assert one.prompt == "Hello" and two.prompt is None
    assert one.metrics.ttft_s > 0 and one.metrics.e2e_s >= one.metrics.ttft_s
    assert llm.generate([]) == []
    assert make_llm(enable_prefix_caching=False).options.index == "none"


@pytest.mark.parametrize(
    ("prompts", "fault"),
    [
        (["fine", ""], "empty"),
        (["fine", [49_152]], "49152"),
        (["fine", [1] * 8_192], "context"),
        (["fine", 3.5], "float"),
        (["fine", None], "NoneType"),
        ([["a", "b"]], "integers"),
        (["bad \udcff byte"], "not valid text"),
    ],
)
def test_one_bad_prompt_submits_none(prompts, fault, make_llm):
    llm = make_llm()
    with pytest.raises(ValueError, match=fault):
        llm.generate(prompts)
    assert llm.stats()["lookups"] == 0 and not llm.engine.has_unfinished()


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"index": "tree"}, "radix, hash, none"),
        ({"single_flight": "early"}, "single_flight"),
        ({"page_size": 0}, "page_size"),
        ({"num_pages": 1.5}, "num_pages"),
        ({"pages": 3}, "unknown option 'pages'"),
        ({"block_size": 4, "page_size": 4}, "same option"),
        ({"device": "tpu"}, "tpu"),
        ({"dtype": "int8"}, "dtype"),
        ({"num_pages": 10**18}, "lower num_pages"),
        ({"num_pages": 9, "page_size": 2**62, "kernels": "torch"}, "lower num_pages"),
    ],
)
def test_bad_options_are_named(options, fault, make_llm):
    with pytest.raises(ValueError, match=fault):
        make_llm(**options)


def test_an_interrupted_generate_leaves_nothing_running(make_llm, monkeypatch):
    llm = make_llm()

    def interrupt(chunks):
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine.runner, "run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["Hello", "World"])
    assert not llm.engine.has_unfinished()
    llm.engine.scheduler.cache.check()


def test_a_seed_gives_one_text_alone_and_in_company(make_llm):
    """f7: seed 42 alone, then beside unseeded neighbours, which differ."""
    llm = make_llm()
    seeded = SamplingParams(temperature=1.2, seed=42, max_tokens=8)
    free = SamplingParams(temperature=1.2, max_tokens=8)
    alone = llm.generate(TEXT, seeded)[0].outputs[0].token_ids
    outputs = llm.generate([TEXT, TEXT, TEXT], [free, seeded, free])
    texts = [output.outputs[0].token_ids for output in outputs]
    assert texts[1] == alone and texts[0] != texts[2]


def test_stop_strings_and_text(make_llm):
    """A stop string across token borders ends the text before it; the ids stay."""
    llm = make_llm()
    params = SamplingParams(temperature=0, max_tokens=20)
    whole = llm.generate(PROMPTS[0], params)[0].outputs[0]
    assert "Paris" in whole.text
    stop = whole.text[3:9]
    cut = llm.generate(
        PROMPTS[0], SamplingParams(temperature=0, max_tokens=20, stop=stop)
    )[0]
    assert (
        cut.outputs[0].text == whole.text[:3] and cut.outputs[0].finish_reason == "stop"
    )
    assert whole.token_ids[: len(cut.outputs[0].token_ids)] == cut.outputs[0].token_ids


def test_a_stop_string_ends_what_token_ids_began(make_llm):
    """The prompt has no text; its continuation has, and the stop string is found."""
    llm = make_llm()
    ids = llm.tokenizer.encode(PROMPTS[0]).ids
    params = SamplingParams(temperature=0, max_tokens=20, stop=["is."])
    by_text, by_ids = llm.generate([PROMPTS[0], ids], params)
    for output in (by_text, by_ids):
        [answer] = output.outputs
        assert answer.text == " Par" and answer.finish_reason == "stop"
        assert answer.stop_reason == "is."
    assert by_ids.prompt is None and by_ids.prompt_token_ids == ids


def test_logprobs_spell_their_tokens(make_llm):
    """The words of prompt and answer are there, and likely; so is what stood second."""
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=0)
    [output] = make_llm(num_pages=32).generate(["The capital of France is"], params)
    [answer] = output.outputs
    assert answer.text.startswith(" Paris")
    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
    said = [table[token] for token, table in pairs]
    assert "".join(entry.decoded_token for entry in said) == answer.text
    assert all(entry.rank == 1 and entry.logprob < 0 for entry in said)
    assert all(len(table) == 2 for table in answer.logprobs)
    ids = output.prompt_token_ids
    prompt = [
        table[token].decoded_token
        for token, table in zip(ids[1:], output.prompt_logprobs[1:], strict=True)
    ]
    assert prompt == [" capital", " of", " France", " is"]


def test_sixteen_bit(smollm2, make_llm):
    """bfloat16 and float16 run on the CPU and find Paris."""
    from minivllm.loader import load_model
    from minivllm.model import Decoder

    checkpoint, _ = smollm2
    for dtype in (torch.bfloat16, torch.float16):
        decoder: Decoder = load_model(checkpoint, torch.device("cpu"), dtype)
        runner = ModelRunner(decoder, num_pages=4, page_size=16)
        ids = encode_ids(load_tokenizer(checkpoint).encode(PROMPTS[0]).ids)
        (token,) = runner.run([Chunk("0", ids, 0, [2], 0, samples=True)])
        assert load_tokenizer(checkpoint).decode([token]) == " Paris"


def test_a_history_is_found_up_to_its_first_other_token(
    make_llm,
):
    """d11: sent back as ids, a chat hits all full pages; as text, what is alike."""
    llm = make_llm(page_size=4)
    first = llm.generate(TEXT, GREEDY)[0]
    history = [*first.prompt_token_ids, *first.outputs[0].token_ids]
    follow_up = llm.tokenizer.encode(" And then?").ids
    by_ids = llm.generate([*history, *follow_up], GREEDY)[0]
    assert by_ids.num_cached_tokens == (len(history) - 1) // 4 * 4, (
        "no K/V for the last"
    )
    assert llm.reset_prefix_cache()
    llm.generate(TEXT, GREEDY)
    by_text = llm.generate(TEXT + first.outputs[0].text + " And then?", GREEDY)[0]
    pairs = zip(by_text.prompt_token_ids, history, strict=False)
    alike = next((i for i, (a, b) in enumerate(pairs) if a != b), len(history))
    assert by_text.num_cached_tokens == min(alike, len(history) - 1) // 4 * 4


def test_outputs_answer_their_prompts_in_order(make_llm):
    """d12: long and short prompts, three at a time."""
    llm = make_llm(max_running=3, max_batch_tokens=16)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.prompt for output in outputs] == PROMPTS
    assert all(
        output.outputs[0].token_ids
        == llm.generate(prompt, GREEDY)[0].outputs[0].token_ids
        for prompt, output in list(zip(PROMPTS, outputs, strict=True))[:3]
    )
