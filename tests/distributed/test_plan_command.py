"""``python -m megatron_muon.plan``: a small model at 16 virtual ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_muon.dry_run.command import main
from megatron_muon.dry_run.devices import DEVICES, device_of
from megatron_muon.optim.rule import MOST_CONVERTED

ROOT = Path(__file__).parents[2]
_MODEL = """--num-layers 4 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 8
 --vocab-size 512 --swiglu --untie-embeddings-and-output-weights --disable-bias-linear
 --normalization RMSNorm --position-embedding-type rope --seq-length 64 --max-position-embeddings 64
 --micro-batch-size 1 --global-batch-size 16 --train-iters 2 --lr 1e-3 --lr-decay-style constant
 --tokenizer-type NullTokenizer --mock-data --bf16 --use-distributed-optimizer
 --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"""


def _plan(*ours: str, script: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "megatron_muon.plan", "--world-size", "16"),
            *(
                "--ranks-per-node",
                "4",
                *ours,
                "examples/pretrain_gpt_small.py",
                *_MODEL.split(),
                *script,
            ),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.fixture(scope="module", params=["dmuon", "orth_dion"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The report of a command with a rule that matches the first stage only."""
    folder = tmp_path_factory.mktemp("plan")
    rule = "decoder.layers.0.mlp.linear_fc1.weight:optimizer=adam"
    done = _plan(
        *("--json", str(folder / "report.json"), "--plot", str(folder / "owners.png")),
        script=("--optimizer", request.param, "--matrix-rule", rule, "--tp-comm-overlap"),
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "owners.png").read_bytes().startswith(b"\x89PNG")
    read = json.loads((folder / "report.json").read_text())
    assert read["optimizer"] == request.param
    assert read["table_at_start"] in done.stdout
    return read


def test_every_stage_is_reported(report: Any) -> None:
    assert report["format"] == "megatron_muon plan 1"
    # q, k, v, proj, gate, up and fc2 of two layers each; one fc1 is Adam's.
    matrices = [[g["matrices"] for g in stage["groups"]] for stage in report["stages"]]
    assert matrices == [[12], [14]]
    assert [stage["rank"] for stage in report["stages"]] == [0, 8]
    assert "--transformer-impl" in report["flags_set"]
    assert report["flags_removed"] == ["--tp-comm-overlap"]
    assert report["prediction"]["modelled"] is True
    assert "rule decoder.layers.0.mlp.linear_fc1.weight" in report["table_at_start"]


def test_counts_equal_the_plan(report: Any) -> None:
    for stage in report["stages"]:
        for group in stage["groups"]:
            sent = group["sent_bytes_in_node"] + group["sent_bytes_over_network"]
            assert sent == group["sent_bytes"] > 0
            assert group["sent_bytes_over_network"] > 0 or report["optimizer"] == "orth_dion"
            assert group["balance"] >= group["balance_bound"] >= 1
            memory = group["memory"]
            # What is converted at once is small beside real matrices, and not beside these.
            assert 0.9 * memory["step_planned"] < memory["step"]
            assert memory["step"] < 1.1 * memory["step_planned"] + 4 * MOST_CONVERTED
            assert (memory["right_factors"] > 0) == (report["optimizer"] == "orth_dion")
            # An eighth of what the rank's TP shard has, give or take where buckets end.
            held = memory["momentum"] // 4 + memory["adam_moments"] // 8
            assert memory["masters"] == 4 * held
            assert held == pytest.approx(memory["weights"] / 2 / 4, rel=0.02)


def test_refusals_are_those_of_a_real_run() -> None:
    done = _plan(
        script=("--optimizer", "dmuon", "--matrix-rule", "decoder.nothing.*:optimizer=adam")
    )
    assert done.returncode == 2
    assert done.stderr.endswith(
        "megatron_muon: 1 configuration problem\n"
        "  - rule 'decoder.nothing.*' (--matrix-rule or --matrix-rules) matches no trainable "
        "parameter; names look like 'decoder.layers.0.self_attention.linear_proj.weight', correct "
        "the pattern or remove the rule\n"
    )
    assert len(done.stderr.splitlines()) == 4, "two of progress, two of the refusal"
    assert done.stdout == ""


def test_another_optimizer_is_refused() -> None:
    done = _plan(script=("--optimizer", "adam"))
    assert done.returncode == 2
    assert "--optimizer adam cannot be planned: type --optimizer dmuon" in done.stderr


def test_our_flags_are_checked_together_before_anything_is_built(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    none = str(tmp_path / "none" / "report.json")
    assert main(["--world-size", "0", "--json", none, "--cost-table", none, "none.py"]) == 2
    message = capsys.readouterr().err
    assert "--world-size is 0: type a number of at least 1" in message
    assert f"--json {none} is not a file in an existing folder" in message
    assert "script none.py does not exist" in message
    assert f"--cost-table {none} cannot be read" in message
    assert main(["none.py"]) == 2
    assert "type --world-size and the number of GPUs" in capsys.readouterr().err
    assert main(["--world-siz", "8", "none.py"]) == 2
    assert "--world-siz is not a flag of python -m megatron_muon.plan: did you mean --world-s" in (
        capsys.readouterr().err
    )
    assert main(["--world-size", "8", "--seq-length", "2", "none.py"]) == 2
    assert "type flags of a script after the script" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"gemm_tflop": 1}', "has the unknown key gemm_tflop; supported are gemm_tflops, "),
        ('{"launch_us": 0}', "launch_us is 0; it must be a number above 0"),
        ('{"launch_us": true}', "launch_us is True; it must be a number above 0"),
        ("[1]", "holds no JSON object"),
        ("{", "is not JSON"),
    ],
)
def test_a_wrong_cost_table_is_refused(tmp_path: Path, content: str, sentence: str) -> None:
    path = tmp_path / "rates.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"^--cost-table ") as caught:
        device_of("h100", str(path))
    assert sentence in str(caught.value)


def test_a_cost_table_replaces_single_numbers(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_text('{"launch_us": 2.5}')
    found = device_of("b200", str(path))
    assert (found.launch_us, found.gemm_tflops) == (2.5, DEVICES["b200"].gemm_tflops)
