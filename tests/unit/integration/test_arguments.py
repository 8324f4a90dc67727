"""Our flags on Megatron's real parser: what is read, refused, and shown to Megatron."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from megatron_muon.config import MatrixConfig
from megatron_muon.flags import FLAGS
from megatron_muon.integration import refusals
from megatron_muon.integration.arguments import (
    add_matrix_arguments,
    matrix_config_from_args,
    translate_arguments,
)
from megatron_muon.integration.refusals import REFUSALS
from megatron_muon.integration.support import ConfigurationError
from megatron_muon.matrices import Rule
from megatron_muon.placement import CostTable, MeasuredCost, write_cost_table

Parse = Callable[..., argparse.Namespace]
DMUON = ("--optimizer", "dmuon", "--use-distributed-optimizer")
ORTH_DION = ("--optimizer", "orth_dion", "--use-distributed-optimizer")


@pytest.fixture(scope="module")
def parser(megatron: Any) -> argparse.ArgumentParser:
    """Megatron's own parser with our flags, built as ``megatron.training.parse_args`` does."""
    from megatron.training import arguments

    # Unwrapped, in case that another test has installed the hooks.
    add = arguments.add_megatron_arguments
    add = getattr(add, "__wrapped__", add)
    return add_matrix_arguments(add(argparse.ArgumentParser(allow_abbrev=False)))


@pytest.fixture
def parse(parser: argparse.ArgumentParser) -> Parse:
    """Arguments of a command line, as ``validate_args`` gets them."""

    def parse(*words: str, world_size: int = 4, rank: int = 0) -> argparse.Namespace:
        args = parser.parse_args(["--lr", "1e-2", "--min-lr", "1e-3", *words])
        args.world_size, args.rank = world_size, rank
        return args

    return parse


def _problems(args: argparse.Namespace) -> tuple[str, ...]:
    """What is refused; nothing of the arguments that Megatron reads may have changed by then."""
    before = {k: v for k, v in vars(args).items() if k != "matrix_optimizer"}
    with pytest.raises(ConfigurationError) as error:
        translate_arguments(args)
    after = {k: v for k, v in vars(args).items() if k != "matrix_optimizer"}
    assert before == after
    return error.value.problems


