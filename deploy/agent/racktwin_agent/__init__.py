"""The node agent of racktwin: what a node measures goes out, leased commands come in, and it acts alone if
it must.

It imports the standard library, paho-mqtt and nvidia-ml-py; nothing of racktwin itself, so that it can be
installed on a compute node by itself. `node.py` holds it together; `leases.py` and `contingency.py` decide.
"""

VERSION = "0.1.0"
