"""Scale modes: the factor s between the orthogonal factor and the update.

For a logical matrix with m rows (outputs) and n columns (inputs), both of the whole matrix and not
of a shard, an orthogonal factor has min(m, n) singular values 1, so its entries have the root
mean square 1/√max(m, n). The update s·O then has

================  ================  =========================  ====================================
mode              s(m, n)           RMS of s·O                 source
================  ================  =========================  ====================================
spectral          √max(m, n)        1                          Liu et al., arXiv:2502.16982
unit_rms_norm     √(m/n)            √(m/n) / √max(m, n)        Pethick et al. (Scion),
                                                               arXiv:2502.07529
shape_scaling     √max(1, m/n)      1/√n                       K. Jordan,
                                                               kellerjordan.github.io/posts/muon
match_rms_adamw   0.2·√max(m, n)    0.2                        Liu et al., arXiv:2502.16982
================  ================  =========================  ====================================

``--muon-extra-scale-factor`` multiplies s and hence the RMS.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

SCALE_MODES: Final[Mapping[str, Callable[[int, int], float]]] = MappingProxyType(
    {
        "spectral": lambda m, n: math.sqrt(max(m, n)),
        "unit_rms_norm": lambda m, n: math.sqrt(m / n),
        "shape_scaling": lambda m, n: math.sqrt(max(1.0, m / n)),
        "match_rms_adamw": lambda m, n: 0.2 * math.sqrt(max(m, n)),
    }
)


def update_scale(mode: str, m: int, n: int) -> float:
    """Returns s(m, n), the factor of the orthogonalized matrix.

    Args:
        mode: Key of ``SCALE_MODES``.
        m: Rows of the whole logical matrix, at least 1.
        n: Columns of the whole logical matrix, at least 1.

    Raises:
        ValueError: Unknown mode, or a size below 1.
    """
    scale = SCALE_MODES.get(mode)
    if scale is None:
        raise ValueError(
            f"--muon-scale-mode {mode} is unknown; supported are {', '.join(SCALE_MODES)}. "
            "Type for example --muon-scale-mode spectral."
        )
    if min(m, n) < 1:
        raise ValueError(f"A {m}x{n} matrix has no scale: both sizes must be at least 1.")
    return scale(m, n)


def update_rms(mode: str, m: int, n: int) -> float:
    """Returns the root mean square of the entries of s(m, n)·O for an orthogonal factor O.

    Exact when all min(m, n) singular values of O are 1. Arguments and errors as in
    ``update_scale``.
    """
    return update_scale(mode, m, n) / math.sqrt(max(m, n))
