"""Where options come from; `chat` and `env`."""

import io
import json
import subprocess
import sys
from contextlib import closing
from dataclasses import fields

import pytest
from test_chat import MARKED, Terminal, talker  # noqa: F401  # a fixture

import minivllm.command_chat  # noqa: F401  # before `open_llm` is replaced
from minivllm.cli import main
from minivllm.llm import LLM
from minivllm.options import SAMPLING, EngineOptions
from minivllm.request import SamplingParams

CHAT = ("--temperature", "0", "--max-tokens", "6", "--num-pages", "64")


@pytest.fixture
def command(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            main([str(a) for a in arguments])
        return end.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def seen(monkeypatch):
    """The options of the engine that a command would open."""
    caught = {}

    def instead(options, as_json, trace=None):
        caught.update(options)
        raise ValueError("opened")

    monkeypatch.setattr("minivllm.cli.open_llm", instead)
    return caught


# ---- Command line > environment > file > default -------------------------------------


def test_every_field_has_an_option():
    """`seed` is the engine's; a table cannot be typed."""
    names = {each.name for each in fields(SamplingParams)} - {"seed", "logit_bias"}
    assert names <= set(SAMPLING)


def test_who_wins(command, seen, tmp_path, monkeypatch):
    file = tmp_path / "engine.toml"
    file.write_text(
        'page_size = 4\nmax-running = 5\nseed = 6\nstop = ["a b", "c"]\n'
        'tiers = [3, 9]\nmodel = "there"\nignore_eos = true\n',
        encoding="utf-8",
    )
    monkeypatch.setenv("MINIVLLM_PAGE_SIZE", "8")
    monkeypatch.setenv("MINIVLLM_MAX_RUNNING", "9")
    command("generate", "--prompt", "x", "--config", file, "--page-size", "2")
    assert seen["page_size"] == 2  # the command line
    assert seen["max_running"] == 9  # the environment
    assert seen["seed"] == 6 and seen["model"] == "there"  # the file
    assert seen["stop"] == ["a b", "c"] and tuple(seen["tiers"]) == (3, 9)
    assert seen["ignore_eos"] is True
    assert seen["max_batch_tokens"] == EngineOptions().max_batch_tokens  # the default


def test_a_stop_string_may_hold_spaces(command, seen, tmp_path, monkeypatch):
    """One alone in a file, as `SamplingParams` takes it; a line each in a variable."""
    file = tmp_path / "engine.toml"
    file.write_text('stop = "a b"\nstop_token_ids = 7\n', encoding="utf-8")
    command("generate", "--prompt", "x", "--config", file)
    assert seen["stop"] == ["a b"] and seen["stop_token_ids"] == [7]
    monkeypatch.setenv("MINIVLLM_STOP", "e 9\nend of\n")
    monkeypatch.setenv("MINIVLLM_STOP_TOKEN_IDS", "1 2")
    for more in ((), ("--config", file)):
        command("generate", "--prompt", "x", *more)
        assert seen["stop"] == ["e 9", "end of"]
        assert seen["stop_token_ids"] == [1, 2]


def test_a_file_named_by_the_environment(command, seen, tmp_path, monkeypatch):
    """And a key for another command is no fault."""
    file = tmp_path / "engine.toml"
    file.write_text("page_size = 4\n", encoding="utf-8")
    monkeypatch.setenv("MINIVLLM_CONFIG", str(file))
    command("generate", "--prompt", "x")
    assert seen["page_size"] == 4


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("pagesize = 4", "unknown key 'pagesize'"),
        ("[engine]\npage_size = 4", "unknown key 'engine'"),
        ("page_size = 'many'", "page_size: "),
        ("page_size = 4.5", "page_size: "),
        ("page_size = true", "page_size: "),
        ("page_size = ", "cannot be read"),
        ("page_size = 4\npage-size = 8", "one key twice"),
        ("stop = [['a', 'b']]", "stop cannot be"),
        ("stop = {a = 1}", "stop cannot be"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_file_is_one_line(text, named, command, tmp_path):
    file = tmp_path / "engine.toml"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    code, out, err = command("generate", "--prompt", "x", "--config", file)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert named in err and "engine.toml" in err


def test_a_bad_variable_is_one_line(command, monkeypatch):
    monkeypatch.setenv("MINIVLLM_PAGE_SIZE", "many")
    code, _, err = command("generate", "--prompt", "x")
    assert code == 2 and "--page-size" in err and "MINIVLLM_PAGE_SIZE" in err


# ---- Completion ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("minivllm ch", ["chat"]),
        ("minivllm chat --index ra", ["radix"]),
        ("minivllm generate --page", ["--page-size"]),
    ],
)
def test_the_shell_completes(words, expected, command, monkeypatch):
    monkeypatch.setenv("_MINIVLLM_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert command("ignored")[1].split() == expected


def test_the_completion_script(command, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    code, out, _ = command("--show-completion", "bash")
    assert code == 0 and "_MINIVLLM_COMPLETE=complete_bash" in out


# ---- chat ----------------------------------------------------------------------------


@pytest.fixture
def say(talker, command, monkeypatch):  # noqa: F811
    """Run `minivllm chat` with these lines on stdin."""
    (talker / "chat_template.jinja").write_text(MARKED, encoding="utf-8")

    def run(lines, *arguments):
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        where = ("--model", talker, "--page-size", "4")
        return command("chat", *where, *CHAT, *arguments)

    return run


def test_a_script_of_turns(say):
    """Each turn finds the history; /clear forgets it; /exit leaves the rest unread."""
    code, out, err = say("w7\n\nw8\n/clear\nw7\n/exit\nw9\n", "--json")
    turns = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and err == "" and len(turns) == 3
    first, second, again = turns
    assert first["cached_tokens"] == 0 and first["schema_version"] == 1
    assert second["cached_tokens"] >= first["prompt_tokens"] // 4 * 4 + 4
    assert again["text"] == first["text"] and again["output_tokens"] == 6
    assert again["finish_reason"] == "length"
    assert again["prompt_tokens"] == first["prompt_tokens"]


def test_text_and_counts_are_apart(say):
    _, out, _ = say("w7\n", "--json")
    code, shown, err = say("w7\n")
    assert code == 0 and shown.strip() == json.loads(out)["text"].strip()
    assert "0 of them cached; 6 new; length" in err


def test_a_system_message_comes_first(say):
    _, out, _ = say("w7\n", "--json")
    _, told, _ = say("w7\n", "--json", "--system", "w9 w10")
    more = json.loads(told)["prompt_tokens"] - json.loads(out)["prompt_tokens"]
    assert more == 3  # s w9 w10


def test_a_turn_that_cannot_run_ends_a_script(say):
    code, out, err = say("w7 " * 300 + "\nw8\n")
    assert code == 2 and out == "" and "context" in err and err.count("\n") == 1


def test_one_answer_only(say):
    code, _, err = say("w7\n", "--n", "2", "--temperature", "1")
    assert code == 2 and "--n must be 1" in err


def by_hand(monkeypatch, typed):
    """A person at a terminal types this; an exception is a key."""
    keys = iter(typed)

    def press(prompt):
        key = next(keys, EOFError())
        if isinstance(key, BaseException):
            raise key
        return key

    monkeypatch.setattr("builtins.input", press)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    return Terminal()


def test_a_person_goes_on(say, monkeypatch, capsys):
    """A turn too long is told, Ctrl-C drops a line, Ctrl-D ends."""
    terminal = by_hand(monkeypatch, ["w7 " * 300, KeyboardInterrupt(), "w7"])
    monkeypatch.setattr("io.StringIO", lambda text: terminal)
    code, out, err = say("")
    assert code == 0 and "/clear starts anew" in err and "6 new" in err
    assert len(out.split()) == 6


def test_ctrl_c_stops_the_answer(say, monkeypatch):
    """What had come stays in the history; the next turn runs, and finds it."""
    whole, turns = LLM.stream, []

    def cut(llm, *asked):
        turns.append(asked)
        with closing(whole(llm, *asked)) as stream:
            for i, output in enumerate(stream):
                yield output
                if i == 2 and len(turns) == 1:
                    raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", cut)
    code, out, _ = say("w7\nw8\n", "--json")
    first, second = map(json.loads, out.splitlines())
    assert code == 0
    assert first["finish_reason"] == "abort" and first["output_tokens"] == 3
    assert second["finish_reason"] == "length" and second["cached_tokens"] >= 4


# ---- env -----------------------------------------------------------------------------


def test_env_names_what_is_there(command):
    code, out, _ = command("env", "--json")
    told = json.loads(out)
    assert code == 0 and told["packages"]["torch"] and told["device"]
    code, out, _ = command("env")
    assert code == 0 and "torch " in out and "device: " in out


def test_env_names_what_is_missing(command, monkeypatch):
    from importlib.metadata import PackageNotFoundError, version

    def without(name):
        if name == "safetensors":
            raise PackageNotFoundError(name)
        return "0.1" if name == "gguf" else version(name)

    monkeypatch.setattr("minivllm.cli.version", without)
    monkeypatch.setenv("MINIVLLM_PAGESIZE", "3")
    monkeypatch.delenv("MINIVLLM_TRACES", raising=False)  # that of our own tests
    code, out, _ = command("env", "--json")
    told = json.loads(out)
    assert code == 0 and told["packages"]["safetensors"] is None
    missing = {line.split(":")[0] for line in told["missing"]}
    assert missing == {"safetensors>=0.5", "gguf>=0.17", "MINIVLLM_PAGESIZE"}


def test_commands_are_known_without_torch():
    """Help, and a bad option, shall not wait for it."""
    code = "import sys; from minivllm.cli import add_commands; add_commands()"
    check = f"{code}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)
