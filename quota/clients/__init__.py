"""Clients that charge every HTTP attempt before it leaves, and the meaning of upstream's answers.

metering           what one attempt does to a budget, for every client; what others used
gate               which requests of a client are charged, and as which method
google             Google's client; `answers` is what it sends over, and limits what it reads
requests, httpx    the other clients, with aiohttp; `urllib3` is below requests
instrument         finds the attempts of libraries that a program uses itself
caller, login      sign a request as it leaves
upstream           the seam for upstreams: names the method of a request, reads an answer
answer_fields      limits an answer, and reads the parts of it that the cost book names
upstream_errors    classifies an error answer, and reads the exceptions of client libraries
"""
