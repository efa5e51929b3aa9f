"""GGUF files: every quantisation, Llama 3's rotation, tokenizers, memory."""

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quantize
from gguf_files import gguf_name, write_gguf
from tiny_models import MODELS, tiny
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from minivllm import LLM, SamplingParams
from minivllm.loader import LoadError, load_model, open_checkpoint
from minivllm.model import Decoder, ModelConfig
from minivllm.tokenizer import PRE_TOKENIZERS, load_tokenizer

SIZES = ModelConfig(64, 256, 256, 1, 4, 2, 64, 128)
CPU = torch.device("cpu")
Q = GGMLQuantizationType
QUANTISED = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0"]
PACKED = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ2_XS", "IQ2_S"]
PACKED += ["IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS", "NVFP4"]


def load(path, dtype=torch.float32):
    return load_model(open_checkpoint(path), CPU, dtype)


@pytest.fixture(scope="module")
def weights():
    torch.manual_seed(0)
    return {n: torch.randn(p.shape) for n, p in Decoder(SIZES).named_parameters()}


@pytest.mark.parametrize("name", [*QUANTISED, "MXFP4"])
def test_what_gguf_can_pack_we_unpack(name, weights, tmp_path, monkeypatch):
    """Row by row in our order, exactly what the packed rows mean; in several chunks."""
    if (kind := getattr(Q, name, None)) is None:
        pytest.skip("this gguf does not know it")
    monkeypatch.setattr("minivllm.loader.CHUNK", 5 * 256)
    path = write_gguf(tmp_path / "x.gguf", SIZES, weights, kind)
    for found, tensor in load(path).named_parameters():
        whole = weights[found].numpy()
        packed = quantize(whole, kind if whole.ndim == 2 else Q.F32)
        meant = dequantize(packed, kind if whole.ndim == 2 else Q.F32)
        assert torch.equal(tensor, torch.from_numpy(meant)), found
        assert np.corrcoef(whole.ravel(), tensor.numpy().ravel())[0, 1] > 0.6


@pytest.mark.parametrize("name", PACKED)
def test_what_gguf_cannot_pack_we_unpack(name, weights, tmp_path):
    """Raw blocks in one matrix; the others are plain."""
    if (kind := getattr(Q, name, None)) is None:
        pytest.skip("this gguf does not know it")
    values, size = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 60, (256, 256 // values * size))
    raw = raw.astype(np.uint8)
    target = "layers.0.mlp.up_proj.weight"
    rest = {n: t for n, t in weights.items() if n != target}
    from gguf import GGUFWriter

    adds = GGUFWriter.add_tensor

    def add(writer, where, array, **kept):
        if array is raw:
            kept = {"raw_dtype": kind}
        adds(writer, where, array, **kept)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GGUFWriter, "add_tensor", add)
        more = {gguf_name(target): raw}
        path = write_gguf(tmp_path / "x.gguf", SIZES, rest, tensors=more)
    found = load(path).get_parameter(target)
    meant = torch.from_numpy(dequantize(raw, kind))
    assert found.shape == (256, 256)
    assert torch.equal(found.nan_to_num(), meant.nan_to_num())


def test_an_unknown_packing_is_one_line(weights, tmp_path):
    more = {"blk.0.ffn_up.weight": np.zeros((256, 256), np.int32)}
    rest = {n: t for n, t in weights.items() if "up_proj" not in n}
    path = write_gguf(tmp_path / "x.gguf", SIZES, rest, tensors=more)
    with pytest.raises(LoadError, match=r"x\.gguf cannot be read as a model: .*I32"):
        load(path)


# ---- The rotation of Llama 3 ---------------------------------------------------------


def as_gguf(model, path, **more):
    return write_gguf(
        path, model.decoder.config, dict(model.decoder.named_parameters()), **more
    )


def test_a_stretched_rotation(tmp_path):
    """rope_freqs.weight divides the frequencies: logits as transformers has them."""
    model = tiny("llama 3 rope")
    config = model.decoder.config
    steps = torch.arange(0, config.head_dim, 2) / config.head_dim
    plain = config.rope_theta**-steps
    factors = plain / model.reference.model.rotary_emb.inv_freq
    assert factors.max() > 4
    named = {"rope_freqs.weight": factors.numpy()}
    llm = LLM(as_gguf(model, tmp_path / "x.gguf", tensors=named), num_pages=32)
    assert torch.allclose(
        llm.engine.runner.model.frequencies, model.decoder.frequencies, rtol=1e-6
    )
    ids = [3 + i % 90 for i in range(120)]
    params = SamplingParams(temperature=0, max_tokens=1)
    expected = int(model.logits(ids)[-1].argmax())
    assert llm.generate(ids, params)[0].outputs[0].token_ids == [expected]


