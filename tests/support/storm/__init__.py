"""Storm: daemons, agents, broker, election and disks of a small site, simulated, with seeded faults.

`python -m tests.support.storm SEED` blows one; the same seed is the same storm.
"""
