"""The ledger on other people's infrastructure: machines, networks and servers for real.

network.py      machines on one Linux: network namespaces, joined by a bridge, that can be cut off
machines.py     four machines of four workers over one Redis, one cut off, one with a wrong clock
"""
