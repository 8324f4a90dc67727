"""Models and layouts of the size that users train, as whole command lines of Megatron."""

from __future__ import annotations

from dataclasses import dataclass

_COMMON = (
    "--normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --seq-length 8192 --max-position-embeddings 8192 "
    "--micro-batch-size 1 --train-iters 20 --lr 4e-3 --lr-decay-style constant "
    "--tokenizer-type NullTokenizer --mock-data --bf16 --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather"
)


_GPT = "examples/pretrain_gpt_small.py --swiglu --position-embedding-type rope"


def _gpt(*, layers: int, hidden: int, ffn: int, heads: int, vocabulary: int, more: str) -> str:
    return (
        f"{_GPT} --num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {ffn} "
        f"--num-attention-heads {heads} --vocab-size {vocabulary} {more} {_COMMON}"
    )


def _llama(*, layers: int, hidden: int, ffn: int, heads: int) -> str:
    return _gpt(
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        vocabulary=128256,
        more="--group-query-attention --num-query-groups 8",
    )


def _qwen_moe(*, layers: int, hidden: int, ffn: int, heads: int, groups: int, expert: int) -> str:
    return _gpt(
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        vocabulary=151936,
        more=f"--group-query-attention --num-query-groups {groups} --qk-layernorm "
        f"--kv-channels 128 --num-experts 128 --moe-ffn-hidden-size {expert} "
        "--moe-router-topk 8 --moe-router-load-balancing-type aux_loss "
        "--moe-token-dispatcher-type alltoall",
    )


def _deepseek(*, heads: int, vocabulary: int, experts: int, dense: int) -> str:
    return _gpt(
        layers=61,
        hidden=7168,
        ffn=18432,
        heads=heads,
        vocabulary=vocabulary,
        more="--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
        "--qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm "
        f"--num-experts {experts} --moe-ffn-hidden-size 2048 "
        "--moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-router-dtype fp32 --moe-router-load-balancing-type seq_aux_loss "
        f"--moe-layer-freq ([0]*{dense}+[1]*{61 - dense}) --moe-token-dispatcher-type alltoall",
    )


# Nemotron-H-56B: 54 layers of Mamba, 54 MLPs, 10 of attention, cut into four stages.
_LAYERS = "M-M-M-M*-" + 9 * "M-M-M-M-M*-" + "M-M-M-M-M-"
_PATTERN = "|".join((_LAYERS[:30], _LAYERS[30:60], _LAYERS[60:90], _LAYERS[90:]))
_NEMOTRON_H = (
    "tests/scale/pretrain_hybrid.py --squared-relu --position-embedding-type none "
    "--hidden-size 8192 --ffn-hidden-size 32768 --num-attention-heads 64 --vocab-size 131072 "
    "--group-query-attention --num-query-groups 8 --kv-channels 128 --mamba-num-heads 256 "
    "--mamba-head-dim 64 --mamba-state-dim 256 --mamba-num-groups 8 "
    f"--hybrid-layer-pattern {_PATTERN} {_COMMON}"
)

