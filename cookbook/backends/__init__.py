"""Where training happens: ``local`` in this process."""
