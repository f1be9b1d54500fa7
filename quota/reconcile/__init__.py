"""Upstream's own count of a project beside ours.

reconcile    compares both, and tightens where upstream knows more
monitoring   upstream's figures, from Cloud Monitoring
"""