# Words after DMUON, the flag in the sentence, what to do instead.
UNSUPPORTED = [
    ("--use-precision-aware-optimizer", "--use-precision-aware-optimizer", "remove the flag"),
    ("--optimizer-cpu-offload", "--optimizer-cpu-offload", "remove the flag"),
    ("--optimizer-cuda-graph", "--optimizer-cuda-graph", "remove the flag"),
    ("--use-megatron-fsdp", "--use-megatron-fsdp", "use --use-distributed-optimizer instead"),
    ("--use-torch-fsdp2", "--use-torch-fsdp2", "use --use-distributed-optimizer instead"),
    ("--fp8-param-gather --fp8-recipe custom", "--fp8-recipe custom", "remove --fp8-param-gather"),
    (
        "--fp8-param-gather --fp8-recipe mxfp8",
        "--reuse-grad-buf-for-mxfp8-param-ag is needed",
        "add it",
    ),
    (
        "--fp8-param-gather --moe-single-grouped-weight",
        "--moe-single-grouped-weight",
        "or --fp8-param-gather",
    ),
    ("--fp4-param-gather", "--fp4-param-gather", "remove the flag"),
    (
        "--overlap-param-gather-with-optimizer-step",
        "--overlap-param-gather-with-optimizer-step",
        "use --overlap-param-gather",
    ),
    ("--use-mup", "--use-mup", "set --matrix-lr"),
    (
        "--tensor-parallel-num-weight-shards 4",
        "--tensor-parallel-num-weight-shards",
        "remove the flag",
    ),
    ("--freeze-all-layers", "--freeze-all-layers", "use --optimizer adam"),
    ("--save x --ckpt-format torch", "--ckpt-format", "type --ckpt-format torch_dist"),
    ("--load x --ckpt-format torch_dcp", "--ckpt-format", "type --ckpt-format torch_dist"),
    ("--save x --ckpt-format fsdp_dtensor", "--ckpt-format", "type --ckpt-format torch_dist"),
    ("--non-persistent-ckpt-type local", "--non-persistent-ckpt-type", "use global"),
    ("--non-persistent-ckpt-type in_memory", "--non-persistent-ckpt-type", "use global"),
    (
        "--ckpt-convert-format torch --ckpt-convert-save x",
        "--ckpt-convert-format",
        "remove the flag and --ckpt-convert-save",
    ),
    ("--muon-tp-mode duplicated", "--muon-tp-mode", "remove the flag"),
    ("--muon-tp-mode distributed", "--muon-tp-mode", "remove the flag"),
    ("--muon-fp32-matmul-prec high", "--muon-fp32-matmul-prec", "--dmuon-compute-dtype"),
    ("--muon-scalar-optimizer lion", "--muon-scalar-optimizer", "remove the flag"),
    (
        "--num-experts 2 --expert-tensor-parallel-num-weight-shards 4",
        "--expert-tensor-parallel-num-weight-shards",
        "remove the flag",
    ),
    ("--qk-clip", "--qk-clip writes weights", "remove the flag"),
    ("--init-model-with-meta-device", "--init-model-with-meta-device", "remove the flag"),
    ("--perform-rl-step", "--perform-rl-step", "remove the flag"),
    ("--vision-pretraining-type dino", "--vision-pretraining-type dino", "remove the flag"),
    ("--bert-load x", "--bert-load", "remove the flag"),
    ("--ict-load x", "--ict-load", "remove the flag"),
    ("--moe-use-upcycling", "--moe-use-upcycling", "remove the flag"),
    ("--main-grads-dtype bf16", "--main-grads-dtype", "state is fp32"),
    ("--main-params-dtype fp16", "--main-params-dtype", "state is fp32"),
    ("--exp-avg-dtype bf16", "--exp-avg-dtype", "state is fp32"),
    ("--exp-avg-sq-dtype fp8", "--exp-avg-sq-dtype", "state is fp32"),
    *(
        (words, words.split()[0] + " has no effect on dmuon", "remove the flag")
        for words in (
            "--sgd-momentum 0.5",
            "--lion-beta1 0.5",
            "--lion-beta2 0.5",
            "--optimizer-offload-fraction 0.5",
            "--use-torch-optimizer-for-cpu-offload",
            "--overlap-cpu-optimizer-d2h-h2d",
            "--no-pin-cpu-grads",
            "--no-pin-cpu-params",
            "--data-parallel-sharding-strategy optim",
            "--outer-dp-sharding-strategy optim",
            "--no-gradient-reduce-div-fusion",
            "--suggested-communication-unit-size 7",
            "--megatron-fsdp-main-params-dtype bf16",
            "--megatron-fsdp-main-grads-dtype bf16",
            "--megatron-fsdp-grad-comm-dtype bf16",
            "--keep-fp8-transpose-cache",
            "--fsdp-double-buffer",
            "--fsdp-db-use-persist-buf-on-alloc-fail",
            "--fsdp-manual-registration",
            "--megatron-fsdp-enable-fine-grained-param-gather",
            "--megatron-fsdp-max-pool-double-buffer",
        )
    ),
]


SUPPORTED = [
    "--num-experts 4 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
    "--num-distributed-optimizer-instances 2",
    "--context-parallel-size 2",
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "--num-virtual-stages-per-pipeline-rank 2",
    "--pipeline-model-parallel-layout Et|tL",
    "--multi-latent-attention",
    "--mtp-num-layers 1",
    "--hybrid-layer-pattern M*",
    "--fp16 --initial-loss-scale 65536 --hysteresis 1",
    "--fp8-format hybrid --fp8-recipe custom",
    *(
        f"--fp8-format {form} --fp8-param-gather --fp8-recipe {recipe} --first-last-layers-bf16"
        for form, recipe in (("hybrid", "delayed"), ("e4m3", "tensorwise"), ("e4m3", "blockwise"))
    ),
    "--fp8-format e4m3 --fp8-param-gather --fp8-recipe mxfp8 --reuse-grad-buf-for-mxfp8-param-ag",
    "--moe-single-grouped-weight",
]


