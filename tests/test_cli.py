"""The command line as a user types it: every command, and what it says when it cannot."""

import functools
import json
import shutil

import pytest
from tiny import CHECKPOINT
from tokenizers import Tokenizer

from dsa_jax import loading
from dsa_jax.cli import _encode, _encode_chat, main
from pallas_kernels import aot, platform


@pytest.mark.parametrize("family", ["v32", pytest.param("v4", marks=pytest.mark.slow)])
def test_demo_writes_a_checkpoint_shows_the_plan_and_generates(family, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loading, "load_model", functools.cache(loading.load_model))  # both commands compile the same steps
    directory = tmp_path / "demo"
    assert main(["demo", "--family", family, "--directory", str(directory), "--max-new-tokens", "9"]) == 0
    printed = capsys.readouterr().out
    plan = {"v4": ("indexed", "experts by"), "v32": ("dense", "moe")}
    for word in ("devices", "tokens/s", *plan[family]):
        assert word in printed
    # The same checkpoint through the other commands, and the same tokens.
    assert main(["inspect", str(directory), "--json", str(tmp_path / "report.json")]) == 0
    assert json.loads((tmp_path / "report.json").read_text())
    capsys.readouterr()
    assert main(["generate", str(directory), "--prompt", "The index finds what attention reads.", "--max-new-tokens", "9"]) == 0
    generated = capsys.readouterr().out.splitlines()[0]
    assert generated and generated in printed


def test_a_chat_message_is_put_into_the_family_s_format():
    ids = _encode_chat(CHECKPOINT, "Hello", thinking=True)
    plain = _encode(CHECKPOINT, "Hello")
    text = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")).decode(ids, skip_special_tokens=False)
    assert ids[0] == plain[0] == 0 and "Hello" in text and len(ids) > len(plain)
    assert "<｜User｜>Hello" in text and text.endswith("<think>")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tokens", "1,x"], "is not a list of token ids"),
        (["--tokens", "5,999"], "outside the vocabulary of 384 tokens"),
        (["--tokens", "5", "--temperature", "-1"], "temperature=-1.0 must be finite"),
        (["--tokens", "7", "--implementation", "sm90"], "needs a GPU of that family"),
        (["--tokens", "5", "--max-new-tokens", "0"], "max_new_tokens=0"),
        (["--tokens", "7", "--thinking"], "--thinking belongs to --chat"),
        (["--tokens", "7,5"], "token id 5 has none"),
        (["--tokens", "7", "--max-new-tokens", "70000"], "longer than the 65536 positions"),
    ],
)
def test_generate_refuses_with_a_sentence(arguments, sentence, capsys):
    assert main(["generate", str(CHECKPOINT), *arguments]) == 2
    error = capsys.readouterr().err
    assert sentence in error and "Traceback" not in error


def test_commands_of_the_kernels_say_what_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(platform, "kernel_name", lambda: None)
    assert main(["bench", "top_k"]) == 2
    assert "dsa-jax: A benchmark needs an NVIDIA GPU" in capsys.readouterr().err
    monkeypatch.setattr(aot, "missing", lambda: "The assembler is not installed.")
    assert main(["compile-report"]) == 2
    assert "dsa-jax: The assembler is not installed." in capsys.readouterr().err


def edited_checkpoint(tmp_path, **changes):
    """The golden checkpoint with changed keys of config.json (dots enter objects; None removes)."""
    directory = tmp_path / "checkpoint"
    shutil.copytree(CHECKPOINT, directory)
    config = json.loads((directory / "config.json").read_text())
    for path, value in changes.items():
        *parents, key = path.split("__")
        section = config
        for parent in parents:
            section = section[parent]
        if value is None:
            del section[key]
        else:
            section[key] = value
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("model_type", ["deepseek_v41_mini", "deepseek_v4_lite", "deepseek_v5"])
def test_ac_66_the_family_is_chosen_by_the_exact_model_type(model_type, tmp_path, capsys):
    directory = edited_checkpoint(tmp_path, model_type=model_type)
    assert main(["generate", str(directory), "--tokens", "7"]) == 2
    assert f"model_type '{model_type}' is not known" in capsys.readouterr().err


def test_ac_66_a_config_is_read_by_the_rules_of_its_own_type(tmp_path, capsys):
    """V4.1's config under V4's name: V4's keys are asked for, nothing is taken from the similar family."""
    directory = edited_checkpoint(tmp_path, model_type="deepseek_v4")
    assert main(["generate", str(directory), "--tokens", "7"]) == 2
    error = capsys.readouterr().err
    assert "hidden_size" in error and "compress_ratios" in error and "Traceback" not in error


def test_a_missing_config_key_is_named(tmp_path, capsys):
    directory = edited_checkpoint(tmp_path, text_config__index_topk=None, text_config__rms_norm_eps=None)
    assert main(["generate", str(directory), "--tokens", "7"]) == 2
    error = capsys.readouterr().err
    assert "index_topk" in error and "rms_norm_eps" in error


def test_missing_and_cut_shards_are_named_together(tmp_path, capsys):
    directory = edited_checkpoint(tmp_path)
    (directory / "model-00001-of-00002.safetensors").unlink()
    shard = directory / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert main(["generate", str(directory), "--tokens", "7"]) == 2
    error = capsys.readouterr().err
    assert "model-00001-of-00002.safetensors" in error and "model-00002-of-00002.safetensors" in error
    assert main(["inspect", str(directory)]) == 0
    assert "model-00001-of-00002.safetensors" in capsys.readouterr().out