@pytest.mark.parametrize("factors", [np.ones(3, np.float32), np.zeros(2, np.float32)])
def test_factors_that_do_not_fit(factors, tmp_path):
    named = {"rope_freqs.weight": factors}
    path = as_gguf(tiny("llama 3 rope"), tmp_path / "x.gguf", tensors=named)
    with pytest.raises(LoadError, match=r"rope_freqs\.weight must be 2 numbers"):
        load(path)


@pytest.mark.parametrize(
    "name", ["qwen2, biases", "qwen3, head norms", "llama, three heads a group"]
)
def test_each_family_has_the_same_logits(name, tmp_path):
    """A tiny model as GGUF and as transformers wrote it."""
    model = tiny(name)
    family = MODELS[name][1].model_type
    path = as_gguf(model, tmp_path / "x.gguf", family=family)
    again = load(path)
    for found, tensor in again.named_parameters():
        assert torch.equal(tensor, model.decoder.get_parameter(found)), found
    kept = replace(again.config, eos_token_ids=frozenset())
    assert kept == replace(
        model.decoder.config, eos_token_ids=frozenset(), norm_eps=kept.norm_eps
    )


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"llama.rope.scaling.factor": 4.0}, "rope scaling"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling"),
        ({"llama.attention.value_length": 32}, "another size of values"),
        ({"llama.attention.value_length": 64, "llama.rope.scaling.factor": 0.0}, None),
        ({"tokenizer.ggml.eos_token_id": 64}, "the end token 64 is not in"),
        ({"llama.attention.head_count": 0}, "head_count must be a whole number"),
    ],
)
def test_what_would_change_the_numbers(facts, named, weights, tmp_path):
    path = write_gguf(tmp_path / "x.gguf", SIZES, weights, facts=facts)
    if named is None:
        assert load(path)
        return
    with pytest.raises(LoadError, match=named):
        load(path)


WORDS = {"model": "llama", "scores": [0.0] * SIZES.vocab_size}


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        (WORDS | {"bos_token_id": 5000}, "bos token 5000 is no token"),
        (WORDS | {"unknown_token_id": 999}, "unknown token 999 is no token"),
        (WORDS | {"token_type": [1, 1]}, "token_type has not one entry"),
        ({"model": "llama", "scores": [0.0]}, "scores has not one entry"),
        ({"chat_template": 5}, "chat_template is no text"),
        ({"chat_template": ["a", "b"]}, "chat_template is no text"),
    ],
)
def test_words_that_do_not_fit(facts, named, weights, tmp_path):
    named_facts = {f"tokenizer.ggml.{k}": v for k, v in facts.items()}
    if "chat_template" in facts:
        named_facts = {"tokenizer.chat_template": facts["chat_template"]}
    path = write_gguf(tmp_path / "x.gguf", SIZES, weights, facts=named_facts)
    with pytest.raises(LoadError, match=named):
        LLM(path, num_pages=4)


def test_text_that_is_none_is_named(weights, tmp_path):
    """A byte that is not UTF-8, in a text of the file."""
    facts = {"tokenizer.chat_template": "MARKED"}
    path = write_gguf(tmp_path / "x.gguf", SIZES, weights, facts=facts)
    path.write_bytes(path.read_bytes().replace(b"MARKED", b"MAR\xffED"))
    with pytest.raises(LoadError, match=r"x\.gguf: tokenizer\.chat_template cannot"):
        LLM(path, num_pages=4)