@pytest.fixture(autouse=True)
def transformer_engine(megatron: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets the version of Transformer Engine that Megatron finds."""
    from megatron.core import utils

    def found(version: str) -> None:
        monkeypatch.setattr(utils, "get_te_version", lambda: Version(version))

    found("2.20.2")
    return found


@pytest.mark.parametrize(
    ("version", "what"),
    [
        ("0.0.0", "none is installed"),
        ("2.18.1", "2.18.1 is installed"),
        ("2.21.0.dev0+abc", "2.21.0.dev0+abc is installed"),
        ("2.19.0", None),
        ("2.20.2+cu13", None),
    ],
)
def test_quantized_weights_need_a_transformer_engine_that_was_tested(
    parse: Parse, transformer_engine: Callable[[str], None], version: str, what: str | None
) -> None:
    transformer_engine(version)
    args = parse(*DMUON, *FP8)
    if what is None:
        translate_arguments(args)
        return
    (problem,) = _problems(args)
    assert what in problem and "--fp8-param-gather" in problem and "pip install" in problem


@pytest.mark.parametrize("words", SUPPORTED)
def test_parallelism_and_models_of_megatron_are_not_refused(parse: Parse, words: str) -> None:
    args = parse(*DMUON, *words.split())
    translate_arguments(args)
    assert args.matrix_optimizer == "dmuon"


FP8 = ("--fp8-format", "e4m3", "--fp8-param-gather", "--fp8-recipe", "blockwise")


@pytest.mark.parametrize(
    ("words", "is_said"),
    [
        ("--no-load-optim", True),
        ("--finetune", True),
        ("--pretrained-checkpoint x", True),
        ("--no-load-optim --load-main-params-from-ckpt", True),
        ("--no-load-optim --load-main-params-from-ckpt --no-stream-ckpt-dequant", False),
        ("--no-load-optim --load-main-params-from-ckpt --fp8-recipe tensorwise", False),
        ("", False),
    ],
)
def test_masters_of_quantized_weights_are_recommended_from_the_checkpoint(
    parse: Parse, capsys: pytest.CaptureFixture[str], words: str, is_said: bool
) -> None:
    translate_arguments(parse(*DMUON, *FP8, *words.split()))
    assert ("add --load-main-params-from-ckpt" in capsys.readouterr().out) is is_said
    translate_arguments(parse(*DMUON, *words.split()))
    assert "load-main-params" not in capsys.readouterr().out


def test_instances_without_einops_are_refused(
    parse: Parse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "find_spec", lambda name: None)
    (problem,) = _problems(parse(*DMUON, "--num-distributed-optimizer-instances", "2"))
    assert "pip install einops" in problem


@pytest.mark.parametrize(("words", "flag", "instead"), UNSUPPORTED, ids=[u[0] for u in UNSUPPORTED])
def test_an_unsupported_flag_is_refused_with_what_to_type(
    parse: Parse, words: str, flag: str, instead: str
) -> None:
    (problem,) = _problems(parse(*DMUON, *words.split()))
    assert flag in problem
    assert instead in problem


def test_every_sentence_about_a_flag_has_a_case_above(
    parse: Parse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "find_spec", lambda name: None)
    said = {
        problem
        for words in [*(u[0] for u in UNSUPPORTED), "--num-distributed-optimizer-instances 2"]
        for problem in _problems(parse(*DMUON, *words.split()))
    }
    rows = [row for row in REFUSALS if hasattr(parse(*DMUON), row.name)]
    reasons = [row.reason.format(optimizer="dmuon") for row in rows]
    sentences = zip(rows, reasons, strict=True)
    assert {f"{row.typed} {reason}: {row.advice}" for row, reason in sentences} == said


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--bf16 --overlap-grad-reduce --overlap-param-gather --sequence-parallel",
        "--save x --load x --ckpt-format torch_dist",
        "--tensor-model-parallel-size 2 --tensor-parallel-num-weight-shards 2",
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        "--ckpt-format torch",
        "--non-persistent-ckpt-type global",
    ],
)
def test_what_is_supported_is_accepted(parse: Parse, words: str) -> None:
    args = parse(*DMUON, *words.split())
    translate_arguments(args)
    assert (args.optimizer, args.matrix_optimizer) == ("adam", "dmuon")


# Words after DMUON and the beginning of the sentence.
OUT_OF_RANGE = [
    ("--muon-num-ns-steps 0", "--muon-num-ns-steps 0"),
    ("--muon-num-ns-steps 6", "--muon-num-ns-steps 6"),
    ("--muon-momentum 1", "--muon-momentum is 1.0; it must be >= 0 and < 1"),
    ("--muon-momentum nan", "--muon-momentum is nan"),
    ("--muon-momentum=-0.1", "--muon-momentum is -0.1"),
    ("--muon-extra-scale-factor nan", "--muon-extra-scale-factor is nan"),
    ("--muon-extra-scale-factor inf", "--muon-extra-scale-factor is inf"),
    ("--matrix-exchange-buffer-mb 0", "--matrix-exchange-buffer-mb is 0; it must be a number > 0"),
    ("--matrix-exchange-buffer-mb=-5", "--matrix-exchange-buffer-mb is -5"),
    ("--matrix-exchange-buffer-mb nan", "--matrix-exchange-buffer-mb is nan"),
    ("--matrix-exchange-buffer-mb inf", "--matrix-exchange-buffer-mb is inf"),
    ("--matrix-exchange-buffer-mb 1e308", "--matrix-exchange-buffer-mb is 1e+308"),
    ("--matrix-lr=-1", "--matrix-lr is -1.0; it must be a number >= 0"),
    ("--matrix-lr nan", "--matrix-lr is nan"),
    ("--matrix-min-lr=-1", "--matrix-min-lr is -1.0"),
    ("--matrix-weight-decay inf", "--matrix-weight-decay is inf"),
    ("--matrix-lr 1e-4", "the learning rate of matrices has its maximum at 0.0001 and its minimum"),
    ("--matrix-min-lr 1", "the learning rate of matrices has its maximum at 0.01 and its minimum"),
    ("--dmuon-coefficients 1,2,3", "--dmuon-coefficients is set but"),
    ("--dmuon-coefficients 1,2", "--dmuon-coefficients"),
    ("--matrix-rule *:optimizer=sgd", "--matrix-rule '*:optimizer=sgd': optimizer is 'sgd'"),
    ("--matrix-rules nothing.json", "--matrix-rules nothing.json: [Errno 2]"),
    ("--dmuon-split-ranks 0", "--dmuon-split-ranks is 0; it must be an integer >= 1"),
    (
        "--dmuon-split-ranks 2 --dmuon-split-min-gflop=-1",
        "--dmuon-split-min-gflop is -1; it must be a number >= 0",
    ),
    ("--dmuon-split-ranks 2 --dmuon-split-min-gflop nan", "--dmuon-split-min-gflop is nan"),
    (
        "--dmuon-split-ranks 1 --dmuon-split-min-gflop 2",
        "--dmuon-split-min-gflop has no effect with --dmuon-split-ranks 1: remove one of them",
    ),
    ("--matrix-ranks-per-node 0", "--matrix-ranks-per-node is 0; it must be an integer >= 1"),
    ("--dmuon-cost-table nothing.json", "--dmuon-cost-table nothing.json cannot be read (No such"),
]


@pytest.mark.parametrize(("words", "sentence"), OUT_OF_RANGE, ids=[o[0] for o in OUT_OF_RANGE])
def test_a_value_out_of_range_is_refused_by_flag(parse: Parse, words: str, sentence: str) -> None:
    problems = _problems(parse(*DMUON, *words.split()))
    assert problems[0].startswith(sentence)
    # A maximum that is no learning rate may also be said to be below the minimum.
    assert len(problems) == 1 or "--matrix-lr" in sentence


def test_custom_coefficients_that_cannot_be_read_are_one_problem(parse: Parse) -> None:
    """Nobody who gave some is told to give some."""
    words = "--muon-coefficient-type custom --dmuon-coefficients 1,2"
    (problem,) = _problems(parse(*DMUON, *words.split()))
    assert problem.startswith("--dmuon-coefficients")


def test_everything_that_is_wrong_is_said_together(parse: Parse) -> None:
    words = (
        "--optimizer dmuon --qk-clip --matrix-min-dim 0 --muon-tp-mode duplicated "
        "--muon-momentum 2 --matrix-lr 1e-5 --matrix-rule *:x=1 --matrix-rule a:lr_mult=-1"
    )
    args = parse(*words.split())
    problems = _problems(args)
    for sentence in (
        *(
            "--qk-clip",
            "--matrix-min-dim is 0",
            "--muon-tp-mode",
            "--muon-momentum is 2.0",
            "unknown key 'x'",
        ),
        *("lr_mult is '-1'", "maximum at 1e-05", "at data-parallel size 4 needs Megatron's"),
    ):
        assert sum(sentence in problem for problem in problems) == 1, sentence
    assert len(problems) == 8
    text = str(ConfigurationError(problems))
    assert text.startswith("megatron_muon: 8 configuration problems\n  - ")
    assert text.count("\n  - ") == 8
    assert str(ConfigurationError(["one"])) == "megatron_muon: 1 configuration problem\n  - one"


@pytest.mark.parametrize(
    ("words", "world_size", "dp"),
    [
        ("", 2, 2),
        ("--tensor-model-parallel-size 2", 4, 2),
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 16, 4),
    ],
)
def test_without_the_distributed_optimizer_data_parallel_is_refused(
    parse: Parse, words: str, world_size: int, dp: int
) -> None:
    args = parse("--optimizer", "dmuon", *words.split(), world_size=world_size)
    (problem,) = _problems(args)
    assert f"--optimizer dmuon at data-parallel size {dp} needs" in problem
    assert "add --use-distributed-optimizer" in problem


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "words", ["", "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"]
)
def test_one_data_parallel_rank_switches_the_distributed_optimizer_on(
    parse: Parse, capsys: pytest.CaptureFixture[str], words: str, rank: int
) -> None:
    args = parse("--optimizer", "dmuon", *words.split(), world_size=2 if words else 1, rank=rank)
    assert not args.use_distributed_optimizer
    translate_arguments(args)
    assert args.use_distributed_optimizer is True
    said = capsys.readouterr().out
    assert ("--use-distributed-optimizer switched on" in said) is (rank == 0)


OF_ORTH_DION = [
    "--orth-dion-rank-fraction 0.5",
    "--orth-dion-rank-multiple-of 8",
    "--orth-dion-momentum 0.9",
    "--orth-dion-right-factor polar",
    "--orth-dion-scale-mode spectral",
    "--orth-dion-rank-compensation",
    "--orth-dion-state-dtype bf16",
    "--orth-dion-exchange matrix",
    "--orth-dion-exchange-dtype bf16",
]
OF_DMUON = [
    "--dmuon-coefficients 1,2,3",
    "--dmuon-compute-dtype bf16",
    "--dmuon-exchange-dtype bf16",
    "--matrix-momentum-dtype bf16",
    "--dmuon-split-ranks 8",
    "--dmuon-split-min-gflop 1",
    "--dmuon-cost-table x.json",
]
OF_BOTH = [
    "--matrix-no-split-mla",
    "--matrix-no-split-ssm",
    "--matrix-split-heads",
    "--matrix-min-dim 16",
    "--matrix-lr 1",
    "--matrix-min-lr 0",
    "--matrix-weight-decay 0",
    "--matrix-rule *:lr_mult=1",
    "--matrix-rules x.json",
    "--matrix-no-split-gate-up",
    "--matrix-exchange-buffer-mb 1",
    "--matrix-ranks-per-node 8",
]
STRAY = [*OF_BOTH, *OF_DMUON, *OF_ORTH_DION]
OF_MUON = [
    "--muon-momentum 0.5",
    "--muon-nesterov",
    "--muon-scale-mode unit_rms_norm",
    "--muon-extra-scale-factor 2",
    "--muon-coefficient-type simple",
    "--muon-num-ns-steps 4",
]


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon"])
@pytest.mark.parametrize("words", STRAY)
def test_our_flags_are_refused_with_another_optimizer(
    parse: Parse, optimizer: str, words: str
) -> None:
    (problem,) = _problems(parse("--optimizer", optimizer, *words.split()))
    instead = {
        words in OF_BOTH: "--optimizer dmuon or --optimizer orth_dion",
        words in OF_DMUON: "--optimizer dmuon",
        words in OF_ORTH_DION: "--optimizer orth_dion",
    }[True]
    assert problem == (
        f"{words.split()[0]} has no effect with --optimizer {optimizer}: remove it or type "
        f"{instead}"
    )


@pytest.mark.parametrize("words", [*OF_DMUON, *OF_MUON])
def test_dmuons_flags_are_refused_with_orth_dion(parse: Parse, words: str) -> None:
    (problem,) = _problems(parse(*ORTH_DION, *words.split()))
    assert problem.startswith(f"{words.split()[0]} has no effect with --optimizer orth_dion")


@pytest.mark.parametrize("words", OF_ORTH_DION)
def test_orth_dions_flags_are_refused_with_dmuon(parse: Parse, words: str) -> None:
    (problem,) = _problems(parse(*DMUON, *words.split()))
    assert problem.startswith(f"{words.split()[0]} has no effect with --optimizer dmuon")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--orth-dion-rank-fraction 0", "--orth-dion-rank-fraction is 0; it must be > 0 and <= 1"),
        ("--orth-dion-rank-fraction 1.5", "--orth-dion-rank-fraction is 1.5"),
        ("--orth-dion-rank-fraction nan", "--orth-dion-rank-fraction is nan"),
        ("--orth-dion-rank-multiple-of 0", "--orth-dion-rank-multiple-of is 0"),
        ("--orth-dion-momentum 1", "--orth-dion-momentum is 1.0; it must be >= 0 and < 1"),
    ],
)
def test_values_of_orth_dion_out_of_range_are_refused(
    parse: Parse, words: str, sentence: str
) -> None:
    (problem,) = _problems(parse(*ORTH_DION, *words.split()))
    assert problem.startswith(sentence)


@pytest.mark.parametrize(
    "flag", ["right-factor", "scale-mode", "state-dtype", "exchange", "exchange-dtype"]
)
def test_choices_of_orth_dion_are_refused_by_the_parser(
    parse: Parse, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    with pytest.raises(SystemExit):
        parse(*ORTH_DION, f"--orth-dion-{flag}", "unknown")
    assert f"--orth-dion-{flag}: invalid choice: 'unknown'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--muon-momentm 0.9", "--muon-momentm is no flag: did you mean --muon-momentum?"),
        (
            "--dmuon-split-rank=4",
            "--dmuon-split-rank is no flag: did you mean --dmuon-split-ranks?",
        ),
        ("--unlike-any 3", "unrecognized arguments: --unlike-any 3\n"),
    ],
)
def test_the_nearest_flag_is_named(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(words.split())
    told = capsys.readouterr().err
    assert sentence in told
    assert ("did you mean" in told) == ("did you mean" in sentence)


def test_defaults_of_muons_flags_are_those_of_megatron(parse: Parse) -> None:
    args = parse(*ORTH_DION)
    muons = [flag for flag in FLAGS if flag.is_megatron_flag]
    assert {f.name: getattr(args, f.dest) for f in muons} == {f.name: f.default for f in muons}
    assert {words.split()[0] for words in OF_MUON} == {
        flag.name for flag in muons if "orth_dion" not in flag.optimizers
    }


def test_every_flag_of_ours_has_a_case_above(parser: argparse.ArgumentParser) -> None:
    ours = {
        f
        for f in parser._option_string_actions
        if f.startswith(("--matrix-", "--dmuon-", "--orth-dion-"))
    }
    assert ours == {words.split()[0] for words in STRAY}


def test_several_stray_flags_are_said_together(parse: Parse) -> None:
    words = " ".join(STRAY).split()
    assert len(_problems(parse("--optimizer", "adam", *words))) == len(STRAY)


def test_our_scale_mode_is_refused_with_another_optimizer(parse: Parse) -> None:
    mode = ("--muon-scale-mode", "match_rms_adamw")
    (problem,) = _problems(parse("--optimizer", "adam", *mode))
    assert problem.startswith("--muon-scale-mode has no effect without --optimizer dmuon")
    (problem,) = _problems(parse("--optimizer", "muon", *mode))
    assert "--muon-scale-mode spectral --muon-extra-scale-factor 0.2" in problem


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon", "dist_muon"])
def test_another_optimizer_is_left_alone(parse: Parse, optimizer: str) -> None:
    args = parse("--optimizer", optimizer)
    before = dict(vars(args))
    translate_arguments(args)
    assert vars(args) == {**before, "matrix_optimizer": None}
    assert matrix_config_from_args(args) is None


def test_megatron_sees_adam_and_all_else_as_given(parse: Parse) -> None:
    args = parse(*DMUON, "--bf16")
    before = dict(vars(args))
    translate_arguments(args)
    assert vars(args) == {
        **before,
        "optimizer": "adam",
        "matrix_optimizer": "dmuon",
        "dist_ckpt_optim_fully_reshardable": True,
    }


def test_arguments_without_our_choice_give_no_settings() -> None:
    """Megatron also builds the config from arguments that were never translated."""
    assert matrix_config_from_args(argparse.Namespace()) is None


EVERYTHING = (
    "--muon-momentum 0.8 --muon-nesterov --muon-scale-mode match_rms_adamw "
    "--muon-extra-scale-factor 0.5 --muon-coefficient-type custom --muon-num-ns-steps 4 "
    "--muon-no-split-qkv --matrix-no-split-gate-up --dmuon-coefficients 3,-2.5,0.5;1.5,-0.5,0 "
    "--dmuon-compute-dtype fp32 --dmuon-exchange-dtype bf16 --matrix-exchange-buffer-mb 64.5 "
    "--matrix-momentum-dtype bf16 "
    "--matrix-lr 0.02 "
    "--matrix-min-lr 0.002 --matrix-weight-decay 0.3 --matrix-rule *.a:lr_mult=2 "
    "--matrix-rule *.b:optimizer=adam --matrix-no-split-mla --matrix-no-split-ssm "
    "--matrix-split-heads --matrix-min-dim 8 --dmuon-split-ranks 4 --dmuon-split-min-gflop 2.5 "
    "--matrix-ranks-per-node 2"
)


def test_every_setting_is_read_from_its_flag(parse: Parse, tmp_path: Path) -> None:
    """The file's rules come first, so that one on the command line wins."""
    path = tmp_path / "rules.json"
    path.write_text(json.dumps([{"pattern": "*.c", "split": "none"}]))
    table = tmp_path / "costs.json"
    measured = MeasuredCost(short=8, long=16, batch=1, nanoseconds=500)
    write_cost_table(CostTable(device="one", dtype="float32", steps=4, measured=(measured,)), table)
    files = ("--matrix-rules", str(path), "--dmuon-cost-table", str(table))
    args = parse(*DMUON, *EVERYTHING.split(), *files)
    translate_arguments(args)
    settings = matrix_config_from_args(args)
    assert settings == MatrixConfig(
        optimizer="dmuon",
        momentum=0.8,
        nesterov=True,
        scale_mode="match_rms_adamw",
        extra_scale_factor=0.5,
        coefficient_type="custom",
        coefficients=((3.0, -2.5, 0.5), (1.5, -0.5, 0.0)),
        num_ns_steps=4,
        split_qkv=False,
        split_gate_up=False,
        split_mla=False,
        split_ssm=False,
        split_heads=True,
        min_dim=8,
        compute_dtype="fp32",
        exchange_dtype="bf16",
        momentum_dtype="bf16",
        exchange_buffer_mb=64.5,
        split_ranks=4,
        split_min_gflop=2.5,
        cost_table=str(table),
        ranks_per_node=2,
        lr=0.02,
        min_lr=0.002,
        weight_decay=0.3,
        rules=(
            Rule(pattern="*.c", split="none"),
            Rule(pattern="*.a", lr_mult=2.0),
            Rule(pattern="*.b", optimizer="adam"),
        ),
    )
    defaults = MatrixConfig()
    for name in MatrixConfig.__dataclass_fields__:
        if name not in ("optimizer", *ONLY_ORTH_DION):
            assert getattr(settings, name) != getattr(defaults, name), f"{name} is not tested"


ONLY_ORTH_DION = (
    *("rank_fraction", "rank_multiple_of", "right_factor", "rank_compensation", "exchange"),
    "state_dtype",
)


def test_every_setting_of_orth_dion_is_read_from_its_flag(parse: Parse) -> None:
    args = parse(*ORTH_DION, *" ".join(OF_ORTH_DION).split(), "--matrix-lr", "0.02")
    translate_arguments(args)
    settings = matrix_config_from_args(args)
    assert settings == MatrixConfig(
        optimizer="orth_dion",
        momentum=0.9,
        scale_mode="spectral",
        rank_fraction=0.5,
        rank_multiple_of=8,
        right_factor="polar",
        rank_compensation=True,
        exchange="matrix",
        exchange_dtype="bf16",
        state_dtype="bf16",
        lr=0.02,
    )
    defaults = MatrixConfig()
    for name in ONLY_ORTH_DION:
        assert getattr(settings, name) != getattr(defaults, name), f"{name} is not tested"


def test_without_flags_orth_dion_has_its_defaults(parse: Parse) -> None:
    args = parse(*ORTH_DION)
    translate_arguments(args)
    assert matrix_config_from_args(args) == MatrixConfig(
        optimizer="orth_dion", scale_mode="shape_scaling"
    )


def test_without_flags_the_settings_are_the_defaults(parse: Parse) -> None:
    """Only the momentum is not ours: Megatron's flag has a default of its own."""
    args = parse(*DMUON)
    translate_arguments(args)
    assert matrix_config_from_args(args) == MatrixConfig(momentum=args.muon_momentum)


def test_settings_are_the_same_from_arguments_that_a_checkpoint_kept(parse: Parse) -> None:
    args = parse(*DMUON, *EVERYTHING.split())
    translate_arguments(args)
    kept = argparse.Namespace(**json.loads(json.dumps(_ours(args))))
    assert matrix_config_from_args(kept) == matrix_config_from_args(args)


def _ours(args: argparse.Namespace) -> dict[str, Any]:
    return {k: v for k, v in vars(args).items() if k.startswith(("muon_", "dmuon_", "matrix_"))}


def test_arguments_hold_plain_values_only(parse: Parse, tmp_path: Path) -> None:
    """Megatron stores them in checkpoints, which are read with an allow-list."""
    import torch

    args = parse(*DMUON, *EVERYTHING.split())
    translate_arguments(args)
    ours = _ours(args)
    assert len(ours) > 15
    for name, value in ours.items():
        for item in value if isinstance(value, list) else [value]:
            assert item is None or type(item) in (str, int, float, bool), name
    torch.save(ours, tmp_path / "args.pt")
    assert torch.load(tmp_path / "args.pt", weights_only=True) == ours


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ("orth_dion", ["--muon-momentum", "0.9"]),
        ("orth_dion", ["--muon-momentum=0.9"]),
        ("dmuon", ["--orth-dion-momentum", "0.95"]),
        ("adam", ["--matrix-min-dim", "32"]),
    ],
)
def test_a_stray_flag_is_refused_with_its_default_value_too(
    parse: Parse, monkeypatch: pytest.MonkeyPatch, optimizer: str, words: list[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", "--optimizer", optimizer, *words])
    args = parse("--optimizer", optimizer, "--use-distributed-optimizer", *words)
    (problem,) = _problems(args)
    assert problem.startswith(f"{words[0].partition('=')[0]} has no effect with")


def test_help_is_shown_although_megatrons_texts_have_a_lone_percent_sign(
    parser: argparse.ArgumentParser,
) -> None:
    text = parser.format_help()
    assert "--orth-dion-rank-fraction" in text
    broken = argparse.ArgumentParser(allow_abbrev=False)
    broken.add_argument("--optimizer", choices=["adam"], default="adam", help="90% (or %(default)s")
    broken.add_argument("--muon-scale-mode", choices=["spectral"], default="spectral")
    broken.add_argument("--share", help="30% of them (at most)")
    assert "30% of them (at most)" in add_matrix_arguments(broken).format_help()
