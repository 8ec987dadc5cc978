"""No metric is without a panel: what nobody drew has a plain one in a row that is folded."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from tracerl.api.constants import METRICS, Role
from tracerl_monitoring.panels import Board, Row, shown_plainly

_TITLE = "Everything else"


def with_the_rest(board: Board, sources: Collection[Role], scope: str) -> Board:
    """Add the metrics of some roles that no panel of the dashboard shows."""
    shown = " ".join(query.expr for panel in board.panels() for query in panel.queries)
    names = set(re.findall(r"tracerl_\w+", shown))
    names |= {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
    rest = tuple(
        shown_plainly(spec, scope) for spec in METRICS if spec.source in sources and spec.name not in names
    )
    return replace(board, rows=(*board.rows, Row(_TITLE, rest, collapsed=True)) if rest else board.rows)
