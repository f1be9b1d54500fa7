"""Code that the HTTP applications share. It knows nothing of quotas.

documents.py     problem documents, and the document of /healthz
protection.py    the layer before an application: the check of the Host, header fields, the last error handler
lifecycle.py     a server that ends on a signal; only it needs the extra `web`, and only when it serves
"""
