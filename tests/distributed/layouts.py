"""Every (model, layout) that is trained and compared with one process, as in docs/support.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_muon.config import MatrixConfig
from tests.distributed.training import RATES, Run
from tests.tiny_models import MODELS, Layout


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model at a layout.

    Attributes:
        model: Key of ``MODELS``.
        layout: Parallel sizes.
        overlap_gather: Whether the parameter gather is overlapped too; the reduction always is.
        options: Further options of ``build_gpt``.
        quick: Whether it is one of the fast tests.
    """

    model: str
    layout: Layout
    overlap_gather: bool = True
    options: tuple[tuple[str, Any], ...] = ()
    quick: bool = False

    @property
    def note(self) -> str:
        """Special settings of the case."""
        uneven = dict(self.options).get("num_layers_in_first_pipeline_stage")
        notes = ["" if self.overlap_gather else "gather not overlapped"]
        notes.append(f"{uneven} layer in the first stage" if uneven else "")
        return ", ".join(note for note in notes if note)

    @property
    def name(self) -> str:
        """Shown by pytest and in the table."""
        return " ".join(filter(None, (self.model, str(self.layout), self.note)))

    def run(self, **changes: Any) -> Run:
        """Several buckets, overlap, sequence parallel where TP cuts, several rates."""
        sizes = {name: getattr(self.layout, name) for name in Layout.__dataclass_fields__}
        settings: dict[str, Any] = {
            **sizes,
            "model": self.model,
            "overlap": True,
            "overlap_gather": self.overlap_gather,
            "sequence_parallel": True,
            "options": self.options,
            "config": MatrixConfig(min_dim=1, rules=RATES),
        }
        return Run(**(settings | changes))


UNEVEN = (("num_layers_in_first_pipeline_stage", 1),)


def _cases() -> tuple[Case, ...]:
    def case(model: str, quick: bool = False, gather: bool = True, **sizes: Any) -> Case:
        return Case(model=model, layout=Layout(**sizes), overlap_gather=gather, quick=quick)

    pipelines = [
        case("gpt", pp=2),
        case("gpt", pp=4),
        case("gpt", pp=2, vpp=2, quick=True),
        case("gpt", pp=2, vpp=2, gather=False),
        case("gpt", pp=2, vpp=2, tp=2, dp=2),
        Case(model="gpt", layout=Layout(pp=2, dp=2), options=UNEVEN),
        case("gpt-tied", pp=2, quick=True),
        case("gpt-tied", pp=2, vpp=2, tp=2),
        case("gpt-tied", tp=2, dp=2),
        case("mtp", dp=2),
        case("mtp", pp=2, tp=2, quick=True),
    ]
    data = [
        case("gpt"),
        case("gpt", tp=4, dp=2),
        case("gpt", tp=2, dp=4),
        case("gpt", dp=3),
        case("gpt", tp=2, dp=3),
        case("gpt", dp=4, instances=2, quick=True),
        case("gpt", tp=2, dp=4, instances=2),
        case("gpt-cp"),
        case("gpt-cp", cp=2, quick=True),
        case("gpt-cp", tp=2, cp=2, dp=2),
    ]
    experts = [
        case("moe", dp=2),
        case("moe", tp=2, etp=2),
        case("moe", dp=2, ep=2, quick=True),
        case("moe", dp=4, ep=4),
        case("moe", dp=4, ep=2),
        case("moe", dp=3),
        case("moe", tp=2, dp=2, ep=2, etp=1, quick=True),
        case("moe", tp=2, dp=2, ep=2, etp=2),
        case("moe", tp=2, dp=1, ep=2, etp=1),
        case("moe", tp=4, ep=2, etp=2),
        case("moe", tp=2, dp=4, ep=4, etp=2),
        case("moe", pp=2, vpp=2, dp=2, ep=2),
        case("moe", dp=4, ep=2, instances=2),
        case("moe-shared", dp=2, ep=2),
        case("moe-shared", tp=2, dp=2, ep=4, etp=1),
    ]
    attention = [
        case("gpt-mha-bias", tp=2, dp=2),
        case("gpt-mqa", tp=2, dp=2),
        case("gpt-mqa", tp=4),
        case("gpt-gated-attention", tp=2, dp=2),
        case("mla", tp=2, quick=True),
        case("mla", tp=2, dp=2),
        case("mla", dp=3),
        case("mla-local", tp=2, dp=2),
        case("mla", cp=2, tp=2),
        case("mla-moe", tp=2, dp=2, ep=2, etp=1),
    ]
    return tuple(pipelines + data + experts + attention)


CASES = _cases()

assert {case.model for case in CASES} == set(MODELS), "every model is trained at some layout"