def test_a_file_that_is_cut_off_says_so(weights, tmp_path):
    """Wherever: at its head, within a list, a tensor's table, the last tensor."""
    path = write_gguf(tmp_path / "x.gguf", SIZES, weights)
    whole = path.read_bytes()
    assert load(path)
    for size in [*range(1, 4000, 97), len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(LoadError, match="it ends") as told:
            load(path)
        assert "x.gguf" in str(told.value) and "\n" not in str(told.value)


def test_lists_are_read_as_the_package_reads_them():
    """Every value of the default model's file, and no list in thousands of parts."""
    file = open_checkpoint("smollm2")
    theirs = GGUFReader(str(file.path))
    assert len(theirs.fields) > 30
    for name, field in theirs.fields.items():
        assert file.get(name) == field.contents(), name
        assert len(file._reader.fields[name].parts) < 8
    for ours, told in zip(file._reader.tensors, theirs.tensors, strict=True):
        assert ours.name == told.name and np.array_equal(ours.data, told.data)


# ---- Tokenizers ----------------------------------------------------------------------

TEXTS = [
    "Hello world, it's I'LL  2024-12345 x=1.5\n\n\tdone  ",
    "été e\u0301 naïve 😀 東京 ٣٤٥",
    "",
    " leading",
    "a\r\n b",
]


@pytest.fixture(scope="module")
def pieces():
    """A vocabulary of byte pairs and its merges, learned from little."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, show_progress=False
    )
    learner.train_from_iterator(
        [*TEXTS, *(f"the {i} of it's" for i in range(99))], trainer
    )
    import json

    table = json.loads(learner.to_str())["model"]
    words = sorted(table["vocab"], key=table["vocab"].get)
    return words, [" ".join(pair) for pair in table["merges"]]


def tokenizer_of(tmp_path, words, **facts):
    named = {f"tokenizer.ggml.{key}": value for key, value in facts.items()}
    path = write_gguf(tmp_path / "x.gguf", SIZES, {}, vocabulary=words, facts=named)
    return load_tokenizer(open_checkpoint(path))


def test_qwen2_words(pieces, tmp_path):
    from transformers import Qwen2Tokenizer

    words, merges = pieces
    pairs = [tuple(m.split(" ")) for m in merges]
    theirs = Qwen2Tokenizer(vocab={w: i for i, w in enumerate(words)}, merges=pairs)
    ours = tokenizer_of(tmp_path, words, model="gpt2", pre="qwen2", merges=merges)
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.backend_tokenizer.encode(text).ids


def test_llama3_words(pieces, tmp_path):
    """Cut as transformers' converter cuts; begun once; whole words are not merged."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    words, merges = pieces
    # A word that no merge makes, and the token that begins a text.
    words = [*words, "Ġwhole", "<|begin_of_text|>"]
    begin = len(words) - 1
    facts = {"model": "gpt2", "pre": "llama-bpe", "merges": merges}
    ours = tokenizer_of(tmp_path, words, **facts, bos_token_id=begin)
    assert ours.encode(" whole").ids == [begin, begin - 1]
    pattern = TikTokenConverter(vocab_file="").pattern
    from tokenizers import Regex

    cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    for text in TEXTS:
        spans = [span for _, span in PRE_TOKENIZERS["llama-bpe"].pre_tokenize_str(text)]
        assert spans == [span for _, span in cut.pre_tokenize_str(text)]
    quiet = tokenizer_of(tmp_path, words, **facts, add_bos_token=False)
    assert quiet.encode(" whole").ids == [begin - 1]


SCORED = ["▁", "h", "e", "l", "o", "w", "r", "d"]
PAIRS = [
    "he",
    "ll",
    "hell",
    "▁w",
    "or",
    "ld",
    "▁hell",
    "hello",
    "▁hello",
    "lo",
    "wor",
    "▁wor",
]


def naive(text, scores):
    """SentencePiece's rule, word for word: the best neighbours first."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [left + right for left, right in pairwise(parts)]
        known = [i for i, word in enumerate(joined) if word in scores]
        if not known:
            return parts
        at = max(known, key=lambda i: (scores[joined[i]], -i))
        parts[at : at + 2] = [joined[at]]


def test_sentencepiece_words(tmp_path):
    """Scores decide; unknown characters become bytes, and come back; a <s> begins."""
    spelt = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["<unk>", "<s>", "</s>", *spelt, *PAIRS, *SCORED]
    scores = [0.0] * 259 + [-float(i) for i in range(len(PAIRS) + len(SCORED))]
    facts = {"model": "llama", "scores": scores, "bos_token_id": 1, "eos_token_id": 2}
    ours = tokenizer_of(tmp_path, words, **facts)
    table = dict(zip(words, scores, strict=True))
    for text in ("hello world", "hell hello low", "world  hold", "llllo"):
        encoded = ours.encode(text)
        assert encoded.tokens == ["<s>", *naive(text, table)]
        assert ours.decode(encoded.ids) == text
    assert ours.encode("é").tokens == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert ours.decode(ours.encode("hé 😀").ids) == "hé 😀"
    bare = tokenizer_of(
        tmp_path, words, **facts, add_space_prefix=False, add_bos_token=False
    )
    assert (
        bare.encode("hello").tokens == ["hello"] and bare.decode([1, 267]) is not None
    )


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"model": "bert"}, "tokenizer 'bert'"),
        ({"model": "gpt2", "pre": "falcon"}, "'falcon' is not known"),
    ],
)
def test_an_unknown_tokenizer_is_one_line(facts, named, tmp_path):
    with pytest.raises(LoadError, match=named):
        tokenizer_of(tmp_path, ["a", "b"], **facts)


def test_a_template_out_of_the_file(tmp_path):
    from minivllm.chat import load_template

    facts = {
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
        "tokenizer.ggml.bos_token_id": 1,
    }
    path = write_gguf(
        tmp_path / "x.gguf", SIZES, {}, vocabulary=["<unk>", "<s>"], facts=facts
    )
    message = [{"role": "user", "content": "Hi"}]
    assert load_template(open_checkpoint(path)).render(message) == "<s>Hi"


# ---- Memory --------------------------------------------------------------------------

MEASURE = """
import sys, threading, time, torch
from minivllm.llm import choose_backend
from minivllm.loader import load_model, open_checkpoint
from minivllm.runner import ModelRunner
CPU = torch.device("cpu")
def own():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("VmRSS"))
def watch():
    while not done:
        peak[0] = max(peak[0], own())
        time.sleep(0.0005)
