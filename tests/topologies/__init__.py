"""The ledger on other people's infrastructure: machines, networks and servers for real.

__main__.py     `make topologies`: the contract over each topology, what a decision costs there, and all parts below
charging.py     machines that charge, and what came of it; charger.py is one of their processes
failover.py     a primary dies under load, while its replicas lag; a slot of a cluster moves
partition.py    the primary is cut off with one machine
network.py      machines on one Linux: network namespaces, joined by a bridge, that can be cut off
"""
