"""The command line: one verb a file, each calling the public API only."""
