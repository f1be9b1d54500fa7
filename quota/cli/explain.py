"""`quota explain`: why a call was refused, and what a charge did."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quota.cli.render import told
from quota.wording.of_explanations import charge_told, refusal_told

if TYPE_CHECKING:
    from rich.console import RenderableType

    from quota.explain.charge import ChargeExplained
    from quota.explain.refusal import RefusalExplained


def render_refusal(x: RefusalExplained) -> RenderableType:
    """Render why a call was refused."""
    return told(refusal_told(x))


def render_charge(x: ChargeExplained) -> RenderableType:
    """Render what a charge was, and each limit before and after it."""
    return told(charge_told(x))
