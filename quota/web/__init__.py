"""What the applications over HTTP share. It knows neither quotas nor what is served.

documents.py     problems, and the document of /healthz
protection.py    what stands in front of an application: the check of the Host, header fields, the last resort
lifecycle.py     a server that ends when told to; it alone needs the extra `web`, and only when it serves
"""
