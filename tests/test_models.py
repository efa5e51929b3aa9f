"""Loading and parity: small random checkpoints that transformers itself writes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from minivllm import LLM, SamplingParams
from minivllm.batch import Chunk
from minivllm.loader import LoadError, load_model, open_checkpoint, read_config
from minivllm.model import ModelConfig, rope_frequencies
from minivllm.request import encode_ids
from minivllm.runner import ModelRunner

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "llama, one K/V head for each head": (
        LlamaForCausalLM,
        LlamaConfig,
        {"num_key_value_heads": 12},
    ),
    "llama, three heads a group": (
        LlamaForCausalLM,
        LlamaConfig,
        {"num_key_value_heads": 4},
    ),
    "llama, four heads a group, wide heads, tied": (
        LlamaForCausalLM,
        LlamaConfig,
        {"num_key_value_heads": 3, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "llama 3 rope": (
        LlamaForCausalLM,
        LlamaConfig,
        {"num_key_value_heads": 4, "rope_parameters": LLAMA3},
    ),
    "qwen2, biases": (Qwen2ForCausalLM, Qwen2Config, {"num_key_value_heads": 4}),
    "qwen3, head norms": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"num_key_value_heads": 4, "head_dim": 16},
    ),
}


def write_checkpoint(folder, name, **save):
    make_model, make_config, extra = MODELS[name]
    torch.manual_seed(0)
    model = make_model(make_config(**SIZES | extra)).eval()
    for tensor in model.parameters():  # biases and norms start as constants: stir them
        tensor.data += 0.1 * torch.randn_like(tensor)
    model.save_pretrained(folder, **save)
    return model


def load(folder):
    return load_model(open_checkpoint(str(folder)), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name, tmp_path):
    """In one go, in chunks, from another request's pages, and beside other requests."""
    reference = write_checkpoint(tmp_path, name)
    runner = ModelRunner(load(tmp_path), num_pages=12, page_size=4)
    tokens, other = (
        encode_ids([(k * i + 1) % 101 for i in range(21)]) for k in (7, 11)
    )
    with torch.inference_mode():
        expected, other_expected = (
            reference(torch.tensor([list(ids)])).logits[0, -1]
            for ids in (tokens, other)
        )
    mine, theirs = [5, 0, 9, 3, 7, 1], [2, 8, 4, 10, 6, 11]

    def chunk(ids, start, end, pages, num_shared=0):
        return Chunk(
            "0", ids[start:end], start, pages, num_shared, samples=end == len(ids)
        )

    whole = runner.logits([chunk(tokens, 0, 21, mine)])[0]
    assert runner.run([chunk(tokens, 0, 9, mine)]) == [None]
    runner.logits([chunk(tokens, 9, 20, mine), chunk(other, 0, 13, theirs)])
    both = runner.logits([chunk(tokens, 20, 21, mine), chunk(other, 13, 21, theirs)])
    shared = runner.logits([chunk(tokens, 16, 21, [*mine[:4], 8, 2], num_shared=4)])[0]
    for logits, wanted in [
        (whole, expected),
        (both[0], expected),
        (both[1], other_expected),
        (shared, expected),
    ]:
        assert (logits - wanted).abs().max() < 1e-4


def test_the_first_key_matters(tmp_path):
    """h13: the comparison above must fail when a stored key is removed."""
    reference = write_checkpoint(tmp_path, "qwen2, biases")
    runner = ModelRunner(load(tmp_path), num_pages=4, page_size=4)
    tokens = encode_ids(range(8))
    runner.logits([Chunk("0", tokens[:7], 0, [0, 1], 0, samples=False)])
    for memory in runner.memory:
        memory.keys[0] = 0
    broken = runner.logits([Chunk("0", tokens[7:], 7, [0, 1], 0, samples=True)])[0]
    with torch.inference_mode():
        expected = reference(torch.tensor([list(tokens)])).logits[0, -1]
    assert (broken - expected).abs().max() > 1e-3


def test_llama3_rope_scaling():
    """g6: theta 5e5, 128-wide heads, factor 8, 1 and 4, 8192."""
    scaling = {
        "factor": 8,
        "low_freq_factor": 1,
        "high_freq_factor": 4,
        "original_max_position_embeddings": 8192,
    }
    shape = {"head_dim": 128, "max_context": 1, "rope_theta": 5e5}
    plain = rope_frequencies(ModelConfig(1, 1, 1, 1, 1, 1, **shape))
    scaled = rope_frequencies(
        ModelConfig(1, 1, 1, 1, 1, 1, rope_scaling=scaling, **shape)
    )
    ratio = scaled / plain
    for i, expected in [
        (28, 1),
        (29, 0.82817),
        (31, 0.49351),
        (35, 0.125),
        (63, 0.125),
    ]:
        assert abs(ratio[i].item() - expected) < 1e-4


