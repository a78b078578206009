# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""Arguments that make no sense are refused before a command runs, and the message says what is accepted."""

import pytest

from deepspeed_hybrid.cli import build_parser, main

TRAIN = ["train-draft", "--model", "m"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("demo --steps 1.5", "--steps: must be an integer of at least 1; got '1.5'"),
        ("bench decode --runs -1", "--runs: must be an integer of at least 1; got '-1'"),
        ("bench decode --batch 1,,2", "--batch: must be an integer of at least 1; got ''"),
        ("bench prefill --shapes axb", "--shapes: must be an integer of at least 1; got 'a'"),
        ("bench prefill --shapes 3", "--shapes: must be like 1x128,64x512; got '3'"),
        ("bench rollouts --parts all", "--parts: must be some of schedules,shared,chunks; got 'all'"),
        ("fidelity --temperature warm", "--temperature: must be a number above 0; got 'warm'"),
        ("fidelity --temperature 0", "--temperature: must be a number above 0; got '0'"),
        ("fidelity --train-seconds long", "--train-seconds: must be seconds, 0 or more; got 'long'"),
        ("fidelity --train-seconds nan", "--train-seconds: must be seconds, 0 or more; got 'nan'"),
    ],
)
def test_numbers(arguments, named, capsys):
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "option", "wants"),
    [
        (["demo"], "--out", "a folder"),
        ([*TRAIN, "--text", "file"], "--out", "a folder"),
        (["fidelity"], "--save", "a folder"),
        (["fidelity"], "--out", "a file"),
        (["fidelity"], "--plot", "a file"),
        (["bench", "decode"], "--out", "a file"),
        (["bench", "prefill"], "--out", "a file"),
        (["bench", "rollouts"], "--out", "a file"),
    ],
    ids=str,
)
def test_files_and_folders(command, option, wants, tmp_path, monkeypatch, capsys):
    """What a command writes when its work is done can be written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").mkdir()
    right, wrong = ("file", "folder") if wants == "a file" else ("folder", "file")
    build_parser().parse_args([*command, option, right])
    build_parser().parse_args([*command, option, "new/one"])
    for refused in (wrong, "file/one"):
        with pytest.raises(SystemExit):
            main([*command, option, refused])
        assert f"argument {option}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "given", "named"),
    [
        *(("--model", model, "a folder, or a name that transformers knows") for model in ("/nowhere", "./m", "~/m")),
        *((option, file, "a file") for option in ("--prompts", "--text") for file in ("nowhere", "folder")),
    ],
)
def test_what_a_draft_is_trained_on_is_there(option, given, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("some")
    options = {
        "--model": "folder",
        "--out": "out",
        **({"--text": "file"} if option == "--model" else {}),
        option: given,
    }
    assert main(["train-draft", *(part for pair in options.items() for part in pair)]) == 1
    assert f"error: {option} must be {named}; got {given!r}" in capsys.readouterr().out
