"""The README is true: each command in it runs, each file it names exists."""

import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.S)
    for line in block.splitlines()
    if line.strip()
]
MAKE = [command for command in COMMANDS if command.startswith("make ")]
PYTHON = [command for command in COMMANDS if command.startswith(".venv/bin/python ")]


def test_every_command_is_known_here():
    assert COMMANDS and set(COMMANDS) == {*MAKE, *PYTHON}


@pytest.mark.parametrize("command", MAKE)
def test_make_targets_exist(command):  # they run this very suite, or for ever
    assert subprocess.run([*command.split(), "-n"], cwd=ROOT, capture_output=True, check=False).returncode == 0


def test_files_exist():
    for target in re.findall(r"\]\(([^)#:]+)\)", README) + re.findall(
        r"`((?:assets|configs|docs|tests|engine)/[^`*]*)`", README
    ):
        assert (ROOT / target).exists(), target


@pytest.mark.slow
def test_commands_run(tmp_path):
    """In a folder of its own, with this interpreter, in the README's order; what says and what judges side by side."""
    for name in ("assets", "configs", "engine", "eval"):
        (tmp_path / name).symlink_to(ROOT / name)
    judging = [command for command in PYTHON if " -m eval " in command]
    saying = [command for command in PYTHON if command not in judging]
    assert saying and judging
    with ThreadPoolExecutor(2) as pool:  # each loads its models on one core
        for group in [pool.submit(run_all, commands, tmp_path) for commands in (saying, judging)]:
            group.result()
    assert (tmp_path / "runs/readme/report.html").is_file()


def run_all(commands, folder):
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for command in commands:
        words, _, target = command.partition(" > ")
        done = subprocess.run(
            [sys.executable, *shlex.split(words)[1:]],
            cwd=folder,
            env=env,
            capture_output=True,
            check=False,
            timeout=280,
        )
        assert done.returncode == 0, (command, done.stderr.decode()[-2000:])
        if target:
            assert len(done.stdout) > 1920 * 2
        elif " say " in command:
            line = json.loads(done.stdout)
            assert line["seed"] == 7 and line["frames"] >= 2 and line["weights"] == "trained"
            assert (folder / "out.wav").stat().st_size == 44 + line["frames"] * 1920 * 2
