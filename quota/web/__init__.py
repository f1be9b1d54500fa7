"""Code that the HTTP applications share. It knows nothing of quotas.

documents.py     problem documents, and the document of /healthz
serving.py       a server that ends on a signal, and the layer of checks before an application. Only the server
                 needs the extra `web`, and only when it serves
"""