def test_shards_and_their_index(tmp_path):
    """g4, g5: shards load; the index decides; a lost shard is named."""
    write_checkpoint(tmp_path, "llama, three heads a group", max_shard_size="40KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text("utf-8"))
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 1
    expected = load(tmp_path).norm.weight
    foreign = next(s for s in shards if s != index["weight_map"]["model.norm.weight"])
    tensors = load_file(tmp_path / foreign) | {
        "model.norm.weight": torch.full((48,), 9.0)
    }
    save_file(tensors, tmp_path / foreign)
    assert torch.equal(load(tmp_path).norm.weight, expected)
    (tmp_path / foreign).unlink()
    with pytest.raises(LoadError, match=foreign):
        load(tmp_path)


def edit(folder, remove=(), config=None, **tensors):
    path = folder / "model.safetensors"
    kept = {n: t for n, t in load_file(path).items() if n not in remove}
    save_file(kept | tensors, path)
    if config:
        raw = json.loads((folder / "config.json").read_text("utf-8")) | config
        (folder / "config.json").write_text(json.dumps(raw), "utf-8")


def test_tied_heads(tmp_path):
    """g2: tied without and with a head in the file: the embedding is the head."""
    write_checkpoint(tmp_path, "llama, four heads a group, wide heads, tied")
    for extra in ({}, {"lm_head.weight": torch.zeros(101, 48)}):
        edit(tmp_path, **extra)
        model = load(tmp_path)
        assert model.lm_head.weight is model.embed_tokens.weight


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"remove": ["lm_head.weight"]}, "lm_head.weight"),  # g3
        (
            {"remove": ["model.layers.1.mlp.up_proj.weight"]},
            "layers.1.mlp.up_proj.weight",
        ),
        ({"model.layers.0.extra.weight": torch.zeros(1)}, "layers.0.extra.weight"),
        ({"model.norm.weight": torch.zeros(7)}, "norm.weight"),
        ({"config": {"model_type": "mamba"}}, "unknown architecture 'mamba'"),
        ({"config": {"attention_bias": True}}, "attention_bias"),
        ({"config": {"use_sliding_window": True}}, "use_sliding_window"),
        ({"config": {"hidden_act": "gelu"}}, "hidden_act=gelu"),
        (
            {"config": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}},
            "yarn",
        ),
    ],
)
def test_what_does_not_fit_is_named(change, named, tmp_path):
    write_checkpoint(tmp_path, "llama, three heads a group")
    edit(tmp_path, **change)
    with pytest.raises(LoadError, match=named.replace(".", r"\.")):
        load(tmp_path)


def test_broken_files_are_named(tmp_path):
    write_checkpoint(tmp_path, "llama, three heads a group")
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(LoadError, match=r"model\.safetensors"):
        load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(LoadError, match="neither"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{", "utf-8")
    with pytest.raises(LoadError, match=r"config\.json"):
        load(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"GGUX")
    with pytest.raises(LoadError, match=r"x\.gguf"):
        open_checkpoint(str(tmp_path / "x.gguf"))
    with pytest.raises(LoadError, match="no model at"):
        open_checkpoint(str(tmp_path / "nowhere"))


def test_end_tokens_of_both_files(tmp_path):
    """g7: generation_config.json and config.json together."""
    write_checkpoint(tmp_path, "llama, three heads a group")
    (tmp_path / "generation_config.json").write_text(
        '{"eos_token_id": [5, 6]}', "utf-8"
    )
    assert read_config(tmp_path).eos_token_ids == {2, 5, 6}


def test_a_folder_without_tokenizer_works_with_ids(tmp_path):
    write_checkpoint(tmp_path, "qwen3, head norms")
    llm = LLM(str(tmp_path), num_pages=32, page_size=4)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    (output,) = llm.generate([1, 2, 3, 4, 5], params)
    assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 3
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.generate("text", params)


def byte_tokenizer_file(folder, **settings):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:90]
    words = {c: i for i, c in enumerate([*alphabet, "<end>"])}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")


def test_settings_of_a_tokenizers_training_are_not_obeyed(tmp_path):
    """A saved truncation or padding would change prompts in silence."""
    write_checkpoint(tmp_path, "llama, three heads a group")
    byte_tokenizer_file(tmp_path)
    assert (
        len(LLM(str(tmp_path), num_pages=16).tokenizer.encode("ABCDEFGHIJ").ids) == 10
    )


@pytest.mark.parametrize("name", ["<end>", {"content": "<end>"}])
def test_the_tokenizers_end_token_ends(name, tmp_path):
    """g7: a third end token, in tokenizer_config.json."""
    write_checkpoint(tmp_path, "llama, three heads a group")
    byte_tokenizer_file(tmp_path, eos_token=name)
    llm = LLM(str(tmp_path), num_pages=16)
    assert llm.engine.limits.eos_token_ids == {2, 90}


def test_prompts_of_other_kinds(tmp_path):
    """Arrays and tensors are token ids; generators, sets and bytes are named."""
    write_checkpoint(tmp_path, "llama, three heads a group")
    llm = LLM(tmp_path, num_pages=16)
    params = SamplingParams(temperature=0, max_tokens=1)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    batch = [llm.generate(x, params) for x in (ids, ids.numpy(), list(ids.numpy()))]
    assert all([o.prompt_token_ids for o in out] == ids.tolist() for out in batch)
    for wrong in ({1, 2}, None, b"abc", {"prompt": "x"}, [1.5], [["a"]]):
        with pytest.raises(ValueError, match="prompt"):
            llm.generate(wrong, params)
