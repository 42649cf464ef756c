"""Groups of ranks on this machine: processes that train one model together, for the backend ``local`` and ``cookbook serve``.

The ranks are a server (``cookbook serve``): the first rank serves and leads, the other ranks follow. A supervisor starts the
ranks, and restarts all of them if one rank is lost (``supervisor.py``). The server then replays its journal, so that its
clients notice only a pause. A private group belongs to one trainer (``backends/remote/group_trainer.py``). The checkpoints of
this trainer are ordinary checkpoints of a run.
"""
