"""The launcher's command line: what it refuses, with which words and exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_muon.cpu import default_flags
from megatron_muon.integration.launcher import main, missing_flags

ROOT = Path(__file__).parents[3]
Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "no script given"),
        (["--cpu"], "no script given"),
        (["--gpu", "pretrain_gpt.py"], "unknown flag --gpu before the script"),
        (["--cpu", "--optimizer", "dmuon"], "unknown flag --optimizer before the script"),
        (["nothing.py"], "script nothing.py does not exist; give the path of pretrain_gpt.py"),
        (["--cpu", str(ROOT / "tests")], f"script {ROOT / 'tests'} does not exist"),
    ],
)
def test_a_wrong_command_line_is_refused(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, argv: list[str], sentence: str
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.out == ""
    if sentence.startswith(("unknown flag", "no script")):
        assert "usage: python -m megatron_muon.launch [--cpu] pretrain_gpt.py" in captured.err


@pytest.mark.parametrize(
    ("rank", "local_rank", "speaks"),
    [("3", None, False), ("3", "3", False), ("0", "0", True), ("8", "0", True)],
)
def test_one_rank_of_a_node_says_what_is_wrong_but_all_exit(
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
    rank: str,
    local_rank: str | None,
    speaks: bool,
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert main(["nothing.py"]) == 2
    assert ("nothing.py does not exist" in capsys.readouterr().err) is speaks


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--cpu", "--help", "nothing.py"]])
def test_help_is_printed(capsys: Captured, argv: list[str]) -> None:
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("usage: python -m megatron_muon.launch")
    assert "--cpu" in captured.out and captured.err == ""


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ([], ["--a", "1", "--b", "--c", "x", "y"]),
        (["script.py", "--b"], ["--a", "1", "--c", "x", "y"]),
        (["--a", "2"], ["--b", "--c", "x", "y"]),
        (["--a=2", "--c=z"], ["--b"]),
        (["--aa", "1", "--bb=3", "x", "1"], ["--a", "1", "--b", "--c", "x", "y"]),
        (["--a", "--b", "--c"], []),
    ],
)
def test_flags_that_are_given_are_not_added(given: list[str], missing: list[str]) -> None:
    assert missing_flags(given, ["--a", "1", "--b", "--c", "x", "y"]) == missing


def test_the_cpu_flags_are_added_once() -> None:
    once = missing_flags([], default_flags())
    assert once == default_flags()
    assert missing_flags(once, default_flags()) == []


def _launch(*argv: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """``python -m megatron_muon.launch`` where only ``path`` can hold a megatron."""
    folders = [*([str(path)] if path else []), str(ROOT)]
    return subprocess.run(
        [sys.executable, "-S", "-m", "megatron_muon.launch", *argv],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders), "RANK": "0"},
        cwd=ROOT / "tests",
        capture_output=True,
        text=True,
        timeout=60,
    )


def _script(folder: Path) -> str:
    path = folder / "script.py"
    path.write_text("print('ran')")
    return str(path)


@pytest.mark.parametrize("flags", [(), ("--cpu",)])
def test_without_megatron_nothing_runs(tmp_path: Path, flags: tuple[str, ...]) -> None:
    done = _launch(*flags, _script(tmp_path), "--optimizer", "dmuon")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("megatron_muon needs megatron-core 0.19.x and found none")
    assert len(done.stderr.splitlines()) == 1


def test_with_another_megatron_nothing_runs(tmp_path: Path) -> None:
    for part in ("core", "training"):
        (tmp_path / "fake" / "megatron" / part).mkdir(parents=True)
        (tmp_path / "fake" / "megatron" / part / "__init__.py").touch()
    (tmp_path / "fake" / "megatron" / "core" / "package_info.py").write_text(
        "MAJOR = 0\nMINOR = 18\nPATCH = 1\n"
    )
    done = _launch(_script(tmp_path), path=tmp_path / "fake")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("megatron_muon found megatron-core 0.18.1; supported is")
    assert len(done.stderr.splitlines()) == 1


def test_the_script_runs_as_main_with_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """In its own folder's company, as with python itself; its exit code is the launcher's."""
    from megatron_muon.integration import hooks, launcher

    monkeypatch.setattr(launcher, "require_megatron", lambda training: "0.19.2")
    monkeypatch.setattr(launcher, "_has_gpu", lambda: True)
    installed: list[bool] = []
    monkeypatch.setattr(hooks, "install", lambda: installed.append(True))
    monkeypatch.setattr(sys, "argv", ["before"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside.py").write_text("value = 7")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom beside import value\n"
        "if __name__ == '__main__':\n    print(value, sys.argv[1:])\n    sys.exit(5)\n"
    )
    with pytest.raises(SystemExit) as left:
        main([str(script), "--help", "--optimizer", "dmuon"])
    assert left.value.code == 5
    assert installed == [True]
    assert capsys.readouterr().out == "7 ['--help', '--optimizer', 'dmuon']\n"


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (
            "support import ConfigurationError as Refusal\nraise Refusal(['one', 'two'])",
            "megatron_muon: 2 configuration problems\n  - one\n  - two\n",
        ),
        (
            "support import CheckpointMismatchError as Refusal\nraise Refusal('one')",
            "one\n",
        ),
    ],
    ids=["settings", "checkpoint"],
)
def test_what_our_checks_refuse_is_a_sentence_and_not_a_traceback(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
    raised: str,
    told: str,
) -> None:
    from megatron_muon.integration import hooks, launcher

    monkeypatch.setattr(launcher, "require_megatron", lambda training: "0.19.2")
    monkeypatch.setattr(launcher, "_has_gpu", lambda: True)
    monkeypatch.setattr(hooks, "install", lambda: None)
    monkeypatch.setattr(sys, "argv", ["before"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("RANK", "0")
    script = tmp_path / "script.py"
    script.write_text(f"from megatron_muon.integration.{raised}\n")
    assert main([str(script)]) == 2
    assert capsys.readouterr().err == told


def test_without_a_gpu_the_cpu_flag_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_muon.integration import launcher

    monkeypatch.setattr(launcher, "require_megatron", lambda training: "0.19.2")
    monkeypatch.setattr(launcher, "_has_gpu", lambda: False)
    assert main([_script(tmp_path)]) == 2
    assert "put --cpu before the script" in capsys.readouterr().err
