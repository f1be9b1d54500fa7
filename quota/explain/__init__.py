"""Why a call was refused, and what a charge did to the limits, as data; `quota.cli.explain` displays it."""
