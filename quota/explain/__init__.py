"""Why a call was refused, and what a charge did to the limits, as data; `quota.wording` says it.

refusal   what a call met at its refusal, what it would meet now, and who filled the limit
admits    which changes of the configuration would have admitted it
charge    what a charge was, and what each limit counted before and after it
"""