def load(path):
    model = load_model(open_checkpoint(path), CPU, dtype, False, backend.empty)
    size = sum(p.numel() * p.element_size() for p in set(model.parameters()))
    return size, ModelRunner(model, 4, 16, backend=backend)
warm, *paths = sys.argv[3:]
dtype = getattr(torch, sys.argv[1])
backend = choose_backend(sys.argv[2], CPU, dtype)
load(warm)
for path in paths:
    before, peak, done = own(), [0], False
    thread = threading.Thread(target=watch)
    thread.start()
    size, runner = load(path)
    done = True
    thread.join()
    print((peak[0] - before) / size, (own() - before) / size, size)
    del runner
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("dtype", "kernels", "limit"),
    [
        ("float32", "auto", 1.3),
        ("bfloat16", "auto", 1.3),
        ("float32", "torch", 1.8),  # a packed head is a copy: for a while, or if tied
    ],
)
def test_a_model_is_in_memory_once(weights, tmp_path, dtype, kernels, limit):
    """The process grows by little more than the weights, from a file to a runner."""
    large = ModelConfig(30_000, 1024, 2048, 4, 8, 4, 128, 128)
    runs = [write_gguf(tmp_path / "warm.gguf", SIZES, weights)]
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in Decoder(large).named_parameters()}
    ones = {n: torch.ones(shape) for n, shape in shapes.items()}
    runs.append(write_gguf(tmp_path / "large.gguf", large, ones, Q.Q8_0))
    runs.append(write_folder(tmp_path / "large", large, ones))
    asked = [sys.executable, "-c", MEASURE, dtype, kernels, *map(str, runs), "smollm2"]
    done = subprocess.run(asked, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    rows = [[*map(float, line.split())] for line in done.stdout.splitlines()]

    assert len(rows) == 3 and rows[0][2] > 198e6
    assert max(peak for peak, _, _ in rows) < limit, rows
    assert min(now for _, now, _ in rows) > 0.9, "it is there at all"


def write_folder(folder, size, weights):
    """The same as a folder in bfloat16, in shards with an index."""
    import json

    from safetensors.torch import save_file

    folder.mkdir()
    names = sorted(weights)
    index = {}
    for number in range(2):
        file = f"model-{number}.safetensors"
        part = {f"model.{n}": weights[n].bfloat16() for n in names[number::2]}
        save_file(part, folder / file)
        index |= dict.fromkeys(part, file)
    table = folder / "model.safetensors.index.json"
    table.write_text(json.dumps({"weight_map": index}), "utf-8")
    config = {
        "model_type": "llama",
        "vocab_size": size.vocab_size,
        "hidden_size": size.hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": size.head_dim,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder
