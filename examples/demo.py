"""Trains a small GPT on real text, with dmuon and with adam, on four CPU ranks.

Real megatron-core, tensor parallel 2 × data parallel 2 over gloo, with the distributed optimizer
and its overlapped gradient reduction and parameter gather. Both runs use the same seed and data.

    make demo        (or: .venv/bin/python examples/demo.py)

Writes to demo_output/: result.md, result.json, loss.png, and the logs of all ranks.
"""

import argparse
import dataclasses
import json
import os
import platform
import queue
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from text_corpus import VOCAB_SIZE, CorpusInfo, build_corpus

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = ("-m", "megatron_muon.launch", "--cpu")
RANKS = 4
# Also covers a rank that never starts: the demo is never silent for so long.
SILENCE_LIMIT_S = 180
# The first steps allocate and warm up; their times are not representative.
WARM_UP_STEPS = 3

MODEL_FLAGS = (
    "--num-layers 4 --hidden-size 192 --ffn-hidden-size 512 --num-attention-heads 6"
    " --group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm"
    " --position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear"
    " --seq-length 256 --max-position-embeddings 256 --attention-dropout 0 --hidden-dropout 0"
)
PARALLEL_FLAGS = (
    "--tensor-model-parallel-size 2 --use-distributed-optimizer"
    " --overlap-grad-reduce --overlap-param-gather"
)
TRAINING_FLAGS = (
    "--micro-batch-size 8 --global-batch-size 16 --seed 1234"
    " --lr-decay-style cosine --lr-warmup-iters 10"
    " --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95"
    # One validation, at the end.
    " --eval-interval 1000000 --eval-iters 8"
)
# The timers are written at logging level INFO (20).
LOG_FLAGS = "--log-interval 1 --timing-log-level 1 --timing-log-option max --logging-level 20"
# Selected by the loss on held-out text, one seed: adam has the best of 1e-3, 2e-3 and 4e-3; dmuon
# has adam's rate for all parameters but matrices, and for these the best of 2e-3, 4e-3, 1e-2. The
# scale mode gives matrix updates about the size of Adam's.
OPTIMIZER_FLAGS = {
    "dmuon": "--optimizer dmuon --muon-scale-mode match_rms_adamw --muon-momentum 0.95"
    " --muon-nesterov --lr 2e-3 --min-lr 2e-4 --matrix-lr 1e-2 --matrix-min-lr 1e-3",
    "adam": "--optimizer adam --lr 2e-3 --min-lr 2e-4",
}

ITERATION = re.compile(
    r"iteration +(\d+)/ *\d+ \|.*elapsed time per iteration \(ms\): ([\d.]+) .*lm loss: (\S+)"
)
# Does not match `optimizer-inner-step` and other parts.
OPTIMIZER_TIMER = re.compile(r"^ +optimizer \.+: ([\d.]+)")
VALIDATION = re.compile(r"on validation set \| lm loss value: (\S+)")
RANK_PREFIX = re.compile(r"^\[default(\d+)\]:")
FIRST_FAILURE = re.compile(r"Root Cause.*?local_rank: (\d+)", re.DOTALL)


class RunFailed(Exception):
    """A training run failed; the message has the end of its log."""


@dataclasses.dataclass
class RunResult:
    """Values from the log of one run."""

    optimizer: str
    losses: dict[int, float] = dataclasses.field(default_factory=dict)
    step_times_ms: list[float] = dataclasses.field(default_factory=list)
    optimizer_times_ms: list[float] = dataclasses.field(default_factory=list)
    validation_loss: float | None = None
    wall_s: float = 0.0

    def median_step_ms(self) -> float:
        """Return the time of a whole iteration."""
        return statistics.median(self.step_times_ms[WARM_UP_STEPS:])

    def median_optimizer_ms(self) -> float:
        """Return the time in `optimizer.step` of the slowest rank, by Megatron's timer."""
        return statistics.median(self.optimizer_times_ms[WARM_UP_STEPS:])

    def read(self, line: str) -> bool:
        """Parse a log line; return True for a finished iteration."""
        if match := ITERATION.search(line):
            iteration, step_ms, loss = match.groups()
            self.losses[int(iteration)] = float(loss)
            self.step_times_ms.append(float(step_ms))
            return True
        if match := OPTIMIZER_TIMER.search(line):
            self.optimizer_times_ms.append(float(match[1]))
        elif match := VALIDATION.search(line):
            self.validation_loss = float(match[1])
        return False


def command(optimizer: str, corpus: CorpusInfo, iterations: int, logs: Path) -> list[str]:
    """Return the command line of one run."""
    torchrun = f"--standalone --nproc-per-node {RANKS} --redirects 3 --tee 3 --log-dir"
    data = (
        f"--tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE} --split {corpus.split}"
        # No more padding tokens than tensor parallelism requires: they contribute to the loss.
        " --make-vocab-size-divisible-by 1"
    )
    flags = (OPTIMIZER_FLAGS[optimizer], MODEL_FLAGS, PARALLEL_FLAGS, TRAINING_FLAGS, LOG_FLAGS)
    return [
        *(sys.executable, "-m", "torch.distributed.run", *torchrun.split(), str(logs)),
        *(*LAUNCHER, str(ROOT / "examples" / "pretrain_gpt_small.py")),
        *(flag for group in (*flags, data) for flag in group.split()),
        *("--train-iters", str(iterations)),
        *("--data-path", corpus.prefix, "--data-cache-path", str(Path(corpus.prefix).parent)),
    ]


def output_lines(process: subprocess.Popen[str]) -> Iterator[str]:
    """Yield the lines of a process as they arrive.

    Raises:
        TimeoutError: The process was silent for SILENCE_LIMIT_S.
    """
    assert process.stdout is not None
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def pump(stream: Iterator[str]) -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=pump, args=(process.stdout,), daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=SILENCE_LIMIT_S)
        except queue.Empty:
            raise TimeoutError from None
        if line is None:
            return
        yield line


def train(optimizer: str, corpus: CorpusInfo, iterations: int, out: Path) -> RunResult:
    """Run on four ranks, with periodic progress lines."""
    logs = out / "logs" / optimizer
    logs.mkdir(parents=True, exist_ok=True)
    log_file = out / "logs" / f"{optimizer}.log"
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        # Megatron requires it for tensor parallelism.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        # Each rank repeatedly warns about missing Transformer Engine and Apex.
        "PYTHONWARNINGS": "ignore::UserWarning",
    }
    result = RunResult(optimizer)
    started = time.monotonic()
    print(f"\n{optimizer}: starting {RANKS} ranks, TP2 × DP2; full log in {log_file}", flush=True)
    with (
        log_file.open("w") as log,
        subprocess.Popen(
            command(optimizer, corpus, iterations, logs),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=ROOT,
            env=environment,
        ) as process,
    ):
        try:
            for line in output_lines(process):
                log.write(line)
                prefix = RANK_PREFIX.match(line)
                # Megatron logs on the last rank.
                if prefix is None or int(prefix[1]) != RANKS - 1:
                    continue
                if result.read(line[prefix.end() :]):
                    show_progress(result, iterations, time.monotonic() - started)
        except TimeoutError:
            raise RunFailed(
                f"{optimizer}: no output for {SILENCE_LIMIT_S} s\n{tail(log_file)}"
            ) from None
        finally:
            # Also ends the ranks; no effect after the end.
            process.terminate()
    result.wall_s = time.monotonic() - started
    if process.returncode != 0 or iterations not in result.losses:
        raise RunFailed(
            f"{optimizer}: failed with exit code {process.returncode} after"
            f" {len(result.losses)} of {iterations} iterations\n{failure_log(log_file, logs)}"
        )
    return result


def show_progress(result: RunResult, iterations: int, elapsed_s: float) -> None:
    """Print a line for the first and every tenth iteration."""
    iteration, loss = list(result.losses.items())[-1]
    if iteration == 1 or iteration % 10 == 0 or iteration == iterations:
        print(
            f"{result.optimizer:>6} iteration {iteration:4d}/{iterations}  loss {loss:.4f}"
            f"  step {result.step_times_ms[-1] / 1000:.2f} s  elapsed {elapsed_s:3.0f} s",
            flush=True,
        )


def tail(path: Path, lines: int = 30) -> str:
    """Return the end of a log file under its name."""
    text = path.read_text(errors="replace").splitlines()
    return "\n".join([f"--- end of {path}", *text[-lines:]])


def failure_log(log_file: Path, logs: Path) -> str:
    """Return the end of the log of the first failed rank, or of the run if none is named.

    Includes that of rank 0, which alone explains a refusal on all ranks.
    """
    match = FIRST_FAILURE.search(log_file.read_text(errors="replace"))
    if match is None:
        return tail(log_file)
    # torchrun creates a folder per run; the newest belongs to this one.
    run = max((path for path in logs.iterdir() if path.is_dir()), key=os.path.getmtime)
    errors = [run / "attempt_0" / str(rank) / "stderr.log" for rank in sorted({0, int(match[1])})]
    return "\n".join(tail(path) for path in errors if path.stat().st_size)


def table(results: list[RunResult], iterations: int) -> str:
    """Return a Markdown table of loss, step time and optimizer time of the runs."""
    marks = [1, *(round(iterations * k / 6) for k in range(1, 7))]
    validation = [
        "–" if result.validation_loss is None else f"{result.validation_loss:.4f}"
        for result in results
    ]
    rows = [
        ("", [result.optimizer for result in results]),
        ("---", ["---:" for _ in results]),
        *(
            (f"loss at iteration {mark}", [f"{result.losses[mark]:.4f}" for result in results])
            for mark in marks
        ),
        ("loss on held-out text", validation),
        ("step, median (ms)", [f"{result.median_step_ms():.0f}" for result in results]),
        ("optimizer part (ms)", [f"{result.median_optimizer_ms():.1f}" for result in results]),
        ("whole run (s)", [f"{result.wall_s:.0f}" for result in results]),
    ]
    return "\n".join(
        f"| {name:<24} | " + " | ".join(f"{cell:>8}" for cell in cells) + " |"
        for name, cells in rows
    )


def plot(results: list[RunResult], path: Path) -> None:
    """Plot the loss curves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for result in results:
        axes.plot(list(result.losses), list(result.losses.values()), label=result.optimizer)
    axes.set(
        xlabel="iteration",
        ylabel="training loss (nats per byte)",
        title="Small GPT on Python's sources and manual, TP2 × DP2",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def settings_of(results: list[RunResult]) -> str:
    """Return the settings and environment of the table."""
    lines = [f"- {r.optimizer}: `{OPTIMIZER_FLAGS[r.optimizer]}`" for r in results]
    lines += [
        f"- both, on {RANKS} CPU ranks: `{MODEL_FLAGS} {PARALLEL_FLAGS} {TRAINING_FLAGS}`",
        f"- torch {version('torch')}, megatron-core {version('megatron-core')}, one seed",
        f"- {os.cpu_count()} cores; times are unreliable on a busy machine",
        "- Megatron prints the mean of iterations 1 and 2 as the loss of iteration 2",
    ]
    return "\n".join(lines)


def write_results(results: list[RunResult], iterations: int, out: Path) -> str:
    """Write the table, its data and the plot; return the table."""
    markdown = table(results, iterations)
    (out / "result.md").write_text(f"{markdown}\n\n{settings_of(results)}\n")
    numbers = {
        "flags": {
            "model": MODEL_FLAGS,
            "parallel": PARALLEL_FLAGS,
            "training": TRAINING_FLAGS,
            "optimizer": {
                result.optimizer: OPTIMIZER_FLAGS[result.optimizer] for result in results
            },
        },
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()}
        | {package: version(package) for package in ("torch", "megatron-core")},
        "runs": [
            dataclasses.asdict(result)
            | {
                "median_step_ms": result.median_step_ms(),
                "median_optimizer_ms": result.median_optimizer_ms(),
            }
            for result in results
        ],
    }
    (out / "result.json").write_text(json.dumps(numbers, indent=2) + "\n")
    plot(results, out / "loss.png")
    return markdown


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--iterations", type=int, default=100, help="iterations of each run (default: 100)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "demo_output", help="folder to write to")
    parser.add_argument(
        "--optimizers",
        nargs="+",
        choices=list(OPTIMIZER_FLAGS),
        default=list(OPTIMIZER_FLAGS),
        help="runs, in this order (default: dmuon adam)",
    )
    arguments = parser.parse_args()
    if arguments.iterations <= WARM_UP_STEPS + 10:
        parser.error(f"--iterations must be more than {WARM_UP_STEPS + 10}: warm-up comes first")
    out = arguments.out.resolve()
    # As on Ctrl-C: exit through the `finally` that ends the ranks.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))

    print("Corpus: Python's sources and manual, torch's docstrings, byte tokens", flush=True)
    corpus = build_corpus(out / "corpus")
    print(f"{corpus.tokens:,} tokens in {corpus.documents} documents, {corpus.prefix}", flush=True)
    try:
        results = [
            train(optimizer, corpus, arguments.iterations, out)
            for optimizer in arguments.optimizers
        ]
    except RunFailed as failure:
        print(f"\n{failure}", file=sys.stderr)
        return 1
    print(f"\n{write_results(results, arguments.iterations, out)}\n")
    print(f"Written: {out}/result.md, result.json, loss.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
