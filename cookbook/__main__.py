"""The command ``cookbook``, also as ``python -m cookbook``. Ctrl-C during the imports ends the process without a trace."""

import signal


def main() -> None:
    # Python's own handler would print a trace of the import that it interrupts. A signal that the parent ignores stays ignored.
    replaced = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if replaced:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cookbook.cli import app

    if replaced:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    app.main()


if __name__ == "__main__":
    main()
