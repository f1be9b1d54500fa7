"""Upstream clients whose every HTTP attempt is charged before it leaves, and what upstream's answers mean.

metering           what one attempt does to a budget, whatever client sends it
gate               which requests of a client are charged, and as what
google             Google's client; `answers` and `answer_limits` bound what it reads
requests, httpx    the other clients, and aiohttp; `urllib3` is below requests
instrument         finds the attempts of libraries that a program uses itself
caller, login      who calls: what signs a request as it leaves
upstream           the seam for upstreams: which method a request is, what an answer means
discovery          one of Google's APIs, as its client describes it
answer_fields      what an answer says, where the cost book says to look
upstream_errors    what an error answer means
evidence           what answers say that others have used
failures           what an exception of a client library says
"""