_MODELS = {
    "llama3-8b": _llama(layers=32, hidden=4096, ffn=14336, heads=32),
    "llama3-70b": _llama(layers=80, hidden=8192, ffn=28672, heads=64),
    "llama3-405b": _llama(layers=126, hidden=16384, ffn=53248, heads=128),
    "qwen3-30b-a3b": _qwen_moe(layers=48, hidden=2048, ffn=6144, heads=32, groups=4, expert=768),
    "qwen3-235b-a22b": _qwen_moe(
        layers=94, hidden=4096, ffn=12288, heads=64, groups=4, expert=1536
    ),
    "deepseek-v3": _deepseek(heads=128, vocabulary=129280, experts=256, dense=3),
    "kimi-k2": _deepseek(heads=64, vocabulary=163840, experts=384, dense=1),
    "nemotron-h-56b": _NEMOTRON_H,
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A model, a number of ranks, and how it is cut.

    Attributes:
        model: One of the models above.
        world_size: Number of ranks.
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        ep: Expert-parallel size.
        ends: Layers of the first and the last stage where they are given.
        stages: The stages that are counted: the middle one, and those that differ much from it.
    """

    model: str
    world_size: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    ends: tuple[int, int] | None = None
    stages: tuple[str, ...] = ("middle",)

    @property
    def name(self) -> str:
        return f"{self.model} on {self.world_size}" + (f" tp{self.tp}" if self.tp > 1 else "")

    @property
    def flags(self) -> list[str]:
        found: dict[str, int] = {}
        if self.tp > 1:
            found |= {"tensor-model-parallel-size": self.tp}
        if self.pp > 1:
            found |= {"pipeline-model-parallel-size": self.pp}
        if self.ep > 1:
            found |= {"expert-model-parallel-size": self.ep, "expert-tensor-parallel-size": 1}
        if self.ends:
            first, last = self.ends
            found |= {
                "decoder-first-pipeline-num-layers": first,
                "decoder-last-pipeline-num-layers": last,
            }
        words = [word for flag, value in found.items() for word in (f"--{flag}", str(value))]
        return [*words, "--sequence-parallel"] if self.tp > 1 else words


LAYOUTS = (
    Layout(model="llama3-8b", world_size=64),
    Layout(model="llama3-8b", world_size=64, tp=2),
    Layout(model="llama3-70b", world_size=512, tp=8, pp=4),
    Layout(model="llama3-70b", world_size=16384, tp=8, pp=4),
    Layout(model="llama3-405b", world_size=8192, tp=8, pp=16, ends=(7, 7)),
    Layout(model="qwen3-30b-a3b", world_size=64, ep=8),
    Layout(model="qwen3-235b-a22b", world_size=512, tp=4, pp=8, ep=8, ends=(11, 11)),
    Layout(
        model="deepseek-v3",
        world_size=2048,
        pp=16,
        ep=64,
        ends=(3, 2),
        stages=("middle", "first"),
    ),
    Layout(
        model="deepseek-v3",
        world_size=16384,
        pp=16,
        ep=64,
        ends=(3, 2),
        stages=("middle", "first"),
    ),
    Layout(model="kimi-k2", world_size=1024, pp=16, ep=32, ends=(3, 2), stages=("middle", "first")),
    Layout(model="nemotron-h-56b", world_size=512, tp=8, pp=4),
)
_OPTIMIZERS = {
    "dmuon": "--optimizer dmuon",
    "dmuon with symmetric kernel": "--optimizer dmuon",
    "orth_dion": "--optimizer orth_dion",
    "orth_dion 1/16": "--optimizer orth_dion --orth-dion-rank-fraction 0.0625",
}
_ONLY_ON = {
    "dmuon with symmetric kernel": ("llama3-8b on 64", "qwen3-30b-a3b on 64"),
    "orth_dion 1/16": ("llama3-8b on 64", "llama3-70b on 512 tp8"),
}
_FAST = ("llama3-8b on 64", "qwen3-30b-a3b on 64", "deepseek-v3 on 2048")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One stage of a model on a layout under one of our optimizers.

    Attributes:
        layout: The model and its layout.
        optimizer: Its name, with the rank fraction where that is not the default.
        stage: Position in the pipeline.
    """

    layout: Layout
    optimizer: str
    stage: str

    @property
    def name(self) -> str:
        where = "" if self.stage == "middle" else f", {self.stage} stage"
        return f"{self.layout.name}{where}: {self.optimizer}"

    @property
    def has_kernel(self) -> bool:
        """True with emerging-optimizers' kernel, which processes one matrix at a time."""
        return "symmetric kernel" in self.optimizer

    @property
    def is_fast(self) -> bool:
        """True if it is among the quick tests."""
        return self.layout.name in _FAST and (self.stage, self.optimizer) in (
            ("middle", "dmuon"),
            ("middle", "orth_dion"),
        )

    @property
    def rank(self) -> int:
        """A rank of the stage, and not the first one of any group."""
        pp = self.layout.pp
        stage = {"first": 0, "middle": pp // 2, "last": pp - 1}[self.stage]
        return stage * (self.layout.world_size // pp) + 3

    @property
    def command(self) -> list[str]:
        """The script and its arguments."""
        return [
            *_MODELS[self.layout.model].split(),
            *self.layout.flags,
            *("--global-batch-size", str(self.layout.world_size)),
            *_OPTIMIZERS[self.optimizer].split(),
        ]


CASES = {
    case.name: case
    for case in (
        Case(layout=layout, optimizer=optimizer, stage=stage)
        for layout in LAYOUTS
        for stage in layout.stages
        for optimizer in _OPTIMIZERS
        if layout.name in _ONLY_ON.get(optimizer, (layout.name,))
    )
}
"""Every model and layout under both optimizers, by name."""
