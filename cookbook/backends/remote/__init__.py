"""Backend ``remote``: training on a server that implements the Tinker protocol, ``cookbook serve`` or hosted Tinker.

The connection requests the server's capabilities once (``connection.py``). A loss that the server knows is sent by name. Any
other loss is computed on the client, from the server's logprobs, and sent as the weights of a linear loss
(``linearized_loss.py``).
"""
