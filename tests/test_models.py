"""Loading: what a checkpoint says is what runs, or one line says why not."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_chat import Terminal
from tiny_models import MODELS, load, write_checkpoint
from tokenizers import Tokenizer, models, pre_tokenizers

from minivllm import LLM, SamplingParams
from minivllm.loader import LoadError, load_model, open_checkpoint, read_config


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


UP = "model.layers.0.mlp.up_proj.weight"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


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
        (
            {"config": {"model_type": "mistral", "sliding_window": 8}},
            "'mistral'",
        ),  # c11
        ({"config": {"use_sliding_window": True}}, "use_sliding_window"),
        ({"config": {"layer_types": 3 * ["sliding_attention"]}}, "layer_types"),
        ({"config": {"hidden_act": "gelu"}}, "hidden_act=gelu"),
        (
            {"config": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}},
            "yarn",
        ),
        ({"config": {"tie_word_embeddings": "false"}}, "tie_word_embeddings is"),
        ({"config": {"rope_parameters": {"rope_theta": 0}}}, "rope_theta must be"),
        ({"config": {"num_key_value_heads": 0}}, "num_kv_heads must be"),
        ({"config": {"num_attention_heads": 0}}, "num_attention_heads must be"),
        ({"config": {"hidden_size": None}}, "hidden_size must be"),
        ({"config": {"rms_norm_eps": float("nan")}}, "norm_eps must be"),
        ({"config": {"rms_norm_eps": float("inf")}}, "norm_eps must be"),
        ({"config": {"rope_parameters": {"rope_theta": float("nan")}}}, "rope_theta"),
        ({"config": {"rope_parameters": "x"}}, "rope_parameters must be a dict"),
        ({"config": {"rope_scaling": "x"}}, "rope_scaling must be a dict"),
        ({"config": {"layer_types": 5}}, "layer_types must be a list"),
        ({"config": {"rope_scaling": LLAMA3 | {"factor": 0}}}, "is no scaling"),
        ({"config": {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}}, "no scaling"),
        ({"config": {"rope_scaling": {"rope_type": "llama3"}}}, "no 'factor'"),
        ({UP: torch.ones(64, 48, dtype=torch.int8)}, "numbers of torch.int8"),
        ({UP: torch.ones(64, 48, dtype=torch.bool)}, "numbers of torch.bool"),
        ({"config": {"head_dim": 0}}, "head_dim must be"),
        ({"config": {"eos_token_id": "x"}}, "the end token 'x' is not in"),
        ({"config": {"eos_token_id": [2, "a"]}}, "the end token 'a' is not in"),
        ({"config": {"eos_token_id": -1}}, "the end token -1 is not in"),
        ({"config": {"eos_token_id": 101}}, "the end token 101 is not in"),
        ({"config": {"eos_token_id": True}}, "the end token True is not in"),
    ],
)
def test_what_does_not_fit_is_named(change, named, tmp_path):
    write_checkpoint(tmp_path, "llama, three heads a group")
    edit(tmp_path, **change)
    with pytest.raises(LoadError, match=named.replace(".", r"\.")):
        load(tmp_path)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_what_is_not_said_is_named(key, tmp_path):
    write_checkpoint(tmp_path, "llama, three heads a group")
    raw = json.loads((tmp_path / "config.json").read_text("utf-8"))
    del raw[key]
    (tmp_path / "config.json").write_text(json.dumps(raw), "utf-8")
    with pytest.raises(LoadError, match=f"no '{key}'"):
        load(tmp_path)


@pytest.mark.parametrize("table", [{}, {"weight_map": []}, {"weight_map": {"a": 1}}])
def test_an_index_that_is_none(table, tmp_path):
    write_checkpoint(tmp_path, "llama, three heads a group")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps(table), "utf-8")
    with pytest.raises(LoadError, match="weight_map is no table"):
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


def test_a_window_that_is_switched_off_is_no_window(tmp_path):
    """Qwen2's own files name a window and say that nobody uses it."""
    write_checkpoint(tmp_path, "qwen2, biases")
    edit(tmp_path, config={"sliding_window": 8, "use_sliding_window": False})
    assert load(tmp_path).config.qkv_bias


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_files_run_in_float32_on_a_cpu(dtype, tmp_path):
    """g10: weights, K/V and logits, unless a dtype was asked for."""
    model = write_checkpoint(tmp_path, "qwen2, biases")
    model.to(dtype).save_pretrained(tmp_path)
    assert LLM(tmp_path, num_pages=4, device="cpu").options.dtype == "auto"
    for chosen, wanted in [("auto", torch.float32), ("bfloat16", torch.bfloat16)]:
        llm = LLM(tmp_path, num_pages=4, device="cpu", dtype=chosen)
        runner = llm.engine.runner
        assert {p.dtype for p in runner.model.parameters()} == {wanted}
        assert {m.keys.dtype for m in runner.memory} == {wanted}
        (output,) = llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=2))
        assert output.outputs[0].token_ids


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


@pytest.mark.parametrize("name", list(MODELS))
def test_a_long_load_draws_a_bar(name, tmp_path, monkeypatch):
    """To its end, tied head or not; on a terminal only, and not if it is not wanted."""
    write_checkpoint(tmp_path, name)
    monkeypatch.setattr("minivllm.progress.PATIENCE_S", -1)
    for progress in (True, False):
        monkeypatch.setattr("sys.stderr", Terminal())
        checkpoint = open_checkpoint(tmp_path)
        load_model(checkpoint, torch.device("cpu"), torch.float32, progress)
        drawn = sys.stderr.getvalue()
        assert ("loading weights" in drawn and "100%" in drawn) == progress


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
