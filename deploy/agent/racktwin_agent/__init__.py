"""The node agent of racktwin: publishes measurements of a node, executes leased commands, and acts without
the daemon in an emergency.

It imports the standard library, paho-mqtt and nvidia-ml-py; nothing of racktwin itself, so that it can be
installed on a compute node by itself. `node.py` holds it together; `leases.py` and `contingency.py` decide.
"""

VERSION = "0.1.0"
