"""What the applications over HTTP share: problems, the check of the Host, health, and a server that ends when told to.

It knows neither quotas nor what is served. Only `lifecycle` needs the extra `web`, and only when it serves.
"""
