"""The command line. Each module starts work that another package does."""
