"""Upstream's own count of a project beside ours.

reconcile    compares both, and tightens where upstream knows more
comparison   the comparison of two counts: pure
monitoring   upstream's figures, from Cloud Monitoring
"""
