"""Why a call was refused, and what a charge did to the limits, as data. `quota.wording` turns it into text.

refusal   the limits at a refusal and now, who filled them, and the changes that would have admitted the call
charge    a charge, and each limit before and after it
"""
