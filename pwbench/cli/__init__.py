"""The command line: one module per command. click and rich are imported here and nowhere else."""
