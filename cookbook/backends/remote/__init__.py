"""The trainer as a client of a server that speaks the Tinker protocol: ``cookbook serve``, or hosted Tinker.

What a server can do is asked of it once, when the connection is made (``facts.py``). A loss it knows by name travels as its
name; any other becomes slopes here, which travel as weights of a linear loss (``surrogate.py``).
"""
