"""Why a call was refused, and what a charge did to the limits, as data; `quota.wording` says it."""
